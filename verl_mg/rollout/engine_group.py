"""The rollout engines of all ranks as one group: weights, memory, distribution of work, restart of dead engines.

What occupies a device that a role and an engine share (`ProcessEngineGroup`), on a GPU with `rollout.sleep`:

    TRAINING      weights and state of roles; the engine is asleep, without weights and cache
      |  update_weights: offloads all roles but the actor's weights, then wakes the engine's weights
    TRANSFER      weights of the actor, weights of the engine, chunks on their way
      |  offloads the actor, then wakes the key-value cache
    GENERATING    weights and cache of the engine
      |  release_memory, before a role computes: sleep                                                 -> TRAINING
    an engine dies: its worker restarts it, with the cache asleep, and announces it; all ranks `recover` it: TRANSFER
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch.distributed as dist

from verl_mg import device
from verl_mg.engines.engine import EngineDiedError, Request, RolloutEngine, Sample, Sampling
from verl_mg.engines.engine_nodes import FollowingNode
from verl_mg.engines.hf.engine import HFEngine
from verl_mg.engines.process_engine import ProcessEngine
from verl_mg.roles.context import JobContext
from verl_mg.roles.models import Actor
from verl_mg.rollout.engine_worker import EngineEvents, EngineRestart
from verl_mg.rollout.work_queue import StaticShare
from verl_mg.servers.pool import ServerPool
from verl_mg.training.runner import Runner
from verl_mg.weight_sync.hf_module import HFEngineSync
from verl_mg.weight_sync.ipc import ProcessEngineSync
from verl_mg.weight_sync.kept_weights import KeptWeights

log = logging.getLogger(__name__)

WrapEngine = Callable[[RolloutEngine], RolloutEngine]
"""Wraps an engine, for example with turns and tools."""


class EngineGroup(ABC):
    """The engines of a job; all ranks call every method together unless it says otherwise.

    `is_leader` says for each rank whether it leads an engine. With `static` each engine has a fixed share of the work;
    otherwise engines with free slots take samples.
    """

    engine: RolloutEngine | None
    """This rank's engine, if it leads one."""
    can_generate_alone = False
    """Whether engines have their own implementation of the model, which a request can probe."""
    rows_are_local = False
    """Whether each rank has the rows that a recipe wants there as soon as they are generated."""

    def __init__(self, is_leader: Sequence[bool], static: bool, context: JobContext) -> None:
        self.is_leader, self._offload = tuple(is_leader), context.offload
        self.num_engines = sum(is_leader)
        number = sum(is_leader[: dist.get_rank()])
        self.share = StaticShare(number, self.num_engines) if static else None
        self.events = EngineEvents(context.store)
        self.version = -1
        """Version of the weights that the engines have."""
        context.offload.register_engines(self.release_memory)

    def acquire_memory(self) -> None:
        """Prepares the engines to generate: takes the device memory that was released."""
        self._offload.offload_all()

    def release_memory(self) -> None:  # noqa: B027, not all engines share memory with roles
        """Releases the engines' device memory before a role computes on their devices."""

    def chosen(self) -> dict[str, str]:
        """Returns what the engine that this rank leads computes with, by part; {} without one, and of servers."""
        return {}

    def generate_alone(self, request: Request, sampling: Sampling) -> list[Sample]:
        """Returns samples of this rank's engine or servers, past their wrappers, while no others are in flight.

        [] of an engine that dies meanwhile, which is restarted as soon as it has other samples to generate.
        """
        return []

    @abstractmethod
    def update_weights(self, actor: Actor) -> dict[str, float]:
        """Transfers the actor's weights to all engines; returns bytes and seconds as metrics."""

    def take_back(self, runner: Runner, version: int) -> KeptWeights | str:
        """Returns the weights that engines have kept from ranks that were lost, or why they have to come from files.

        "" for engines that no rank leaves to another one.
        """
        return ""

    def close(self) -> None:  # noqa: B027, not all engines have processes
        """Ends this rank's engine if this job has started it."""


class InFlightEngineGroup(EngineGroup):
    """Engines outside of the ranks' processes: weights can be updated with requests in flight, and engines restart.

    `inner` is the engine, or the servers, that this rank leads.
    """

    can_generate_alone = True
    restart: EngineRestart | None = None
    """Restart of this rank's engine; None where this job has not started it."""

    def __init__(
        self,
        inner: ProcessEngine | ServerPool | None,
        is_leader: Sequence[bool],
        context: JobContext,
        static: bool,
        wrap: WrapEngine,
    ) -> None:
        super().__init__(is_leader, static, context)
        self.engine = wrap(inner) if inner else None
        self._led = inner
        self._actor: Actor | None = None

    def generate_alone(self, request: Request, sampling: Sampling) -> list[Sample]:
        """Implements `EngineGroup.generate_alone`."""
        if not self._led:
            return []
        samples: list[Sample] = []
        try:
            samples = self._led.generate_on_each(request, sampling)
        except EngineDiedError as error:
            if self.restart is None:
                raise
            self.restart.forget()  # whoever collects samples restarts it, and knows only of those
            log.warning("rollout: a row that is as long as the job allows ended the engine: %s", error)
        self._led.take_counts()  # not part of the metrics of samples
        return samples

    def update_weights_in_flight(self, actor: Actor) -> dict[str, float]:
        """Transfers the weights between two tokens of the requests in flight, which continue; returns metrics."""
        started = time.perf_counter()
        with suppress(EngineDiedError):  # it is restarted by whoever collects its samples
            if self._led:
                self._led.pause()
        report = self.update_weights(actor)
        with suppress(EngineDiedError):
            if self._led:
                self._led.unpause()
        return report | {"time/generation_paused": time.perf_counter() - started}

    @abstractmethod
    def recover(self, engine: int) -> None:
        """Transfers weights to an engine that was restarted, while the others generate."""


class HFEngineGroup(EngineGroup):
    """A module of `transformers` on every rank; each generates its fixed share, so that runs are bitwise repeatable."""

    rows_are_local = True

    def __init__(self, engine: HFEngine, context: JobContext, wrap: WrapEngine = lambda engine: engine) -> None:
        super().__init__([True] * dist.get_world_size(), static=True, context=context)
        self.engine = wrap(engine)
        self._chosen, self._sync = engine.chosen, HFEngineSync(engine)

    def chosen(self) -> dict[str, str]:
        """Returns what the module of this rank computes with."""
        return self._chosen()

    def update_weights(self, actor: Actor) -> dict[str, float]:
        """Transfers the weights into the modules, which share the parameters that their rank has already."""
        self.version = actor.num_updates
        return self._sync.transfer(actor.weights)


class ProcessEngineGroup(InFlightEngineGroup):
    """Engines in processes that this job has started, each on a group of ranks.

    `inner` is the engine that this rank leads, `follower` this rank's part of an engine that a rank on another node
    leads. `version` is the version of the weights that all engines have already, from ranks that were lost; -1: none.
    """

    def __init__(
        self,
        sync: ProcessEngineSync,
        inner: ProcessEngine | None,
        is_leader: Sequence[bool],
        context: JobContext,
        follower: FollowingNode | None = None,
        *,
        sleep: bool,
        disjoint: bool,
        static: bool = False,
        version: int = -1,
        wrap: WrapEngine = lambda engine: engine,
    ) -> None:
        super().__init__(inner, is_leader, context, static, wrap)
        self._inner, self._sync, self._follower = inner, sync, follower
        self._sleep, self._is_asleep, self._disjoint = sleep, False, disjoint
        self.version = version
        if inner:
            self.restart = EngineRestart(inner, sync.number, sleep, self.events)

    def update_weights(self, actor: Actor) -> dict[str, float]:
        """Transfers the actor's weights to the engines, unless they have them from ranks that were lost."""
        is_first, self._actor = self._actor is None, actor
        if is_first and self.version == actor.num_updates:
            return {}  # engines outlive ranks that the launcher restarts
        self.version = actor.num_updates
        self.release_memory()  # the actor's weights take the memory of the cache
        self._offload.load_exclusively(actor.cpu_offload, training=False)
        self._wake(weights=True, kv=False)
        report = self._sync.transfer(actor.weights)
        self._offload.offload_all()
        self._wake(weights=False, kv=True)  # last: the cache takes the memory of the actor's weights
        self._is_asleep = False
        return report

    def take_back(self, runner: Runner, version: int) -> KeptWeights | str:
        """Implements `EngineGroup.take_back`."""
        if self.version != version:
            return f"the engines have {'none' if self.version < 0 else f'version {self.version}'}"
        return self._sync.take_back(runner)

    def chosen(self) -> dict[str, str]:
        """Returns what the engine that this rank leads says of itself."""
        return self._inner.chosen if self._inner else {}

    def _wake(self, *, weights: bool, kv: bool) -> None:
        """Wakes this rank's engine, after all ranks on its devices have returned the memory that they do not use."""
        if not self._sleep:
            return
        # The leader wakes the devices of all ranks of its engine, so they must have emptied torch's cache first.
        device.release_unused_memory()
        self._sync.barrier()
        if self._inner:
            with suppress(EngineDiedError):  # it is restarted before it generates samples
                self._inner.wake(weights=weights, kv=kv)

    def acquire_memory(self) -> None:
        """Wakes the engines; weights that were released are transferred from the actor again."""
        if self._is_asleep and self._actor is not None:
            self.update_weights(self._actor)
            return
        super().acquire_memory()
        # GPU: memory is released before an engine that is restarted sizes its cache.
        # GPU-TEST: tests/weight_sync/test_memory_handover.py::
        # test_update_weights_of_engine_that_dies_reaches_the_other_engine
        # GPU-RAN: not yet
        if device.current_device().type == "cuda" and not self._disjoint:
            # An engine that is restarted sizes its cache by the memory that is free then.
            device.release_unused_memory()
            self._sync.barrier()

    def release_memory(self) -> None:
        """Puts the engines to sleep, if they share devices with roles."""
        if self._sleep and not self._is_asleep:
            if self._inner:
                with suppress(EngineDiedError):  # then it has no memory to release
                    self._inner.sleep()
            self._sync.barrier()  # no rank may use the memory before its engine has left it
            self._is_asleep = True

    def close(self) -> None:
        """Stops the engine of this rank."""
        for part in (self._inner, self._follower):
            if part:
                part.close()

    def recover(self, engine: int) -> None:
        """Transfers the weights of the last update to an engine that was restarted."""
        assert self._actor is not None
        self._sync.barrier()  # the engine on this rank's devices may be starting, and sizes its cache by free memory
        self._offload.load_exclusively(self._actor.cpu_offload, training=False)
        self._sync.transfer_to_engine(self._actor.weights, engine)
        self._offload.offload_all()
        self._wake(weights=False, kv=True)
