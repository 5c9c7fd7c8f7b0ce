"""Loads of experts and the updates of routers' biases, against counts of the routers of `transformers`."""

import copy
from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist

from tests.helpers.roles import build_role
from tests.helpers.tiny_models import nightly, oracle, rows_for, rows_of_rank, tiny_model
from tests.megatron.training import restored
from verl_mg.config import GuardConfig, MegatronConfig, OptimizerConfig
from verl_mg.errors import UserError
from verl_mg.megatron.transformer_config import check_balancing
from verl_mg.roles.models import Actor

RATE, UPDATES, EXPERTS = 0.05, 2, 8
FIELDS = MegatronConfig(transformer={"moe_router_bias_update_rate": RATE})
BIAS = "model.layers.{}.mlp.gate.e_score_correction_bias"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("models") / "deepseek_v3", "deepseek_v3")


def shared_rows(model):
    """Two groups of rows; each row begins with the first five tokens of the first row of its group."""
    batch = rows_for(model)
    rows_of = [batch.row("tokens", row) for row in range(len(batch))]
    batch["prefix_of"] = batch["sample_id"].clone()
    batch["prefix_length"] = torch.zeros(len(batch), dtype=torch.int64)
    longest = [row for row in range(len(batch)) if len(rows_of[row]) > 6]
    for row in longest[1:]:
        batch["prefix_of"][row], batch["prefix_length"][row] = batch["sample_id"][longest[0]], 5
        start = int(batch.offsets[row])
        batch["tokens"][start : start + 5] = rows_of[longest[0]][:5]
    assert len(longest) > 3
    return batch


def actor_on(model, layout, recompute=False, guard=None, lr=1e-30, **options):
    """A learning rate at which no weight moves, so that the oracle need not train."""
    options = {"recompute": recompute, "guard": guard, "megatron": FIELDS} | options
    return build_role(Actor, model, layout, optimizer=OptimizerConfig(lr=lr), **options)


def loss(tokens):
    return -tokens["advantages"] * tokens.logprobs, {"approx_kl": tokens["noise"] * 0 + tokens.columns.get("kl", 0.0)}


def biases_of(actor):
    """(tensor, values) of this rank."""
    shards = actor.runner.shard_map().shards(dist.get_rank())
    named = {name: bias for name, bias in actor.runner.parameters().items() if name.endswith("expert_bias")}
    return [(shards[name].pieces[0].tensor, bias.clone()) for name, bias in named.items()]


def update(model, layout, batch, recompute, fields=FIELDS):
    """Biases after each update, and the reported loads."""
    actor = actor_on(model, layout, recompute, megatron=fields)
    actor.compute_logprobs(rows_of_rank(batch))  # does not count
    biases, loads = [], []
    for _ in range(UPDATES):
        loads.append(actor.update(rows_of_rank(batch), loss, "token-mean")["actor/max_expert_load"])
        biases.append(biases_of(actor))
    return biases, loads


@pytest.fixture(scope="module")
def expected(model):
    return {name: count_by_hand(model, batch(model)) for name, batch in BATCHES.items()}


def count_by_hand(model, batch):
    """{tensor: bias} after each update, and the largest loads, from the routers of `transformers`."""
    net, chosen = copy.deepcopy(oracle(model)), {}
    routers = {number: layer.mlp.gate for number, layer in enumerate(net.model.layers) if hasattr(layer.mlp, "gate")}
    for number, router in routers.items():
        router.register_forward_hook(lambda _, __, output, n=number: chosen.setdefault(n, []).append(output[2]))
    biases, largest = [], []
    for _ in range(UPDATES):
        chosen.clear()
        with torch.no_grad():
            for row in range(len(batch)):
                net(batch.row("tokens", row)[None])
        ratios = []
        for number, router in routers.items():
            counts = [int((torch.cat(chosen[number]) == expert).sum()) for expert in range(EXPERTS)]
            mean = sum(counts) / EXPERTS
            ratios.append(max(counts) / mean)
            for expert, count in enumerate(counts):
                router.e_score_correction_bias[expert] += RATE * ((count < mean) - (count > mean))
        biases.append({BIAS.format(n): router.e_score_correction_bias.clone() for n, router in routers.items()})
        largest.append(sum(ratios) / len(ratios))
    return biases, largest


BATCHES = {"rows": rows_for, "shared": shared_rows}
LAYOUTS = [
    ("tp1", 1, "rows", False),
    ("tp2-pp2-ep2-etp1", 4, "rows", False),
    ("cp2-ep2", 4, "rows", True),
    ("tp2", 2, "shared", ["moe"]),
    *nightly(*product(("tp2", "cp2", "pp2", "ep2", "tp1", "pp2-vpp2"), [2], BATCHES, (False, True, ["moe"]))),
]


@pytest.mark.parametrize(("layout", "count", "kind", "recompute"), LAYOUTS)
def test_update_changes_biases_by_the_loads_of_the_whole_mini_batch(
    ranks, model, expected, layout, count, kind, recompute
):
    wanted, largest = expected[kind]
    before = oracle(model).state_dict()
    for biases, loads in ranks.run(count, update, model, layout, BATCHES[kind](model), recompute):
        assert loads == pytest.approx(largest, rel=1e-12) and min(largest) > 1
        for step, found in enumerate(biases):
            for name, values in found:
                assert torch.equal(values, wanted[step][name]), (step, name)
                assert (values - before[name]).abs().max() > 0.9 * RATE
    assert not all(torch.equal(wanted[1][name] - wanted[0][name], wanted[0][name] - before[name]) for name in wanted[0])


def test_update_without_a_rate_keeps_biases_and_reports_loads(ranks, model, expected):
    ((biases, loads),) = ranks.run(1, update, model, "tp1", rows_for(model), False, MegatronConfig())
    assert loads[0] == pytest.approx(expected["rows"][1][0])
    assert all(torch.equal(values, oracle(model).state_dict()[name]) for name, values in biases[-1])


def guarded(model, layout, bad, guard):
    """Biases before two updates, after a good one, and after a bad one."""
    actor, batch = actor_on(model, layout, guard=guard), rows_of_rank(rows_for(model))
    batch["kl"] = torch.zeros(batch.total_tokens)
    found = [biases_of(actor)]
    for value in (0.0, bad):
        batch["kl"][:] = value
        if value != value:
            batch["advantages"][:] = value
        actor.update(batch, loss, "token-mean")
        found.append(biases_of(actor))
    return found


@pytest.mark.parametrize(
    ("bad", "guard", "after"),
    [
        (float("nan"), GuardConfig(), 1),
        (9.0, GuardConfig(max_kl=1.0), 1),
        (9.0, GuardConfig(max_kl=1.0, action="rollback"), 0),
    ],
)
def test_guard_skips_or_rolls_back_the_biases_too(ranks, model, bad, guard, after):
    for found in ranks.run(2, guarded, model, "pp2", bad, guard):
        values = [torch.stack([bias for _, bias in biases]) for biases in found]
        assert not torch.equal(values[0], values[1])
        assert torch.equal(values[2], values[after])


def resumed(model, layout, guard):
    """Three updates, and one followed by two of a role that restores its checkpoint; the biases after each."""
    batch, build = rows_of_rank(rows_for(model)), partial(actor_on, model, layout, guard=guard, lr=1e-2)

    def biases_after_an_update(actor):
        actor.update(batch, loss, "token-mean")
        return biases_of(actor)

    actor, stopped = build(), build()
    whole = [biases_after_an_update(actor) for _ in range(3)]
    stopped.update(batch, loss, "token-mean")
    other = restored(stopped, build)
    return whole, [biases_of(other), *(biases_after_an_update(other) for _ in range(2))]


@pytest.mark.parametrize(
    "guard",
    [*nightly(GuardConfig()), GuardConfig(max_kl=1.0, action="rollback")],
    ids=["no guard", "rollback"],
)
def test_restored_role_continues_with_its_biases_bitwise(ranks, model, guard):
    for whole, parts in ranks.run(2, resumed, model, "tp2", guard):
        for expected, found in zip(whole, parts, strict=True):
            assert all(torch.equal(a, b) for (_, a), (_, b) in zip(expected, found, strict=True))


def exported(model, folder, layout):
    actor = actor_on(model, layout)
    actor.update(rows_of_rank(rows_for(model)), loss, "token-mean")
    actor.save(folder, model)
    return biases_of(actor)


def test_save_writes_the_updated_biases(ranks, model, expected, tmp_path):
    ranks.run(2, exported, model, tmp_path / "saved", "tp2")
    saved = oracle(tmp_path / "saved").state_dict()
    for name, values in expected["rows"][0][0].items():
        assert torch.equal(saved[name], values)


@pytest.mark.parametrize(
    ("architecture", "rate", "lora", "message"),
    [
        ("qwen3_moe", 0.1, False, "the routers of the model have no bias"),
        ("qwen3", 0.1, False, "the routers of the model have no bias"),
        ("deepseek_v3", 0.1, True, "with lora all weights are frozen"),
        ("deepseek_v3", -0.1, False, "is below 0"),
    ],
)
def test_check_balancing_refuses_what_nothing_would_do(configs, architecture, rate, lora, message):
    with pytest.raises(UserError, match=rf"megatron\.transformer\.moe_router_bias_update_rate: .*{message}"):
        check_balancing(configs[architecture], MegatronConfig(transformer={"moe_router_bias_update_rate": rate}), lora)
