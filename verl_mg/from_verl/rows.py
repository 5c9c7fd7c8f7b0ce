"""Rows of the table: keys of verl, and the values of our keys that follow.

    same("aorr.actor.clip_ratio_low", "algorithm.clip_low")                  the same value under another name
    Row(("trainer.save_freq",), ("checkpoint.every",), lambda job: {...})    a value that is computed

A row reads values of a `VerlJob`, of the file or else verl's defaults. A value that has no counterpart is
reported by `job.report`, and never left out silently.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from verl_mg.from_verl.job import ALWAYS, Condition, Kind, VerlJob

Values = dict[str, Any]  # {our key: value}
NONE: Kind = "no counterpart"
ASK: Kind = "ask"


def keys_of(*texts: str) -> tuple[str, ...]:
    """Returns the keys that texts name: "x y.z" two of them, and "a b: x y" a.x, a.y, b.x and b.y."""
    keys: list[str] = []
    for text in texts:
        sections, colon, names = text.rpartition(": ")
        prefixes = [f"{section}." for section in sections.split()] if colon else [""]
        keys += [prefix + name for prefix in prefixes for name in names.split()]
    return tuple(keys)


@dataclass(frozen=True)
class Row:
    """Keys of verl that are read together, and the values of our keys that follow."""

    theirs: tuple[str, ...]  # `section.*` stands for all keys of a section
    ours: tuple[str, ...]
    convert: Callable[[VerlJob], Values]
    note: str = ""  # for the page
    when: Condition = ALWAYS  # when verl reads the keys

    def reads(self, key: str) -> bool:
        """Whether a key of verl is one of the row's."""
        return any(key == name or (name.endswith(".*") and key.startswith(name[:-1])) for name in self.theirs)


def same(theirs: str, ours: str, note: str = "", when: Condition = ALWAYS) -> Row:
    """Returns the row of a key that has the same values here."""
    return Row((theirs,), (ours,), lambda job: {ours: job[theirs]}, note, when)


MEGATRON = Condition(lambda job: job.megatron, "with FSDP")
FSDP = Condition(lambda job: not job.megatron, "with Megatron")
CRITIC = Condition(lambda job: job.has_critic, "without a critic")
REFERENCE = Condition(lambda job: job.has_reference, "without a KL penalty")
CLIPPED = Condition(lambda job: job.loss not in ("gpg", "kl_cov", "sapo"), "with this loss, which clips no ratio")
AGGREGATED = Condition(
    lambda job: job.loss not in ("gspo", "sapo", "geo_mean"), "with this loss, which averages itself"
)


def loss_is(*losses: str) -> Condition:
    """Returns the condition that the policy loss is one of some."""
    return Condition(lambda job: job.loss in losses, "with another loss_mode")


def advantage_is(*estimators: str) -> Condition:
    """Returns the condition that the advantage is one of some."""
    return Condition(lambda job: job.advantage in estimators, "with another adv_estimator")
