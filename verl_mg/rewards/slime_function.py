"""Reward functions with slime's interface: `async def custom_rm(args, sample)`, the files of its `--custom-rm-path`."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType
from typing import Any

from verl_mg.errors import UserError
from verl_mg.rewards.foreign import adapted, reference, reward_of
from verl_mg.rewards.sample import Reward, Sample

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
    """Function of slime's `--custom-rm-path` as a reward.

    Attributes:
        call: function of a `Sample`, or of several, that returns rewards.
        batched: whether it is of several: its second parameter is then called `samples`, as with `--group-rm`.
        given: None, since options become attributes of `args`.
    """

    given: tuple[str, ...] | None = None

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
