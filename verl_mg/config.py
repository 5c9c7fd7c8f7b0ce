"""The typed configuration tree: YAML, `a.b=c` overrides, and errors that say what to write instead.

A recipe brings its own section, `algorithm`, as a subclass of `Section` named `Config`; the rest is the
same for every recipe. Nothing here changes what was written: derived values are methods of the readers.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveInt,
    TypeAdapter,
    ValidationError,
    create_model,
    field_validator,
    model_validator,
)

from verl_mg.errors import UserError
from verl_mg.layout import EngineLayout, Layout


class Section(BaseModel):
    """A part of the configuration: fields are typed, unknown ones are refused, nothing can be changed later."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelConfig(Section):
    """The Hugging Face directory that every role starts from."""

    path: Path
    dtype: Literal["float32", "bfloat16"] = "float32"


class SourceConfig(Section):
    """One of several sources of prompts. `weight`: its share of the prompts taken, against the other sources'; a test
    has none. Fields and instruction are those of `data` unless given."""

    path: Path
    weight: float = Field(1.0, gt=0, allow_inf_nan=False)
    prompt_field: str | None = None
    answer_field: str | None = None
    instruction: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _known(cls, value: Any) -> Any:
        if not isinstance(value, dict | SourceConfig):
            raise ValueError("write a mapping, {path: ...}")
        # The names of sources are the user's, so `_nearest` finds no key of a source.
        unknown = [key for key in value if key not in cls.model_fields] if isinstance(value, dict) else []
        if unknown:
            raise ValueError(f"unknown key {unknown[0]!r}; a source has {', '.join(cls.model_fields)}")
        return value


class CurriculumConfig(Section):
    """Skip training prompts whose pass rate is outside [low, high]; 0 and 1 skip none. One that is skipped `revisit`
    times running is taken again. An answer passes with a reward of `threshold` or more; a prompt's rate is a running
    average in which the past weighs `decay`."""

    low: float = Field(0.0, ge=0, le=1)
    high: float = Field(1.0, ge=0, le=1)
    revisit: PositiveInt = 3
    threshold: float = 0.5
    decay: float = Field(0.5, ge=0, lt=1)

    @field_validator("high")
    @classmethod
    def _not_below_low(cls, high: float, info: Any) -> float:
        if high < info.data.get("low", 0.0):
            raise ValueError("must not be smaller than low")
        return high


class DataConfig(Section):
    """Prompts, and which fields of a record to read.

    `train`, `test`: a path, or several sources as `NAME: {path: ..., weight: ...}`. A path is a .jsonl, .json (lines)
    or .parquet file, a folder of shards, a pattern such as data/train-*.parquet, or a folder that save_to_disk of
    Hugging Face datasets has written. `chosen_field`, `rejected_field`: the answers of a preference.
    """

    train: Path | dict[str, SourceConfig]
    test: Path | dict[str, SourceConfig] | None = None
    prompt_field: str = "prompt"
    answer_field: str = "answer"
    chosen_field: str = "chosen"
    rejected_field: str = "rejected"
    chat_template: bool = False
    instruction: str = ""
    max_prompt_tokens: PositiveInt = 1024
    too_long: Literal["error", "drop"] = "error"
    curriculum: CurriculumConfig = CurriculumConfig()

    @field_validator("train", "test", mode="before")
    @classmethod
    def _path_or_sources(cls, value: Any, info: Any) -> Any:
        # Decided here, or an error would list the complaints of both kinds.
        if isinstance(value, dict) and value:
            return TypeAdapter(dict[str, SourceConfig]).validate_python(value)
        if isinstance(value, str | Path) or (value is None and info.field_name == "test"):
            return value
        raise ValueError("write a path, or sources as NAME: {path: ...}")

    @field_validator("rejected_field")
    @classmethod
    def _not_the_chosen(cls, name: str, info: Any) -> str:
        if name == info.data.get("chosen_field"):
            raise ValueError("must be another field than chosen_field")
        return name


class OptimizerConfig(Section):
    """Adam with decoupled weight decay; the schedule counts optimizer steps."""

    lr: float = Field(1e-6, gt=0)
    min_lr: float = Field(0.0, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(0, ge=0)
    decay_steps: PositiveInt | None = None
    weight_decay: float = Field(0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    clip_grad: float = Field(1.0, ge=0)

    @field_validator("decay_steps")
    @classmethod
    def _longer_than_warmup(cls, steps: int | None, info: Any) -> int | None:
        if steps is not None and steps <= info.data.get("warmup_steps", 0):
            raise ValueError("must be larger than warmup_steps")
        return steps


class GuardConfig(Section):
    """What keeps a bad update away from the weights.

    A step whose loss or gradient is not finite is left out; after `bad_steps` of them in a row the run stops. Where the
    policy has moved further than `max_kl` nats a token from that of the iteration's start, the step is left out (skip),
    or the weights go back to those before the last step, and the learning rate to its beginning (rollback).
    """

    bad_steps: PositiveInt = 10
    max_kl: float | None = Field(None, gt=0)
    action: Literal["skip", "rollback"] = "skip"


class LoraConfig(Section):
    """Low-rank adapters (arXiv:2106.09685), trained in place of the weights: W + alpha / rank * B A for each linear W.

    `targets`: names of linear layers, such as [q_proj, v_proj]; without it all of attention and of feed-forward layers,
    but for experts, which have no adapters yet, so that of a mixture of experts often attention alone is adapted.
    A critic's head is trained whole beside them. `path`: a folder in PEFT's format with the adapters to go on from, of
    the same rank, alpha and targets; without it they are drawn from `seed`, and change nothing at first.
    """

    rank: PositiveInt = 16
    alpha: float = Field(32.0, gt=0, allow_inf_nan=False)
    targets: list[str] | None = Field(None, min_length=1)
    path: Path | None = None
    seed: int = Field(0, ge=0)

    @model_validator(mode="before")
    @classmethod
    def _known(cls, value: Any) -> Any:
        # The section may be absent, so the list of all keys that `_nearest` looks in has none of its own.
        unknown = [key for key in value if key not in cls.model_fields] if isinstance(value, dict) else []
        if unknown:
            raise ValueError(f"unknown key {unknown[0]!r}; lora has {', '.join(cls.model_fields)}")
        return value


def _parsed(kind: type[Layout] | type[EngineLayout], text: str) -> str:
    try:
        kind.parse(text)
    except UserError as error:
        raise ValueError(str(error)) from None
    return text


class LayoutSection(Section):
    """A section with a parallel layout such as tp2-pp2."""

    layout: str = "tp1"

    @field_validator("layout")
    @classmethod
    def _can_be_parsed(cls, text: str) -> str:
        return _parsed(Layout, text)


class TrainedConfig(LayoutSection):
    """A model that learns. A micro-batch is filled up to `tokens_per_micro_batch` tokens. `lora`: train adapters."""

    tokens_per_micro_batch: PositiveInt = 8192
    recompute: bool = False
    optimizer: OptimizerConfig = OptimizerConfig()
    guard: GuardConfig = GuardConfig()
    lora: LoraConfig | None = None


class ActorConfig(TrainedConfig):
    """The policy that is trained. `offload`: parameters and optimizer wait on the host while samples are drawn."""

    offload: bool = False


class CriticConfig(TrainedConfig):
    """A model that learns to judge, built only where a recipe asks for it. `path`: of its own, not `model.path`."""

    path: Path | None = None


class ReferenceConfig(LayoutSection):
    """A frozen policy, built only where a recipe asks for it: the initial one, or a teacher at `path`."""

    path: Path | None = None
    tokens_per_micro_batch: PositiveInt = 16384


class RolloutConfig(Section):
    """Generation. `temperature` 0 is greedy; `top_k` 0 is off; `max_batch`: samples that an engine works on at once.

    Of the engine `sglang` alone: `layout`, that of one engine, such as tp8-ep8; `memory_fraction` of a GPU for weights
    and key-value cache; `sleep`: release both while training; `replay_routing`: train with the experts that SGLang
    chose; `request_timeout` in seconds; `ranks`: so many of the job's last ranks hold engines and no actor (0: engines
    and actor share all), and `sleep` does not count; `sglang`: further server arguments by SGLang's own names.
    `urls`: SGLang servers that somebody else has started, such as http://node7:30000, take the place of engines of this
    job; what concerns those alone does not count then. Weights come to them through a process group of `update` group,
    or, with disk, through `shared_folder`, a folder of this job alone that the servers see under the same path.
    `partial`: samples that were cut go on in the next iteration. `tools`: functions as `package.module:name` or
    `file.py:name`, called for at most `max_turns` turns in the format of SGLang's tool-call parser `tool_format`.
    """

    engine: Literal["embedded", "sglang"] = "embedded"
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    max_new_tokens: PositiveInt = 256
    max_batch: PositiveInt = 256
    partial: bool = False
    layout: str = "tp1"
    ranks: int = Field(0, ge=0)
    memory_fraction: float = Field(0.6, gt=0, lt=1)
    sleep: bool = True
    replay_routing: bool = False
    request_timeout: float = Field(3600.0, gt=0)
    sglang: dict[str, Any] = {}
    urls: list[str] = []
    update: Literal["disk", "group"] = "group"
    shared_folder: Path | None = None
    tools: list[str] = []
    max_turns: PositiveInt = 1
    tool_timeout: float = Field(30.0, gt=0)
    tool_format: str = "qwen25"

    @field_validator("layout")
    @classmethod
    def _can_be_parsed(cls, text: str) -> str:
        return _parsed(EngineLayout, text)


class MixedReward(Section):
    """One reward of a mixture. Weight 0: it is only logged."""

    function: str
    options: dict[str, Any] = {}
    weight: float = Field(1.0, allow_inf_nan=False)


class RewardConfig(Section):
    """`package.module:thing` or `path/file.py:thing`, with `options` as keyword arguments; see `load_reward`.

    `mixture`: rewards by name, whose weighted sum takes the place of `function`. `weights_file`: JSON or YAML, read
    once an iteration where it has changed, with new weights by name. `workers`: calls of a reward on a rank at once.
    """

    function: str = "verl_mg.rewards.math:score"
    options: dict[str, Any] = {}
    mixture: dict[str, MixedReward] = {}
    weights_file: Path | None = None
    workers: PositiveInt = 8

    @field_validator("mixture")
    @classmethod
    def _has_the_options(cls, mixture: dict[str, MixedReward], info: Any) -> dict[str, MixedReward]:
        if mixture and info.data.get("options"):
            raise ValueError("write the options under each reward of the mixture, not beside it")
        return mixture

    @field_validator("weights_file")
    @classmethod
    def _has_a_mixture(cls, file: Path | None, info: Any) -> Path | None:
        if file is not None and not info.data.get("mixture"):
            raise ValueError("there is no mixture whose weights it could tell; write reward.mixture")
        return file


class EvaluationConfig(Section):
    """Answers to `data.test`, scored by the reward, every `every` iterations (0: never).

    To the first `prompts` prompts of each source, `samples` answers each at `temperature` (0: greedy). An answer passes
    with a reward of `passed` or more.
    """

    every: int = Field(0, ge=0)
    prompts: PositiveInt = 256
    samples: PositiveInt = 1
    temperature: float = Field(0.0, ge=0)
    passed: float = 1.0

    @field_validator("temperature")
    @classmethod
    def _no_copies(cls, temperature: float, info: Any) -> float:
        if temperature == 0 and info.data.get("samples", 1) > 1:
            raise ValueError("greedy samples are copies; write a temperature such as 0.6, or evaluation.samples=1")
        return temperature


class JobConfig(Section):
    """Where the run goes and how long it is. `save`: write the trained model as a Hugging Face directory."""

    output: Path = Path("runs/job")
    iterations: PositiveInt = 100
    seed: int = 0
    save: bool = True
    console: bool = True


class Config(Section):
    """The whole tree; `algorithm` is the recipe's own section."""

    model: ModelConfig
    data: DataConfig
    actor: ActorConfig = ActorConfig()
    critic: CriticConfig = CriticConfig()
    reward_model: CriticConfig = CriticConfig()
    process_reward: CriticConfig = CriticConfig()
    reference: ReferenceConfig = ReferenceConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    job: JobConfig = JobConfig()
    algorithm: Any = None


def tree_for(algorithm: type[Section]) -> type[Config]:
    """The configuration class of a recipe whose own section is `algorithm`."""
    return create_model("RecipeConfig", __base__=Config, algorithm=(algorithm, Field(default_factory=algorithm)))


def load_config(path: str | Path | None, overrides: list[str], algorithm: type[Section]) -> Config:
    """Read a YAML file, apply `a.b=c` overrides (their values are YAML too), check everything.

    Raises UserError with one line that names the file or the override, the key, and the remedy.
    """
    tree = _read_yaml(Path(path)) if path is not None else {}
    for override in overrides:
        _apply_override(tree, override)
    kind = tree_for(algorithm)
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        raise UserError(f"{path or 'overrides'}: {_first_problem(error, kind)}") from None


def dump_config(config: Config) -> str:
    """The whole tree as YAML, defaults included: what the run was really started with."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot read the configuration ({error.strerror})") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        where = getattr(error, "problem_mark", None)
        line = f":{where.line + 1}" if where else ""
        raise UserError(f"{path}{line}: not valid YAML ({getattr(error, 'problem', None) or error})") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise UserError(f"{path}: the configuration must be a mapping of sections such as `model:` and `data:`")
    return tree


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise UserError(f"override {override!r}: write section.key=value, such as actor.layout=tp2")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise UserError(f"override {override!r}: the value is not valid YAML; quote it") from None
    *parents, last = key.split(".")
    node = tree
    for parent in parents:
        child = node.setdefault(parent, {})
        if child is None:
            child = node[parent] = {}
        if not isinstance(child, dict):
            raise UserError(f"override {override!r}: {parent!r} is a value, not a section")
        node = child
    node[last] = value


def _first_problem(error: ValidationError, kind: type[Section]) -> str:
    problem = error.errors()[0]
    where = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"unknown key {where!r}{_nearest(problem['loc'], kind)}"
    if problem["type"] == "missing":
        return f"{where!r} is missing; write it in the file or as {where}=VALUE"
    message = problem["msg"].removeprefix("Value error, ")
    return f"{where!r} is {problem['input']!r}: {message[0].lower()}{message[1:]}"


def _nearest(location: tuple[int | str, ...], kind: type[Section]) -> str:
    """`; did you mean ...?` for an unknown key, looked for in its section first, then in the whole tree."""
    known = _known_keys(kind)
    whole = ".".join(map(str, location))
    parent, _, name = whole.rpartition(".")
    siblings = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == parent}
    beside = [siblings[close] for close in difflib.get_close_matches(name, siblings, 1)]
    elsewhere = [key for key in known if key.rpartition(".")[2] == name]
    within = [key for key in elsewhere if key.startswith(f"{parent}.")]
    if best := within or beside or elsewhere or difflib.get_close_matches(whole, known, 1):
        return f"; did you mean {best[0]!r}?"
    return f"; {parent or 'the top level'} has {', '.join(siblings)}"


def _known_keys(kind: type[BaseModel], prefix: str = "") -> list[str]:
    keys = []
    for name, field in kind.model_fields.items():
        keys.append(prefix + name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys += _known_keys(field.annotation, f"{prefix}{name}.")
    return keys
