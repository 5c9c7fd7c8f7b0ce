"""An actor on some ranks of a job, with idle ranks or with engines on the others."""

from functools import partial
from itertools import chain

import pytest
import torch
import torch.distributed as dist

from tests.helpers.engines import SGLANG, VLLM_NIGHTLY
from tests.helpers.tiny_models import tiny_model
from tests.roles.updates import COUNT, actor_on, own_rows, rows, settings, with_entropy
from tests.rollout.engine_jobs import checked_steps, complaint, engine_job, inputs, trained_once
from verl_mg.layout import Layout, Placement
from verl_mg.megatron.process_groups import ParallelGroups
from verl_mg.weight_sync import transfer_plan

# (layout, its ranks, ranks of the job, architecture)
PLACEMENTS = [
    pytest.param("tp2", (0, 1), 3, "qwen3", marks=pytest.mark.nightly),
    ("pp2", (0, 1), 4, "qwen2"),  # tied embeddings on two stages
    pytest.param("tp1", (0, 1), 3, "llama", marks=pytest.mark.nightly),  # dp2
    ("tp2-pp2", (1, 2, 4, 5), 6, "qwen3"),
    ("ep2", (1, 3), 4, "qwen3_moe"),
]
STEPS = 2


def train(model, layout, placed, folder):
    """This rank's log-probs, metrics of two updates, and parameters; rows are distributed over all ranks of the job."""
    actor = actor_on(model, layout, 40, placed)
    batch = own_rows(rows(model))
    column = actor.compute_logprobs(batch).split(batch.lengths.tolist())
    metrics = []
    for _ in range(STEPS):
        actor.cpu_offload.to_host()
        actor.cpu_offload.to_device()
        metrics.append(actor.update(batch, partial(with_entropy, settings("token-mean")), "token-mean"))
    actor.save(folder, model)
    return {
        "logprobs": dict(zip(batch["sample_id"].tolist(), column, strict=True)),
        "metrics": metrics,
        "updates": actor.num_updates,
        "parameters": {name: tensor.detach().clone() for name, tensor in actor.runner.parameters().items()},
        "holders": actor.runner.shard_map().ranks,
    }


def gathered(results):
    """The log-probs of all rows, by sample id."""
    return dict(sorted(chain.from_iterable(result["logprobs"].items() for result in results)))


@pytest.mark.parametrize(("layout", "placed", "count", "architecture"), PLACEMENTS)
def test_actor_on_some_ranks_is_bitwise_identical_to_all(ranks, tmp_path, layout, placed, count, architecture):
    model = tiny_model(tmp_path / "model", architecture)
    alone = ranks.run(len(placed), train, model, layout, None, tmp_path / "alone")
    found = ranks.run(count, train, model, layout, placed, tmp_path / "apart")
    expected, got = gathered(alone), gathered(found)
    assert len(got) == COUNT and got.keys() == expected.keys()
    assert all(torch.equal(got[row], expected[row]) for row in got)
    for rank, result in enumerate(found):
        assert result["metrics"] == alone[0]["metrics"] and result["metrics"][0]["actor/grad_norm"] > 0
        assert result["updates"] == STEPS and result["holders"] == placed
        own = alone[placed.index(rank)]["parameters"] if rank in placed else {}
        assert result["parameters"].keys() == own.keys()
        assert all(torch.equal(result["parameters"][name], own[name]) for name in own)
    saved = sorted(file.name for file in (tmp_path / "alone").iterdir())
    assert saved == sorted(file.name for file in (tmp_path / "apart").iterdir())
    assert all((tmp_path / "alone" / name).read_bytes() == (tmp_path / "apart" / name).read_bytes() for name in saved)


def grouped(ranks_of_layout):
    """Whether this rank is a member, and its coordinates or the error."""
    before = dist.get_world_size, dist.all_gather_object
    groups = ParallelGroups(Placement(Layout(tp=2), ranks_of_layout))
    assert (dist.get_world_size, dist.all_gather_object) == before
    try:
        return groups.is_member, groups.coordinates.tp, dist.get_process_group_ranks(groups.collection.tp)
    except LookupError as error:
        return groups.is_member, str(error)


def test_parallel_groups_of_a_placement_contain_its_ranks(ranks):
    outside, first, second = ranks.run(3, grouped, (1, 2))
    assert outside == (False, "rank 0 is not among the ranks (1, 2) of tp2")
    assert (first, second) == ((True, 0, [1, 2]), (True, 1, [1, 2]))


def test_parallel_groups_with_unsorted_ranks_are_refused():
    with pytest.raises(ValueError, match=r"in increasing order: \(1, 0\) is not"):
        ParallelGroups(Placement(Layout(tp=2), (1, 0)))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.num_ranks=4"], "rollout.num_ranks=4: none of the job's 4 ranks is left to train. Start at least 5."),
        (
            ["rollout.num_ranks=2", "actor.ranks=1-2"],
            "actor.layout=tp1 on actor.ranks=1-2: rank 2 is out of range, models can be placed on ranks 0 to 1. "
            "Lower actor.ranks, or start more ranks.",
        ),
        (
            ["rollout.num_ranks=1", "actor.layout=tp2"],
            "actor.layout=tp2 with rollout.num_ranks=1: layout tp2 requires a multiple of 2 ranks, not 3. "
            "Start 2 or 4. Nearest valid layouts on 3 ranks: tp1.",
        ),
        (
            ["rollout.num_ranks=2", "actor.layout=pp2", "actor.pipeline_layers=[1, 2]"],
            "actor.pipeline_layers: [1, 2] are 3 layers, and the model has 2. Distribute all of them, or leave the key "
            "out.",
        ),
    ],
)
def test_job_with_unfit_ranks_is_refused_with_a_remedy(ranks, tmp_path, overrides, message):
    assert ranks.run(4, complaint, inputs(tmp_path, "qwen3"), *overrides) == [message] * 4


def train_with_engines(folder, engine):
    """Two iterations with a reference under another layout; this rank's results and bytes received in each transfer."""
    received, execute = [], transfer_plan.execute

    def counting(*arguments, **options):
        traffic = execute(*arguments, **options)
        received.append(traffic.bytes_received)
        return traffic

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer_plan, "execute", counting)
        job, recipe = engine_job(
            folder,
            *("actor.layout=tp2", "reference.layout=pp2", "algorithm.kl.coefficient=0.01"),
            *("rollout.layout=tp2", "rollout.num_ranks=2"),
            engine=engine,
        )
        reported = [trained_once(job, recipe, folder, f"step-{update}") for update in range(2)]
    held = [len(policy.runner.parameters()) for policy in (job.actor, job.reference)]
    return reported, received, held


@pytest.mark.parametrize("engine", [SGLANG, VLLM_NIGHTLY])
def test_engines_on_disjoint_ranks_generate_as_the_exported_checkpoint(ranks, tmp_path, engine):
    folder = inputs(tmp_path, "qwen3")
    results = ranks.run(4, train_with_engines, folder, engine)
    for step, reported in enumerate(checked_steps(folder, [reported for reported, _, _ in results])):
        assert len({rank["grad_norm"] for rank in reported}) == 1
        got, bound = reported[0]["sync"]
        assert got == bound > 0
        assert {version for rank in reported for version in rank["versions"]} == {step}
        assert sorted(i for rank in reported for i in rank["ids"]) == list(range(step * 24, (step + 1) * 24))
    for rank, (_, received, held) in enumerate(results):
        assert len(received) == 3 and all((size > 0) == (rank >= 2) for size in received)
        assert all((count > 0) == (rank < 2) for count in held)
    assert sum(received[-1] for _, received, _ in results) == results[0][0][-1]["sync"][0]
