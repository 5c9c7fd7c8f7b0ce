"""Finding a reward by its name, giving it its options, and checking what comes out of it."""

from __future__ import annotations

import asyncio
import difflib
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from numbers import Real
from typing import Any

from verl_mg.errors import UserError
from verl_mg.import_function import load_function
from verl_mg.rewards.base import Reward, Sample

BATCH_SIZE = 16
"""Of a `score_many` that names no `batch_size`."""


class LoadedReward:
    """A reward that can be asked: a function, or an object with `score` or `score_many`; sync or async.

    Attributes:
        name: as it was given, for errors.
        asynchronous: it runs on an event loop; else it blocks a thread.
        batched: it takes several samples a call.
        batch_size: how many at most; 1 where it is not batched.
        parallel: how many calls may run at once; None where any number may.
    """

    def __init__(self, name: str, function: Callable[..., Any], *, batched: bool, owner: Any = None) -> None:
        self.name, self.batched, self.asynchronous = name, batched, inspect.iscoroutinefunction(function)
        self.batch_size: int = getattr(owner, "batch_size", BATCH_SIZE) if batched else 1
        self.parallel: int | None = getattr(owner, "parallel", 1 if batched else None)
        self._function, self._owner = function, owner

    def __call__(self, sample: Sample) -> Reward:
        """Score one sample in this thread, which runs no event loop.

        Raises:
            UserError: the reward raises, or returns anything but finite numbers.
        """
        return asyncio.run(self.ask([sample]))[0]

    async def ask(self, samples: Sequence[Sample], threads: Executor | None = None) -> list[Reward]:
        """Score up to `batch_size` samples; what blocks runs in one of `threads`, or here without them.

        Raises:
            UserError: as above.
        """
        call = functools.partial(self._function, list(samples) if self.batched else samples[0])
        try:
            if threads is not None and not self.asynchronous:
                result = await asyncio.get_running_loop().run_in_executor(threads, _contained, call)
            else:
                result = call()
            if inspect.isawaitable(result):
                result = await result
        except UserError:
            raise
        except (Exception, SystemExit) as error:
            raise UserError(f"reward '{self.name}' raised {type(error).__name__}: {error}; mend it") from error
        results = self._checked_length(result, len(samples)) if self.batched else [result]
        return [_as_reward(result, self.name) for result in results]

    def close(self) -> None:
        """Let go of what it holds, if it has a `close`."""
        close = getattr(self._owner, "close", None)
        if close is not None:
            close()

    def _checked_length(self, results: Any, expected: int) -> Sequence[Any]:
        if not isinstance(results, Sequence) or len(results) != expected:
            got = f"{len(results)} results" if isinstance(results, Sequence) else f"{results!r:.80}"
            raise UserError(f"reward '{self.name}' returned {got} for {expected} samples; return one Reward each")
        return results


def load_reward(name: str | Callable[..., Any], options: Mapping[str, Any] | None = None) -> LoadedReward:
    """The reward of that name, its results checked.

    Args:
        name: `package.module:thing` or `path/to/file.py:thing`, or the thing itself: a function of a `Sample` and of
            the options; or a class, built once with the options, whose instances have `score(sample)`, or
            `score_many(samples)` for up to their `batch_size` samples at a time. Each may be async, and returns a
            `Reward` or a plain number for a sample.
        options: keyword arguments by name.

    Raises:
        UserError: no such module, file or thing, importing it fails, an option is unknown or missing, or the class
            refuses its options.
    """
    thing, options = load_function(name, "reward") if isinstance(name, str) else name, dict(options or {})
    name = name if isinstance(name, str) else thing.__qualname__
    if not inspect.isclass(thing):
        _check_options(name, thing, options, skip=1)
        return LoadedReward(name, functools.partial(thing, **options) if options else thing, batched=False)
    batched = hasattr(thing, "score_many")
    if not (batched or hasattr(thing, "score")):
        raise UserError(f"reward '{name}': the class has neither score(sample) nor score_many(samples); give it one")
    _check_options(name, thing, options, skip=0)
    try:
        owner: Any = thing(**options)
    except UserError as error:
        raise UserError(f"reward '{name}': {error}") from error
    except Exception as error:
        raise UserError(
            f"reward '{name}' cannot be built with its options ({type(error).__name__}: {error}); mend them"
        ) from error
    return LoadedReward(name, owner.score_many if batched else owner.score, batched=batched, owner=owner)


def _contained(call: Callable[[], Any]) -> Any:
    """StopIteration can leave no coroutine, so it may not leave the thread either."""
    try:
        return call()
    except StopIteration as error:
        raise RuntimeError(f"StopIteration: {error}") from error


def _check_options(name: str, thing: Callable[..., Any], options: Mapping[str, Any], skip: int) -> None:
    try:
        parameters = list(inspect.signature(thing).parameters.values())[skip:]
    except (TypeError, ValueError):  # something built in, which tells nothing of itself
        return
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    unknown = [] if any(p.kind is p.VAR_KEYWORD for p in parameters) else [key for key in options if key not in named]
    if unknown:
        near = difflib.get_close_matches(unknown[0], named, 1)
        has = f"did you mean '{near[0]}'? It has: " if near else "it has: "
        raise UserError(f"reward '{name}' has no option '{unknown[0]}'; {has}{', '.join(named) or 'none'}")
    missing = [p.name for p in named.values() if p.default is p.empty and p.name not in options]
    if missing:
        raise UserError(f"reward '{name}' needs the option '{missing[0]}'; write it among the reward's options")


def _as_reward(result: Any, name: str) -> Reward:
    reward = result if isinstance(result, Reward) else Reward(result)
    value = _finite(reward.value, name)
    parts = {part: _finite(number, f"{name} ({part})") for part, number in reward.parts.items()}
    return Reward(value, parts, reward.answer)


def _finite(value: Any, name: str) -> float:
    if not isinstance(value, Real) or not math.isfinite(value):
        raise UserError(f"reward '{name}' returned {value!r:.80}; return a finite number or a Reward of them")
    return float(value)
