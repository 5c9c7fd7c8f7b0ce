"""`verl-mg models`: the table of families, or what works with one model."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from verl_mg.errors import UserError
from verl_mg.hub import HubName
from verl_mg.models import multi_token, tiny_vision_model
from verl_mg.models.hf_families import FAMILIES, SAME_AS, VISION_LANGUAGE
from verl_mg.models.named_models import MODEL_FILES, local_model
from verl_mg.models.tiny_model import make_tiny_model
from verl_mg.models.tiny_vision_model import make_tiny_vision_model
from verl_mg.support.model import Answer, ModelSupport

EXIT_PROBLEMS = 1  # exit code where no backend can train the model, or files are missing
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


LAYERS = 4  # layers of a tiny model, so that pipeline stages can be interleaved
MULTI_TOKEN = "multi-token prediction of the family"
"""Topic that tiny models cannot answer: `transformers` writes no such layers."""
COLUMNS = {
    "backend megatron": "Megatron",
    "backend fsdp": "FSDP",
    "engine hf": "hf",
    "engine sglang": "SGLang",
    "engine vllm": "vLLM",
    "LoRA": "LoRA",
    "experts' LoRA": "LoRA of experts",
    "images": "images",
    MULTI_TOKEN: "MTP",
}
"""Topics that have a column, and its name; sizes of a backend or an engine are in its column."""
WITH_REASONS = ("backend", "engine", "megatron", "fsdp", "sglang", "vllm")
"""First words of the topics whose reasons are listed."""
INTRODUCTION = """\
# Models

What works with each family of models, by its `model_type` in config.json. The table is written by
`python -m tools.docs.write_models_doc`, which asks the code that decides in jobs about a tiny model of each family.
`verl-mg models` prints it, and `verl-mg models DIR`, or with the name of a model on a hub, says for one model which
sizes of each dimension are possible, what does not work and why, and which files are missing. It downloads no weights.

In the columns of backends and engines are the dimensions that can be above 1: tensor (tp), pipeline (pp), virtual
pipeline (vpp), context (cp) and expert (ep) parallelism, and data-parallel attention (adp) of engines. *traced*: there
is no built-in table of the engine's parameters, and a job traces them from the engine's loader as it begins, see
[resharding.md](resharding.md). MTP: a layer of multi-token prediction is kept in training and exports. Other families
work with the backend fsdp where `transformers` has them.
"""


def markdown() -> str:
    """Returns the document: the table, and the reasons for what does not work."""
    with tempfile.TemporaryDirectory(prefix="models-") as folder:
        rows = {model.name: _answers(model) for model in _tiny_models(Path(folder))}
    lines = [f"| model_type | {' | '.join(COLUMNS.values())} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for kind, answers in rows.items():
        names = ", ".join(f"`{name}`" for name in (kind, *(other for other, same in SAME_AS.items() if same == kind)))
        lines.append(f"| {names} | {' | '.join(_cell(topic, answers) for topic in COLUMNS)} |")
    return "\n".join([INTRODUCTION, *lines, "", "## Why not", "", *_reasons(rows), ""])


def _tiny_models(folder: Path) -> Iterator[Path]:
    """Yields a directory for each family, with the name of its `model_type`."""
    for kind, family in FAMILIES.items():
        yield make_tiny_model(folder / kind, kind, layers=LAYERS, tie_embeddings=family.tied)
    for kind in tiny_vision_model.ARCHITECTURES:
        yield make_tiny_vision_model(folder / kind, kind, layers=LAYERS)


def _answers(model: Path) -> list[Answer]:
    """Returns the answers for a directory, in words that hold for the whole family."""
    # Reasons name the temporary directory and the model_type, and are joined where they are equal otherwise.
    kind = VISION_LANGUAGE.get(model.name, model.name)
    with_layer = Answer(MULTI_TOKEN, kind in multi_token.ARCHITECTURES, "")
    answers = [*ModelSupport(model).answers(), with_layer]
    texts = [a.text.replace(f"{model}/", "").replace(kind, "this family") for a in answers]
    return [replace(a, text=text.replace(model.name, "this family")) for a, text in zip(answers, texts, strict=True)]


def _cell(topic: str, answers: Sequence[Answer]) -> str:
    """Returns the cell of a column: no, or the dimensions that can be above 1, or yes."""
    answer = next(answer for answer in answers if answer.topic == topic)
    if not answer.works:
        return "no"
    prefix = topic.split()[-1] + " "
    sizes = [a.topic.removeprefix(prefix) for a in answers if a.topic.startswith(prefix) and a.works]
    return ", ".join(sizes) or ("traced" if answer.text.startswith("traced") else "yes")


def _reasons(rows: dict[str, list[Answer]]) -> Iterator[str]:
    """Yields a line for each reason why something does not work, with the families that it holds for."""
    reasons: dict[tuple[str, str], list[str]] = defaultdict(list)
    for kind, answers in rows.items():
        for answer in answers:
            if not answer.works and answer.topic.startswith(WITH_REASONS):
                reasons[answer.topic, answer.text].append(kind)
    for (topic, text), kinds in reasons.items():
        yield f"- {topic}, {'all' if len(kinds) == len(rows) else ', '.join(f'`{kind}`' for kind in kinds)}: {text}"
