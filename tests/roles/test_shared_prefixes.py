"""Updates and log-probs of rows that share prefixes, against the same rows computed whole and `transformers`."""

import pytest
import torch

from tests.helpers.tiny_models import oracle, oracle_outputs
from tests.megatron.layout_models import ModelFolders
from tests.megatron.shared_rows import SAMPLED, positions_computed_once, sampled_rows, sharing_rows
from tests.roles.updates import TEMPERATURE, assert_same, passes
from verl_mg.config import LoraConfig, MegatronConfig
from verl_mg.layout import Layout, Placement
from verl_mg.megatron.model_runner import MegatronRunner
from verl_mg.megatron.process_groups import ParallelGroups
from verl_mg.models.flops import row_flops
from verl_mg.models.hf_config import read_config
from verl_mg.roles.models import Actor, Critic
from verl_mg.roles.role import can_share_prefixes
from verl_mg.sharding.weight_table import weight_table
from verl_mg.training.model_spec import ModelSpec

ROOMY, TIGHT = 4096, 24
LAYOUTS = [
    ("dense", "tp1", 1, ROOMY, {}),
    ("dense", "pp2", 2, TIGHT, {}),
    ("latent", "cp2-ep2", 2, TIGHT, {}),
    ("capped", "tp2", 2, ROOMY, {}),
]
NIGHTLY_LAYOUTS = [
    ("dense", "tp2", 2, ROOMY, {}),
    ("dense", "tp2", 4, TIGHT, {}),
    ("dense", "cp2", 2, ROOMY, {}),
    ("dense", "pp2", 4, TIGHT, {}),
    ("dense", "pp2-vpp3", 2, TIGHT, {}),
    ("dense", "tp2-cp2", 4, ROOMY, {"recompute": True}),
    ("dense", "tp2", 2, TIGHT, {"lora": LoraConfig(rank=4)}),
    ("mixture", "tp2-ep2", 4, ROOMY, {}),
    ("mixture", "pp2-ep2", 4, TIGHT, {}),
    ("latent", "tp2-cp2-ep2-etp1", 4, TIGHT, {}),
    ("latent", "tp2-pp2", 4, ROOMY, {"recompute": ["core_attn", "mla_up_proj", "layernorm"]}),
    ("latent", "ep2", 2, TIGHT, {}),
    ("capped", "cp2", 2, ROOMY, {}),
    ("capped", "tp2-pp2", 4, TIGHT, {"recompute": ["core_attn"]}),
    ("linear", "tp1", 1, ROOMY, {}),
    ("linear dense", "cp2", 2, TIGHT, {"recompute": ["core_attn"]}),
]
CASES = [*LAYOUTS, *(pytest.param(*case, marks=pytest.mark.nightly) for case in NIGHTLY_LAYOUTS)]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return ModelFolders(tmp_path_factory.mktemp("models"))


def flops_of_tokens(model):
    """FLOPs of a forward pass over tokens that are computed once, each of which sees those before it and itself."""
    table = weight_table(read_config(model))
    flops = row_flops(table.config, table.tensor_index)
    return sum(flops.per_token + flops.per_pair * (2 * position + 1) for position in positions_computed_once())


def check_sharing(ranks, count, arguments, kind=Actor, options=(), rows=sharing_rows):
    """What `passes` returns of rows that share prefixes and of whole rows: the same, but from fewer tokens."""
    batch = rows(read_config(arguments[0]).vocab)
    shared, whole = (ranks.run(count, passes, *arguments, batch, on, kind, options) for on in (True, False))
    assert_same(shared, whole)
    assert sum(result[4] for result in shared) < sum(result[4] for result in whole)
    return shared, whole


@pytest.mark.parametrize(("name", "layout", "count", "budget", "options"), CASES)
def test_update_and_logprobs_of_shared_prefixes_equal_those_of_whole_rows(
    ranks, models, name, layout, count, budget, options
):
    model, batch = models[name], sharing_rows(read_config(models[name]).vocab)
    shared, whole = check_sharing(ranks, count, (model, layout, budget), options=options)
    if layout == "tp1":
        assert (shared[0][4], whole[0][4]) == (len(positions_computed_once()), batch.total_tokens)
        assert shared[0][5] == pytest.approx(3 * flops_of_tokens(model))
    assert shared[0][5] < whole[0][5]
    with torch.no_grad():
        logprobs, _ = oracle_outputs(oracle(model), batch, TEMPERATURE)
    expected = torch.where(batch["loss_mask"] & (batch.positions > 0), logprobs, 0).split(batch.lengths.tolist())
    for own, outputs, *_ in shared:
        for row, output in zip(own, outputs, strict=True):
            assert torch.allclose(output, expected[row], atol=1e-4)


@pytest.mark.parametrize(("layout", "count"), [("tp1", 1), pytest.param("tp1", 2, marks=pytest.mark.nightly)])
def test_update_and_logprobs_of_samples_compute_the_prompt_of_a_group_once(ranks, models, layout, count):
    shared, whole = check_sharing(ranks, count, (models["dense"], layout, ROOMY), rows=sampled_rows)
    tokens = [sum(result[4] for result in results) for results in (shared, whole)]
    assert tokens[1] == sum(len(responses) * prompt + sum(responses) for prompt, responses in SAMPLED)
    if count == 1:  # the sample without a response computes its prompt too
        assert tokens[0] == sum(prompt + sum(responses) for prompt, responses in SAMPLED) + SAMPLED[0][0]


@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["tp1", "pp2"])
def test_update_and_values_of_shared_prefixes_equal_those_of_whole_rows(ranks, models, layout):
    check_sharing(ranks, 2, (models["dense"], layout, ROOMY), Critic)


@pytest.mark.parametrize(
    ("layout", "dynamic", "fields", "model", "columns", "expected"),
    [
        ("cp2", False, {}, "dense", (), True),
        ("tp1", False, {"cp_comm_type": "all_gather"}, "dense", (), True),
        ("cp2", False, {"cp_comm_type": "all_gather"}, "dense", (), False),
        ("cp2", True, {}, "dense", (), False),
        ("tp1", False, {}, "dense", ("routed_experts",), True),
        ("tp1", False, {}, "mixture", ("routed_experts",), False),
    ],
)
def test_can_share_prefixes_depends_on_ranks_and_prescribed_experts(
    ranks, models, layout, dynamic, fields, model, columns, expected
):
    for sharing in ranks.run(2, sharing_on, models[model], layout, dynamic, fields, columns):
        assert sharing == expected


def sharing_on(model, layout, dynamic, fields, columns):
    """Whether a model shares the prefixes of rows with these columns."""
    groups = ParallelGroups(Placement.on(Layout.parse(layout), 2), dynamic_cp=dynamic)
    runner = MegatronRunner(ModelSpec(model, torch.float32, megatron=MegatronConfig(transformer=fields)), groups)
    return can_share_prefixes(runner, {"tokens", *columns})


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["prescribed experts", "exchanged keys"])
def test_rows_are_computed_whole_where_prefixes_cannot_be_shared(ranks, models, kind):
    name, layout = ("mixture", "tp2") if kind == "prescribed experts" else ("dense", "cp2")
    batch, options = sharing_rows(read_config(models[name]).vocab), {}
    if kind == "prescribed experts":
        batch["routed_experts"] = torch.full((batch.total_tokens, 5, 2), -1, dtype=torch.int16)
    else:
        options["megatron"] = MegatronConfig(transformer={"cp_comm_type": "all_gather"})
    arguments = (models[name], layout, ROOMY, batch)
    shared, whole = (ranks.run(2, passes, *arguments, on, Actor, options) for on in (True, False))
    assert_same(shared, whole)
    assert [result[4] for result in shared] == [result[4] for result in whole]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "layout", "count"), [("dense", "tp2-cp2", 4), ("latent", "tp2-ep2-etp1", 2), ("capped", "pp2", 2)]
)
def test_update_with_transformer_engine_of_shared_prefixes_equals_that_of_whole_rows(
    transformer_engine, models, name, layout, count
):
    unfused = {"moe_permute_fusion": False} if read_config(models[name]).experts else {}
    options = {"kernels": "transformer_engine", "megatron": MegatronConfig(transformer=unfused)}
    check_sharing(transformer_engine, count, (models[name], layout, ROOMY), options=options)
