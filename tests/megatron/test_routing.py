"""Routing replay against a mixture of experts in plain torch with given experts."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.helpers.given_experts import net_with_choices, with_experts
from tests.helpers.tiny_models import LATENT, daily_of, nightly, oracle, rows_for, tiny_model
from tests.megatron.training import assert_equal, one_rank, train, train_in_plain_torch
from verl_mg.config import MegatronConfig
from verl_mg.errors import UserError
from verl_mg.megatron.routing import check_routed_experts
from verl_mg.models.hf_config import read_config

LAYERS, EXPERTS, TOP_K, DENSE = 4, 4, 2, 1
LAYOUTS = [
    ("tp1", 1),
    ("tp2-cp2-ep2", 4),
    ("tp2-pp2", 4),
    ("pp2-vpp2", 2),
    *nightly(("tp2", 2), ("cp2", 2), ("pp2", 2), ("ep2", 2)),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A Qwen3-MoE of which layer 1 has no experts."""
    folder = tiny_model(tmp_path_factory.mktemp("models") / "mixture", "qwen3_moe")
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"mlp_only_layers": [DENSE]}))
    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    return folder


def rows(model, choices=None):
    batch = rows_for(model)
    if choices is not None:
        batch["routed_experts"] = choices
    return batch


def choices(model):
    """Random ones; some tokens' are not known; the last layer leaves two experts idle; nothing of the dense layer."""
    generator = torch.Generator().manual_seed(1)
    tokens = rows(model).total_tokens
    given = torch.rand(tokens, LAYERS, EXPERTS, generator=generator).topk(TOP_K).indices
    given[torch.rand(tokens, generator=generator) < 0.3] = -1
    given[::5, 2, 1] = -1
    given[:, 3] = torch.tensor([1, 0])
    given[:, DENSE] = 99
    return given.to(torch.int16)


@pytest.fixture(scope="module")
def expected(model, tmp_path_factory):
    given = choices(model)
    return train_in_plain_torch(with_experts(model, given), rows(model), tmp_path_factory.mktemp("expected"))


@pytest.mark.parametrize(("layout", "count"), LAYOUTS)
def test_train_with_routed_experts_equals_plain_torch(ranks, model, expected, layout, count):
    recompute = {"tp2-pp2": ["moe"], "pp2": True, "ep2": True}.get(layout, False)
    results = ranks.run(count, train, model, layout, rows(model, choices(model)), recompute)
    assert_equal(results, expected, 2e-5)
    assert expected.idle() == {
        f"model.layers.3.mlp.experts.{expert}.{name}_proj.weight"
        for expert in (2, 3)
        for name in ("gate", "up", "down")
    }


OVERLAP = {"ddp": {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 1000}}
"""Also of experts without tokens."""


@pytest.mark.parametrize(
    ("layout", "count", "fields"),
    [
        ("tp2-cp2-ep2", 4, {"transformer": {"cp_comm_type": "all_gather"}}),
        *nightly(*((layout, 2, OVERLAP) for layout in ("tp1", "ep2", "pp2-vpp2"))),
    ],
)
def test_train_with_routed_experts_and_options_equals_plain_torch(ranks, model, expected, layout, count, fields):
    batch = rows(model, choices(model))
    results = ranks.run(count, train, model, layout, batch, megatron=MegatronConfig(**fields))
    assert_equal(results, expected, 2e-5)


def test_train_without_routed_experts_differs_from_replay(ranks, model, expected):
    free = one_rank(ranks.run(1, train, model, "tp1", rows(model))[0])
    assert apart(free, expected) > 0.1
    assert not free.idle()


def apart(one, other):
    """How far log-probs and entropies differ at most."""
    return max((a[:2] - b[:2]).abs().max() for a, b in zip(one.outputs, other.outputs, strict=True))


@pytest.mark.parametrize(("layout", "count"), [("tp1", 1), *nightly(("tp2", 2))])
def test_train_replaying_the_routers_choice_changes_nothing(ranks, model, layout, count):
    batch = rows(model)
    net = with_experts(model, torch.full((batch.total_tokens, LAYERS, TOP_K), -1))
    with torch.no_grad():
        for row in range(len(batch)):
            net(batch.row("tokens", row)[None])
    taken = torch.zeros(batch.total_tokens, LAYERS, TOP_K, dtype=torch.int16)
    for number, layer in enumerate(net.model.layers):
        if number != DENSE:
            taken[:, number] = torch.cat(layer.mlp.taken).short()
    free = ranks.run(count, train, model, layout, batch)
    replayed = ranks.run(count, train, model, layout, rows(model, taken))
    for one, other in zip(free, replayed, strict=True):
        # Weights after the second step differ by what the first step changes in the routers' own choice.
        assert one.norms[0] == pytest.approx(other.norms[0], rel=1e-6)
        for row, output in one.outputs.items():
            assert torch.equal(output, other.outputs[row])
        for (name, box, a), (_, _, b) in zip(one.gradients, other.gradients, strict=True):
            assert torch.equal(a, b), (name, box)


def test_plain_torch_mixture_equals_transformers(model):
    tokens = rows(model).row("tokens", 0)[None]
    with torch.no_grad():
        found = with_experts(model, torch.full((tokens.shape[1], LAYERS, TOP_K), -1))(tokens).logits
        assert torch.allclose(found, oracle(model)(tokens).logits, atol=1e-5)


@pytest.mark.parametrize(("layout", "count"), [*nightly(("tp1", 1)), ("tp2-pp2-ep2-etp1", 4), ("cp2-ep2", 2)])
@pytest.mark.parametrize("family", daily_of([*LATENT, "gpt_oss"], "deepseek_v3"))
def test_train_family_with_routed_experts_equals_plain_torch(ranks, families, tmp_path, family, layout, count):
    model = families[family]
    batch, generator, of = rows(model), torch.Generator().manual_seed(1), read_config(model).experts.count
    given = torch.rand(batch.total_tokens, 2, of, generator=generator).topk(TOP_K).indices
    given[torch.rand(len(given), generator=generator) < 0.3] = -1
    expected = train_in_plain_torch(net_with_choices(model, given), batch, tmp_path / "expected")
    free = one_rank(ranks.run(1, train, model, "tp1", batch)[0])
    batch["routed_experts"] = given.to(torch.int16)
    assert_equal(ranks.run(count, train, model, layout, batch), expected, 2e-5)
    assert apart(free, expected) > 0.1
    assert not expected.idle()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda given: given[:, :3], r"has \(3, 2\) entries per token, and the model needs \(4, 2\)"),
        (
            lambda given: given.index_fill(1, torch.tensor([0]), 4),
            "contains expert 4, and the model has 4, counted from 0",
        ),
    ],
)
def test_check_routed_experts_of_another_model_raises(model, change, message):
    with pytest.raises(UserError, match=message):
        check_routed_experts(rows(model, change(choices(model))), read_config(model))


def test_check_routed_experts_dense_model_ignores_the_column(model, configs):
    check_routed_experts(rows(model, choices(model)), configs["qwen3"])
