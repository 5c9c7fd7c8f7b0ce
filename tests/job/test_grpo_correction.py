"""GRPO with an off-policy correction: what it does to an update on the tiny model, under any layout."""

import math
from functools import partial

import pytest
import torch
import torch.distributed as dist

from tests.helpers.roles import build_role
from tests.helpers.tiny_models import oracle, oracle_outputs, random_rows, tiny_model
from verl_mg.config import OptimizerConfig
from verl_mg.distributed.collectives import all_reduce_sum
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
