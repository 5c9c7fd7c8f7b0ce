"""Weighted mixture of several rewards; the weights can be edited in a file during the run."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from verl_mg.errors import UserError
from verl_mg.rewards.sample import Reward


def warn(line: str) -> None:
    """Reports a line as a Python warning; the default of `report`."""
    warnings.warn(line, stacklevel=3)


class Mixture:
    """Weighted sum of named rewards.

    Weights {"math": 1.0, "form": 0.1} and the rewards 1.0 and 0.0 of a sample give value 1.0 and the parts math 1.0,
    form 0.0.

    All ranks of a job must use the same weights within an iteration, but ranks may see the file or an edit of it at
    different times or not at all. So `refresh` reads the file on one rank, and `use` sets the weights on all:

        weights = mixture.refresh()      rank 0, once an iteration
        mixture.use(weights)             every rank, with the weights of rank 0
    """

    def __init__(
        self, weights: Mapping[str, float], file: Path | None = None, report: Callable[[str], None] = warn
    ) -> None:
        self._weights, self._file, self._report = dict(weights), file, report
        self._read: dict[str, float] = {}
        self._seen: object = None
        self.use(weights)

    @property
    def weights(self) -> dict[str, float]:
        """The current weights by name."""
        return dict(self._weights)

    def refresh(self) -> dict[str, float]:
        """Returns the current weights, updated by the file, which is read where it has changed."""
        if self._file is not None and self._has_changed(self._file):
            try:
                self._read = self._checked(_parsed(self._file), f"{self._file}")
            except UserError as error:
                self._report(f"{error} The weights remain unchanged.")
        return self._weights | self._read

    def use(self, weights: Mapping[str, float]) -> None:
        """Sets weights; UserError for an unknown name or a number that is not finite."""
        self._weights |= self._checked(weights, "weights of the rewards")

    def combine(self, rewards: Mapping[str, Reward]) -> Reward:
        """Returns the weighted sum, parts NAME (unweighted) and NAME/PART, and the first answer that there is.

        Where some of the rewards are by agent, so is the result, of the agents that all of these have.
        """
        if by_agent := [reward.agents.keys() for reward in rewards.values() if reward.agents]:
            agents = [agent for agent in by_agent[0] if all(agent in others for others in by_agent)]
            if not agents:
                names = ", ".join(sorted({agent for of_one in by_agent for agent in of_one}))
                raise UserError(
                    f"reward.mixture: its rewards are of different agents ({names}), and no agent has all of them. "
                    "Return from each a number for every agent, or one number for all."
                )
            of_agents = ({name: reward.of(agent) for name, reward in rewards.items()} for agent in agents)
            return Reward.by_agent(dict(zip(agents, map(self.combine, of_agents), strict=True)))
        parts: dict[str, float] = {}
        for name in self._weights:
            parts[name] = rewards[name].value
            parts |= {f"{name}/{part}": number for part, number in rewards[name].parts.items()}
        value = sum(weight * rewards[name].value for name, weight in self._weights.items())
        answers = (rewards[name].answer for name in self._weights)
        return Reward(value, parts, next((answer for answer in answers if answer is not None), None))

    def _has_changed(self, file: Path) -> bool:
        try:
            status = file.stat()
            # The inode too: an editor that replaces the file may keep size and, within the clock's step, time.
            now: object = (status.st_mtime_ns, status.st_size, status.st_ino)
        except OSError as error:
            now = error.strerror
        changed, self._seen = now != self._seen, now
        return changed

    def _checked(self, weights: Any, place: str) -> dict[str, float]:
        known = ", ".join(self._weights)
        if not isinstance(weights, Mapping):
            raise UserError(f"{place}: not a mapping. Write a mapping of names to weights; the names are {known}.")
        for name, weight in weights.items():
            if name not in self._weights:
                raise UserError(f"{place}: no reward is named {name!r}. Write one of: {known}.")
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
                raise UserError(f"{place}: the weight of '{name}' is {weight!r:.40}. Write a finite number.")
        return {name: float(weight) for name, weight in weights.items()}


def _parsed(file: Path) -> Any:
    try:
        text = file.read_text(encoding="utf-8")
        return json.loads(text) if file.suffix == ".json" else yaml.safe_load(text)
    except OSError as error:
        raise UserError(
            f"{file}: the weights of the rewards cannot be read ({error.strerror}). Correct reward.weights_file."
        ) from None
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{file}: neither JSON nor YAML ({first}). Correct it.") from None
