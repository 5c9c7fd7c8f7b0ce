"""Bad updates do not reach the weights: not finite ones, and those after the policy has moved too far."""

import logging
from functools import partial

import pytest
import torch
import torch.distributed as dist

from tests.helpers.roles import build_role
from tests.helpers.tiny_models import nightly, random_rows, tiny_model
from verl_mg.config import GuardConfig, OptimizerConfig
from verl_mg.errors import UserError
from verl_mg.roles.models import Actor
from verl_mg.training.trainer import NON_FINITE_BUFFERS, UpdateGuard

OPTIMIZER = OptimizerConfig(lr=1e-2, warmup_steps=2)


def actor_with(model, layout, guard):
    return build_role(Actor, model, layout, optimizer=OPTIMIZER, guard=guard)


def rows():
    batch = random_rows(8, vocab=24, seed=dist.get_rank())
    batch["sample_id"] = batch["sample_id"] * 8 + dist.get_rank()
    return batch


def weights_of(actor):
    return {name: weight.detach().clone() for name, weight in actor.runner.parameters().items()}


def same(before, actor):
    return all(torch.equal(before[name], weight) for name, weight in actor.runner.parameters().items())


def loss_with(poison):
    """The last row of rank 0 alone is bad: in its loss, or only in its gradient."""

    def loss(tokens):
        per_token = -tokens["advantages"] * tokens.logprobs
        if poison == "loss":
            per_token = per_token * tokens["poison"]
        if poison == "gradient":  # the slope of the root is infinite at 0, and its value is 0
            per_token = per_token + (tokens.logprobs - tokens.logprobs.detach()).abs().sqrt() * tokens["poison"].isnan()
        return per_token, {}

    return loss


def poisoned(model, layout, poison):
    actor, batch = actor_with(model, layout, GuardConfig(bad_steps=3)), rows()
    batch["poison"] = torch.ones(batch.total_tokens)
    if dist.get_rank() == 0:
        batch["poison"][-2:] = float("nan")
    reported = [actor.update(batch, loss_with(None), "token-mean")]
    before = weights_of(actor)
    reported += [actor.update(batch, loss_with(poison), "token-mean") for _ in range(2)]
    kept = same(before, actor)
    reported.append(actor.update(batch, loss_with(None), "token-mean"))
    moved = not same(before, actor)
    reported += [actor.update(batch, loss_with(poison), "token-mean") for _ in range(2)]
    with pytest.raises(UserError) as error:
        actor.update(batch, loss_with(poison), "token-mean")
    return reported, kept, moved, str(error.value)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("guard") / "model", "qwen3", layers=2)


@pytest.mark.parametrize(
    ("layout", "count", "poison"),
    [
        ("tp1", 2, "loss"),
        ("tp1", 2, "gradient"),
        *nightly(("tp1", 1, "loss"), ("tp1", 1, "gradient"), ("tp2-pp2", 4, "loss"), ("tp2-pp2", 4, "gradient")),
    ],
)
def test_update_non_finite_is_skipped_and_many_end_the_run(ranks, model, layout, count, poison):
    for reported, kept, moved, message in ranks.run(count, poisoned, model, layout, poison):
        assert [metrics["actor/skipped"] for metrics in reported] == [0, 1, 1, 0, 1, 1]
        assert kept and moved
        assert "actor: loss or gradient not finite in 3 steps in a row. Lower actor.optimizer.lr" in message
        # The learning rate did not move on in the steps that were left out.
        assert [metrics["actor/lr"] for metrics in reported] == pytest.approx([5e-3, 5e-3, 5e-3, 1e-2, 1e-2, 1e-2])


def drifting(model, layout, action):
    """Three steps; the second one's divergence is said to be too large."""
    actor, batch = actor_with(model, layout, GuardConfig(max_kl=0.1, action=action)), rows()
    seen, states = [], []

    def loss(tokens, divergence):
        far = tokens.logprobs.detach() * 0 + divergence
        return -tokens["advantages"] * tokens.logprobs, {"approx_kl": far}

    states.append(weights_of(actor))
    for divergence in (0.0, 0.05, 0.2, 0.0):
        seen.append(actor.update(batch, partial(loss, divergence=divergence), "token-mean"))
        states.append(weights_of(actor))
    equal = [[all(torch.equal(a[n], b[n]) for n in a) for b in states] for a in states]
    return seen, equal


@pytest.mark.parametrize(("layout", "count"), [("tp1", 2), *nightly(("tp2-pp2", 4))])
def test_update_above_max_kl_is_skipped(ranks, model, layout, count):
    for seen, equal in ranks.run(count, drifting, model, layout, "skip"):
        assert [metrics["actor/skipped"] for metrics in seen] == [0, 0, 1, 0]
        assert equal[2][3] and not equal[1][2] and not equal[3][4]
        assert "actor/rolled_back" not in seen[0]


@pytest.mark.parametrize(("layout", "count"), [("tp1", 2), *nightly(("tp2-pp2", 4))])
def test_update_above_max_kl_rolls_back_weights_and_learning_rate(ranks, model, layout, count):
    for seen, equal in ranks.run(count, drifting, model, layout, "rollback"):
        assert [metrics["actor/rolled_back"] for metrics in seen] == [0, 0, 1, 0]
        assert equal[3][1] and not equal[3][2], "back to the weights before the second step"
        assert seen[1]["actor/lr"] == pytest.approx(1e-2) and seen[3]["actor/lr"] == pytest.approx(5e-3)
        # From the same weights, moments and learning rate a step leads to the same place: half the second's way here.
        assert not equal[4][3]


def rolled_back_and_repeated(model):
    """A step, a step that is taken back, and the step again, beside an actor that never took it back."""
    results = []
    for divergences in ((0.0, 0.0), (0.0, 0.0, 0.2, 0.0)):
        optimizer = OPTIMIZER.model_copy(update={"warmup_steps": 0})
        guard = GuardConfig(max_kl=0.1, action="rollback")
        actor = build_role(Actor, model, "tp2", dtype=torch.bfloat16, optimizer=optimizer, guard=guard)
        for divergence in divergences:

            def loss(tokens, divergence=divergence):
                return -tokens["advantages"] * tokens.logprobs, {"approx_kl": tokens.logprobs.detach() * 0 + divergence}

            actor.update(rows(), loss, "token-mean")
        results.append(weights_of(actor))
    return all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_rollback_restores_optimizer_and_main_weights_bitwise(ranks, model):
    assert all(ranks.run(2, rolled_back_and_repeated, model))


def test_update_guard_max_kl_without_metric_raises():
    with pytest.raises(UserError, match=r"actor\.guard\.max_kl: the recipe's loss reports no approx_kl"):
        UpdateGuard(GuardConfig(max_kl=0.1), "actor").check({NON_FINITE_BUFFERS: 0.0, "loss": 1.0})


def test_update_guard_logs_its_verdicts(caplog):
    guard = UpdateGuard(GuardConfig(max_kl=0.1, action="rollback"), "actor")
    with caplog.at_level(logging.WARNING):
        assert guard.check({NON_FINITE_BUFFERS: 0.0, "loss": 1.0, "approx_kl": 0.25})[0] == "rollback"
        assert guard.check({NON_FINITE_BUFFERS: 2.0, "loss": 1.0})[0] == "skip"
        assert guard.check({NON_FINITE_BUFFERS: 0.0, "loss": float("inf")})[0] == "skip"
    assert [record.getMessage() for record in caplog.records] == [
        "actor: approx_kl 0.25 is above guard.max_kl=0.1: weights and learning rate rolled back",
        "actor: gradient is not finite: step skipped (1 in a row)",
        "actor: loss is not finite: step skipped (2 in a row)",
    ]
