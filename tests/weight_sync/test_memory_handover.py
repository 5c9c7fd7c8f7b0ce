"""Memory of devices handed over between training and engines: who leaves and who comes, in the order of all ranks."""

import time
import weakref

import pytest
import torch
import torch.distributed as dist

from tests.helpers.rank_pool import job_context, job_store
from tests.helpers.roles import build_role
from tests.helpers.tiny_jobs import RECIPES
from tests.helpers.tiny_models import tiny_model
from tests.helpers.traces import needs_sglang
from tests.rollout.engine_jobs import inputs, settings
from verl_mg.config import OptimizerConfig, load_config
from verl_mg.engines import engine_options
from verl_mg.engines.engine import EngineDiedError, RolloutEngine
from verl_mg.engines.engine_options import EngineOptions
from verl_mg.engines.payloads import Staging
from verl_mg.job import build_engines
from verl_mg.job.build_models import ModelRoleBuilder
from verl_mg.job.job import RunningJob
from verl_mg.job.recipe import load_recipe
from verl_mg.layout import EngineLayout, EnginePlacement, Layout, Placement
from verl_mg.megatron.process_groups import ParallelGroups
from verl_mg.models.hf_config import read_config
from verl_mg.roles.models import Actor, TrainableRole
from verl_mg.rollout.engine_group import ProcessEngineGroup
from verl_mg.sharding.weight_table import weight_table
from verl_mg.training.offload import CpuOffload
from verl_mg.weight_sync import ipc, transfer_plan
from verl_mg.weight_sync.ipc import ProcessEngineSync, engine_groups

SLOW_S = 0.3


class History:
    """What the ranks did, numbered in one order by the store that they share."""

    def __init__(self):
        self._store, self.events = job_store(), []

    def note(self, what):
        self.events.append((self._store.add("events", 1), what, dist.get_rank()))

    def of_all_ranks(self):
        gathered = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, self.events)
        return [(what, rank) for _, what, rank in sorted(event for events in gathered for event in events)]


class RecordingEngine(RolloutEngine):
    """Writes down what is called; after `dies_in` loads, and one more, its process has ended."""

    def __init__(self, history, dies_in=None):
        self._history, self._dies_in, self._loads, self.version = history, dies_in, 0, -1

    def _note(self, what):
        if self._dies_in is not None and self._loads > self._dies_in:
            raise EngineDiedError(f"its process ended before {what}")
        self._history.note(what)

    def sleep(self, *, weights=True, kv=True):
        self._note(f"sleep weights={weights} kv={kv}")

    def wake(self, *, weights=True, kv=True):
        self._note(f"wake weights={weights} kv={kv}")

    def begin_load(self):
        self._note("begin load")

    def load(self, payloads, version):
        self._note("load")
        self._loads += 1
        return self._loads, version

    def loaded(self, load):
        self._note("loaded" if load[1] is None else "loaded all")
        if load[1] is not None:
            self.version = load[1]

    def num_free_slots(self):
        return 1

    def submit(self, requests, sampling): ...

    def collect(self, timeout):
        return []

    def abort(self): ...

    def health(self):
        return self.version >= 0


class SlowOffload(CpuOffload):
    """Takes its time on the rank that leads no engine."""

    def __init__(self, history, *arguments):
        super().__init__(*arguments)
        self._history = history

    def to_host(self, weights=True):
        if dist.get_rank() == 1:
            time.sleep(SLOW_S)
        super().to_host(weights)
        if weights:
            self._history.note("offload")


def group_of(model, history, layout, context, dies_in=None):
    """An actor on all ranks, offloaded, and engines of this layout, of which the last one dies."""
    actor = build_role(
        Actor,
        model,
        ParallelGroups(Placement.on(Layout(tp=2), dist.get_world_size())),
        context,
        tokens_per_micro_batch=60,
        optimizer=OptimizerConfig(lr=1e-2),
    )
    actor.cpu_offload = SlowOffload(history, actor.runner, actor.trainer)
    context.offload.register(actor.cpu_offload)
    placement = EnginePlacement(layout, tuple(range(dist.get_world_size())))
    leaders = [ranks[0] for ranks in placement.members().values()]
    is_last = dist.get_rank() == leaders[-1]
    engine = RecordingEngine(history, dies_in if is_last else None) if dist.get_rank() in leaders else None
    group = ProcessEngineGroup(
        ProcessEngineSync(placement, engine_groups(placement), engine, actor.runner.table),
        engine,
        [rank in leaders for rank in range(dist.get_world_size())],
        context,
        sleep=True,
        disjoint=False,
    )
    return actor, engine, group


def handed_over(model):
    """Events of all ranks in an update; number of chunks with memory whenever torch's is emptied, and of all."""
    history, chunks, alive = History(), [], []

    class Noted(Staging):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            chunks.append(weakref.ref(self))

    def empty_cache():
        alive.append(sum(chunk() is not None for chunk in chunks))
        history.note("empty")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ipc, "Staging", Noted)
        patch.setattr(transfer_plan, "CHUNK_BYTES", 2**13)
        actor, _, group = group_of(model, history, EngineLayout(tp=2), job_context())
        patch.setattr(torch.cuda, "empty_cache", empty_cache)
        group.update_weights(actor)
    return history.of_all_ranks(), alive, len(chunks)


def test_update_weights_wakes_engine_after_all_ranks_released_memory(ranks, tmp_path):
    (events, _, num_chunks), (other, *_) = found = ranks.run(2, handed_over, tiny_model(tmp_path / "model", "qwen3"))
    assert events == other and num_chunks > 2
    names = [name for name, _ in events]
    weights, cache = names.index("wake weights=True kv=False"), names.index("wake weights=False kv=True")
    assert names.index("sleep weights=True kv=True") < weights < names.index("begin load") < names.index("load")
    assert names.index("load") < names.index("loaded all") < cache
    for rank in range(2):
        own = [name for name, of in events[:cache] if of == rank and name in ("empty", "offload")]
        assert own[0] == "empty" and own[-2:] == ["offload", "empty"]
        assert events.index(("empty", rank)) < weights
    # All chunks have gone when torch's memory is emptied the last time, before the cache is allocated.
    assert all(alive[-1] == 0 for _, alive, _ in found)


def with_death(model, dies_in):
    """Two engines, of which the second ends in the middle of a transfer: the groups' versions, and all events."""
    history = History()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer_plan, "CHUNK_BYTES", 2**13)
        actor, engine, group = group_of(model, history, EngineLayout(), job_context(), dies_in)
        actor.num_updates = 3
        group.update_weights(actor)
    return engine.version, [name for name, rank in history.of_all_ranks() if rank == 1]


@pytest.mark.parametrize("dies_in", [-1, 0, 2])
def test_update_weights_of_engine_that_dies_reaches_the_other_engine(ranks, tmp_path, dies_in):
    (version, events), (dead, _) = ranks.run(2, with_death, tiny_model(tmp_path / "model", "qwen3"), dies_in)
    assert (version, dead) == (3, -1)
    assert events.count("load") == dies_in + 1 and "loaded all" not in events


def bytes_held(role):
    """Bytes of weights, gradients and optimizer state on the device."""
    storages = role.runner.weight_storages()
    if isinstance(role, TrainableRole):
        storages += role.trainer.state_storages()
        storages += role.trainer.gradient_storages()
    return sum(storage.nbytes() for storage in storages)


def built(folder):
    """Bytes of each role after each build and where the engine starts, the critic's moments then, and all events."""
    history, roles, after_builds, at_start = History(), {}, [], []
    build = ModelRoleBuilder.build

    def noted_build(self, name):
        roles[name] = build(self, name)
        after_builds.append({name: bytes_held(role) for name, role in roles.items()})
        return roles[name]

    def slow_empty_cache():
        time.sleep(SLOW_S * dist.get_rank())
        history.note("empty")

    def engine(*_, **__):
        history.note("engine")
        sizes = {name: bytes_held(role) for name, role in roles.items()}
        at_start.append((sizes, roles["critic"].trainer.counters().moments))
        return RecordingEngine(history)

    recipe = load_recipe(RECIPES / "ppo.py")
    offload = ["actor.offload=true", "reference.offload=true", "actor.layout=tp2", "algorithm.kl.coefficient=0.1"]
    config = load_config(None, [*settings(folder), "rollout.layout=tp2", *offload], recipe.config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelRoleBuilder, "build", noted_build)
        patch.setattr(build_engines, "ProcessEngine", engine)
        patch.setattr(torch.cuda, "empty_cache", slow_empty_cache)
        RunningJob(config, recipe.roles(config.algorithm), job_store())
    return after_builds, at_start, history.of_all_ranks()


@needs_sglang
def test_job_starts_engine_when_offloaded_roles_have_left_all_devices(ranks, tmp_path):
    (after_builds, at_start, events), (others, *_) = ranks.run(2, built, inputs(tmp_path, "qwen3"))
    for sizes in (*after_builds, *others):
        assert all((sizes[name] > 0) == (name == "critic") for name in sizes)
    ((sizes, steps),) = at_start
    assert sizes.keys() == {"actor", "critic", "reference"} and steps == 0
    assert sizes["actor"] == sizes["reference"] == 0 < sizes["critic"]
    assert {event for event in events if event[0] == "empty"} == {("empty", 0), ("empty", 1)}
    assert events[-1] == ("engine", 0)


@pytest.mark.parametrize(("num_ranks", "expected"), [(0, 0.95), (2, 0.925)])
def test_engine_options_on_disjoint_ranks_leave_6_gib(ranks, tmp_path, num_ranks, expected):
    overrides = ["rollout.memory_fraction=0.95", f"rollout.num_ranks={num_ranks}"]
    found = ranks.run(2, fraction_of_80_gib, inputs(tmp_path, "qwen3"), overrides)
    assert found == [expected] * 2


def fraction_of_80_gib(folder, overrides):
    recipe = load_recipe(RECIPES / "grpo.py")
    config = load_config(None, [*settings(folder), *overrides], recipe.config)
    table = weight_table(read_config(folder / "model"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_options.device, "total_memory", lambda: 80 * 2**30)
        return EngineOptions.of_job(config, torch.bfloat16, table).memory_fraction
