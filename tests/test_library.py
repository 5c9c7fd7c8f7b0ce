"""Libraries whose internals are used: other versions, and parts that are missing, are errors of one line."""

import importlib
from types import SimpleNamespace

import pytest

from verl_mg.errors import UserError
from verl_mg.library import Library, is_installed


def library(version: str = "1.2.3") -> Library:
    return Library("Some", version, ("1.2.", "0.9.1"), "Install Some 1.2.")


@pytest.mark.parametrize(("version", "accepted"), [("1.2.9", True), ("0.9.1", True), ("1.3.0", False), ("0.9", False)])
def test_library_check_accepts_the_versions_of_the_tests_alone(version, accepted):
    if accepted:
        library(version).check()
        return
    with pytest.raises(UserError, match=rf"^Some {version}: not supported. Install Some 1.2.$"):
        library(version).check()


def test_library_replace_given_missing_attribute_names_the_version():
    module = SimpleNamespace(old=1)
    library().replace(module, old=2)
    with pytest.raises(UserError, match=r"^Some 1.2.3: .* has no new. Install Some 1.2.$"):
        library().replace(module, new=3)
    assert vars(module) == {"old": 2}


def test_library_replaced_attribute_of_a_base_is_inherited_again():
    class Base:
        old = 1

    class Derived(Base):
        pass

    with library().replaced(Derived, old=2):
        assert (Derived.old, Base.old) == (2, 1)
    Base.old = 3
    assert Derived.old == 3


def test_library_replaced_restores_after_an_error():
    module = SimpleNamespace(old=1)
    with pytest.raises(KeyError), library().replaced(module, old=2):
        assert module.old == 2
        raise KeyError
    assert module.old == 1


def test_is_installed_given_folder_without_modules_is_false(tmp_path, monkeypatch):
    """Python imports such a folder too, as a namespace, and without what the package has."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "some_kernels" / "cute").mkdir(parents=True)
    assert not is_installed("some_kernels") and not is_installed("absent_kernels")
    (tmp_path / "some_kernels" / "__init__.py").touch()
    importlib.invalidate_caches()
    assert is_installed("some_kernels") and is_installed("torch")
