"""Paths of models in a configuration that are names on a hub, as folders on this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from verl_mg.config import Config
from verl_mg.errors import UserError
from verl_mg.hub import HubName, fetch

MODEL_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken")
"""Files of a model: configuration, weights, tokenizer and chat template."""
CONFIG_FILES = ("config.json",)
"""Files that describe the tensors of a model."""
SECTIONS = ("model", "critic", "reward_model", "process_reward", "reference")
"""Sections of the configuration with the path of a model."""


def local_model(path: Path, key: str, files: Sequence[str] = MODEL_FILES) -> Path:
    """Returns a model's folder on this machine; a name such as `Qwen/Qwen3-0.6B` is downloaded unless it is cached.

    Args:
        path: path or name.
        key: key of the configuration, for errors.
        files: names of the files to download.

    Raises:
        UserError: the model cannot be fetched.
    """
    name = HubName.parse(path)
    if name is None:
        return path
    if name.part:
        raise UserError(
            f"{key}: {name.text}: a model has no part ':{name.part}'. Write OWNER/NAME or OWNER/NAME@REVISION."
        )
    return fetch(name, "model", files, key)


def with_local_models(
    config: Config, files: Sequence[str] = MODEL_FILES, report: Callable[[str], None] | None = None
) -> Config:
    """Returns the configuration with a folder on this machine in place of each model's name.

    Args:
        config: the configuration of a job.
        files: names of the files to download.
        report: receives one line for each name.

    Raises:
        UserError: a model cannot be fetched.
    """
    sections = {}
    for section in SECTIONS:
        value = getattr(config, section)
        if value.path is not None and (folder := local_model(value.path, f"{section}.path", files)) != value.path:
            if report:
                report(f"{section}.path: {value.path} is {folder}")
            sections[section] = value.model_copy(update={"path": folder})
    return config.model_copy(update=sections)
