"""Auxiliary losses of routers against their formulas in plain torch, on the logits of the routers of `transformers`."""

import copy
from functools import cache
from itertools import product

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.roles import megatron_runner
from tests.helpers.tiny_models import nightly, oracle, rows_for, tiny_model
from tests.megatron.training import (
    assembled,
    assert_parts_near,
    recorded_gradients,
    token_loss,
    uneven_micro_batches,
    update,
    zero_loss,
)
from verl_mg.config import MegatronConfig, OptimizerConfig
from verl_mg.errors import UserError
from verl_mg.megatron.balance_losses import check_balance_losses
from verl_mg.megatron.trainer import MegatronTrainer

TOP_K, BALANCE, Z = 2, 0.3, 0.02
BOTH = {"moe_aux_loss_coeff": BALANCE, "moe_z_loss_coeff": Z}
OPTIMIZER = OptimizerConfig(lr=1e-3, clip_grad=0.0)


@pytest.fixture(scope="module", params=["deepseek_v3", "qwen3_moe"])
def model(request, tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("models") / request.param, request.param)


@pytest.fixture(scope="module")
def expected(model, tmp_path_factory):
    """(balance loss, z loss, gradients of their sum with factors by the names of the checkpoint)."""

    @cache
    def of(balance, z):
        net, batch, logits = copy.deepcopy(oracle(model)), rows_for(model), []
        for layer in net.model.layers:
            if hasattr(layer.mlp, "gate"):
                layer.mlp.gate.register_forward_hook(lambda _, __, output: logits.append(output[0]))
        balances, squares = [], []
        for row in range(len(batch)):
            logits.clear()
            net(batch.row("tokens", row)[None])
            balances.append([balance_of_row(one.float(), net.config.model_type) for one in logits])
            squares.append([one.float().exp().sum(-1).log().square() for one in logits])
        by_layer = torch.stack([torch.stack(one) for one in balances]).mean(0)
        z_by_layer = torch.stack([torch.cat([row[n] for row in squares]).mean() for n in range(len(by_layer))])
        (balance * by_layer.sum() + z * z_by_layer.sum()).backward()
        with torch.no_grad():
            for weight in net.parameters():
                weight.copy_(torch.zeros_like(weight) if weight.grad is None else weight.grad)
        folder = tmp_path_factory.mktemp("gradients")
        net.save_pretrained(folder)
        return by_layer.mean().item(), z_by_layer.mean().item(), load_file(folder / "model.safetensors")

    return of


def balance_of_row(logits, kind):
    """DeepSeek-V3, equations 17 to 20, token by token."""
    tokens, experts = logits.shape
    affinities = logits.sigmoid() if kind == "deepseek_v3" else logits.softmax(-1)
    total = 0.0
    for expert in range(experts):
        chosen = sum(1 for t in range(tokens) if expert in affinities[t].topk(TOP_K).indices)
        frequency = experts / (TOP_K * tokens) * chosen
        mean = sum(affinities[t, expert] / affinities[t].sum() for t in range(tokens)) / tokens
        total = total + frequency * mean
    return total


def train(model, layout, fields, recompute, loss):
    """Metrics and gradients of an update of uneven micro-batches."""
    runner = megatron_runner(model, layout, recompute=recompute, megatron=MegatronConfig(transformer=fields))
    trainer, batch = MegatronTrainer(runner, OPTIMIZER), rows_for(model)
    gradients = recorded_gradients(trainer)
    return update(trainer, uneven_micro_batches(runner, batch), batch, loss), gradients[0]


ONE_OF_THEM = ({"moe_aux_loss_coeff": BALANCE}, {"moe_z_loss_coeff": Z})
LAYOUTS = [
    ("tp1", 1, False, BOTH),
    ("tp2-pp2-ep2-etp1", 4, False, BOTH),
    ("tp2-cp2-ep2", 4, ["moe"], BOTH),
    *nightly(*product(("tp1", "tp2", "cp2", "pp2", "ep2", "pp2-vpp2"), [2], (False, True, ["moe"]), ONE_OF_THEM)),
    *nightly(("cp2", 2, False, BOTH | {"cp_comm_type": "all_gather"})),
]


@pytest.mark.parametrize(("layout", "count", "recompute", "fields"), LAYOUTS)
def test_update_losses_and_gradients_equal_their_formulas(ranks, model, expected, layout, count, recompute, fields):
    balance, z, gradients = expected(fields.get("moe_aux_loss_coeff", 0.0), fields.get("moe_z_loss_coeff", 0.0))
    results = ranks.run(count, train, model, layout, fields, recompute, zero_loss)
    for metrics, parts in results:
        assert_parts_near(parts, gradients, 3e-5)
        if "moe_aux_loss_coeff" in fields:
            assert metrics["moe_aux_loss"] == pytest.approx(balance, rel=1e-5) and balance > 1
        if "moe_z_loss_coeff" in fields:
            assert metrics["moe_z_loss"] == pytest.approx(z, rel=1e-5)
        assert metrics["loss"] == 0
    routers = [values for name, values in gradients.items() if name.endswith("mlp.gate.weight")]
    assert routers and all(values.any() for values in routers)


def test_update_adds_the_losses_to_that_of_the_recipe(ranks, model, expected):
    ((without, parts),) = ranks.run(1, train, model, "tp1", {}, False, token_loss)
    ((both, sums),) = ranks.run(1, train, model, "tp1", BOTH, False, token_loss)
    assert both["loss"] == without["loss"] and "moe_aux_loss" not in without
    plain, (_, _, auxiliary) = assembled(parts), expected(BALANCE, Z)
    assert_parts_near(sums, {name: values + auxiliary[name] for name, values in plain.items()}, 3e-5)


@pytest.mark.parametrize(
    ("architecture", "fields", "message"),
    [
        ("qwen3", {"moe_aux_loss_coeff": 0.1}, "moe_aux_loss_coeff: the model has no experts"),
        ("qwen3", {"moe_z_loss_coeff": 0.1}, "moe_z_loss_coeff: the model has no experts"),
        ("qwen3_moe", {"moe_z_loss_coeff": -0.1}, r"moe_z_loss_coeff: -0\.1 is below 0"),
        ("qwen3_moe", {"moe_aux_loss_coeff": [0.1]}, "moe_aux_loss_coeff: there is one kind"),
        ("qwen3_moe", {"moe_router_load_balancing_type": "aux_loss"}, "type=aux_loss: .* Write seq_aux_loss"),
    ],
)
def test_check_balance_losses_refuses_what_is_not_computed(configs, architecture, fields, message):
    with pytest.raises(UserError, match=rf"megatron\.transformer\..*{message}"):
        check_balance_losses(configs[architecture], MegatronConfig(transformer=fields))
