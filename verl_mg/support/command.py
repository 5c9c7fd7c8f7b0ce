"""`verl-mg models`: the table of families, or what works with one model."""

from __future__ import annotations

from pathlib import Path

from verl_mg.errors import UserError
from verl_mg.hub import HubName
from verl_mg.models.named_models import MODEL_FILES, local_model
from verl_mg.support.families import markdown
from verl_mg.support.model import ModelSupport

EXIT_PROBLEMS = 1
"""Exit code where no backend can train the model, or files are missing."""
SMALL_FILES = tuple(pattern for pattern in MODEL_FILES if pattern != "*.safetensors")
"""Files of a model without its weights."""


def show_families() -> int:
    """Prints the table of families; returns exit code 0."""
    print(markdown(), end="")
    return 0


def show_model(name: Path) -> int:
    """Prints what works with a model directory, or a name on a hub, and returns the exit code."""
    folder = local_model(name, "model", SMALL_FILES)
    if not folder.is_dir():
        raise UserError(f"{name}: no such model directory. Write a directory, or the name of a model as OWNER/NAME.")
    is_remote = HubName.parse(name) is not None
    support = ModelSupport(folder, has_weights=not is_remote or any(folder.glob("*.safetensors")))
    size, *answers = support.answers()
    print(f"{folder if is_remote else name}: {size.text}")
    width = max(len(answer.topic) for answer in answers)
    for answer in answers:
        print(f"  {answer.topic:{width}}  {answer}")
    trains = any(answer.works for answer in answers if answer.topic.startswith("backend "))
    complete = all(answer.works for answer in support.files())
    return 0 if trains and complete else EXIT_PROBLEMS
