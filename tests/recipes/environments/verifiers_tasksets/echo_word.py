"""Taskset of verifiers for the tests: the reply is to be the word of the task."""

from collections.abc import Iterable

import verifiers.v1 as vf

__all__ = ["EchoTaskset"]


class EchoData(vf.TaskData):
    word: str


class EchoTask(vf.Task[EchoData]):
    @vf.reward(weight=2.0)
    async def same(self, trace: vf.Trace) -> float:
        return float(self.data.word in trace.last_reply)

    @vf.metric
    async def letters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class EchoTaskset(vf.Taskset[EchoTask, vf.TasksetConfig]):
    def load(self) -> Iterable[EchoTask]:
        for word in ("one", "two"):
            yield EchoTask(EchoData(prompt=f"Say {word}.", system_prompt="Be brief.", word=word), self.config.task)
