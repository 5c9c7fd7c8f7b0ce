"""Reward functions with the interface of another framework, the files of its users.

verl    `compute_score(data_source, solution_str, ground_truth, extra_info)`, of `custom_reward_function`
slime   `async def custom_rm(args, sample)`, of `--custom-rm-path`
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import json
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType
from typing import Any, NamedTuple

from verl_mg.errors import UserError
from verl_mg.import_function import load_function
from verl_mg.rewards.sample import Reward, Sample

# Arguments of a function that scores one response (verl 0.9.1, NaiveRewardManager).
ONE = ("data_source", "solution_str", "ground_truth", "extra_info")
# Arguments of a function that scores several together (verl 0.9.1, utils/reward_score/math_batch.py).
MANY = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
TYPES = "slime.utils.types"  # module of slime with the class `Sample`, which files of rewards import
REWARD_KEY = "reward_key"  # option that names the value of the reward in a mapping, as slime's `--reward-key`


class Foreign(NamedTuple):
    """A function of another framework, and a call of it as a reward."""

    function: Callable[..., Any]
    call: Callable[[Any], Any]  # of a `Sample`, or of several; async where the function is
    batched: bool  # whether the call is of several samples
    given: tuple[str, ...] | None  # arguments of the function that are no options; None: it has no options


def verl_function(name: str, path: str, options: Mapping[str, Any]) -> Foreign:
    """Loads a function, sync or async, of the arguments `ONE` or `MANY`; `options` are verl's `reward_kwargs`."""
    function = load_function(path, "reward")
    parameters = inspect.signature(function).parameters
    batched = MANY[0] in parameters
    given = MANY if batched else ONE
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if missing := [argument for argument in given if argument not in parameters and not takes_all]:
        raise UserError(
            f"reward '{name}': takes no argument '{missing[0]}'. Define it as verl does: "
            f"compute_score({', '.join(ONE)}=None)."
        )

    def arguments(samples: Sequence[Sample]) -> dict[str, Any]:
        columns = [list(column) for column in zip(*map(_verl_values, samples), strict=True)]
        return dict(zip(given, columns if batched else [column[0] for column in columns], strict=True)) | dict(options)

    def reward(result: Any) -> Reward:
        return _reward(result, "score", name, "Return a number, or a mapping with 'score'.")

    return Foreign(function, _adapted(function, batched, arguments, reward), batched, given)


def slime_function(name: str, path: str, options: Mapping[str, Any]) -> Foreign:
    """Loads a function, sync or async, of arguments and a sample, or `samples` as with `--group-rm`."""
    _prepare_import_of_slime()
    function = load_function(path, "reward")
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [key for key, value in inspect.signature(function).parameters.items() if value.kind in kinds]
    if len(parameters) < 2:
        raise UserError(f"reward '{name}': does not take (args, sample). Define it as slime does: rm(args, sample).")
    first, second = parameters[:2]
    batched, sample_class, args = second == "samples", sys.modules[TYPES].Sample, SlimeArguments(options)

    def arguments(samples: Sequence[Sample]) -> dict[str, Any]:
        theirs = [_to_slime(sample, sample_class) for sample in samples]
        return {first: args, second: theirs if batched else theirs[0]}

    def reward(result: Any) -> Reward:
        remedy = f"Name the entry with the reward by the option {REWARD_KEY}."
        return _reward(result, args.reward_key or "score", name, remedy)

    return Foreign(function, _adapted(function, batched, arguments, reward), batched, None)


def _adapted(
    function: Callable[..., Any],
    batched: bool,
    arguments: Callable[[Sequence[Sample]], dict[str, Any]],
    reward: Callable[[Any], Reward],
) -> Callable[[Any], Any]:
    """Returns a function of a sample, or of several, that calls another one; it is async where that one is."""

    def converted(result: Any) -> Any:
        if not batched:
            return reward(result)
        results = as_list(result)
        return result if results is None else [reward(item) for item in results]

    async def after(result: Awaitable[Any]) -> Any:
        return converted(await result)

    def call(given: Any) -> Any:
        result = function(**arguments(given if batched else [given]))
        return after(result) if inspect.isawaitable(result) else converted(result)

    async def call_async(given: Any) -> Any:
        return await call(given)

    # A decorated async function does not look like one, and then returns something to await.
    return call_async if inspect.iscoroutinefunction(function) else call


def as_list(results: Any) -> list[Any] | None:
    """Returns the results of several samples as a list: of a sequence or a flat array; None for anything else."""
    if hasattr(results, "tolist") and getattr(results, "ndim", 0) == 1:  # of numpy, torch or pandas
        results = results.tolist()
    return list(results) if isinstance(results, Sequence) and not isinstance(results, str | bytes) else None


def _reward(result: Any, key: str, name: str, remedy: str) -> Reward:
    """Returns a number, or a mapping with further values, as a reward.

    The other numbers of a mapping are parts, texts are left out. `pred` is the final answer, as in verl's functions.
    """
    if not isinstance(result, Mapping):
        return Reward(_plain_number(result))
    if key not in result:
        raise UserError(f"reward '{name}' returned a mapping without '{key}' ({', '.join(map(str, result))}). {remedy}")
    values = {str(part): _plain_number(value) for part, value in result.items() if part != key}
    parts = {part: value for part, value in values.items() if isinstance(value, int | float)}
    answer = result.get("pred")
    return Reward(_plain_number(result[key]), parts, answer if isinstance(answer, str) else None)


def _reference(value: Any, answer: str | None) -> Any:
    """Returns a copy of the value that was read as an answer; the answer where that was read from another field."""
    # Answers are texts, while functions of other frameworks get the numbers, lists and mappings of the record.
    text = json.dumps(value, ensure_ascii=False, default=str) if isinstance(value, list | dict) else str(value)
    # A copy: functions may change it, and all samples of a prompt share the record.
    return copy.deepcopy(value) if text == answer else answer


def _plain_number(value: Any) -> Any:
    """Returns a number of numpy or torch as one of Python, other values unchanged."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value


def _verl_values(sample: Sample) -> tuple[str, str, Any, dict[str, Any]]:
    record = sample.record
    model = record.get("reward_model")
    truth = _reference(model.get("ground_truth") if isinstance(model, dict) else None, sample.answer)
    extra = record.get("extra_info")
    entries = copy.deepcopy(extra) if isinstance(extra, dict) else {}
    # Entries of extra_info that verl adds itself.
    more: dict[str, Any] = {"num_turns": None, "rollout_reward_scores": {}}
    return str(record.get("data_source") or ""), sample.response, truth, entries | more


@dataclass
class SlimeSample:
    """Sample with the fields of slime's that reward functions read."""

    class Status(Enum):
        """Reasons why a response ended."""

        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    prompt: str = ""
    response: str = ""
    response_length: int | None = None  # tokens of the response
    label: Any = None  # reference answer, of the type that the record has
    reward: Any = None  # always None: the functions return it
    status: Status = Status.PENDING  # reason why the response ended
    metadata: dict[str, Any] = field(default_factory=dict)  # field `metadata` of the record
    group_index: int | None = None  # always None
    index: int | None = None  # always None


class SlimeArguments:
    """The options of a reward as attributes, in place of slime's command line."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.reward_key: str | None = None
        vars(self).update(options)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"args.{name} is not set, write it in the reward's options")


def _prepare_import_of_slime() -> None:
    """Makes `from slime.utils.types import Sample` possible: slime's class, or where it is not installed, ours."""
    if TYPES in sys.modules:
        return
    if importlib.util.find_spec("slime") is not None:
        importlib.import_module(TYPES)
        return
    # Only if slime is not installed: its functions may use more of its class than ours has.
    for name in ("slime", "slime.utils", TYPES):
        sys.modules[name] = ModuleType(name, "Replacement for a module of slime, which is not installed.")
    vars(sys.modules[TYPES])["Sample"] = SlimeSample


def _to_slime(sample: Sample, sample_class: Any) -> Any:
    status = {"stop": "completed", "length": "truncated", "abort": "aborted"}[sample.finish]
    return sample_class(
        prompt=sample.prompt,
        response=sample.response,
        response_length=sample.num_tokens,
        label=_reference(sample.record.get("label"), sample.answer),
        status=sample_class.Status(status),
        metadata=copy.deepcopy(sample.record.get("metadata") or {}),
    )
