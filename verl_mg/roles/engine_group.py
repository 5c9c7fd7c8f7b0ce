"""The rollout engines of a job, as all ranks see them together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from verl_mg.roles.context import JobContext
from verl_mg.roles.engine_restarts import EngineRestarts
from verl_mg.roles.models import Actor
from verl_mg.roles.weight_sync import HFEngineSync, SGLangEngineSync
from verl_mg.rollout.engine import EngineDiedError, RolloutEngine
from verl_mg.rollout.hf.engine import HFEngine
from verl_mg.rollout.sglang.engine import SGLangEngine
from verl_mg.rollout.work_queue import DynamicWorkQueue, Group, StaticWorkQueue, WorkQueue

EngineWrapper = Callable[[RolloutEngine], RolloutEngine]
"""Puts something around an engine, such as turns and tools."""


class EngineGroup(ABC):
    """engine: this rank's, if it leads one. engines: how many there are. leads: which ranks lead one.

    at_home: whether rows are on the ranks where a recipe wants them as soon as they are written. apart: whether the
    engines can draw samples while training computes. version: of their weights. residence: the roles beside them.
    fixed: each engine has its share of the work from the start; otherwise whichever has room takes the next sample.
    """

    engine: RolloutEngine | None
    at_home: bool
    apart: bool

    def __init__(self, leads: Sequence[bool], fixed: bool, context: JobContext) -> None:
        self.leads, self.fixed = tuple(leads), fixed
        self.engines = sum(leads)
        self.version = -1
        self._offload = context.offload
        self._offload.register_engines(self.rest)

    def deal(self, store: Store, key: str, groups: Sequence[Group], enough: int) -> WorkQueue:
        """How the work of a call is shared."""
        if self.fixed:
            own = sum(self.leads[: dist.get_rank()])
            return StaticWorkQueue(store, key, groups, enough, own, self.engines)
        return DynamicWorkQueue(store, key, groups, enough)

    def ready(self) -> None:
        """Called before samples are drawn: take memory that was given back."""
        self._offload.offload_all()

    def rest(self) -> None:  # noqa: B027, not all have something to do
        """Called before something else computes on the engines' devices: give their memory back."""

    @abstractmethod
    def sync(self, actor: Actor) -> dict[str, float]:
        """Bring the weights to all engines; what that took."""

    def close(self) -> None:  # noqa: B027, not all have something to do
        """End this rank's engine, if it is one of this job's."""

    @abstractmethod
    def revive(self) -> None:
        """See `verl_mg.rollout.engine_loop.Rescue`."""

    @abstractmethod
    def serve(self) -> None:
        """See `verl_mg.rollout.engine_loop.Rescue`."""


class HFEngineGroup(EngineGroup):
    """A module of `transformers` on every rank; each answers its own share, so that runs repeat to the bit."""

    at_home, apart = True, False

    def __init__(self, engine: HFEngine, context: JobContext, wrap: EngineWrapper = lambda engine: engine) -> None:
        super().__init__([True] * dist.get_world_size(), True, context)
        self.engine = wrap(engine)
        self._sync = HFEngineSync(engine)

    def sync(self, actor: Actor) -> dict[str, float]:
        """See `EngineGroup`."""
        self.version = actor.num_updates
        return self._sync.sync(actor)

    def revive(self) -> None:
        """An engine lives and dies with its rank."""

    def serve(self) -> None:
        """See `revive`."""


class SGLangEngineGroup(EngineGroup):
    """SGLang engines on groups of ranks.

    sleeps: the engines release weights and key-value cache while training computes.
    """

    at_home = False

    def __init__(
        self,
        sync: SGLangEngineSync,
        inner: SGLangEngine | None,
        leads: Sequence[bool],
        context: JobContext,
        *,
        sleeps: bool,
        apart: bool,
        fixed: bool = False,
        wrap: EngineWrapper = lambda engine: engine,
    ) -> None:
        super().__init__(leads, fixed, context)
        self.engine = wrap(inner) if inner else None
        self._inner, self._sync, self._revivals = inner, sync, EngineRestarts(PrefixStore("rollout", context.store))
        self._sleeps, self._resting, self.apart = sleeps, False, apart
        self._actor: Actor | None = None

    def sync(self, actor: Actor) -> dict[str, float]:
        """See `EngineGroup`.

        The actor's weights stand beside the engines'; when it has left, the key-value cache comes.
        """
        self._actor, self.version = actor, actor.num_updates
        self._offload.load_exclusively(actor.cpu_offload, training=False)
        if self._inner:
            with suppress(EngineDiedError):  # the sync finds that out too
                self._inner.wake(weights=True, kv=False)
        report = self._sync.sync(actor)
        self._offload.offload_all()
        if self._inner:
            self._inner.wake(weights=False, kv=True)
        self._resting = False
        return report

    def ready(self) -> None:
        """See `EngineGroup`. Weights that were released come from the actor again."""
        if self._resting and self._actor is not None:
            self.sync(self._actor)
        super().ready()

    def rest(self) -> None:
        """See `EngineGroup`."""
        if self._sleeps and not self._resting:
            if self._inner:
                with suppress(EngineDiedError):  # then it has no memory to give
                    self._inner.sleep()
            self._sync.meet()
            self._resting = True

    def close(self) -> None:
        """See `EngineGroup`."""
        if self._inner:
            self._inner.close()

    def revive(self) -> None:
        """See `verl_mg.rollout.engine_loop.Rescue`."""
        assert self._inner is not None
        self._inner.restart()
        self._revivals.announce(self._sync.number)
        while not self._inner.health():
            self.serve()
        self._inner.resume()

    def serve(self) -> None:
        """See `verl_mg.rollout.engine_loop.Rescue`."""
        for engine in self._revivals.unseen():
            assert self._actor is not None
            self._offload.load_exclusively(self._actor.cpu_offload, training=False)
            self._sync.sync_one(self._actor, engine)
            self._offload.offload_all()
