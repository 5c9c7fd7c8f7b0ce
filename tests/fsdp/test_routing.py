"""Routing replay in modules of `transformers`, against plain torch with given experts, and the check of each family."""

from functools import cache

import pytest
import torch
from transformers import CONFIG_MAPPING

from tests.fsdp.training import train
from tests.helpers.given_experts import net_with_choices, with_experts
from tests.helpers.tiny_models import nightly, rows_for, tiny_model
from tests.megatron.training import assert_equal, train_in_plain_torch
from tools.docs.family_checks import ALWAYS_NEEDED
from verl_mg.errors import UserError
from verl_mg.fsdp import routing
from verl_mg.fsdp.family_reference import FamilyReference
from verl_mg.fsdp.mesh import MeshGroups
from verl_mg.fsdp.model_runner import FsdpRunner
from verl_mg.fsdp.replay_check import check_replay
from verl_mg.layout import Layout, Placement
from verl_mg.models.hf_config import read_config
from verl_mg.training.model_spec import ModelSpec

LAYERS, TOP_K = 3, 2


def random_choices(model, tokens):
    """Of each layer, from as few groups as the family chooses from; a third of the tokens' are not known."""
    experts, generator = read_config(model).experts, torch.Generator().manual_seed(1)
    of_groups = torch.rand(tokens, LAYERS, experts.groups, generator=generator).topk(experts.topk_groups).indices
    numbers = torch.arange(experts.count) // (experts.count // experts.groups)
    admitted = (of_groups[..., None] == numbers).any(-2)
    given = torch.rand(tokens, LAYERS, experts.count, generator=generator).where(admitted, -1.0).topk(TOP_K).indices
    given[torch.rand(tokens, generator=generator) < 0.3] = -1
    given[::7, 1, 1] = -1
    return given


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    @cache
    def of(family):
        folder = tmp_path_factory.mktemp(family)
        model = tiny_model(folder / "model", family, layers=LAYERS)
        rows = rows_for(model, 9)
        given = random_choices(model, rows.total_tokens)
        net = with_experts(model, given) if family == "qwen3_moe" else net_with_choices(model, given)
        expected = train_in_plain_torch(net, rows, folder)
        rows["routed_experts"] = given.to(torch.int16)
        return model, rows, expected

    return of


@pytest.mark.parametrize(
    ("family", "layout", "recompute"),
    [
        ("deepseek_v2", "cp2", True),
        *nightly(
            *(("qwen3_moe", layout, layout == "dp2") for layout in ("dp2", "tp2", "tp2-cp2", "cp2-dp2", "dp4")),
            *((family, "tp2", False) for family in ("deepseek_v2", "deepseek_v3", "glm4_moe")),
            ("gpt_oss", "cp2", True),
            ("qwen3_next", "dp2", True),  # each row by itself
        ),
    ],
)
def test_train_with_routed_experts_equals_plain_torch(ranks, cases, family, layout, recompute):
    model, rows, expected = cases(family)
    results = ranks.run(Layout.parse(layout).ranks, train, model, layout, 1, rows, recompute)
    assert_equal(results, expected, 2e-5)


def test_train_without_the_check_of_replay_refuses_routed_experts(ranks, cases):
    model, rows, _ = cases("deepseek_v2")
    assert "Set rollout.replay_routing=true" in ranks.run(1, refusal, model, rows)[0]


def refusal(model, rows):
    """The error of a pass over rows with experts that were not announced."""
    runner = FsdpRunner(ModelSpec(model, torch.float32), MeshGroups(Placement.on(Layout.parse("tp1"), 1)))
    with pytest.raises(UserError) as error:
        runner.infer([rows], 1.0)
    return str(error.value)


def reference_of(folder, family):
    CONFIG_MAPPING[family](**ALWAYS_NEEDED.get(family, {})).save_pretrained(folder)
    return FamilyReference(folder, "language", 1024)


REPLAYED = """
afmoe aria_text axk1 axk2 cohere2_moe deepseek_v2 deepseek_v3 deepseek_v32 dots1 ernie4_5_moe exaone_moe flex_olmo
glm4_moe glm4_moe_lite glm5_next glm_moe_dsa gpt_oss granitemoe granitemoehybrid granitemoeshared hunyuan_v1_moe hy_v3
hy_v4 inkling_text jamba kimi_linear laguna lfm2_moe mellum mimo_v2_flash minimax minimax_m2 minimax_m3_vl_text mixtral
nemotron_h olmoe qwen2_moe qwen3_5_moe_text qwen3_moe qwen3_next qwen3_vl_moe qwen4_exp_text solar_open
"""


@pytest.mark.nightly
@pytest.mark.parametrize("family", REPLAYED.split())
def test_family_replays_the_choice_of_its_routers_and_another(tmp_path, family):
    check_replay(reference_of(tmp_path, family))


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("phimoe", "layer 0 computes with other experts than are prescribed"),
        *nightly(
            ("deepseek_v4", "layer 0 computes with other experts than are prescribed"),  # by the token's id
            ("zaya", "layer 0 computes with other experts than are prescribed"),
            ("dbrx", "does not run its experts by registered functions"),
            ("llama4_text", "does not run its experts by registered functions"),
        ),
    ],
)
def test_family_whose_choice_is_not_replaced_is_refused(tmp_path, family, words):
    with pytest.raises(UserError, match=f"rollout.replay_routing: .*{words}"):
        check_replay(reference_of(tmp_path, family))


class OwnWeights(routing._PrescribedChoice):
    """Gives prescribed experts the weights of the router's own choice."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs)
        return type(result)((func(*args, **kwargs).values, result.indices)) if func is torch.topk else result


class OwnGroups(routing._PrescribedChoice):
    """Leaves the choice of groups to the router."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        is_of_groups = func is torch.topk and args[0].shape[-1] < self._count
        return func(*args, **kwargs) if is_of_groups else super().__torch_function__(func, types, args, kwargs)


@pytest.mark.parametrize(("family", "fault"), [("mixtral", OwnWeights), ("deepseek_v2", OwnGroups)])
def test_fault_in_the_replay_of_a_family_is_refused(tmp_path, monkeypatch, family, fault):
    monkeypatch.setattr(routing, "_PrescribedChoice", fault)
    with pytest.raises(UserError, match="differs by|other experts"):
        check_replay(reference_of(tmp_path, family))
