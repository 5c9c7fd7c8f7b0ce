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
from typing import Any

from verl_mg.errors import UserError
from verl_mg.rewards.sample import Reward, Sample


def adapted(
    function: Callable[..., Any], arguments: Callable[[Any], dict[str, Any]], convert: Callable[[Any], Any]
) -> Callable[[Any], Any]:
    """Returns a function of a sample, or of several, that calls another one; it is async where that one is."""
    if inspect.iscoroutinefunction(function):

        async def call_async(given: Any) -> Any:
            return convert(await function(**arguments(given)))

        return call_async

    async def after(result: Awaitable[Any]) -> Any:
        return convert(await result)

    def call(given: Any) -> Any:
        # A decorated async function does not look like one.
        result = function(**arguments(given))
        return after(result) if inspect.isawaitable(result) else convert(result)

    return call


def reward_of(result: Any, key: str, name: str, remedy: str) -> Reward:
    """Returns a number, or a mapping with further values, as a reward.

    The other numbers of a mapping are parts, texts are left out. `pred` is the final answer, as in verl's functions.
    """
    if not isinstance(result, Mapping):
        return Reward(plain_number(result))
    if key not in result:
        raise UserError(f"reward '{name}' returned a mapping without '{key}' ({', '.join(map(str, result))}). {remedy}")
    values = {str(part): plain_number(value) for part, value in result.items() if part != key}
    parts = {part: value for part, value in values.items() if isinstance(value, int | float)}
    answer = result.get("pred")
    return Reward(plain_number(result[key]), parts, answer if isinstance(answer, str) else None)


def reference(value: Any, answer: str | None) -> Any:
    """Returns a copy of the value that was read as an answer; the answer where that was read from another field."""
    # Answers are texts, while functions of other frameworks get the numbers, lists and mappings of the record.
    text = json.dumps(value, ensure_ascii=False, default=str) if isinstance(value, list | dict) else str(value)
    # A copy: functions may change it, and all samples of a prompt share the record.
    return copy.deepcopy(value) if text == answer else answer


def plain_number(value: Any) -> Any:
    """Returns a number of numpy or torch as one of Python, other values unchanged."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value


# Arguments of a function that scores one response (verl 0.9.1, NaiveRewardManager).
ONE = ("data_source", "solution_str", "ground_truth", "extra_info")
# Arguments of a function that scores several together (verl 0.9.1, utils/reward_score/math_batch.py).
MANY = ("data_sources", "solution_strs", "ground_truths", "extra_infos")


class VerlFunction:
    """Function of verl's `custom_reward_function` as a reward: `call`, of several samples if `batched`."""

    given: tuple[str, ...] | None  # names of the arguments that are not options

    def __init__(self, name: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
        """Reads the signature of a function, sync or async, of `ONE` or `MANY`; `options`: verl's `reward_kwargs`."""
        self._name, self._options = name, dict(options)
        parameters = inspect.signature(function).parameters
        self.batched = MANY[0] in parameters
        self.given = MANY if self.batched else ONE
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        if missing := [argument for argument in self.given if argument not in parameters and not takes_all]:
            raise UserError(
                f"reward '{name}': takes no argument '{missing[0]}'. Define it as verl does: "
                f"compute_score({', '.join(ONE)}=None)."
            )
        arguments = self._of_several if self.batched else self._of_single
        self.call = adapted(function, arguments, self._rewards if self.batched else self._reward)

    @staticmethod
    def prepare_import() -> None:
        """Does nothing: files with functions for verl need not import it."""

    def _of_single(self, sample: Sample) -> dict[str, Any]:
        return dict(zip(ONE, _values(sample), strict=True)) | self._options

    def _of_several(self, samples: Sequence[Sample]) -> dict[str, Any]:
        columns = zip(*map(_values, samples), strict=True)
        return dict(zip(MANY, map(list, columns), strict=True)) | self._options

    def _reward(self, result: Any) -> Reward:
        return reward_of(result, "score", self._name, "Return a number, or a mapping with 'score'.")

    def _rewards(self, results: Any) -> Any:
        return [self._reward(result) for result in results] if isinstance(results, Sequence) else results


def _values(sample: Sample) -> tuple[str, str, Any, dict[str, Any]]:
    record = sample.record
    model = record.get("reward_model")
    truth = reference(model.get("ground_truth") if isinstance(model, dict) else None, sample.answer)
    extra = record.get("extra_info")
    entries = copy.deepcopy(extra) if isinstance(extra, dict) else {}
    # Entries of extra_info that verl adds itself.
    more: dict[str, Any] = {"num_turns": None, "rollout_reward_scores": {}}
    return str(record.get("data_source") or ""), sample.response, truth, entries | more


TYPES = "slime.utils.types"  # module of slime with the class `Sample`, which files of rewards import
REWARD_KEY = "reward_key"  # option that names the value of the reward in a mapping, as slime's `--reward-key`


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


class SlimeFunction:
    """Function of slime's `--custom-rm-path` as a reward; `batched` if it takes `samples`, as with `--group-rm`."""

    given: tuple[str, ...] | None = None  # options become attributes of `args`

    def __init__(self, name: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
        """Reads the signature of a function, sync or async; `options` are attributes of `args`."""
        self._name, self._arguments = name, SlimeArguments(options)
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = [key for key, value in inspect.signature(function).parameters.items() if value.kind in kinds]
        if len(parameters) < 2:
            raise UserError(
                f"reward '{name}': does not take (args, sample). Define it as slime does: rm(args, sample)."
            )
        self.batched = parameters[1] == "samples"
        first, second = parameters[:2]
        sample_class = sys.modules[TYPES].Sample

        def arguments(given: Any) -> dict[str, Any]:
            samples = [_to_slime(sample, sample_class) for sample in (given if self.batched else [given])]
            return {first: self._arguments, second: samples if self.batched else samples[0]}

        self.call = adapted(function, arguments, self._rewards if self.batched else self._reward)

    @staticmethod
    def prepare_import() -> None:
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

    def _reward(self, result: Any) -> Reward:
        key = self._arguments.reward_key or "score"
        return reward_of(result, key, self._name, f"Name the entry with the reward by the option {REWARD_KEY}.")

    def _rewards(self, results: Any) -> Any:
        return [self._reward(result) for result in results] if isinstance(results, Sequence) else results


def _to_slime(sample: Sample, sample_class: Any) -> Any:
    status = {"stop": "completed", "length": "truncated", "abort": "aborted"}[sample.finish]
    return sample_class(
        prompt=sample.prompt,
        response=sample.response,
        response_length=sample.num_tokens,
        label=reference(sample.record.get("label"), sample.answer),
        status=sample_class.Status(status),
        metadata=copy.deepcopy(sample.record.get("metadata") or {}),
    )
