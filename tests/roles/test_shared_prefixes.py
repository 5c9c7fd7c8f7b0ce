"""Updates and log-probs of rows that share prefixes, against the same rows computed whole and `transformers`."""

import pytest
import torch
import torch.distributed as dist

from tests.megatron.layout_models import MODELS, make_model
from tests.megatron.shared_rows import sharing_rows, tokens_computed_once
from tests.megatron.training import assembled, gradients_here, token_loss
from tests.roles.updates import TEMPERATURE, role_on
from tests.tiny_models import oracle, oracle_outputs
from verl_mg.config import LoraConfig, MegatronConfig
from verl_mg.models.hf_config import read_config
from verl_mg.roles.models import Actor, Critic

ROOMY, TIGHT = 4096, 24
LAYOUTS = [
    ("dense", "tp1", 1, ROOMY, {}),
    ("latent", "tp2-cp2-ep2-etp1", 4, TIGHT, {}),
    ("capped", "pp2", 2, ROOMY, {}),
]
NIGHTLY_LAYOUTS = [
    ("dense", "tp2", 2, ROOMY, {}),
    ("dense", "tp2", 4, TIGHT, {}),
    ("dense", "cp2", 2, ROOMY, {}),
    ("dense", "pp2", 4, TIGHT, {}),
    ("dense", "pp2-vpp3", 2, TIGHT, {}),
    ("dense", "tp2-cp2", 4, ROOMY, {"recompute": True}),
    ("dense", "tp2", 2, TIGHT, {"lora": LoraConfig(rank=4)}),
    ("mixture", "tp2-ep2", 2, ROOMY, {}),
    ("mixture", "pp2-ep2", 4, TIGHT, {}),
    ("latent", "tp2-pp2", 4, ROOMY, {"recompute": ["core_attn", "mla_up_proj", "layernorm"]}),
    ("latent", "ep2", 2, TIGHT, {}),
    ("capped", "cp2", 2, ROOMY, {}),
    ("capped", "tp2-pp2", 4, TIGHT, {"recompute": ["core_attn"]}),
]
CASES = [*LAYOUTS, *(pytest.param(*case, marks=pytest.mark.nightly) for case in NIGHTLY_LAYOUTS)]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {name: make_model(folder / name, name) for name in MODELS}


def passes(model, layout, budget, batch, shares, kind=Actor, **options):
    """Own row numbers and outputs of this rank's rows, then metrics, gradients, and tokens of an update."""
    batch = batch if shares else batch.select_columns(set(batch.names()) - {"prefix_of", "prefix_length"})
    own = list(range(dist.get_rank(), len(batch), dist.get_world_size()))
    role, mine = role_on(kind, model, layout, budget, **options), batch.select(own)
    outputs = role.forward(mine).split(mine.lengths.tolist())
    trainer, gradients, tokens = role.trainer, [], []
    step = trainer.optimizer.step

    def seen():
        gradients.extend(gradients_here(role.runner))
        return step()

    trainer.optimizer.step = seen
    role.runner.chunks[0].register_forward_pre_hook(lambda _, given: tokens.append(int(given[0].packed.lengths.sum())))
    return own, outputs, role.update(mine, token_loss, "token-mean"), gradients, sum(tokens)


def assert_same(shared, whole, tolerance=1e-5):
    """The rows' outputs, the metrics and every gradient; of the first rank where all have them."""
    for (own, outputs, *_), (_, expected, *_) in zip(shared, whole, strict=True):
        for row, found, wanted in zip(own, outputs, expected, strict=True):
            assert torch.allclose(found, wanted, atol=tolerance, rtol=tolerance), row
    metrics, expected = shared[0][2], whole[0][2]
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=tolerance, abs=1e-9), name
    gradients, wanted = (assembled([part for result in results for part in result[3]]) for results in (shared, whole))
    assert gradients.keys() == wanted.keys() and wanted
    for name, gradient in wanted.items():
        error = (gradients[name] - gradient).abs().max()
        assert error <= tolerance * gradient.abs().max(), f"{name}: {error / gradient.abs().max():.1e}"


@pytest.mark.parametrize(("name", "layout", "count", "budget", "options"), CASES)
def test_update_and_logprobs_of_shared_prefixes_equal_those_of_whole_rows(
    ranks, models, name, layout, count, budget, options
):
    model, batch = models[name], sharing_rows(read_config(models[name]).vocab)
    shared, whole = (ranks.run(count, passes, model, layout, budget, batch, on, **options) for on in (True, False))
    assert_same(shared, whole)
    assert sum(result[4] for result in shared) < sum(result[4] for result in whole)
    if layout == "tp1":
        assert (shared[0][4], whole[0][4]) == (tokens_computed_once(), batch.total_tokens)
    with torch.no_grad():
        logprobs, _ = oracle_outputs(oracle(model), batch, TEMPERATURE)
    expected = torch.where(batch["loss_mask"] & (batch.positions > 0), logprobs, 0).split(batch.lengths.tolist())
    for own, outputs, *_ in shared:
        for row, output in zip(own, outputs, strict=True):
            assert torch.allclose(output, expected[row], atol=1e-4)


@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["tp1", "pp2"])
def test_update_and_values_of_shared_prefixes_equal_those_of_whole_rows(ranks, models, layout):
    model, batch = models["dense"], sharing_rows(read_config(models["dense"]).vocab)
    shared, whole = (ranks.run(2, passes, model, layout, ROOMY, batch, on, Critic) for on in (True, False))
    assert_same(shared, whole)
    assert sum(result[4] for result in shared) < sum(result[4] for result in whole)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["prescribed experts", "exchanged keys"])
def test_rows_are_computed_whole_where_prefixes_cannot_be_shared(ranks, models, kind):
    name, layout = ("mixture", "tp2") if kind == "prescribed experts" else ("dense", "cp2")
    batch, options = sharing_rows(read_config(models[name]).vocab), {}
    if kind == "prescribed experts":
        batch["routed_experts"] = torch.full((batch.total_tokens, 5, 2), -1, dtype=torch.int16)
    else:
        options["megatron"] = MegatronConfig(transformer={"cp_comm_type": "all_gather"})
    shared, whole = (ranks.run(2, passes, models[name], layout, ROOMY, batch, on, **options) for on in (True, False))
    assert_same(shared, whole)
    assert [result[4] for result in shared] == [result[4] for result in whole]
