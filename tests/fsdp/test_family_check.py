"""The check that proves a family: its outcome for families of each kind, and that it sees faults that are planted."""

import io
import logging
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed._composable import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING
from transformers.models.qwen3_next import modeling_qwen3_next

from tests.helpers.tiny_models import nightly, random_rows, tiny_model
from verl_mg.choice import Choice
from verl_mg.errors import UserError
from verl_mg.fsdp import family_check, packed_rows
from verl_mg.fsdp.family_check import PROBED, PROBED_ROWS, FamilyCheck, FamilyChecks, check_module, form_on_ranks
from verl_mg.fsdp.mesh import MeshGroups, TensorRanks
from verl_mg.fsdp.model import (
    PackedModule,
    build_module,
    layer_blocks,
    logit_scale_of,
    module_of,
    recompute_layers,
    sharded_blocks,
)
from verl_mg.fsdp.model_runner import FsdpRunner
from verl_mg.fsdp.packed_rows import PackedRows, RowsReader
from verl_mg.layout import Layout, Placement
from verl_mg.models.flops import row_flops
from verl_mg.models.hf_config import read_config
from verl_mg.models.hf_tensors import model_spec
from verl_mg.models.tensor_index import index_of
from verl_mg.models.transformers_module import meta_module
from verl_mg.training.microbatch import TokenShard
from verl_mg.training.model_spec import ModelSpec

ROPE = {"rope_theta": 10000.0, "original_max_position_embeddings": 512}
DYNAMIC = {"max_position_embeddings": 512, "rope_parameters": {**ROPE, "rope_type": "dynamic", "factor": 4.0}}
LONG = {
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 512,
    "rope_parameters": {**ROPE, "rope_type": "longrope", "short_factor": [1.0] * 48, "long_factor": [4.0] * 48},
}
CONVOLUTIONS = ["conv", "full_attention"] * 2
OUTCOMES = [
    # Dropout of 0.1 by default.
    ("gpt2", {}, 1024, "packed"),
    # Layers with a state: without kernels of a GPU they do not read where rows begin.
    ("lfm2", {"num_hidden_layers": 4, "layer_types": CONVOLUTIONS}, 1024, "conv"),
    ("qwen3_next", {}, 1024, "linear_attn"),
    # Never calls the registered attention.
    ("bloom", {}, 1024, "self_attention"),
    # Frequencies of the longest row.
    ("phi3", LONG, 1024, "rotary_emb"),
    ("phi3", LONG, 512, "packed"),
    ("llama", DYNAMIC, 1024, "neither"),
    # An encoder.
    ("bert", {}, 512, "later ones"),
]
NIGHTLY = [
    ("llama", DYNAMIC, 512, "packed"),
    ("seed_oss", {}, 1024, "packed"),
    ("phimoe", {}, 1024, "packed"),
    ("olmo2", {}, 1024, "packed"),
    ("xglm", {}, 1024, "out_proj"),
    ("mpt", {}, 1024, "NoneType"),
    ("stablelm", {}, 1024, "pass on"),
    ("gpt_neox_japanese", {}, 1024, "attention"),
    ("gpt_neo", {}, 1024, "transformers cannot replace its attention"),
    # A head whose width is computed, and constants of the family among its buffers.
    ("falcon", {}, 1024, "transformers cannot replace its attention"),
    ("minimax", {}, 1024, "differs"),
    *((name, {}, 1024, "differs") for name in ("qwen3_5_text", "nemotron_h", "kimi_linear", "jamba", "zaya", "zamba2")),
]


def saved(folder: Path, name: str, fields: dict) -> Path:
    CONFIG_MAPPING[name](**fields).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("name", "fields", "longest_row", "words"), [*OUTCOMES, *nightly(*NIGHTLY)])
def test_family_is_packed_or_unpacked_for_a_reason_or_refused(tmp_path, name, fields, longest_row, words):
    """Unpacked, the reason names the first part of the module that is wrong."""
    try:
        form = FamilyCheck(saved(tmp_path, name, fields), "language", longest_row).form()
    except UserError as error:
        assert words in str(error) and str(tmp_path) in str(error)
    else:
        assert (form.reason == "") == form.is_packed
        assert words in (form.reason or "packed")


def form_on(model: Path, layout: str) -> tuple[bool, str] | str:
    """The form on the ranks of a layout, or the error."""
    groups = MeshGroups(Placement.on(Layout.parse(layout), dist.get_world_size()))
    try:
        return FamilyChecks().form(ModelSpec(model, torch.float32), groups)
    except UserError as error:
        return str(error)


RANKS = [
    ("olmo2", {}, "tp2", "packed"),
]
NIGHTLY_RANKS = [
    # Its layers have a state, which the next rank does not know.
    ("granitemoehybrid", {"layer_types": ["mamba", "attention"], "num_hidden_layers": 2}, "cp2", "each by itself"),
    ("olmo2", {}, "cp2", "packed"),
    ("olmo2", {}, "tp2-cp2", "packed"),
    ("glm4", {}, "tp2", "packed"),
    ("cohere", {}, "tp2", "packed"),
    ("phi3", LONG, "cp2", "each by itself"),
    ("bloom", {}, "tp2", "no plan"),
]


@pytest.mark.parametrize(("name", "fields", "layout", "words"), [*RANKS, *nightly(*NIGHTLY_RANKS)])
def test_ranks_compute_what_one_rank_does_or_are_refused_together(ranks, tmp_path, name, fields, layout, words):
    found = ranks.run(Layout.parse(layout).ranks, form_on, saved(tmp_path, name, fields), layout)
    assert all(each == found[0] for each in found)
    assert words in (found[0] if isinstance(found[0], str) else found[0][1] or "packed")


def form_with_a_fault_on_one_rank(model: Path, fault: str) -> tuple[bool, str] | str:
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1 and fault == "form":
            patch.setitem(packed_rows.AttentionInterface._global_mapping, packed_rows.NAME, without_rows)
        elif dist.get_rank() == 1:
            build = family_check.shard_tensors

            def fails(module, mesh, where):
                if mesh is not None:
                    raise ValueError("planted")
                return build(module, mesh, where)

            patch.setattr(family_check, "shard_tensors", fails)
        return form_on(model, "tp2")


@pytest.mark.parametrize(
    ("fault", "words"), [("form", "o_proj differs"), ("built", "one rank does (ValueError: planted)")]
)
def test_fault_on_one_rank_changes_or_ends_the_check_of_all(ranks, tmp_path, fault, words):
    first, second = ranks.run(2, form_with_a_fault_on_one_rank, saved(tmp_path, "olmo2", {}), fault)
    assert first == second and words in (first if isinstance(first, str) else first[1])


@pytest.mark.nightly
def test_layout_is_checked_by_new_processes(tmp_path):
    """Without a job, as `verl-mg models` needs it."""
    model = saved(tmp_path, "olmo2", {})
    assert form_on_ranks(model, "language", 1024, Layout.parse("tp2")).is_packed
    with pytest.raises(UserError, match="no plan"):
        form_on_ranks(saved(tmp_path / "bloom", "bloom", {}), "language", 1024, Layout.parse("tp2"))


def said_of(model: Path) -> tuple[list[Choice], list[str]]:
    """What two roles of a model compute with, as the start of a job says it, and the warnings of their check."""
    groups, families = MeshGroups(Placement.on(Layout.parse("tp1"), dist.get_world_size())), FamilyChecks()
    warnings = io.StringIO()
    handler = logging.StreamHandler(warnings)
    logging.getLogger("verl_mg.fsdp.family_check").addHandler(handler)
    actor, _ = (FsdpRunner(ModelSpec(model, torch.float32), groups, families=families) for _ in range(2))
    logging.getLogger("verl_mg.fsdp.family_check").removeHandler(handler)
    return list(actor.chosen()), warnings.getvalue().splitlines()


def test_start_says_once_that_each_row_is_computed_by_itself(ranks, tmp_path):
    ((choices, warnings),) = ranks.run(1, said_of, tiny_model(tmp_path, "qwen3_next", 2))
    chosen = {choice.part: choice for choice in choices}
    assert chosen["rows"].chosen.startswith("each by itself, since packed: ") and "linear_attn" in chosen["rows"].chosen
    assert chosen["attention"].chosen == "transformers' sdpa"
    (warning,) = warnings
    assert chosen["rows"].chosen in warning and "a call for each row, slow for short ones" in warning


def without_rows(*arguments, packed, **options):
    """Attention that takes all rows for one."""
    whole = PackedRows(packed.lengths.sum()[None], packed.position_ids, packed.cu_seqlens_q[[0, -1]], None)
    return packed_rows.packed_attention(*arguments, packed=whole, **options)


def without_windows(*arguments, sliding_window=None, **options):
    return packed_rows.packed_attention(*arguments, sliding_window=None, **options)


def without_gradient(module, query, key, value, *arguments, **options):
    """Attention whose values are right."""
    return packed_rows.packed_attention(module, query, key.detach(), value, *arguments, **options)


@pytest.mark.parametrize(
    ("planted", "words"),
    [(without_rows, "layers.0.self_attn"), (without_windows, "layers.0.self_attn"), (without_gradient, "gradient of")],
)
def test_fault_in_packed_attention_is_found_with_its_place(tmp_path, monkeypatch, planted, words):
    model = saved(tmp_path, "mistral", {"sliding_window": 512})
    assert FamilyCheck(model, "language", 1024).form().is_packed
    monkeypatch.setitem(packed_rows.AttentionInterface._global_mapping, packed_rows.NAME, planted)
    form = FamilyCheck(model, "language", 1024).form()
    assert not form.is_packed and words in form.reason


def tiny(name: str, folder: Path, is_packed: bool = True, **more):
    """A module with random weights."""
    fields = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = CONFIG_MAPPING[name](**fields, num_hidden_layers=4, vocab_size=64, **more)
    config.save_pretrained(folder)
    module = module_of(config, folder, "language", torch.float32, is_packed)
    scale = logit_scale_of(module, "language", folder)
    generator = torch.Generator().manual_seed(0)
    module._apply(lambda t: torch.randn(t.shape, generator=generator) / 4 if t.is_meta else t)
    module.tie_weights()
    return PackedModule(module, scale, TensorRanks())


def test_module_whose_layers_mix_rows_is_refused(tmp_path):
    """With its real weights, whatever the narrow copy showed; each row by itself is right."""
    for is_packed, expected in ((False, nullcontext()), (True, pytest.raises(UserError, match="computed again"))):
        module = tiny("lfm2", tmp_path, is_packed, layer_types=CONVOLUTIONS)
        with expected:
            check_module(module, RowsReader(1, is_packed), TokenShard(1, 1), torch.float32, "config.json")


def fails(**_):
    raise ValueError("planted")


@pytest.mark.parametrize(
    ("forward", "words"),
    [
        (lambda hidden_states, **_: (hidden_states, None), r"layers\.2\.self_attn"),
        (fails, r"does not run \(ValueError: planted\)"),
    ],
)
def test_module_with_a_layer_that_reads_no_rows_or_fails_is_refused(tmp_path, monkeypatch, forward, words):
    packed = tiny("llama", tmp_path)
    monkeypatch.setattr(packed.module.model.layers[2].self_attn, "forward", forward)
    with pytest.raises(UserError, match=words):
        check_module(packed, RowsReader(1, True), TokenShard(1, 1), torch.float32, "config.json")


def of_each_row(function, ends, lengths, along):
    """A function of tokens that starts anew with each row, as kernels of GPUs do, whose option `ends` has the rows."""

    def kernel(*arguments, **options):
        if options.get(ends) is None:  # of a single row
            return function(*arguments, **options)
        sizes = lengths(options[ends])

        def row(number, value):
            has_tokens = isinstance(value, torch.Tensor) and value.dim() > 2
            return value.split(sizes, along)[number] if has_tokens else value

        results = [
            function(*(row(n, x) for x in arguments), **{name: row(n, x) for name, x in options.items()})
            for n in range(len(sizes))
        ]
        if isinstance(results[0], tuple):  # with the last state, which training does not use
            return torch.cat([output for output, _ in results], along), None
        return torch.cat(results, along)

    return kernel


@pytest.mark.nightly
def test_layers_with_a_state_are_packed_with_kernels_that_read_where_rows_begin(tmp_path, monkeypatch):
    """As with causal-conv1d and flash-linear-attention on a GPU."""
    model = saved(tmp_path, "qwen3_next", {})
    assert not FamilyCheck(model, "language", 1024).form().is_packed
    for name, *rows in (
        ("causal_conv1d_fn", "seq_idx", lambda numbers: numbers[0].bincount().tolist(), 2),
        ("torch_chunk_gated_delta_rule", "cu_seqlens", lambda ends: ends.diff().tolist(), 1),
    ):
        monkeypatch.setattr(modeling_qwen3_next, name, of_each_row(getattr(modeling_qwen3_next, name), *rows))
    assert FamilyCheck(model, "language", 1024).form().is_packed


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["llama4", "mllama", "phi4_multimodal"])
def test_module_whose_body_takes_no_features_of_images_is_refused(tmp_path, name):
    with pytest.raises(UserError, match=r"config\.json: \w+ of transformers does not take features of images"):
        build_module(saved(tmp_path, name, {}), "language", torch.float32)


@pytest.mark.parametrize("name", ["llama", *nightly("jetmoe", "bloom")])
def test_recomputed_layers_run_twice_and_give_the_same_gradients(tmp_path, name):
    """Families with layers that transformers can recompute, and without."""
    rows = random_rows(2, 64)
    gradients, calls = [], []
    for recomputes in (False, True):
        packed = tiny(name, tmp_path, is_packed=name != "bloom")
        if recomputes:
            recompute_layers(packed.module, "config.json")
        counted = []
        block = next(sharded_blocks(packed.module))
        leaf = next(part for part in block.modules() if not list(part.children()) and list(part.parameters()))
        leaf.register_forward_pre_hook(lambda *_, counted=counted: counted.append(1))
        micro = RowsReader(1, name != "bloom").micro_batch(rows, TokenShard(1, 1), torch.device("cpu"), len(rows))
        packed(micro, 1.0).sum().backward()
        calls.append(len(counted))
        gradients.append({n: p.grad for n, p in packed.module.named_parameters() if p.grad is not None})
    assert calls[1] == 2 * calls[0]
    assert gradients[0].keys() == gradients[1].keys()
    assert all(torch.equal(gradients[0][name], gradient) for name, gradient in gradients[1].items())


def test_recomputed_layers_may_share_parameters_and_a_module_without_layers_is_refused(tmp_path):
    """Zamba2's layers share attention: they are not gathered by themselves."""
    kinds = ["linear_attention", "hybrid"] * 2
    config = CONFIG_MAPPING["zamba2"](num_hidden_layers=4, layers_block_type=kinds, num_mem_blocks=1)
    module = meta_module(config, tmp_path)
    blocks = layer_blocks(module)
    assert len(blocks) > len(list(sharded_blocks(module)))
    recompute_layers(module, "config.json")
    assert all(checkpoint.state(block) for block in blocks)
    module._no_split_modules = None
    with pytest.raises(UserError, match="recompute: transformers names no layers of config.json"):
        recompute_layers(module, "config.json")


CONFIGS = Path(__file__).parents[2] / "tools" / "model_configs"
SAMPLES, TOKENS = 64, 512  # of a small iteration
PASSES = 4  # a forward pass for the former log-probs; one of an update, with a backward pass of twice its FLOPs


@pytest.mark.parametrize("name", ["qwen3_32b", "qwen3_235b_a22b"])
def test_check_takes_less_than_a_hundredth_of_an_iteration(tmp_path, name):
    """The narrow copy by torch's counter, the passes of the real module by ours."""
    (tmp_path / "config.json").write_bytes((CONFIGS / f"{name}.json").read_bytes())
    config = read_config(tmp_path)
    flops = row_flops(config, index_of(model_spec(config)))
    with FlopCounterMode(display=False) as counter:
        FamilyCheck(tmp_path, "language", TOKENS).form()
    check = counter.get_total_flops() + PROBED_ROWS * flops(PROBED)
    assert 0 < check < PASSES * SAMPLES * flops(TOKENS) / 100
