"""Scores samples in the background, while others are still being generated.

    caller             submit(1)  submit(2)  ...                      result(1) waits for a Future
                          | run_coroutine_threadsafe                     ^
    thread "rewards"   event loop: a _RewardQueue for each reward; samples wait in the order of submission
                          | _dispatch: while a call is free              |
                          +-> async reward: awaited here ----------------+
                          +-> reward that blocks: run_in_executor        |
    threads "reward"          ThreadPoolExecutor(workers) ---------------+

The thread "rewards" runs from construction to `close`. `_dispatch` consumes the waiting samples of a reward, is
woken by each new sample and by each call that ends, and returns when no call is free or no sample waits.
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
from verl_mg.rewards.mixture import Mixture
from verl_mg.rewards.reward import LoadedReward, Reward, Sample


class AsyncScorer:
    """Scores samples with one reward, or with the rewards of a mixture.

    Results do not depend on when and with which other samples a sample is scored, as far as the rewards themselves
    do not; the weights of a mixture are read in `result`.
    """

    def __init__(
        self, rewards: Mapping[str, LoadedReward], *, workers: int = 8, mixture: Mixture | None = None
    ) -> None:
        """Starts the event loop's thread."""
        if workers < 1:
            raise UserError(f"reward.workers: {workers} is out of range. Give at least 1.")
        if mixture is None and len(rewards) != 1:
            raise ValueError(f"{len(rewards)} rewards need a mixture")
        self.mixture = mixture
        self._rewards = dict(rewards)
        self._running: dict[int, dict[str, Future[Reward]]] = {}
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="reward")
        self._queues = {name: _RewardQueue(reward, self._threads, workers) for name, reward in rewards.items()}
        # Negative, so that `score` may run between `submit` and `result` of a caller's keys.
        self._internal_keys = itertools.count(-1, -1)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rewards", daemon=True)
        self._thread.start()

    def submit(self, key: int, sample: Sample) -> None:
        """Starts scoring a sample and returns immediately."""
        if key < 0 or key in self._running:
            raise ValueError(f"key {key} is negative or in use")
        self._submit(key, sample)

    def result(self, key: int) -> Reward:
        """Waits for the reward of a submitted sample and returns it, repeatedly; UserError where a reward failed."""
        try:
            rewards = {name: future.result() for name, future in self._running[key].items()}
        except CancelledError:
            raise UserError(
                "reward: scoring was cancelled before it had a result. Fix the reward, or close the scorer later."
            ) from None
        return self.mixture.combine(rewards) if self.mixture else next(iter(rewards.values()))

    def is_scored(self, key: int) -> bool:
        """Returns whether `result` of the sample submitted under a key does not wait."""
        return all(future.done() for future in self._running[key].values())

    def discard(self, key: int) -> None:
        """Drops a sample and its result, and cancels its scoring. Unknown keys are ignored."""
        for future in self._running.pop(key, {}).values():
            future.cancel()

    def score(self, samples: Sequence[Sample]) -> list[Reward]:
        """Scores samples and returns their rewards in the same order."""
        keys = [next(self._internal_keys) for _ in samples]
        try:
            for key, sample in zip(keys, samples, strict=True):
                self._submit(key, sample)
            return [self.result(key) for key in keys]
        finally:
            for key in keys:
                self.discard(key)

    def __call__(self, sample: Sample) -> Reward:
        """Scores one sample."""
        return self.score([sample])[0]

    def close(self) -> None:
        """Cancels running work, ends the threads and closes the rewards; waits for calls that block."""
        if self._loop.is_closed():
            return
        for key in list(self._running):
            self.discard(key)
        # Tasks first: a loop that stops with pending tasks leaves their futures waiting for ever.
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

    def _submit(self, key: int, sample: Sample) -> None:
        self._running[key] = {
            name: asyncio.run_coroutine_threadsafe(waiting.score(sample), self._loop)
            for name, waiting in self._queues.items()
        }


class _RewardQueue:
    """Queue of samples that wait for one reward; used only in the event loop's thread."""

    def __init__(self, reward: LoadedReward, threads: ThreadPoolExecutor, workers: int) -> None:
        self._reward, self._threads = reward, threads
        self._free = min(reward.parallel or workers, workers)
        self._waiting: deque[tuple[Sample, asyncio.Future[Reward]]] = deque()
        self._calls: set[asyncio.Task[None]] = set()

    async def score(self, sample: Sample) -> Reward:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Reward] = loop.create_future()
        self._waiting.append((sample, future))
        loop.call_soon(self._dispatch)  # later, so that samples submitted together form a batch
        return await future

    def _dispatch(self) -> None:
        while self._free and (batch := self._next_batch()):
            self._free -= 1
            call = asyncio.create_task(self._call(batch))
            self._calls.add(call)  # the event loop has only weak references to tasks
            call.add_done_callback(self._calls.discard)
            if self._reward.asynchronous:  # a thread cannot be stopped, and its reward is busy until it ends
                _cancel_when_all_are_cancelled(call, [future for _, future in batch])

    def _next_batch(self) -> list[tuple[Sample, asyncio.Future[Reward]]]:
        batch: list[tuple[Sample, asyncio.Future[Reward]]] = []
        while self._waiting and len(batch) < self._reward.batch_size:
            sample, future = self._waiting.popleft()
            if not future.done():  # discarded while it waited
                batch.append((sample, future))
        return batch

    async def _call(self, batch: list[tuple[Sample, asyncio.Future[Reward]]]) -> None:
        futures = [future for _, future in batch]
        try:
            rewards = await self._reward.score([sample for sample, _ in batch], self._threads)
            for future, reward in zip(futures, rewards, strict=True):
                if not future.done():
                    future.set_result(reward)
        except UserError as error:
            for future in futures:
                if not future.done():
                    future.set_exception(error)
        finally:
            for future in futures:
                future.cancel()  # without effect where there is a result
            self._free += 1
            self._dispatch()


def _cancel_when_all_are_cancelled(call: asyncio.Task[None], futures: list[asyncio.Future[Reward]]) -> None:
    def on_done(_: asyncio.Future[Reward]) -> None:
        if all(future.cancelled() for future in futures):
            call.cancel()

    for future in futures:
        future.add_done_callback(on_done)


async def _cancel_all() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
