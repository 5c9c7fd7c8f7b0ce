"""Multi-token prediction against plain torch over layers of `transformers`, as SGLang's model class computes it."""

import dataclasses
import json
from functools import cache, partial
from itertools import product

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.helpers.roles import build_role, megatron_runner
from tests.helpers.tiny_models import nightly, rows_for, rows_of_rank, tiny_model, tiny_model_with_multi_token_layer
from tests.megatron.training import (
    assembled,
    assert_parts_near,
    recorded_gradients,
    restored,
    token_loss,
    uneven_micro_batches,
    update,
    zero_loss,
)
from verl_mg.config import LoraConfig, MegatronConfig, OptimizerConfig
from verl_mg.errors import UserError
from verl_mg.megatron.multi_token import check_multi_token
from verl_mg.megatron.trainer import MegatronTrainer
from verl_mg.models.hf_config import read_config
from verl_mg.models.hf_tensors import with_multi_token_layer
from verl_mg.roles.models import Actor

LAYERS, FACTOR = 2, 0.3
LAYER = f"model.layers.{LAYERS}."
OWN = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "shared_head.norm": "norm"}
QWEN = {"pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "fc": "eh_proj", "norm": "norm"}
"""Tensors of the layer besides those of a transformer layer, and their names in `Reference`."""
OPTIMIZER = OptimizerConfig(lr=0.02, eps=0.1, clip_grad=0.0)
TRAINED = {"mtp_loss_scaling_factor": FACTOR}


def is_qwen(model):
    return read_config(model).linear is not None


def prefix_of(model):
    return "mtp." if is_qwen(model) else LAYER


def own_names(model):
    names = QWEN if is_qwen(model) else OWN
    return {f"{prefix_of(model)}{name}.weight": attribute for name, attribute in names.items()}


QWEN_MODELS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


@pytest.fixture(scope="module", params=["deepseek_v3", *nightly("glm4_moe", *QWEN_MODELS)])
def model(request, tmp_path_factory):
    return tiny_model_with_multi_token_layer(tmp_path_factory.mktemp("models"), request.param, LAYERS)


def rows(model):
    batch = rows_for(model)
    batch["loss_mask"] &= batch["noise"] < 0.4  # with gaps
    return batch


class Reference(torch.nn.Module):
    """The model of `transformers` with one layer more, through which only the prediction passes."""

    def __init__(self, folder):
        super().__init__()
        self.folder, with_layer = folder, folder.parent / "layers"
        config = AutoConfig.from_pretrained(with_layer)
        self.net = AutoModelForCausalLM.from_pretrained(
            with_layer, config=config, dtype=torch.float32, attn_implementation="eager"
        )
        config.num_hidden_layers = self.net.model.config.num_hidden_layers = LAYERS  # of a forward pass
        tensors = load_file(folder / "model.safetensors")
        for name, attribute in own_names(folder).items():
            setattr(self, attribute, torch.nn.Parameter(tensors[name].clone()))

    def forward(self, tokens, detach):
        """Log-probs of the tokens from the third on: (length - 2,)."""
        trunk = self.net.model
        hidden = trunk(tokens[None]).last_hidden_state[0]
        hidden = hidden.detach() if detach else hidden
        following = trunk.embed_tokens.weight.detach()[tokens[1:]]
        joined = torch.cat([self.scaled(following, self.enorm), self.scaled(hidden[:-1], self.hnorm)], dim=-1)
        states = (joined @ self.eh_proj.T)[None]
        length = states.shape[1]
        mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
        positions = trunk.rotary_emb(states, torch.arange(length)[None])
        output = trunk.layers[LAYERS](states, attention_mask=mask, position_embeddings=positions)
        output = output[0] if isinstance(output, tuple) else output
        logits = self.scaled(output[0], self.norm) @ self.net.lm_head.weight.detach().T
        return logits.log_softmax(-1)[:-1].gather(1, tokens[2:, None]).squeeze(1)

    def scaled(self, x, weight):
        weight = 1 + weight if is_qwen(self.folder) else weight
        return x * (x.pow(2).mean(-1, keepdim=True) + self.net.config.rms_norm_eps).rsqrt() * weight

    def loss(self, batch, detach):
        """Mean over the predicted tokens under the loss mask."""
        parts = []
        for row in range(len(batch)):
            logprobs, mask = self(batch.row("tokens", row), detach), batch.row("loss_mask", row)
            parts.append(-logprobs[mask[2:]])
        return torch.cat(parts).mean()

    def gradients(self, folder):
        """By the names of the checkpoint."""
        found = {name: getattr(self, attribute).grad for name, attribute in own_names(self.folder).items()}
        with torch.no_grad():
            for weight in self.net.parameters():
                weight.copy_(torch.zeros_like(weight) if weight.grad is None else weight.grad)
        self.net.config.num_hidden_layers = LAYERS + 1
        self.net.save_pretrained(folder)
        layer = "mtp.layers.0." if is_qwen(self.folder) else LAYER
        saved = load_file(folder / "model.safetensors")
        return found | {name.replace(LAYER, layer): values for name, values in saved.items()}


@pytest.fixture(scope="module")
def expected(model, tmp_path_factory):
    """(loss of the prediction, gradients of the factor's part alone), with and without gradients of the model."""

    @cache
    def of(detach):
        reference = Reference(model)
        loss = reference.loss(rows(model), detach)
        (FACTOR * loss).backward()
        return loss.item(), reference.gradients(tmp_path_factory.mktemp("gradients"))

    return of


def runner_on(model, layout, fields=TRAINED, recompute=False, **options):
    options |= {"recompute": recompute, "megatron": MegatronConfig(transformer=fields), "keeps_multi_token": True}
    return megatron_runner(model, layout, **options)


def train(model, layout, fields, recompute, loss=zero_loss, **options):
    """Metrics of two updates, and the gradients of the first."""
    runner, batch = runner_on(model, layout, fields, recompute, **options), rows(model)
    trainer = MegatronTrainer(runner, OPTIMIZER)
    gradients, micro_batches = recorded_gradients(trainer), uneven_micro_batches(runner, batch)
    return [update(trainer, micro_batches, batch, loss) for _ in range(2)], gradients[0]


LAYOUTS = [
    ("tp1", 1, False, False),
    ("tp2-pp2-ep2-etp1", 4, False, False),
    ("tp2-cp2-ep2", 4, True, True),
    *nightly(*product(("tp2", "cp2", "pp2", "ep2", "tp1"), [2], (False, True), (False, True, ["moe"]))),
]


@pytest.mark.parametrize(("layout", "count", "detach", "recompute"), LAYOUTS)
def test_update_loss_and_gradients_equal_plain_torch(ranks, model, expected, layout, count, detach, recompute):
    if read_config(model).experts is None and (recompute == ["moe"] or "ep" in layout):
        pytest.skip("it has no experts")
    assert_update_equals_plain_torch(ranks, model, expected, layout, count, detach, recompute)


@pytest.mark.parametrize("model", ["qwen3_next"], indirect=True)
def test_update_of_qwen_equals_plain_torch(ranks, model, expected):
    assert_update_equals_plain_torch(ranks, model, expected, "tp2-pp2-ep2-etp1", 4)


def test_update_with_exchanged_keys_equals_plain_torch(ranks, model, expected):
    if is_qwen(model):
        pytest.skip("linear attention has no exchanged keys")
    assert_update_equals_plain_torch(ranks, model, expected, "cp2", 2, fields={"cp_comm_type": "all_gather"})


@pytest.mark.nightly
def test_update_with_transformer_engine_equals_plain_torch(transformer_engine, model, expected):
    fields, kernels = {"moe_permute_fusion": False}, {"kernels": "transformer_engine"}
    assert_update_equals_plain_torch(transformer_engine, model, expected, "tp2-pp2", 4, fields=fields, **kernels)


def assert_update_equals_plain_torch(
    ranks, model, expected, layout, count, detach=False, recompute=False, fields=None, **options
):
    loss, gradients = expected(detach)
    fields = TRAINED | {"mtp_detach_heads": detach} | (fields or {})
    results = ranks.run(count, train, model, layout, fields, recompute, **options)
    found = assembled([part for _, parts in results for part in parts])
    for metrics, parts in results:
        assert metrics[0]["mtp_loss"] == pytest.approx(loss, rel=1e-5)
        assert metrics[1]["mtp_loss"] < loss
        assert_parts_near(parts, gradients, 2e-5)
    moved = {name for name, values in found.items() if values.any()}
    assert own_names(model).keys() < moved
    assert any(name.startswith("model.layers.0.") for name in moved) != detach
    assert not {"model.embed_tokens.weight", "lm_head.weight"} & moved or not detach
    assert not gradients["lm_head.weight"].any() and not found["lm_head.weight"].any()


def test_update_adds_the_prediction_to_the_loss_of_the_recipe(ranks, model):
    ((alone, parts),) = ranks.run(1, train, model, "tp1", {}, False, token_loss)
    ((_, predicted),) = ranks.run(1, train, model, "tp1", TRAINED, False)
    ((both, sums),) = ranks.run(1, train, model, "tp1", TRAINED, False, token_loss)
    assert both[0]["loss"] == pytest.approx(alone[0]["loss"], rel=1e-6) and "mtp_loss" not in alone[0]
    alone, predicted, sums = assembled(parts), assembled(predicted), assembled(sums)
    assert not any(name.startswith(prefix_of(model)) for name in alone)
    for name, values in sums.items():
        wanted = alone.get(name, torch.zeros(())) + predicted[name]
        assert torch.allclose(values, wanted, atol=1e-5 * float(wanted.abs().max())), name


def actor_on(model, layout, fields, **options):
    return build_role(Actor, model, layout, optimizer=OPTIMIZER, megatron=MegatronConfig(transformer=fields), **options)


def updated(model, layout, fields, folder, lora=None):
    """Saves an actor before and after an update."""
    actor = actor_on(model, layout, fields, lora=lora)
    actor.save(folder / "before", model)
    actor.update(rows_of_rank(rows(model)), token_loss, "token-mean")
    actor.save(folder / "after", model)


@pytest.mark.parametrize(
    ("layout", "fields", "lora"),
    [
        ("tp2-pp2-ep2-etp1", {}, None),
        ("tp2-pp2", TRAINED, None),
        *nightly(("tp2", {}, LoraConfig(rank=2))),
    ],
)
def test_save_keeps_the_layer_bitwise_and_after_updates(ranks, model, tmp_path, layout, fields, lora):
    if read_config(model).experts is None and "ep" in layout:
        pytest.skip("it has no experts")
    ranks.run(4, updated, model, layout, fields, tmp_path, lora)
    given, before, after = (
        load_file(folder / "model.safetensors") for folder in (model, tmp_path / "before", tmp_path / "after")
    )
    assert given.keys() == before.keys() == after.keys()
    assert all(torch.equal(given[name], before[name]) for name in given)
    copies = {
        f"{LAYER}embed_tokens.weight": "model.embed_tokens.weight",
        f"{LAYER}shared_head.head.weight": "lm_head.weight",
    }
    copies = {} if is_qwen(model) else copies
    for name, original in copies.items():
        assert torch.equal(after[name], after[original])
        assert lora or not torch.equal(after[name], given[name])
    behind = {name for name in given if name.startswith(prefix_of(model))} - copies.keys()
    moved = {name for name in behind if not torch.equal(given[name], after[name])}
    assert moved == ({n for n in behind if not n.endswith("e_score_correction_bias")} if fields else set())
    field = "mtp_num_hidden_layers" if is_qwen(model) else "num_nextn_predict_layers"
    assert json.loads((tmp_path / "after" / "config.json").read_text())[field] == 1


def resumed(model, layout, fields):
    """Parameters after two updates, and after one update, a checkpoint, and another one."""
    batch, build = rows_of_rank(rows(model)), partial(actor_on, model, layout, fields)
    whole, stopped = build(), build()
    for actor in (whole, whole, stopped):
        actor.update(batch, token_loss, "token-mean")
    other = restored(stopped, build)
    other.update(batch, token_loss, "token-mean")
    return [{name: x.detach().clone() for name, x in actor.runner.parameters().items()} for actor in (whole, other)]


@pytest.mark.parametrize("fields", [{}, TRAINED, TRAINED | {"moe_router_bias_update_rate": 0.01}])
def test_restored_role_continues_bitwise(ranks, model, fields):
    for whole, other in ranks.run(2, resumed, model, "pp2", fields):
        assert all(torch.equal(values, other[name]) for name, values in whole.items())


def test_layer_is_left_out_where_the_directory_does_not_have_it(model, tmp_path):
    plain = tiny_model(tmp_path / "plain", read_config(model).architecture, layers=2)
    assert with_multi_token_layer(read_config(plain), plain).multi_token is None
    config = with_multi_token_layer(read_config(model), model)
    assert config.multi_token is not None and config.multi_token.has_copies != is_qwen(model)
    assert dataclasses.replace(config, multi_token=None) == read_config(model)


@pytest.mark.parametrize(
    ("has_layer", "factor", "lora", "message"),
    [
        (False, 0.1, False, r"no layer of multi-token prediction \((model\.layers\.2\.eh_proj|mtp\.fc)\.weight\)"),
        (True, 0.1, True, "with lora all weights are frozen"),
        (True, -0.1, False, "is below 0"),
    ],
)
def test_check_multi_token_refuses_what_cannot_be_trained(model, has_layer, factor, lora, message):
    config = with_multi_token_layer(read_config(model), model) if has_layer else read_config(model)
    with pytest.raises(UserError, match=rf"megatron\.transformer\.mtp_loss_scaling_factor: .*{message}"):
        check_multi_token(config, MegatronConfig(transformer={"mtp_loss_scaling_factor": factor}), lora)
