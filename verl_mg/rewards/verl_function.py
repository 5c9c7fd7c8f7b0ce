"""Reward functions with verl's interface: `compute_score(data_source, solution_str, ground_truth, extra_info)`."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verl_mg.errors import UserError
from verl_mg.rewards.foreign import adapted, reference, reward_of
from verl_mg.rewards.sample import Reward, Sample

# Arguments of a function that scores one response (verl 0.9.1, NaiveRewardManager).
ONE = ("data_source", "solution_str", "ground_truth", "extra_info")
# Arguments of a function that scores several together (verl 0.9.1, utils/reward_score/math_batch.py).
MANY = ("data_sources", "solution_strs", "ground_truths", "extra_infos")


class VerlFunction:
    """Function of verl's `custom_reward_function`, or of its package, as a reward.

    Attributes:
        call: function of a `Sample`, or of several, that returns rewards.
        batched: whether it is of several.
        given: names of the arguments that are not options.
    """

    given: tuple[str, ...] | None

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
