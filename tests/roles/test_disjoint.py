"""An actor on some ranks of a job, alone or beside SGLang engines on the others: the same numbers as by itself."""

from functools import partial
from itertools import chain

import pytest
import torch
import torch.distributed as dist

from tests.roles.test_actor import COUNT, actor_on, rows, settings, with_entropy
from tests.roles.test_sglang_rollout import checked_answers, inputs, sglang_job, trained_once
from tests.tiny_models import tiny_model
from tests.traces import needs_sglang
from verl_mg.errors import UserError
from verl_mg.layout import Layout, Placement
from verl_mg.megatron.process_groups import ParallelGroups
from verl_mg.roles import weight_sync

# (layout, its ranks, ranks of the job, architecture)
STANDING = [
    ("tp2", (0, 1), 3, "qwen3"),
    ("pp2", (0, 1), 4, "qwen2"),  # tied embeddings on two stages
    ("tp1", (0, 1), 3, "llama"),  # dp2
    ("tp2-pp2", (1, 2, 4, 5), 6, "qwen3"),
    ("ep2", (1, 3), 4, "qwen3_moe"),
]
STEPS = 2


def train(model, layout, standing, folder):
    """What a rank sees of log-probs, two updates and a checkpoint, its rows scattered over all ranks of the job."""
    actor = actor_on(model, layout, 40, standing)
    batch = rows(model).select(range(dist.get_rank(), COUNT, dist.get_world_size()))
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


@pytest.mark.parametrize(("layout", "standing", "count", "architecture"), STANDING)
def test_an_actor_on_some_ranks_is_the_actor_alone(ranks, tmp_path, layout, standing, count, architecture):
    model = tiny_model(tmp_path / "model", architecture)
    alone = ranks.run(len(standing), train, model, layout, None, tmp_path / "alone")
    found = ranks.run(count, train, model, layout, standing, tmp_path / "apart")
    expected, got = gathered(alone), gathered(found)
    assert len(got) == COUNT and got.keys() == expected.keys()
    assert all(torch.equal(got[row], expected[row]) for row in got)
    for rank, result in enumerate(found):
        assert result["metrics"] == alone[0]["metrics"] and result["metrics"][0]["actor/grad_norm"] > 0
        assert result["updates"] == STEPS and result["holders"] == standing
        own = alone[standing.index(rank)]["parameters"] if rank in standing else {}
        assert result["parameters"].keys() == own.keys()
        assert all(torch.equal(result["parameters"][name], own[name]) for name in own)
    saved = sorted(file.name for file in (tmp_path / "alone").iterdir())
    assert saved == sorted(file.name for file in (tmp_path / "apart").iterdir())
    assert all((tmp_path / "alone" / name).read_bytes() == (tmp_path / "apart" / name).read_bytes() for name in saved)


def grouped(ranks_of_layout):
    """Whether this rank is there, and what it is told when it asks where it stands."""
    before = dist.get_world_size, dist.all_gather_object
    groups = ParallelGroups(Placement(Layout(tp=2), ranks_of_layout))
    assert (dist.get_world_size, dist.all_gather_object) == before
    try:
        return groups.is_member, groups.coordinates.tp, dist.get_process_group_ranks(groups.collection.tp)
    except LookupError as error:
        return groups.is_member, str(error)


def test_groups_are_those_of_the_placement(ranks):
    outside, first, second = ranks.run(3, grouped, (1, 2))
    assert outside == (False, "rank 0 has no place in layout tp2 on (1, 2)")
    assert (first, second) == ((True, 0, [1, 2]), (True, 1, [1, 2]))


def test_ranks_that_do_not_rise_are_refused():
    with pytest.raises(ValueError, match=r"\(1, 0\) must rise"):
        ParallelGroups(Placement(Layout(tp=2), (1, 0)))


def refused(folder, overrides):
    try:
        sglang_job(folder, *overrides)
    except UserError as error:
        return str(error)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.num_ranks=4"], "rollout.num_ranks=4: none of the job's 4 is left to train; start 5 or more"),
        (
            ["rollout.num_ranks=2", "rollout.engine=hf"],
            "rollout.num_ranks=2: the embedded engine stands on the ranks of the actor; leave it out, "
            "or write rollout.engine=sglang",
        ),
        (
            ["rollout.num_ranks=2", "actor.ranks=1-2"],
            "actor.layout=tp1 on actor.ranks=1-2: rank 2 is none of the 2 that hold networks, 0 to 1; write lower ones "
            "in actor.ranks, or start more",
        ),
        (
            ["rollout.num_ranks=1", "actor.layout=tp2"],
            "actor.layout=tp2 beside rollout.num_ranks=1: layout tp2 requires a multiple of 2 ranks, not 3. "
            "Start 2 or 4. Nearest valid layouts on 3 ranks: tp1.",
        ),
        (
            ["rollout.num_ranks=3", "rollout.layout=tp2"],
            "rollout.layout=tp2: an engine stands on 2 ranks, the rollout has 3 of the job's 4; "
            "write rollout.num_ranks as a multiple of 2",
        ),
    ],
)
def test_what_cannot_stand_apart_is_refused_in_one_line(ranks, tmp_path, overrides, message):
    assert ranks.run(4, refused, inputs(tmp_path, "qwen3"), overrides) == [message] * 4


def train_beside_engines(folder):
    """Two iterations, the reference under a layout of its own; what this rank saw and received in each sync."""
    received, execute = [], weight_sync.execute

    def counting(*arguments):
        traffic = execute(*arguments)
        received.append(traffic.bytes_received)
        return traffic

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_sync, "execute", counting)
        job, recipe = sglang_job(
            folder,
            *("actor.layout=tp2", "reference.layout=pp2", "algorithm.kl_coefficient=0.01"),
            *("rollout.layout=tp2", "rollout.num_ranks=2"),
        )
        told = [trained_once(job, recipe, folder, f"step-{update}") for update in range(2)]
    held = [len(policy.runner.parameters()) for policy in (job.actor, job.reference)]
    return told, received, held


@needs_sglang
def test_engines_on_ranks_of_their_own_are_the_exported_checkpoint(ranks, tmp_path):
    folder = inputs(tmp_path, "qwen3")
    results = ranks.run(4, train_beside_engines, folder)
    before = None
    for step, told in enumerate(zip(*(told for told, _, _ in results), strict=True)):
        assert told[0]["grad_norm"] > 0 and all(rank["mismatch"] < 1e-4 for rank in told)
        assert len({rank["grad_norm"] for rank in told}) == 1
        answers = checked_answers(folder, told)
        assert len(answers) == 5 and answers != before  # an update shows
        before = answers
        got, bound = told[0]["sync"]
        assert got == bound > 0
        assert {version for rank in told for version in rank["versions"]} == {step}
        assert sorted(i for rank in told for i in rank["ids"]) == list(range(step * 24, (step + 1) * 24))
    for rank, (_, received, held) in enumerate(results):
        assert len(received) == 3 and all((size > 0) == (rank >= 2) for size in received)
        assert all((count > 0) == (rank < 2) for count in held)
    assert sum(received[-1] for _, received, _ in results) == results[0][0][-1]["sync"][0]
