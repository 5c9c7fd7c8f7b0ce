"""Scores samples in the background, while others are still being written.

    caller           begin(1) begin(2) begin(3) ...                     result(1)  result(2) ...
    event loop       async rewards side by side, batches when their reward is free
    threads          rewards that block

Each reward has a desk, at which samples wait in the order in which they came.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from types import TracebackType

from verl_mg.errors import UserError
from verl_mg.rewards.base import Reward, Sample
from verl_mg.rewards.loading import LoadedReward
from verl_mg.rewards.mixture import Mixture


class AsyncScorer:
    """Asks one reward, or the rewards of a mixture, each under its name.

    Results do not depend on when and in which company a sample is scored, as far as the rewards themselves do not;
    weights of a mixture count when a result is asked for.

    workers: calls of a reward that run at once, threads for those that block. A reward that takes batches gets what
    waits when it is free, and says itself how many calls may run at once (`parallel`, by default one).
    mixture: how several rewards become one; needed unless there is a single one.
    """

    def __init__(
        self, rewards: Mapping[str, LoadedReward], *, workers: int = 8, mixture: Mixture | None = None
    ) -> None:
        if workers < 1:
            raise UserError(f"reward.workers is {workers}: give at least 1")
        if mixture is None and len(rewards) != 1:
            raise ValueError(f"{len(rewards)} rewards need a mixture")
        self.mixture = mixture
        self._rewards = dict(rewards)
        self._running: dict[int, dict[str, Future[Reward]]] = {}
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="reward")
        self._desks = {name: _RewardQueue(reward, self._threads, workers) for name, reward in rewards.items()}
        self._own_keys = itertools.count(-1, -1)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rewards", daemon=True)
        self._thread.start()

    def begin(self, key: int, sample: Sample) -> None:
        """Start scoring; returns at once. `key` is 0 or larger, and not in use."""
        if key < 0 or key in self._running:
            raise ValueError(f"key {key} is negative or in use")
        self._begin(key, sample)

    def result(self, key: int) -> Reward:
        """The reward of what was begun under that key, as often as it is asked for; blocks until it is there.

        Raises:
            UserError: a reward failed; it says which and how.
        """
        try:
            rewards = {name: future.result() for name, future in self._running[key].items()}
        except CancelledError:
            raise UserError("a reward was cancelled before it had a result; mend it, or leave the panel open") from None
        return self.mixture.combine(rewards) if self.mixture else next(iter(rewards.values()))

    def forget(self, key: int) -> None:
        """Drop a sample and its result; what has not been scored will not be. Unknown keys are none to drop."""
        for future in self._running.pop(key, {}).values():
            future.cancel()

    def score(self, samples: Sequence[Sample]) -> list[Reward]:
        """The rewards of samples, in their order."""
        keys = [next(self._own_keys) for _ in samples]
        try:
            for key, sample in zip(keys, samples, strict=True):
                self._begin(key, sample)
            return [self.result(key) for key in keys]
        finally:
            for key in keys:
                self.forget(key)

    def __call__(self, sample: Sample) -> Reward:
        """The reward of one sample."""
        return self.score([sample])[0]

    def close(self) -> None:
        """Drop what runs, end the threads, let the rewards go. A call that blocks is waited for."""
        if self._loop.is_closed():
            return
        for key in list(self._running):
            self.forget(key)
        asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._threads.shutdown(cancel_futures=True)
        for reward in self._rewards.values():
            reward.close()

    def __enter__(self) -> AsyncScorer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _begin(self, key: int, sample: Sample) -> None:
        self._running[key] = {
            name: asyncio.run_coroutine_threadsafe(desk.score(sample), self._loop) for name, desk in self._desks.items()
        }


class _RewardQueue:
    """Where samples wait for one reward. Everything here happens in the loop's thread."""

    def __init__(self, reward: LoadedReward, threads: ThreadPoolExecutor, workers: int) -> None:
        self._reward, self._threads = reward, threads
        self._free = min(reward.parallel or workers, workers)
        self._waiting: deque[tuple[Sample, asyncio.Future[Reward]]] = deque()
        self._calls: set[asyncio.Task[None]] = set()

    async def score(self, sample: Sample) -> Reward:
        loop = asyncio.get_running_loop()
        promise: asyncio.Future[Reward] = loop.create_future()
        self._waiting.append((sample, promise))
        loop.call_soon(self._serve)  # not at once: others that came with this one join its batch
        return await promise

    def _serve(self) -> None:
        while self._free and (batch := self._next_batch()):
            self._free -= 1
            call = asyncio.create_task(self._ask(batch))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)
            if self._reward.asynchronous:  # a thread cannot be stopped, and its reward is not free before it ends
                _cancel_when_unwanted(call, [promise for _, promise in batch])

    def _next_batch(self) -> list[tuple[Sample, asyncio.Future[Reward]]]:
        batch: list[tuple[Sample, asyncio.Future[Reward]]] = []
        while self._waiting and len(batch) < self._reward.batch_size:
            sample, promise = self._waiting.popleft()
            if not promise.done():
                batch.append((sample, promise))
        return batch

    async def _ask(self, batch: list[tuple[Sample, asyncio.Future[Reward]]]) -> None:
        wanted = [promise for _, promise in batch]
        try:
            rewards = await self._reward.ask([sample for sample, _ in batch], self._threads)
            for promise, reward in zip(wanted, rewards, strict=True):
                if not promise.done():
                    promise.set_result(reward)
        except UserError as error:
            for promise in wanted:
                if not promise.done():
                    promise.set_exception(error)
        finally:
            for promise in wanted:
                promise.cancel()  # only what has no result by now
            self._free += 1
            self._serve()


def _cancel_when_unwanted(call: asyncio.Task[None], promises: list[asyncio.Future[Reward]]) -> None:
    def look(_: asyncio.Future[Reward]) -> None:
        if all(promise.cancelled() for promise in promises):
            call.cancel()

    for promise in promises:
        promise.add_done_callback(look)


async def _cancel_all() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
