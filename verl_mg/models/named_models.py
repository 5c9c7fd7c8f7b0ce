"""Paths of models in a configuration that are names on a hub, as folders on this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from verl_mg.config import Config
from verl_mg.errors import UserError
from verl_mg.hub import HubName, fetch

# Configuration, tokenizer, chat template, and weights as safetensors only: no second copies in folders below.
MODEL_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken")
CONFIG_FILES = ("config.json",)  # files that describe the tensors of a model
SECTIONS = ("model", "critic", "reward_model", "process_reward", "reference")
"""Sections of the configuration with the path of a model."""


def local_model(path: Path, key: str, files: Sequence[str] = MODEL_FILES) -> Path:
    """Returns a model's folder on this machine; a name such as `Qwen/Qwen3-0.6B` is downloaded unless it is cached."""
    name = _name_of(path, key)
    return fetch(name, "model", files, key) if name else path


def _name_of(path: Path, key: str) -> HubName | None:
    name = HubName.parse(path)
    if name and name.part:
        raise UserError(
            f"{key}: {name.text}: a model has no part ':{name.part}'. Write OWNER/NAME or OWNER/NAME@REVISION."
        )
    return name


def hub_models(config: Config) -> dict[str, HubName]:
    """Returns the models of a configuration that are names on a hub, by section."""
    sections = [*SECTIONS, *(f"teachers.{name}" for name in config.teachers)]
    paths = {section: config.section(section).path for section in sections}
    names = {section: _name_of(path, f"{section}.path") for section, path in paths.items() if path is not None}
    return {section: name for section, name in names.items() if name}


def with_folders(config: Config, folders: Mapping[str, Path]) -> Config:
    """Returns the configuration with these folders as models."""
    sections = {name: config.section(name).model_copy(update={"path": folder}) for name, folder in folders.items()}
    teachers = {name: sections.get(f"teachers.{name}", teacher) for name, teacher in config.teachers.items()}
    others = {name: section for name, section in sections.items() if "." not in name}
    return config.model_copy(update=others | {"teachers": teachers})


def with_local_models(config: Config, files: Sequence[str] = MODEL_FILES) -> Config:
    """Returns the configuration with a folder on this machine in place of each model's name."""
    names = hub_models(config)
    return with_folders(config, {key: fetch(name, "model", files, f"{key}.path") for key, name in names.items()})
