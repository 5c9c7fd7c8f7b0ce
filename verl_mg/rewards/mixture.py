"""Several rewards, weighted; the weights can be edited in a file while the run goes on."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from verl_mg.errors import UserError
from verl_mg.rewards.base import Reward


def warn(line: str) -> None:
    """The default of `report`: a Python warning."""
    warnings.warn(line, stacklevel=3)


class Mixture:
    """The weighted sum of named rewards.

    All ranks of a job must use the same weights within an iteration, and not all may see the file, or see an edit at
    the same time. So `refresh` only reads, on one rank, and `use` sets, on all, with what that rank has read:

        weights = mixture.refresh()      rank 0, once an iteration
        mixture.use(weights)             every rank, with the weights of rank 0

    file: JSON, or YAML where its name does not end in .json: a mapping of names to numbers. Names left out keep their
    weights. It need not exist on any rank but the one that refreshes.
    report: told one line about a file that cannot be used; the weights then stay as they are.
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
        """Those in use, by name."""
        return dict(self._weights)

    def refresh(self) -> dict[str, float]:
        """The weights to use from now on: those in use, with what the file says. It is read where it has changed."""
        if self._file is not None and self._has_changed(self._file):
            try:
                self._read = self._checked(_parsed(self._file), f"{self._file}")
            except UserError as error:
                self._report(f"{error}; the weights stay as they are")
        return self._weights | self._read

    def use(self, weights: Mapping[str, float]) -> None:
        """Set weights. UserError for an unknown name or a number that is not finite."""
        self._weights |= self._checked(weights, "weights of the rewards")

    def combine(self, rewards: Mapping[str, Reward]) -> Reward:
        """value: sum of weight * value. Parts: NAME, the value without its weight, and NAME/PART.

        answer: that of the first reward which has one, in the order of the weights.
        """
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
            now: object = (status.st_mtime_ns, status.st_size, status.st_ino)
        except OSError as error:
            now = error.strerror
        changed, self._seen = now != self._seen, now
        return changed

    def _checked(self, weights: Any, place: str) -> dict[str, float]:
        known = ", ".join(self._weights)
        if not isinstance(weights, Mapping):
            raise UserError(f"{place}: write a mapping of names to weights; the names are {known}")
        for name, weight in weights.items():
            if name not in self._weights:
                raise UserError(f"{place}: no reward is named {name!r}; the names are {known}")
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
                raise UserError(f"{place}: the weight of '{name}' is {weight!r:.40}; write a finite number")
        return {name: float(weight) for name, weight in weights.items()}


def _parsed(file: Path) -> Any:
    try:
        text = file.read_text(encoding="utf-8")
        return json.loads(text) if file.suffix == ".json" else yaml.safe_load(text)
    except OSError as error:
        raise UserError(f"{file}: the weights of the rewards cannot be read ({error.strerror})") from None
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{file}: neither JSON nor YAML ({first})") from None
