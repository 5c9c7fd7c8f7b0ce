"""GRPO with an off-policy correction: what it does to an update on the tiny model, under any layout."""

import math
from functools import partial

import pytest
import torch
import torch.distributed as dist

from tests.helpers.roles import build_role
from tests.helpers.tiny_models import oracle, oracle_outputs, random_rows, tiny_model
from tests.run.jobs import built_job, make_inputs
from verl_mg.config import OptimizerConfig
from verl_mg.distributed.collectives import all_reduce_sum
from verl_mg.fsdp.mesh import MeshGroups
from verl_mg.layout import Layout, Placement
from verl_mg.megatron.process_groups import ParallelGroups
from verl_mg.models.hf_config import read_config
from verl_mg.recipes import grpo
from verl_mg.recipes.common.off_policy import COLUMNS, add_off_policy_weights
from verl_mg.roles.models import Actor
from verl_mg.training.loss_inputs import LossInputs

COUNT, LOW, HIGH = 9, 0.8, 1.3
KINDS = {
    "none": {},
    "icepop": {"weight": "token", "low": LOW, "high": HIGH},
    "sequence": {"weight": "sequence", "high": HIGH},
    "both": {"weight": "sequence", "high": HIGH, "rejection": {"sequence-mean-k1": [LOW, HIGH]}},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"), "qwen3")


def rows(model):
    """Policy, rollout and trainer differ from each other, by token and, the latter two, by row."""
    batch = random_rows(COUNT, read_config(model).vocab)
    with torch.no_grad():
        own, _ = oracle_outputs(oracle(model), batch, 1.0)
    batch["old_logprobs"] = own + 0.5 * batch["noise"]
    batch["rollout_logprobs"] = (
        own - 0.5 * batch["noise"].roll(1) + batch.expand_to_tokens(torch.linspace(-0.5, 0.6, COUNT))
    )
    return batch


def weights_by_hand(model, kind):
    """The weight of every token, and how many scored tokens have a ratio above the bound or are rejected."""
    batch, weights, above, rejected = rows(model), [], 0, 0
    for row in range(COUNT):
        mask = batch.row("loss_mask", row).tolist()
        columns = (batch.row(name, row).tolist() for name in ("old_logprobs", "rollout_logprobs"))
        logs = [old - rollout for old, rollout in zip(*columns, strict=True)]
        scored = [log for log, counts in zip(logs, mask, strict=True) if counts]
        for log, counts in zip(logs, mask, strict=True):
            ratio = math.exp(log if kind == "icepop" else sum(scored))
            kept = LOW <= math.exp(sum(scored) / len(scored)) <= HIGH
            inside = LOW <= ratio <= HIGH
            rule = {"icepop": ratio * inside, "sequence": min(ratio, HIGH), "both": min(ratio, HIGH) * kept}
            weights.append(rule[kind] if counts else 0.0)
            above += counts and ratio > HIGH
            rejected += counts and kind == "both" and not kept
    return torch.tensor(weights), above, rejected


def update(model, layout, budget, kind, scale=None):
    """One update; the advantages times `scale` (tokens,) where it is given."""
    actor = build_role(Actor, model, layout, tokens_per_micro_batch=budget, optimizer=OptimizerConfig(lr=1e-3))
    batch = rows(model)
    if scale is not None:
        batch["advantages"] = batch["advantages"] * scale
    # The last of several ranks holds no rows at all.
    rank, holders = dist.get_rank(), max(dist.get_world_size() - 1, 1)
    mine = batch.select(range(rank, COUNT, holders) if rank < holders else [])
    cfg = grpo.Config.model_validate({"off_policy": KINDS[kind]})
    add_off_policy_weights(mine, cfg.off_policy, all_reduce_sum)
    return actor.update(mine, partial(grpo.policy_loss, cfg=cfg), "seq-mean-token-mean")


@pytest.mark.parametrize(
    "kind",
    ["both", *(pytest.param(kind, marks=pytest.mark.nightly) for kind in ("icepop", "sequence"))],
)
def test_a_correction_scales_the_loss_of_each_token(ranks, model, kind):
    # The clipped loss of w * advantage is w times that of the advantage, so scaled advantages are an oracle.
    weights, above, rejected = weights_by_hand(model, kind)
    (plain,) = ranks.run(1, update, model, "tp1", 4096, "none")
    (expected,) = ranks.run(1, update, model, "tp1", 4096, "none", weights)
    assert abs(expected["actor/grad_norm"] - plain["actor/grad_norm"]) > 0.02 * plain["actor/grad_norm"]
    scored = int(rows(model)["loss_mask"].sum())
    means = {"correction": float(weights.sum()), "correction_above": above, "correction_rejected": rejected}
    assert above > 0 and (rejected > 0) == (kind == "both")
    for count, layout, budget in ((1, "tp1", 4096), (2, "tp1", 24), (4, "tp2-pp2", 30)):
        for found in ranks.run(count, update, model, layout, budget, kind):
            for name in ("actor/loss", "actor/grad_norm"):
                assert found[name] == pytest.approx(expected[name], rel=2e-5, abs=1e-6), (name, layout)
            for name, total in means.items():
                assert found[f"actor/{name}"] == pytest.approx(total / scored, rel=1e-5), (name, layout)


def test_the_kl_term_is_not_weighed():
    column = torch.tensor([-1.0, -2.0])
    names = ("old_logprobs", "advantages", *COLUMNS)
    columns = {**dict.fromkeys(names, torch.zeros(2)), "ref_logprobs": column - 0.5}
    tokens = LossInputs(torch.stack([column, column]), torch.tensor([True, True]), torch.tensor([0, 1]), columns)
    cfg = grpo.Config.model_validate({"off_policy": {"weight": "token"}, "kl": {"coefficient": 0.1}})
    loss, metrics = grpo.policy_loss(tokens, cfg)
    assert loss.tolist() == pytest.approx([0.1 * (math.exp(-0.5) - 0.5)] * 2)
    assert set(names[2:]) | {"kl", "ratio"} <= metrics.keys()


NUM_TOP = 5
CENTRED = grpo.Config.model_validate({"off_policy": {"score_centering": NUM_TOP, "weight": "token", "high": 1.2}})
BACKENDS = {"megatron": ParallelGroups, "fsdp": MeshGroups}


def distributions(model):
    """(tokens, vocabulary) log-probs in the place of each token: policy in training, before the update, sampler."""
    batch, network = rows(model), oracle(model)
    own = []
    for row in range(COUNT):
        log_p = network(batch.row("tokens", row)[None]).logits[0].log_softmax(-1)
        own += [log_p.new_zeros(1, log_p.shape[1]), log_p[:-1]]  # the first token of a row has none
    own = torch.cat(own)
    noise = torch.randn(2, *own.shape, generator=torch.Generator().manual_seed(1))
    return network, own, *((own.detach() + 0.4 * of_other).log_softmax(-1) for of_other in noise)


def centred_rows(model):
    """Rows whose sampler and policy before the update are other ones than the model."""
    with torch.no_grad():
        _, _, old, sampler = distributions(model)
    batch = rows(model)
    top = sampler.topk(NUM_TOP)
    ids = torch.cat([batch["tokens"][:, None], top.indices], 1)
    batch["old_logprobs"], batch["rollout_logprobs"] = old.gather(1, ids), sampler.gather(1, ids[:, :1])[:, 0]
    batch["sampler_top"] = torch.stack([top.values, top.indices.float()], 1)
    return batch


def centred_update(model, backend, layout, budget):
    """Log-probs of the likeliest tokens before an update, and its metrics."""
    groups = BACKENDS[backend](Placement.on(Layout.parse(layout), dist.get_world_size()))
    options = {"tokens_per_micro_batch": budget, "optimizer": OptimizerConfig(lr=1e-3), "likeliest": "sampler_top"}
    actor, batch = build_role(Actor, model, groups, **options), centred_rows(model)
    rank, holders = dist.get_rank(), max(dist.get_world_size() - 1, 1)
    mine = batch.select(range(rank, COUNT, holders) if rank < holders else [])
    outputs = dict(
        zip(mine["sample_id"].tolist(), actor.compute_logprobs(mine).split(mine.lengths.tolist()), strict=True)
    )
    add_off_policy_weights(mine, CENTRED.off_policy, all_reduce_sum)
    return outputs, actor.update(mine, partial(grpo.policy_loss, cfg=CENTRED), "seq-mean-token-mean")


@pytest.mark.parametrize(
    "layouts",
    [
        [("megatron", 4, "tp2-pp2", 30), ("fsdp", 2, "cp2", 24)],
        pytest.param(
            [
                *(
                    ("megatron", count, layout, 24)
                    for count, layout in ((1, "tp1"), (2, "cp2"), (2, "tp2"), (4, "cp2"))
                ),
                *(("fsdp", *place, 24) for place in ((1, "tp1"), (2, "tp2"), (4, "cp2"))),
                ("megatron", 1, "tp1", 4096),
            ],
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["usual", "others"],
)
def test_score_centering_equals_sums_over_the_vocabulary_in_any_layout(ranks, model, layouts):
    batch = centred_rows(model)
    network, own, old, sampler = distributions(model)
    mask, tokens, top = batch["loss_mask"], batch["tokens"][:, None], batch["sampler_top"][:, 1].long()
    is_head = torch.zeros_like(sampler, dtype=torch.bool).scatter(1, top, True)
    tails = [torch.where(is_head, 0, part.exp()).sum(1, keepdim=True) for part in (sampler, old)]
    known = torch.where(is_head, sampler, old + (tails[0] / tails[1]).log())
    weights = (old - known).exp().clamp(max=1.2)
    expected_weight = (known.exp() * weights * (own - old).exp()).sum(1)
    ratio, drawn = (own - old).gather(1, tokens)[:, 0].exp(), (old - sampler).gather(1, tokens)[:, 0].exp()
    a = batch["advantages"]
    clipped = torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.2)) * drawn.clamp(max=1.2)
    of_rows = [part[scored].mean() for part, scored in zip(
        (clipped + a * expected_weight).split(batch.lengths.tolist()), mask.split(batch.lengths.tolist()), strict=True
    )]  # fmt: skip
    loss = torch.stack(of_rows).mean()
    loss.backward()
    loss = loss.item()
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in network.parameters() if p.grad is not None))
    own_outputs = torch.where(mask[:, None], own.detach().gather(1, torch.cat([tokens, top], 1)), 0)
    by_row = dict(zip(batch["sample_id"].tolist(), own_outputs.split(batch.lengths.tolist()), strict=True))
    mass = float(sampler.gather(1, top).exp().sum(1)[mask].mean())
    for backend, count, layout, budget in layouts:
        for outputs, metrics in ranks.run(count, centred_update, model, backend, layout, budget):
            assert metrics["actor/loss"] == pytest.approx(loss, rel=5e-5), (backend, layout)
            assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=5e-5), (backend, layout)
            assert metrics["actor/centering_mass"] == pytest.approx(mass, rel=1e-5)
            assert all(torch.allclose(column, by_row[row], atol=2e-5) for row, column in outputs.items())


def generated(inputs):
    """Shape of the likeliest tokens of a batch, and the probability that they have in all, as far as it is scored."""
    job = built_job(inputs, "algorithm.off_policy.score_centering=1000")
    job.start()
    batch = job.rollout.generate(job.prompts.next_batch(2), num_samples=2)
    job.close()
    top = batch["sampler_top"]
    return tuple(top.shape[1:]), top[batch["loss_mask"], 0].exp().sum(1).tolist()


def test_score_centering_by_more_tokens_than_there_are_takes_the_vocabulary(ranks, tmp_path):
    inputs = make_inputs(tmp_path)
    (shape, sums), *_ = ranks.run(1, generated, inputs)
    assert shape == (2, read_config(inputs / "model").vocab) and sums == pytest.approx([1.0] * len(sums))
