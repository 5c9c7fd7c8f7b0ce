"""Configuration of prompts, rewards and evaluation.

data.train                             data.test
train.jsonl                            test.jsonl                          one path
{math: {path: ..., weight: 3},         {gsm8k: {path: ..., samples: 4},    several by name, each with its
 code: {path: ..., reward: ...}}        aime: {path: ..., k: [1, 8]}}      fields, reward and, in tests, sampling
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PlainSerializer, PositiveInt, TypeAdapter, field_validator, model_validator

from verl_mg.config.section import ConfigSection, StopStrings, refused_values


def _function_name(function: str | Callable[..., Any]) -> str:
    """Returns the text that names a function in a file; `verl_mg.api.Job` accepts the function itself."""
    return function if isinstance(function, str) else f"{function.__module__}:{function.__qualname__}"


RewardFunction = Annotated[str | Callable[..., Any], PlainSerializer(_function_name, return_type=str)]


class WeightedRewardConfig(ConfigSection):
    """One reward of a weighted sum."""

    function: RewardFunction
    """Reward function or class, as in `reward.function`."""
    options: dict[str, Any] = {}
    """Keyword arguments of the function, or of the class when it is created."""
    weight: float = 1.0
    """Factor of this reward in the sum. 0: the reward is only logged."""


class RewardConfig(ConfigSection):
    """Reward of a sample: one function, or a weighted sum."""

    function: RewardFunction = "verl_mg.rewards.math:score"
    """Reward function or class: `package.module:name` or `path/file.py:name`. With the prefix verl: or slime: a
    function as it was written for that framework, such as verl:my_reward.py:compute_score."""
    options: dict[str, Any] = {}
    """Keyword arguments of the function, or of the class when it is created."""
    mixture: dict[str, WeightedRewardConfig] = {}
    """Several rewards as `NAME: {function: ..., weight: ...}`. Their weighted sum replaces `reward.function`."""
    weights_file: Path | None = None
    """JSON or YAML file of new weights by name. It is read again in the iteration after a change."""
    workers: PositiveInt = 8
    """Concurrent calls of the reward on each rank."""
    from_model: bool = False
    """Score samples by the frozen reward model of the section `reward_model`, and run no reward functions."""

    _refused = refused_values(
        mixture=(
            lambda mixture, others: mixture and others.get("options"),
            "reward.options has no effect with a mixture. Write the options of each reward under it",
        ),
        weights_file=(
            lambda file, others: file is not None and not others.get("mixture"),
            "requires reward.mixture. Write the mixture whose weights the file contains",
        ),
    )


class SourceConfig(ConfigSection):
    """One of several sources of prompts."""

    path: Path
    """File, folder, pattern or name, as in `data.train`."""
    weight: float = Field(1.0, gt=0)
    """Share of the prompts taken from this source, relative to the other weights. Unused in `data.test`."""
    prompt_field: str | None = None
    """Field of the prompt in this source. null: `data.prompt_field`."""
    answer_field: str | None = None
    """Field of the answer in this source. null: `data.answer_field`."""
    instruction: str | None = None
    """Text appended to this source's string prompts. null: `data.instruction`."""
    chat_template: bool | None = None
    """Render this source's string prompts through the chat template. null: `data.chat_template`."""
    system_prompt: str | None = None
    """System message of this source's conversations. null: `data.system_prompt`."""
    prepare: str | None = None
    """Function that prepares this source's records. null: `data.prepare`."""
    reward: RewardConfig | None = None
    """Reward of this source's samples, in the form of the section `reward`. null: that section's."""

    _refused = refused_values(
        reward=(
            lambda reward, _: reward is not None and (reward.from_model or reward.weights_file),
            "the reward of a source has neither from_model nor weights_file. Write its function",
        )
    )

    @model_validator(mode="before")
    @classmethod
    def _is_mapping(cls, value: Any) -> Any:
        # pydantic's message would name the class, which users do not know.
        if not isinstance(value, dict | SourceConfig):
            raise ValueError("not a mapping. Write {path: ...}")
        return value


class EvaluationSetConfig(SourceConfig):
    """One of several sets of an evaluation."""

    prompts: PositiveInt | None = None
    """Prompts of this set that are evaluated, from its beginning. null: `evaluation.prompts`."""
    samples: PositiveInt | None = None
    """Answers per prompt. null: `evaluation.samples`."""
    temperature: float | None = Field(None, ge=0)
    """Sampling temperature. null: `evaluation.temperature`."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Nucleus sampling. null: `evaluation.top_p`."""
    max_new_tokens: PositiveInt | None = None
    """Longest response, in tokens. null: `evaluation.max_new_tokens`."""
    stop: StopStrings | None = None
    """Strings that end an answer. null: `evaluation.stop`."""
    k: list[PositiveInt] | None = None
    """Numbers of tries k of pass@k and maj@k. null: `evaluation.k`."""
    pass_threshold: float | None = None
    """Smallest reward of an answer that passes. null: `evaluation.pass_threshold`."""


class CurriculumConfig(ConfigSection):
    """Selection of training prompts by their pass rate."""

    low: float = Field(0.0, ge=0, le=1)
    """Smallest pass rate of a prompt that is taken. 0 excludes none."""
    high: float = Field(1.0, ge=0, le=1)
    """Largest pass rate of a prompt that is taken. 1 excludes none."""
    revisit: PositiveInt = 3
    """Times in a row that a prompt is skipped before it is taken again, since the policy has changed."""
    pass_threshold: float = 0.5
    """Smallest reward of an answer that passes."""
    decay: float = Field(0.5, ge=0, lt=1)
    """Weight of the old pass rate in the running average of a prompt. 0: only the newest observation counts."""

    _refused = refused_values(
        high=(lambda high, others: high < others.get("low", 0.0), "smaller than low. Write low <= high")
    )


class DataConfig(ConfigSection):
    """Training and test prompts, and the fields of a record to read."""

    train: Path | dict[str, SourceConfig]
    """Training prompts: a path, or several sources as `NAME: {path: ..., weight: ...}`. A path is a .jsonl, .json (one
    object per line), .parquet or .arrow file, a folder of shards, a pattern such as data/train-*.parquet, or a folder
    written by `save_to_disk` of Hugging Face datasets. If nothing has this path, it may be a data set of the Hugging
    Face hub such as openai/gsm8k:main:train (configuration and split), or of ModelScope with the prefix modelscope:.
    reasoning_gym:TASK:size=500,seed=0 generates prompts with the package reasoning-gym. harbor:FOLDER is a folder of
    Harbor's task folders."""
    test: Path | dict[str, EvaluationSetConfig] | None = None
    """Prompts of the evaluation, in the form of `data.train`: a path, or several sets by name, each with its sampling
    and its reward. null: no evaluation."""
    prompt_field: str | None = None
    """Field of the prompt: a string, or a list of messages with `role` and `content`. A name such as info.question is
    that of a field inside another. null: prompt, or messages in records without it, of which an assistant message at
    the end is not part of the prompt."""
    answer_field: str | None = None
    """Field of the reference answer, which the reward function receives. Records may be without it. null: the first
    that a record has of answer, reward_model.ground_truth (as verl writes it) and label (as slime reads it); with
    prompts from messages, otherwise their last assistant message."""
    chosen_field: str = "chosen"
    """Field of the preferred answer of a pair, for preference recipes."""
    rejected_field: str = "rejected"
    """Field of the other answer of a pair, for preference recipes."""
    chat_template: bool = False
    """Render string prompts as one user message through the tokenizer's chat template. Lists of messages always are.
    Off by default, since base models have no template."""
    instruction: str = ""
    """Text appended to prompts that are strings."""
    system_prompt: str = ""
    """System message in front of conversations that begin with none. "": none is added."""
    prepare: str | None = None
    """Function that is called with each record as it was read, and returns the record that is used, or None to leave it
    out: `package.module:name` or `path/file.py:name`, such as verl_mg.data.benchmarks:gpqa. null: records are used as
    they were read."""
    max_prompt_tokens: PositiveInt = 1024
    """Longest prompt, in tokens."""
    overlong_prompts: Literal["error", "drop"] = "error"
    """Treatment of longer prompts: stop with an error, or leave them out. Prompts are never truncated."""
    loss_on: Literal["answer", "last", "all", "flagged"] = "answer"
    """Target of fine-tuning on demonstrations. answer: the answer's text and an end of sequence. The others learn
    turns of the assistant in the conversation of `prompt_field`, as the chat template renders them with their end of
    turn: the last one; all, without messages that have train: false or weight: 0; or only flagged ones, which have
    train: true or weight: 1. `max_prompt_tokens` then counts the whole conversation."""
    image_field: str = "images"
    """Field of the images of a prompt, for models that read images: one or a list of paths relative to the data file,
    bytes of image files, {"bytes": ...} as Hugging Face datasets write them into Parquet, or data:image/png;base64,...
    The prompt has <image> in its text, or a part {"type": "image"}, where each belongs."""
    max_image_pixels: PositiveInt = 1 << 24
    """Largest width times height of an image. A larger one is an error; the model's processor may reduce smaller
    ones."""
    max_images: PositiveInt = 8
    """Largest number of images of a prompt."""
    curriculum: CurriculumConfig = CurriculumConfig()
    """Selection of training prompts by their pass rate. Off by default."""

    @field_validator("train", "test", mode="before")
    @classmethod
    def _path_or_sources(cls, value: Any, info: Any) -> Any:
        # Decided here: pydantic's error for a union would list the complaints of both types.
        if isinstance(value, dict) and value:
            kind = SourceConfig if info.field_name == "train" else EvaluationSetConfig
            return TypeAdapter(dict[str, kind]).validate_python(value)  # type: ignore[valid-type]
        if isinstance(value, str | Path) or (value is None and info.field_name == "test"):
            return value
        raise ValueError("neither a path nor sources. Write a path, or NAME: {path: ...} for each source")

    _refused = refused_values(
        rejected_field=(
            lambda name, others: name == others.get("chosen_field"),
            "the same as chosen_field. Write the field of the other answer",
        )
    )


class EvaluationConfig(ConfigSection):
    """Evaluation on `data.test` with the job's reward."""

    every: int = Field(0, ge=0)
    """Iterations between evaluations; one also runs before training. 0: never. With `rollout.mode: async` they run
    together with training's requests, and the next update waits for them."""
    prompts: PositiveInt | None = 256
    """Prompts of each source that are evaluated in training, from its beginning. null: all, as `verl-mg eval` does
    unless its arguments say otherwise."""
    samples: PositiveInt = 1
    """Answers per prompt. More than 1 also gives pass@k."""
    temperature: float = Field(0.0, ge=0, validate_default=True)
    """Sampling temperature. 0: greedy."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Nucleus sampling. null: `rollout.top_p`."""
    max_new_tokens: PositiveInt | None = None
    """Longest response, in tokens. null: `rollout.max_new_tokens`."""
    stop: StopStrings | None = None
    """Strings that end an answer. null: `rollout.stop`."""
    k: list[PositiveInt] | None = None
    """Numbers of tries k of pass@k and maj@k. null: 1, 2, 4, ... and `samples`, or none with one sample."""
    pass_threshold: float = 1.0
    """Smallest reward of an answer that passes. 1: the usual reward of a correct answer."""

    _refused = refused_values(
        temperature=(
            lambda temperature, others: temperature == 0 and others.get("samples", 1) > 1,
            "greedy samples of a prompt are identical. Write a temperature such as 0.6, or evaluation.samples=1",
        )
    )
