"""The weight table of any model, against the project's own tables and against what `from_pretrained` loads."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from tests.helpers.random_models import assemble, numbered
from tests.helpers.tiny_models import published_mixture, tiny_model
from tests.helpers.traces import COMMON, FAMILIES, change_config, folder_of
from tests.oracles.transformers_trace import trace_transformers
from verl_mg.checkpoint.model_directory import ModelDirectory
from verl_mg.errors import UserError
from verl_mg.layout import EngineLayout
from verl_mg.models.flops import active_elements, row_flops
from verl_mg.models.hf_config import read_config
from verl_mg.sharding.boxes import Piece, Shard
from verl_mg.sharding.module_table import module_table
from verl_mg.sharding.weight_table import weight_table

VISION = {"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": 64}
CLIP = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
MROPE = COMMON | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
UNKNOWN = {
    "olmo2": {},
    "phi3": {},  # the checkpoint has fused tensors
    "phi": {},  # the output layer has a bias
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},  # the checkpoint has stacked experts
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_intermediate_size": 32, "moe_k": 2},
    "hrm_text": {},  # tensors of the checkpoint are cut
    "qwen2_5_vl": {"text_config": MROPE, "vision_config": VISION},
    "gemma3": {"text_config": COMMON, "vision_config": CLIP | {"image_size": 28, "patch_size": 14},
               "mm_tokens_per_image": 4},
    "kimi_k25": {"text_config": {"model_type": "deepseek_v3", **COMMON, **LATENT, "n_routed_experts": 4, "n_group": 1,
                                 "topk_group": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1},
                 "vision_config": CLIP | {"patch_size": 14}},
}  # fmt: skip


@pytest.fixture(scope="session")
def unknown(tmp_path_factory):
    """Folders with the config.json of models that the project has no table for."""
    folders = {}
    for kind, own in UNKNOWN.items():
        folders[kind] = tmp_path_factory.mktemp(kind)
        AutoConfig.for_model(kind, **(own if "text_config" in own else COMMON | own)).save_pretrained(folders[kind])
    return folders


@pytest.mark.parametrize("head", ["language", "value"])
@pytest.mark.parametrize("family", FAMILIES)
def test_module_table_of_known_family_equals_its_weight_table(family, head):
    derived, known = module_table(folder_of(family), head), weight_table(read_config(folder_of(family)), head)
    assert derived.parameter_shards() == known.shard_map_replicated((0,)).shards(0)
    assert derived.config == known.config
    assert list(derived.tensor_index.tensors.items()) == list(known.tensor_index.tensors.items())
    assert (derived.tied, derived.router_biases, derived.routers) == (known.tied, known.router_biases, known.routers)
    for experts in (False, True):
        assert derived.linear_tensors(experts) == known.linear_tensors(experts)


@pytest.mark.parametrize("kind", UNKNOWN)
def test_parameter_shards_contain_the_elements_that_from_pretrained_loads(unknown, kind):
    table = module_table(unknown[kind])
    assert not table.has_engine_rules
    derived, loaded = table.parameter_shards(), trace_transformers(unknown[kind])
    assert derived.keys() == loaded.keys()
    shapes = table.module.shapes
    tensors = numbered(shapes)
    for name, shard in derived.items():
        ours, theirs = (s.as_parameter(assemble(s, tensors)) for s in (shard, loaded[name]))
        assert torch.equal(ours, theirs), name
    assert {n: s.shape for n, s in table.huggingface().items()} == shapes


def test_tensors_of_unknown_mixture_have_layers_experts_and_float32(unknown):
    table = module_table(unknown["ernie4_5_moe"])
    entries, layer = table.tensor_index.entries, "model.layers.1.mlp."
    expert = entries[layer + "experts.3.up_proj.weight"]
    assert (expert.layer, expert.expert, expert.of_experts, expert.is_layer_matrix) == (1, 3, True, True)
    assert expert.tensor.name == "model.layers.{layer}.mlp.experts.{expert}.up_proj.weight"
    biases = {f"model.layers.{number}.mlp.moe_statics.e_score_correction_bias" for number in (1, 2)}
    assert table.router_biases == biases
    routers = {f"model.layers.{number}.mlp.gate.weight" for number in (1, 2)}
    assert table.routers == routers
    assert {name for name, entry in entries.items() if entry.tensor.dtype == "float32"} == biases | routers
    assert (table.config.experts.count, table.config.experts.layers) == (4, {1, 2})


def test_tensors_of_vision_tower_are_not_of_text(unknown):
    table = module_table(unknown["qwen2_5_vl"])
    vision = {name for name, entry in table.tensor_index.entries.items() if entry.vision}
    assert vision == {name for name in table.huggingface() if name.startswith("visual.")}
    assert table.vision_parameters == {name for name in table.parameter_shards() if name.startswith("model.visual.")}
    assert "model.layers.0.self_attn.q_proj.weight" in table.linear_tensors()
    assert not vision & set(table.linear_tensors())


@pytest.mark.parametrize("kind", ["olmo2", "phi3", "qwen2_5_vl"])
def test_row_flops_of_unknown_model_equal_the_count_of_torch(unknown, kind):
    """Without a causal mask, so twice the pairs."""
    table, length = module_table(unknown[kind]), 48
    predicted = row_flops(table.config, table.tensor_index)
    config = AutoConfig.from_pretrained(unknown[kind])
    kind_of_model = AutoModelForImageTextToText if "vl" in kind else AutoModelForCausalLM
    model = kind_of_model.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, length, dtype=torch.int64))
    expected = predicted(length) + predicted.per_pair * length**2
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.02)


def test_stacked_experts_count_by_the_share_that_a_token_uses(unknown):
    table = module_table(unknown["granitemoe"])
    assert sum(entry.stacked for entry in table.tensor_index.entries.values()) == 2 * 3
    attention = 64 * 64 + 2 * 64 * 16 + 64 * 64
    a_layer = attention + 4 * 64 + 2 * (3 * 64 * 96) + 2 * 64
    by_hand = 3 * a_layer + 64 + 99 * 64
    assert active_elements(table.config, table.tensor_index) == by_hand


def test_value_head_replaces_an_output_layer_of_several_parameters(unknown):
    table = module_table(unknown["phi"], "value")
    box = ((0, 1), (0, 64))
    assert table.parameter_shards()["score.weight"] == Shard((1, 64), (Piece("score.weight", box, box),))
    assert table.tensor_index.tensors["score.weight"].shape == (1, 64)
    assert not {"lm_head.weight", "lm_head.bias"} & (table.parameter_shards().keys() | table.huggingface().keys())
    assert {"lm_head.weight", "lm_head.bias"} <= module_table(unknown["phi"]).parameter_shards().keys()


def change_tensors(folder, change):
    tensors = change(load_file(folder / "model.safetensors"))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_tensors_that_the_module_does_not_use_are_left_out(tmp_path):
    """Layers for multi-token prediction, the copy of a tied embedding, scales of quantized tensors."""
    folder = tiny_model(tmp_path, "qwen2")
    before = module_table(folder)
    extra = ("model.layers.4.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight_scale_inv", "lm_head.weight")
    change_tensors(folder, lambda tensors: tensors | {name: torch.zeros(before.config.vocab, 32) for name in extra})
    after = module_table(folder)
    assert (after.parameter_shards(), after.huggingface()) == (before.parameter_shards(), before.huggingface())


HASHED = {  # its first layer chooses experts by a table of integers
    "mlp_layer_types": ["hash_moe", "moe"], "layer_types": ["heavily_compressed_attention"] * 2, "num_hidden_layers": 2,
    "vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "head_dim": 32, "qk_rope_head_dim": 4,
    "q_lora_rank": 8, "o_lora_rank": 8, "o_groups": 2, "moe_intermediate_size": 16, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "index_n_heads": 4, "index_head_dim": 8, "hc_mult": 2,
}  # fmt: skip
EXPERTS_OF_TOKEN = "model.layers.0.ffn.gate.tid2eid"


def hashed_files(folder, **changed):
    AutoConfig.for_model("deepseek_v4", **HASHED).save_pretrained(folder)
    tensors = {name: torch.zeros(shape) for name, shape in module_table(folder).module.shapes.items()}
    save_file({n: t for n, t in (tensors | changed).items() if t is not None}, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("stored", "travels"),
    [
        (torch.int64, torch.int64),
        (torch.int32, torch.int32),
        (torch.uint8, torch.uint8),
        (torch.bool, torch.bool),
        (torch.float32, torch.int64),  # has values that the module's table does not have
    ],
)
def test_table_of_integers_has_the_dtype_of_the_files_where_the_module_has_all_its_values(tmp_path, stored, travels):
    hashed_files(tmp_path, **{EXPERTS_OF_TOKEN: torch.zeros(64, 2, dtype=stored)})
    table = module_table(tmp_path)
    assert table.tensor_index.dtypes[EXPERTS_OF_TOKEN] is travels
    parameter = next(n for n, s in table.parameter_shards().items() if s.pieces[0].tensor == EXPERTS_OF_TOKEN)
    assert table.module.dtypes[parameter] is travels


def test_directory_without_a_table_of_integers_is_refused(tmp_path):
    hashed_files(tmp_path, **{EXPERTS_OF_TOKEN: None})
    with pytest.raises(UserError, match=r"no tensor for the parameter model\.layers\.0\.mlp\.gate\.tid2eid of"):
        module_table(tmp_path)


def test_names_are_those_of_the_directory(unknown, tmp_path):
    """Gemma 3 has been published under two sets of names."""
    renamed = {"language_model.model.": "model.language_model.", "vision_tower.": "model.vision_tower."}

    def name_of(name):
        return next((name.replace(old, new) for old, new in renamed.items() if name.startswith(old)), name)

    shapes = module_table(unknown["gemma3"]).module.shapes
    change_config(unknown["gemma3"], tmp_path)
    save_file({name_of(name): torch.zeros(shape) for name, shape in shapes.items()}, tmp_path / "model.safetensors")
    table = module_table(tmp_path)
    assert table.parameter_shards().keys() == module_table(unknown["gemma3"]).parameter_shards().keys()
    assert list(table.huggingface()) == [name_of(name) for name in shapes]


def test_directory_without_a_needed_tensor_names_the_parameter(tmp_path):
    folder, name = tiny_model(tmp_path, "llama"), "model.layers.1.mlp.up_proj.weight"
    change_tensors(folder, lambda tensors: {key: value for key, value in tensors.items() if key != name})
    with pytest.raises(UserError, match=f"^{folder}: the checkpoint has no tensor for the parameter {name} of"):
        module_table(folder)


@pytest.mark.parametrize("family", ["qwen2", "olmo2"])  # with a table, and without
def test_output_layer_in_files_that_config_ties_has_to_equal_the_embedding(tmp_path, family):
    config = AutoConfig.for_model(family, **COMMON | {"tie_word_embeddings": True})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)

    def check(factor):
        embedding = "model.embed_tokens.weight"
        change_tensors(tmp_path, lambda tensors: tensors | {"lm_head.weight": tensors[embedding] * factor})
        tables = [module_table(tmp_path), *([weight_table(read_config(tmp_path))] if family in FAMILIES else [])]
        for table in tables:
            yield lambda table=table: ModelDirectory.find(tmp_path).check(
                table.huggingface(), copies=table.tensor_index.copies
            )

    for equal in check(1):
        equal()
    for other in check(2):
        with pytest.raises(UserError, match=r"'lm_head.weight' has other values than .*, but config.json ties them"):
            other()


def test_reward_model_directory_needs_no_output_layer(tmp_path):
    folder = tiny_model(tmp_path, "llama")
    change_tensors(folder, lambda tensors: {key: value for key, value in tensors.items() if key != "lm_head.weight"})
    assert "score.weight" in module_table(folder, "value").parameter_shards()
    with pytest.raises(UserError, match=r"no tensor for the parameter lm_head\.weight"):
        module_table(folder)


def test_directory_of_other_sizes_names_the_parameter(tmp_path):
    folder = tiny_model(tmp_path, "llama")
    change_config(folder, folder, intermediate_size=40)
    with pytest.raises(UserError, match=r"parameter model\.layers.* has shape \(32, 40\) by config\.json.* \(32, 56\)"):
        module_table(folder)


def test_stacks_of_transposed_matrices_are_single_pieces(tmp_path):
    pytest.importorskip("torchvision", reason="the directory is saved with its processor, which needs torchvision")
    folder = published_mixture(tmp_path / "model")
    table, tensors = module_table(folder), load_file(folder / "model.safetensors")
    loaded = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).state_dict()
    shards = table.parameter_shards()
    assert {len(shard.pieces) for name, shard in shards.items() if ".experts." in name} == {1}
    assert all(torch.equal(s.as_parameter(assemble(s, tensors)), loaded[name]) for name, s in shards.items())
    assert {name: s.shape for name, s in table.huggingface().items()} == {name: t.shape for name, t in tensors.items()}
    ModelDirectory.find(folder, table.tensor_index.stacked).check(table.huggingface())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "unheard_of"}, "transformers .* cannot load it .*unheard_of"),
        ({"model_type": "vit"}, "transformers .* cannot load it"),
        ({"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}, "transformers .* cannot load it"),
        ({"num_hidden_layers": "many"}, "transformers .* cannot load it"),
    ],
)
def test_directory_that_transformers_cannot_load_is_one_line(tmp_path, fields, message):
    change_config(folder_of("llama"), tmp_path, **fields)
    with pytest.raises(UserError, match=message) as raised:
        module_table(tmp_path)
    assert str(raised.value).startswith(f"{tmp_path / 'config.json'}: ")
    assert "\n" not in str(raised.value)


def test_unknown_model_without_a_traced_table_names_the_remedy(unknown):
    with pytest.raises(UserError, match=r"^rollout\.engine=vllm: there is no built-in table for 'olmo2'\. .*-mg trace"):
        module_table(unknown["olmo2"]).for_engine("vllm").engine_shards(EngineLayout(), 0)
