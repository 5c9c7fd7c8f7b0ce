"""Prompts neither too easy nor too hard, by the share of their answers that passed."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from verl_mg.data.mixture import Mixture
from verl_mg.data.prompts import Prompt, PromptSet, check_state


class Curriculum:
    """A walk over a set or a mixture that skips prompts whose known pass rate lies outside a band.

    A group whose answers all pass or all fail teaches group-relative methods nothing. A prompt never observed is
    always taken; one outside is skipped `revisit` times running and then taken, for the policy has moved on.
    A mixture keeps its shares: each source walks on to a prompt of its own.
    """

    def __init__(
        self,
        prompts: PromptSet | Mixture,
        *,
        low: float,
        high: float,
        revisit: int = 3,
        pass_threshold: float = 0.5,
        decay: float = 0.5,
    ) -> None:
        """A band of pass rates around `prompts`.

        Args:
            low: the smallest rate that is taken; high: the largest.
            pass_threshold: an answer passes with this reward or more.
            decay: how much the old rate weighs against that of a new observation, in [0, 1).
        """
        self._prompts = prompts
        self._low, self._high, self._revisit = low, high, revisit
        self._pass_threshold, self._decay = pass_threshold, decay
        self._rates: dict[int, float] = {}
        self._skips: dict[int, int] = {}

    @property
    def dropped(self) -> int:
        """How many prompts were left out for their length."""
        return self._prompts.dropped

    def __len__(self) -> int:
        return len(self._prompts)

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self._prompts)

    def first(self, n: int) -> list[Prompt]:
        """The first `n` prompts of each source, in file order."""
        return self._prompts.first(n)

    def by_id(self, prompt_id: int) -> Prompt:
        """The prompt of that `id`; KeyError where there is none or it was dropped."""
        return self._prompts.by_id(prompt_id)

    def rate(self, prompt_id: int) -> float | None:
        """The running pass rate of a prompt; None before it was observed."""
        return self._rates.get(prompt_id)

    def observe(self, prompt_ids: Sequence[int], rewards: Sequence[float]) -> None:
        """Learn how answers went, one id and one reward an answer, in any order.

        Every rank must tell the same answers, those of all ranks, or the ranks would take different prompts. The
        answers to a prompt within a call are one observation, their mean.
        """
        passes: dict[int, list[bool]] = {}
        for prompt_id, reward in zip(prompt_ids, rewards, strict=True):
            passes.setdefault(int(prompt_id), []).append(float(reward) >= self._pass_threshold)
        for prompt_id, passed in passes.items():
            now = sum(passed) / len(passed)
            before = self._rates.get(prompt_id, now)
            self._rates[prompt_id] = before + (1 - self._decay) * (now - before)

    def take(self, n: int) -> list[Prompt]:
        """The next `n` prompts of the walk.

        Where a turn over a whole set finds too few, those nearest to the band that it has passed fill up.
        """
        return self._prompts.take(n, self._draw) if isinstance(self._prompts, Mixture) else self._draw(self._prompts, n)

    def metrics(self) -> dict[str, float]:
        """The share of prompts whose rate is known; of those, the share inside the band and the mean rate."""
        known = list(self._rates)
        if not known:
            return {"curriculum/known": 0.0}
        return {
            "curriculum/known": len(known) / len(self),
            "curriculum/inside": sum(self._distance(i) == 0 for i in known) / len(known),
            "curriculum/pass_rate": sum(sorted(self._rates.values())) / len(known),
        }

    def state(self) -> dict[str, Any]:
        """Where the walk stands and what was observed, JSON-able, for `load_state` around the same data."""
        return {
            "kind": "curriculum",
            "walk": self._prompts.state(),
            "rates": {str(i): self._rates[i] for i in sorted(self._rates)},
            "skips": {str(i): self._skips[i] for i in sorted(self._skips)},
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state()`; band, threshold and decay may be others than before.

        Raises:
            UserError: the state is of other data, or of a run without a curriculum.
        """
        check_state(state, {"kind": "curriculum"})
        self._prompts.load_state(state["walk"])
        self._rates = {int(i): rate for i, rate in state["rates"].items()}
        self._skips = {int(i): count for i, count in state["skips"].items()}

    def _draw(self, prompts: PromptSet, n: int) -> list[Prompt]:
        taken: list[Prompt] = []
        while len(taken) < n:
            taken += self._turn(prompts, n - len(taken))
        return taken

    def _turn(self, prompts: PromptSet, n: int) -> list[Prompt]:
        """Up to `n` prompts, at least one, of as many as the set has."""
        taken: list[Prompt] = []
        skipped: dict[int, Prompt] = {}
        for _ in range(len(prompts)):
            (prompt,) = prompts.take(1)
            if self._is_due(prompt.id):
                taken.append(prompt)
                self._skips.pop(prompt.id, None)
            else:
                skipped[prompt.id] = prompt
                self._skips[prompt.id] = self._skips.get(prompt.id, 0) + 1
            if len(taken) == n:
                return taken
        # A turn from the middle of an epoch on meets some prompts twice.
        left = [skipped[i] for i in skipped.keys() - {prompt.id for prompt in taken}]
        nearest = sorted(left, key=lambda prompt: (self._distance(prompt.id), prompt.id))[: n - len(taken)]
        for prompt in nearest:
            del self._skips[prompt.id]
        return taken + nearest

    def _is_due(self, prompt_id: int) -> bool:
        return self._distance(prompt_id) == 0 or self._skips.get(prompt_id, 0) >= self._revisit

    def _distance(self, prompt_id: int) -> float:
        """How far a prompt's rate is outside the band; 0 inside, and where it is not known."""
        rate = self._rates.get(prompt_id)
        return 0.0 if rate is None else max(self._low - rate, rate - self._high, 0.0)
