"""Fixtures of the tests of roles."""

from pathlib import Path

import pytest

from tests.tiny_models import MIXTURES, TRAINED, tiny_model


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny model of each architecture."""
    folder = tmp_path_factory.mktemp("models")
    return {name: tiny_model(folder / name, name) for name in (*TRAINED, *MIXTURES)}
