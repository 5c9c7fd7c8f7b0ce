"""`VerlJob`: the values of a job of verl, of its file or else verl's defaults, and what was found to have no match."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import yaml

from verl_mg.errors import UserError
from verl_mg.from_verl.reading import LONG, SHORT, Given, flat, resolved

DEFAULTS: Given = flat(yaml.safe_load(Path(__file__).with_name("defaults.yaml").read_text(encoding="utf-8")))
"""Values that verl assumes, by key."""
Kind = Literal["no counterpart", "ask", "ignored", "unknown"]
"""Fate of a key. no counterpart: the job means something else. ask: the user's choice. ignored: nothing is lost."""


@dataclass(frozen=True)
class Remark:
    """A line about keys of verl."""

    kind: Kind
    keys: tuple[str, ...]
    text: str

    def line(self, job: VerlJob) -> str:
        """Returns the line with the keys and, for one key, its value."""
        first = self.keys[0].replace(SHORT, LONG)
        value = f"={job[self.keys[0]]}" if len(self.keys) == 1 and not self.keys[0].endswith("*") else ""
        more = "".join(f", {key.replace(SHORT, LONG)}" for key in self.keys[1:])
        return f"{self.kind}: {first}{value}{more}: {self.text}"


@dataclass(frozen=True)
class Condition:
    """When verl reads a key, and the words for when it does not."""

    holds: Callable[[VerlJob], bool]
    otherwise: str


ALWAYS = Condition(lambda job: True, "")


@dataclass
class VerlJob:
    """A job of verl; `job["aorr.rollout.n"]` is the value of a key."""

    given: Given
    remarks: list[Remark] = field(default_factory=list)

    def __getitem__(self, key: str) -> Any:
        return resolved(self.given, key, DEFAULTS)

    def section(self, name: str) -> dict[str, Any]:
        """Returns what is given below a key, as a mapping."""
        values: dict[str, Any] = {}
        for key in self.given:
            if key.startswith(f"{name}."):
                *parents, last = key[len(name) + 1 :].split(".")
                node = values
                for parent in parents:
                    node = node.setdefault(parent, {})
                node[last] = self[key]
        return values

    def report(self, kind: Kind, keys: str | tuple[str, ...], text: str) -> None:
        """Adds a line about a key and its value, or about several keys."""
        self.remarks.append(Remark(kind, (keys,) if isinstance(keys, str) else keys, text))

    def refusal(self, key: str, text: str) -> UserError:
        """Returns the error of a value with which no job means the same."""
        return UserError(f"{key.replace(SHORT, LONG)}={self[key]}: {text}.")

    def number(self, key: str) -> float:
        """Returns the value of a key that is a number."""
        value = self[key]
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.refusal(key, "not a number. Correct it")
        return value

    def integer(self, key: str) -> int:
        """Returns the value of a key that is a whole number."""
        value = self.number(key)
        if not float(value).is_integer():
            raise self.refusal(key, "not a whole number. Correct it")
        return int(value)

    def count(self, key: str) -> int:
        """Returns the value of a key that is a whole number above 0."""
        value = self.integer(key)
        if value < 1:
            raise self.refusal(key, "not a number above 0. Correct it")
        return value

    def listed(self, key: str) -> list[str]:
        """Returns the value of a key that is a list of names, a single name, or null for none."""
        value = self[key]
        names = [value] if isinstance(value, str) else [] if value is None else value
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise self.refusal(key, "not a list of names. Correct it")
        return names

    @property
    def megatron(self) -> bool:
        """Whether verl trains with Megatron, and otherwise with FSDP."""
        return bool(self["aorr.actor.strategy"] == "megatron")

    @property
    def loss(self) -> str:
        """Name of the policy loss, its loss_mode."""
        return str(self["aorr.actor.policy_loss.loss_mode"])

    @property
    def advantage(self) -> str:
        """Name of the advantage, its adv_estimator."""
        return str(self["algorithm.adv_estimator"])

    @property
    def has_critic(self) -> bool:
        """Whether a critic is trained."""
        return self.advantage == "gae"

    @property
    def has_reference(self) -> bool:
        """Whether there is a KL penalty."""
        return bool(self["algorithm.use_kl_in_reward"] or self["aorr.actor.use_kl_loss"])

    @property
    def ranks_of_a_node(self) -> int:
        """Number of GPUs of a node."""
        return self.count("trainer.n_gpus_per_node")

    @property
    def ranks(self) -> int:
        """Number of GPUs of the job."""
        return self.count("trainer.nnodes") * self.ranks_of_a_node

    @property
    def minibatches(self) -> int:
        """Optimizer steps of an epoch."""
        prompts, size = self.count("data.train_batch_size"), self.count("aorr.actor.ppo_mini_batch_size")
        if prompts % size:
            text = f"it does not divide the {prompts} prompts of data.train_batch_size. Choose one that does"
            raise self.refusal("aorr.actor.ppo_mini_batch_size", text)
        return prompts // size

    @property
    def updates(self) -> int:
        """Optimizer steps of an iteration. verl's schedules count iterations, ours optimizer steps."""
        return self.minibatches * self.count("aorr.actor.ppo_epochs")

    @cached_property
    def iterations(self) -> int | None:
        """Iterations of the job; None where they depend on files that are not here."""
        if self["trainer.total_training_steps"] is not None:
            return self.count("trainer.total_training_steps")
        if self["algorithm.filter_groups.enable"]:
            return None  # the rollouts of an iteration depend on the policy
        files = self["data.train_files"]
        rows = [self.rows_of(str(file)) for file in (files if isinstance(files, list) else [files])]
        counted = sum(row for row in rows if row)
        if not all(rows):
            return None
        return counted // self.count("data.train_batch_size") * self.count("trainer.total_epochs") or None

    def rows_of(self, file: str) -> int | None:
        """Returns the rows of a Parquet file; None where it is not here."""
        path = Path(file).expanduser()
        if path.suffix != ".parquet" or not path.is_file():
            return None
        from pyarrow import ArrowException, parquet

        try:
            return int(parquet.read_metadata(path).num_rows)
        except (ArrowException, OSError):
            return None
