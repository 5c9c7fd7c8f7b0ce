"""Rewards by name: loading a function or class, and calls whose results are checked."""

from __future__ import annotations

import asyncio
import difflib
import functools
import inspect
import math
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor
from numbers import Real
from pathlib import Path
from typing import Any

from verl_mg.errors import UserError
from verl_mg.import_function import load_function
from verl_mg.rewards.foreign import Foreign, slime_function, verl_function
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
        results = self._checked_length(result, len(samples)) if self.batched else [result]
        return [_as_reward(result, self.name) for result in results]

    def close(self) -> None:
        """Calls the owner's `close`, if it has one."""
        close = getattr(self._owner, "close", None)
        if close is not None:
            close()

    def _checked_length(self, results: Any, expected: int) -> Sequence[Any]:
        if not isinstance(results, Sequence) or len(results) != expected:
            got = f"{len(results)} results" if isinstance(results, Sequence) else f"{results!r:.80}"
            raise UserError(
                f"reward '{self.name}' returned {got} for {expected} samples. Return one Reward per sample."
            )
        return results


def load_reward(name: str | Callable[..., Any], options: Mapping[str, Any] | None = None) -> LoadedReward:
    """Loads a reward, whose results will be checked. UserError names the object, option or import that fails.

    Args:
        name: `package.module:name` or `path/to/file.py:name`, or the object itself: a function of a `Sample` and the
            options; or a class, built once with the options, whose instances have `score(sample)`, or
            `score_many(samples)` for up to `batch_size` samples at a time. Each may be async, and returns a `Reward`
            or a plain number per sample. With the prefix `verl:` or `slime:` it is a function with the interface of
            that framework.
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
    reward = result if isinstance(result, Reward) else Reward(result)
    value = _finite(reward.value, name)
    parts = {part: _finite(number, f"{name} ({part})") for part, number in reward.parts.items()}
    return Reward(value, parts, reward.answer)


def _finite(value: Any, name: str) -> float:
    if not isinstance(value, Real) or not math.isfinite(value):
        raise UserError(
            f"reward '{name}' returned {value!r:.80}. Return a finite number or a Reward of finite numbers."
        )
    return float(value)
