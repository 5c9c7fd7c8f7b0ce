"""Draft models of SGLang: the layer of multi-token prediction of an exported directory, by its loader and by ours.

On a CPU SGLang has EAGLE for Intel's AMX alone, so no engine drafts tokens here; its classes and loaders are real.
"""

import pytest

from tests.helpers import warm_start
from tests.helpers.internals import printed
from tests.helpers.qwen3_5_directories import published
from tests.helpers.tiny_models import tiny_model_with_multi_token_layer
from tests.helpers.traces import change_config, needs_sglang
from verl_mg.engines.sglang.arguments import has_multi_token_draft
from verl_mg.errors import UserError
from verl_mg.layout import EngineLayout
from verl_mg.models.hf_config import read_config
from verl_mg.models.hf_tensors import with_multi_token_layer
from verl_mg.sharding.weight_table import weight_table

FIELDS = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}


VISION_LANGUAGE = ("qwen3_5", "qwen3_5_moe")
NIGHTLY = [pytest.param(name, marks=pytest.mark.nightly) for name in ("glm4_moe", "qwen3_next", *VISION_LANGUAGE)]


@needs_sglang
@pytest.mark.parametrize("architecture", ["deepseek_v3", *NIGHTLY])
def test_draft_class_is_filled_by_its_loader_and_equally_by_ours(tmp_path, architecture):
    if architecture in VISION_LANGUAGE:
        model = published(tmp_path / "model", architecture)
    else:
        model = tiny_model_with_multi_token_layer(tmp_path / "model", architecture, ffn=128)
    if architecture in ("deepseek_v3", "glm4_moe"):
        change_config(model, model, **FIELDS)
    found = printed(warm_start.sglang().python, "tests.engines.sglang.draft_probe", str(model), str(tmp_path))
    assert found["class"].endswith(("ForCausalLMNextN", "ForCausalLMMTP"))
    # These are the policy's own, whose memory SGLang shares, although its loader of Qwen3.5 reads the embedding.
    own = {"lm_head.weight", "model.embed_tokens.weight"}
    assert {*found["unfilled"], *found["different"]} == own and "lm_head.weight" in found["unfilled"]
    assert found["all"] > 12


def test_table_with_draft_model_adds_its_parameters(tmp_path):
    model = tiny_model_with_multi_token_layer(tmp_path / "model", "deepseek_v3")
    table = weight_table(with_multi_token_layer(read_config(model), model))
    plain, both = (t.engine_shards(EngineLayout(tp=2), 1) for t in (table, table.with_draft_model()))
    added = both.keys() - plain.keys()
    assert added and all(name.startswith("draft.model.") for name in added) and not plain.keys() - both.keys()
    read = {piece.tensor for name in added for piece in both[name].pieces}
    assert {name for name in read if not name.startswith("model.layers.2.")} == set()
    with pytest.raises(UserError, match="speculative decoding with pipeline stages is not supported"):
        table.with_draft_model().engine_shards(EngineLayout(pp=2), 0)
    with pytest.raises(UserError, match="has no layer of multi-token prediction"):
        weight_table(read_config(model)).with_draft_model()


def test_draft_is_the_layer_unless_another_model_is_given():
    assert has_multi_token_draft({"speculative_algorithm": "NEXTN"})
    assert has_multi_token_draft({"speculative_algorithm": "EAGLE"})
    assert not has_multi_token_draft({"speculative_algorithm": "EAGLE", "speculative_draft_model_path": "draft"})
    assert not has_multi_token_draft({"speculative_algorithm": "NGRAM"}) and not has_multi_token_draft({})
