"""Engine whose samples are trajectories: the responses of another engine, cut into segments."""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from verl_mg.engines.engine import EngineWrapper, Request, RolloutEngine, Sample, Sampling
from verl_mg.engines.sampled_support import join_tops
from verl_mg.engines.trajectory import NOT_GENERATED, ConversationTurn, Segment, Trajectory
from verl_mg.rewards import Reward


class SplittingEngine(EngineWrapper):
    """Cuts each response at random; a segment repeats everything before its part, which it alone trains.

    The segments are of the agents in turn.
    """

    def __init__(
        self,
        inner: RolloutEngine,
        decode: Callable[[Iterable[int]], str],
        max_segments: int = 4,
        reward: Callable[[Sample], Reward | None] = lambda sample: None,
        agents: Sequence[str] = ("",),
    ) -> None:
        super().__init__(inner)
        self._agents = agents
        self._decode, self._max_segments, self._reward = decode, max_segments, reward
        self._prompts: dict[int, tuple[int, ...]] = {}

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> None:
        self._prompts |= {request.id: request.prompt for request in requests}
        self._engine.submit(requests, sampling)

    def collect(self, timeout: float) -> list[Sample]:
        return [self._split(sample) for sample in self._engine.collect(timeout)]

    def _split(self, sample: Sample) -> Sample:
        if sample.finish == "abort":  # is generated again from its start
            return Sample(sample.id, (), (), (), "abort")
        prompt, draw = self._prompts.pop(sample.id), random.Random(sample.id)
        inner_cuts = draw.sample(range(1, len(sample.tokens)), min(len(sample.tokens), self._max_segments) - 1)
        cuts = [0, *sorted(inner_cuts[: draw.randrange(self._max_segments)]), len(sample.tokens)]
        reply = {"role": "assistant", "content": self._decode(sample.tokens)}
        segments = tuple(
            replace(_segment(number, prompt, sample, cuts), agent=self._agents[number % len(self._agents)])
            for number in range(len(cuts) - 1)
        )
        turns = [(len(cuts) - 2, len(prompt), len(sample.tokens))]
        if len(self._agents) > 1:  # a turn of each, so that each has a last one
            turns = [
                (number, len(prompt) + cuts[number], cuts[number + 1] - cuts[number]) for number in range(len(cuts) - 1)
            ]
        spoken = tuple(
            ConversationTurn(number, "policy", True, 0.0, 0.5, (), reply, *lengths, "stop")
            for number, *lengths in turns
        )
        trajectory = Trajectory(segments, spoken, self._reward(sample), log=f"log of {sample.id}")
        return Sample(sample.id, (), (), (), "stop", trajectory=trajectory)


def _segment(number: int, prompt: tuple[int, ...], sample: Sample, cuts: Sequence[int]) -> Segment:
    begin, end = cuts[number], cuts[number + 1]
    context = len(prompt) + begin
    whole = Segment(
        tokens=prompt + sample.tokens[:end],
        logprobs=(0.0,) * context + sample.logprobs[begin:end],
        policy_versions=(NOT_GENERATED,) * context + sample.policy_versions[begin:end],
        truncated=sample.finish == "length" and end == len(sample.tokens),
        top=None if sample.top is None else join_tops([(context, None), (end - begin, sample.top[begin:end])]),
    )
    if sample.routed_experts is not None:
        whole = replace(whole, routed_experts=sample.routed_experts[: len(whole.tokens) - 1])
    return replace(whole, prefix_of=number - 1, prefix_length=context) if number else whole
