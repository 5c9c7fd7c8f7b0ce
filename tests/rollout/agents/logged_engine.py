"""An engine that notes what it was given and what it has generated."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from verl_mg.rollout.engine import Request, RolloutEngine, Sample, Sampling


class LoggedEngine(RolloutEngine):
    """An engine that notes what it was given and what it has generated."""

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine = engine
        self.log: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        self.most_at_once = 0
        self._requests: dict[int, Request] = {}

    def num_free_slots(self) -> int:
        return self.engine.num_free_slots()

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> None:
        self._requests |= {request.id: request for request in requests}
        self.most_at_once = max(self.most_at_once, len(self._requests))
        self.engine.submit(requests, sampling)

    def collect(self, timeout: float) -> list[Sample]:
        samples = self.engine.collect(timeout)
        for sample in samples:
            self.log.append((self._requests.pop(sample.id).context, sample.tokens))
        return samples

    def abort(self) -> None:
        self.engine.abort()

    def abort_samples(self, ids: Collection[int]) -> None:
        self.engine.abort_samples(ids)

    def health(self) -> bool:
        return self.engine.health()
