"""Names of models in a configuration become folders, in every section that has one."""

from pathlib import Path

import pytest

from verl_mg.config import Config
from verl_mg.errors import UserError
from verl_mg.models import named_models
from verl_mg.models.named_models import CONFIG_FILES, local_model, with_local_models


def test_with_local_models_names_become_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    requested = []

    def fetch(name: object, kind: str, patterns: object, key: str) -> Path:
        requested.append((str(getattr(name, "repository", "")), kind, patterns, key))
        return Path("/cache") / key

    monkeypatch.setattr(named_models, "fetch", fetch)
    sections = {"critic": {"path": "hf:a/critic"}, "reference": {"path": "/a/path"}}
    sections["teachers"] = {"math": {"path": "a/math"}, "code": {"path": "/a/code"}}
    config = Config.model_validate({"model": {"path": "a/model"}, "data": {"train": "x"}, **sections})
    local = with_local_models(config, CONFIG_FILES)
    assert [str(section.path) for section in (local.model, local.critic, local.reference)] == [
        "/cache/model.path",
        "/cache/critic.path",
        "/a/path",
    ]
    assert [str(teacher.path) for teacher in local.teachers.values()] == ["/cache/teachers.math.path", "/a/code"]
    assert (local.reward_model.path, str(config.model.path)) == (None, "a/model")
    assert requested[0] == ("a/model", "model", CONFIG_FILES, "model.path")


def test_local_model_with_a_part_raises() -> None:
    with pytest.raises(UserError, match=r"model.path: a/b:main: a model has no part ':main'. Write OWNER/NAME"):
        local_model(Path("a/b:main"), "model.path")
