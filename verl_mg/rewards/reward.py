"""Rewards by name: loading a function or class, calls whose results are checked, and scores in the background.

    caller             submit(1)  submit(2)  ...                      result(1) waits for a Future
                          | run_coroutine_threadsafe                     ^
    thread "rewards"   event loop: a _RewardQueue for each reward; samples wait in the order of submission
                          | _dispatch: while a call is free              |
                          +-> async reward: awaited here ----------------+
                          +-> reward that blocks: run_in_executor        |
    threads "reward"          ThreadPoolExecutor(workers) ---------------+

The thread "rewards" of an AsyncScorer runs from construction to `close`. `_dispatch` consumes the waiting samples of a
reward, is woken by each new sample and by each call that ends, and returns when no call is free or no sample waits.
"""

from __future__ import annotations

import asyncio
import difflib
import functools
import inspect
import itertools
import math
import threading
import traceback
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from numbers import Real
from pathlib import Path
from typing import Any

from verl_mg.errors import UserError
from verl_mg.import_function import load_function
from verl_mg.rewards.foreign import Foreign, as_list, slime_function, verl_function
from verl_mg.rewards.mixture import Mixture
from verl_mg.rewards.sample import Reward, Sample

BATCH_SIZE = 16  # default `batch_size` of a class with `score_many`
FOREIGN: dict[str, Callable[[str, str, Mapping[str, Any]], Foreign]] = {"verl": verl_function, "slime": slime_function}
"""Prefixes of functions with the interface of another framework, and what calls them."""


class LoadedReward:
    """A callable reward: a function, or an object with `score` or `score_many`; sync or async.

    Attributes:
        name: name from the configuration, for errors.
        asynchronous: whether it runs on an event loop; otherwise it blocks a thread.
        batched: whether a call scores several samples.
        batch_size: largest number of samples per call; 1 where it is not batched.
        parallel: largest number of calls at the same time; None for no limit.
    """

    def __init__(self, name: str, function: Callable[..., Any], *, batched: bool, owner: Any = None) -> None:
        """Wraps a function of a sample, or of several; `owner` may have `batch_size`, `parallel` and `close`."""
        self.name, self.batched, self.asynchronous = name, batched, inspect.iscoroutinefunction(function)
        self.batch_size: int = getattr(owner, "batch_size", BATCH_SIZE) if batched else 1
        self.parallel: int | None = getattr(owner, "parallel", 1 if batched else None)
        self._function, self._owner = function, owner

    def __call__(self, sample: Sample) -> Reward:
        """Scores one sample in this thread, which must not run an event loop."""
        return asyncio.run(self.score([sample]))[0]

    async def score(self, samples: Sequence[Sample], threads: Executor | None = None) -> list[Reward]:
        """Scores up to `batch_size` samples; UserError where the reward raises, or returns anything but finite numbers.

        Args:
            samples: the samples.
            threads: executor for rewards that block; None to block this thread.
        """
        call = functools.partial(self._function, list(samples) if self.batched else samples[0])
        try:
            if threads is not None and not self.asynchronous:
                result = await asyncio.get_running_loop().run_in_executor(threads, _without_stop_iteration, call)
            else:
                result = call()
            if inspect.isawaitable(result):
                result = await result
        except UserError:
            raise
        # SystemExit too: a reward that calls sys.exit would end a thread, and the job would wait for its result.
        except (Exception, SystemExit) as error:
            raise UserError(
                f"reward '{self.name}' raised {type(error).__name__}: {error} ({_place_of(error)}"
                f"prompt {samples[0].prompt[-40:]!r}, response {samples[0].response[:40]!r}"
                f"{f' and {len(samples) - 1} more' if len(samples) > 1 else ''}). Return a number for each sample."
            ) from error
        results = as_list(result) if self.batched else [result]
        if results is None or len(results) != len(samples):
            raise UserError(
                f"reward '{self.name}' returned {_described(result, results)} for {len(samples)} samples. Return a "
                "list or a flat array with one number or Reward per sample."
            )
        return [_as_reward(result, self.name) for result in results]

    def close(self) -> None:
        """Calls the owner's `close`, if it has one."""
        if close := getattr(self._owner, "close", None):
            close()


def load_reward(name: str | Callable[..., Any], options: Mapping[str, Any] | None = None) -> LoadedReward:
    """Loads a reward, whose results will be checked. UserError names the object, option or import that fails.

    Args:
        name: `package.module:name` or `path/to/file.py:name`, or the object itself: a function of a `Sample` and the
            options; or a class, built once with the options, whose instances have `score(sample)`, or
            `score_many(samples)` for up to `batch_size` samples at a time. Each may be async, and returns a `Reward`
            or a plain number per sample, or for agents with names a mapping of these by agent. With the prefix
            `verl:` or `slime:` it is a function with the interface of that framework.
        options: keyword arguments by name.
    """
    options = dict(options or {})
    prefix, _, foreign = name.partition(":") if isinstance(name, str) else ("", "", "")
    if isinstance(name, str) and prefix in FOREIGN and ":" in foreign:
        adapted = FOREIGN[prefix](name, foreign, options)
        if adapted.given is not None:
            _check_options(name, adapted.function, options, skip=0, given=adapted.given)
        return LoadedReward(name, adapted.call, batched=adapted.batched)
    target = load_function(name, "reward") if isinstance(name, str) else name
    name = name if isinstance(name, str) else target.__qualname__
    if not inspect.isclass(target):
        _check_options(name, target, options, skip=1)
        return LoadedReward(name, functools.partial(target, **options) if options else target, batched=False)
    batched = hasattr(target, "score_many")
    if not (batched or hasattr(target, "score")):
        raise UserError(
            f"reward '{name}': the class has neither score(sample) nor score_many(samples). Define one of them."
        )
    # Before it is built, since the class may load a model first.
    _check_options(name, target, options, skip=0)
    try:
        owner: Any = target(**options)
    except UserError as error:
        raise UserError(f"reward '{name}': {error}") from error
    except Exception as error:
        raise UserError(
            f"reward '{name}': the options are not accepted ({type(error).__name__}: {error}). Correct them."
        ) from error
    return LoadedReward(name, owner.score_many if batched else owner.score, batched=batched, owner=owner)


def _described(result: Any, results: list[Any] | None) -> str:
    if results is not None:
        return f"{len(results)} results"
    kind = type(result).__name__
    return f"a {kind} of shape {tuple(result.shape)}" if hasattr(result, "shape") else f"a {kind}, {result!r:.80},"


def _place_of(error: BaseException) -> str:
    """The line of the reward's file at which it failed, `mine.py:7, `; empty where the call itself failed."""
    frames = traceback.extract_tb(error.__traceback__)
    # Below the frames of this package is the function's; what fails may be deeper, in a library that it calls.
    ours = max(number for number, frame in enumerate(frames) if Path(frame.filename).parent == Path(__file__).parent)
    lines = [frame.lineno for frame in frames[ours + 1 :] if frame.filename == frames[ours + 1].filename]
    return f"{Path(frames[ours + 1].filename).name}:{lines[-1]}, " if lines else ""


def _without_stop_iteration(call: Callable[[], Any]) -> Any:
    # StopIteration must not leave the thread, since a coroutine cannot raise it.
    try:
        return call()
    except StopIteration as error:
        raise RuntimeError(f"StopIteration: {error}") from error


def _check_options(
    name: str, target: Callable[..., Any], options: Mapping[str, Any], skip: int, given: Collection[str] = ()
) -> None:
    """Raises UserError for an unknown or missing option; the first `skip` parameters and `given` are no options."""
    try:
        signature = list(inspect.signature(target).parameters.values())[skip:]
    except (TypeError, ValueError):  # a builtin without a signature
        return
    parameters = [parameter for parameter in signature if parameter.name not in given]
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    unknown = [] if any(p.kind is p.VAR_KEYWORD for p in parameters) else [key for key in options if key not in named]
    if unknown:
        near = difflib.get_close_matches(unknown[0], named, 1)
        hint = f"Did you mean '{near[0]}'? " if near else ""
        options_text = ", ".join(named) or "none"
        raise UserError(f"reward '{name}': unknown option '{unknown[0]}'. {hint}Its options are: {options_text}.")
    missing = [p.name for p in named.values() if p.default is p.empty and p.name not in options]
    if missing:
        raise UserError(f"reward '{name}': the option '{missing[0]}' is missing. Set it in the reward's options.")


def _as_reward(result: Any, name: str) -> Reward:
    agents = result.agents if isinstance(result, Reward) else result if isinstance(result, Mapping) else {}
    if agents:
        return Reward.by_agent({str(agent): _of_one(of_agent, name) for agent, of_agent in agents.items()})
    return _of_one(result, name)


def _of_one(result: Any, name: str) -> Reward:
    reward = result if isinstance(result, Reward) else Reward(result)
    value = _finite(reward.value, name)
    parts = {part: _finite(number, f"{name} ({part})") for part, number in reward.parts.items()}
    return Reward(value, parts, reward.answer)


def _finite(value: Any, name: str) -> float:
    if not isinstance(value, Real) or not math.isfinite(value):
        raise UserError(
            f"reward '{name}' returned {value!r:.80}. Return a finite number or a Reward of finite numbers, or for "
            "agents with names a mapping of such by name."
        )
    return float(value)


class AsyncScorer(AbstractContextManager["AsyncScorer"]):
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
        """Starts scoring a sample and returns immediately.

        Args:
            key: number of the sample, 0 or more, by which `result` finds it.
            sample: the sample.
        """
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

    def __exit__(self, *_: object) -> None:
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
