"""Prompts of a job, from the section `data` of the configuration."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from verl_mg.config import DataConfig, SourceConfig
from verl_mg.data.curriculum import Curriculum
from verl_mg.data.mixture import Mixture
from verl_mg.data.prompts import Prompts, PromptSet
from verl_mg.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl_mg.data.image_processor import ImageProcessor

OF_SOURCE = {"prompt_field", "answer_field", "instruction", "chat_template", "system_prompt", "prepare"}
"""Keys of a source that replace the same keys of `data`."""


def reward_key(which: str, name: str) -> str:
    """Returns the key of the section with the reward of a source.

    Args:
        which, name: train or test, and the name of the source.
    """
    return f"data.{which}.{name}.reward"


def read_prompts(
    data: DataConfig,
    which: Literal["train", "test"],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    seed: int = 0,
    tools: Sequence[dict[str, Any]] = (),
    report: Callable[[str], None] | None = None,
    processor: "ImageProcessor | None" = None,
) -> Prompts:
    """Reads the prompts of `data.train` or `data.test`. Errors name `file:line` or the key, and the remedy.

    Args:
        data, which: the section `data`, and its key to read.
        tokenizer, processor: of the model; None: a model that reads no images.
        seed: random seed of the order.
        tools: schemas that a chat template describes to the model.
        report: receives one line for each source whose fields were found and not configured.

    Returns:
        A `PromptSet` for a path, a `Mixture` for sources by name; for training a `Curriculum` around either if
        `data.curriculum` excludes any pass rate.
    """
    where = data.train if which == "train" else data.test
    if where is None:
        raise UserError("data.test: not set. Write data.test=FILE.")
    if not isinstance(where, dict):
        prompts: PromptSet | Mixture = _read_set(
            data, "", SourceConfig(path=where), which, 0, tokenizer, seed, tools, report, processor
        )
    else:
        prompts = _read_mixture(data, where, which, tokenizer, seed, tools, report, processor)
    band = data.curriculum
    if which == "test" or (band.low <= 0 and band.high >= 1):
        return prompts
    return Curriculum(prompts, **band.model_dump())


def _read_mixture(
    data: DataConfig,
    sources: Mapping[str, SourceConfig],
    which: str,
    tokenizer: "PreTrainedTokenizerBase",
    seed: int,
    tools: Sequence[dict[str, Any]],
    report: Callable[[str], None] | None,
    processor: "ImageProcessor | None",
) -> Mixture:
    sets: dict[str, PromptSet] = {}
    rows = 0
    for name, source in sources.items():
        sets[name] = _read_set(data, name, source, which, rows, tokenizer, seed, tools, report, processor)
        rows += len(sets[name]) + sets[name].dropped  # ids do not change with the limit of length
    return Mixture(sets, {name: source.weight for name, source in sources.items()})


def _read_set(
    data: DataConfig,
    name: str,
    source: SourceConfig,
    which: str,
    first_id: int,
    tokenizer: "PreTrainedTokenizerBase",
    seed: int,
    tools: Sequence[dict[str, Any]],
    report: Callable[[str], None] | None,
    processor: "ImageProcessor | None",
) -> PromptSet:
    source_fields = source.model_dump(include=OF_SOURCE, exclude_none=True)
    common = data.model_dump(exclude={"train", "test", "curriculum"})
    # An evaluation generates answers; it trains no turns.
    options = common | source_fields | ({"loss_on": "answer"} if which == "test" else {})
    return PromptSet.from_file(
        source.path,
        tokenizer,
        **options,
        seed=seed,
        tools=tools,
        source=name,
        reward=reward_key(which, name) if source.reward else "",
        first_id=first_id,
        report=report,
        processor=processor,
    )
