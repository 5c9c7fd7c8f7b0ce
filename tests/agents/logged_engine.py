"""An engine that notes what it was given and what it has generated."""

from __future__ import annotations

from collections.abc import Sequence

from verl_mg.engines.engine import EngineWrapper, Request, RolloutEngine, Sample, Sampling


class LoggedEngine(EngineWrapper):
    """An engine that notes what it was given and what it has generated."""

    def __init__(self, engine: RolloutEngine) -> None:
        super().__init__(engine)
        self.log: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        self.most_at_once = 0
        self._requests: dict[int, Request] = {}

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> None:
        self._requests |= {request.id: request for request in requests}
        self.most_at_once = max(self.most_at_once, len(self._requests))
        self._engine.submit(requests, sampling)

    def collect(self, timeout: float) -> list[Sample]:
        samples = self._engine.collect(timeout)
        for sample in samples:
            self.log.append((self._requests.pop(sample.id).context, sample.tokens))
        return samples
