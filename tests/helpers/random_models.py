"""Random architectures and layouts that fit them, and models in which every element is another number."""

from collections.abc import Mapping
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from verl_mg.layout import EngineLayout, EnginePlacement, Layout, Placement
from verl_mg.models.hf_config import HFConfig, parse_config
from verl_mg.models.hf_families import FAMILIES
from verl_mg.reshard import Plan, plan
from verl_mg.sharding.boxes import Shard, slices
from verl_mg.sharding.shard_map import ShardMap
from verl_mg.sharding.weight_table import weight_table

RANKS = 8
SPARSE = ("deepseek_v32", "glm_moe_dsa")
LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", *SPARSE)
WITHOUT_PIPELINE = ("gemma2", "qwen3_next")
LINEAR = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
MIXTURES = ("qwen3_moe", "mixtral", "glm4_moe", "minimax_m2", "qwen3_next", "qwen3_5_moe_text", *LATENT)
PARTLY_ROTATED = ("glm4_moe", "minimax_m2", *LINEAR)
UNTIED = ("glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "minimax_m2")


def fields(family: str, **changes: Any) -> dict[str, Any]:
    """The `config.json` of a small model that 8 ranks can hold in many ways."""
    common = {
        "model_type": family,
        "num_hidden_layers": 4,
        "hidden_size": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 2,
        "intermediate_size": 16,
        "vocab_size": 101,
    }
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    latent = {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "q_lora_rank": 8,
        "kv_lora_rank": 12,
        "qk_nope_head_dim": 2,
        "qk_rope_head_dim": 4,
        "v_head_dim": 3,
    }
    sparse = latent | {"index_n_heads": 3, "index_head_dim": 5}
    glm = experts | {"n_routed_experts": 8, "first_k_dense_replace": 1, "partial_rotary_factor": 1.0}
    linear = {
        "partial_rotary_factor": 1.0,
        "full_attention_interval": 2,
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 2,
        "linear_value_head_dim": 3,
        "linear_conv_kernel_dim": 3,
    }
    shared = {"shared_expert_intermediate_size": 8}
    own = {
        "qwen3_moe": experts,
        "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
        "minimax_m2": {"num_local_experts": 8, "num_experts_per_tok": 2},
        "deepseek_v2": latent,
        "deepseek_v3": latent,
        "glm4_moe_lite": latent,
        "deepseek_v32": sparse,
        "glm_moe_dsa": sparse | {"indexer_rope_interleave": True},
        "glm4_moe": glm | {"attention_bias": True, "use_qk_norm": True},
        "gemma2": {"hidden_activation": "gelu_pytorch_tanh"},
        "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2},
        "qwen3_next": linear | experts | shared,
        "qwen3_5_text": linear,
        "qwen3_5_moe_text": linear | experts | shared,
    }
    return common | own.get(family, {}) | changes


def config(family: str, **changes: Any) -> HFConfig:
    """The same, parsed."""
    return parse_config(fields(family, **changes))


@st.composite
def configs(draw: st.DrawFn) -> HFConfig:
    """Any family, with sizes that tensor parallelism up to 4 divides."""
    family = draw(st.sampled_from(sorted(FAMILIES)))
    kv_heads = draw(st.sampled_from([4, 8]))
    changes: dict[str, Any] = {
        "num_hidden_layers": draw(st.integers(4, 6)),
        "hidden_size": draw(st.integers(3, 7)),
        "num_attention_heads": kv_heads * draw(st.integers(1, 2)),
        "num_key_value_heads": kv_heads,
        "head_dim": draw(st.integers(1, 3)) * (2 if family in PARTLY_ROTATED else 1),  # rotated in pairs
        "intermediate_size": 8 * draw(st.integers(1, 2)),
        "vocab_size": draw(st.integers(5, 150)),
        "tie_word_embeddings": draw(st.booleans()) and family not in UNTIED,
    }
    if family in LATENT:
        changes["q_lora_rank"] = draw(st.sampled_from([4, 8] if family in SPARSE else [None, 4, 8]))
        changes["n_shared_experts"] = draw(st.integers(0, 2))
    if family in LINEAR:
        changes["linear_num_value_heads"] = 8 * draw(st.integers(1, 3))
        changes["full_attention_interval"] = draw(st.integers(2, 4))
    return config(family, **changes)


@st.composite
def layouts(draw: st.DrawFn, c: HFConfig, ranks: int = RANKS) -> Layout:
    """A layout of Megatron on `ranks` ranks that holds the model."""
    tp = draw(st.sampled_from([1, 2, 4]))
    pp = draw(st.sampled_from([size for size in (1, 2, 4) if tp * size <= ranks]))
    cp = draw(st.sampled_from([size for size in (1, 2) if tp * pp * size <= ranks]))
    vpp = draw(st.sampled_from([1, 2])) if pp == 2 else 1
    chosen = draw(pipeline_layers(c.layers, pp * vpp)) if pp > 1 and draw(st.booleans()) else ()
    if c.experts is None:
        return Layout(tp=tp, pp=pp, vpp=vpp, cp=cp, pipeline_layers=chosen).fit(ranks)
    etp = draw(st.sampled_from([1, 2, 4]))
    fitting = [ep for ep in (1, 2, 4, 8) if (ranks // pp) % (etp * ep) == 0]
    if not fitting:
        etp, fitting = 1, [1]
    ep = draw(st.sampled_from(fitting))
    return Layout(tp=tp, pp=pp, vpp=vpp, cp=cp, etp=etp, ep=ep, pipeline_layers=chosen).fit(ranks)


@st.composite
def pipeline_layers(draw: st.DrawFn, layers: int, chunks: int) -> tuple[int, ...]:
    """A number of layers for each chunk; the first and the last one may have none."""
    counts = [0, *[1] * (chunks - 2), 0]
    for _ in range(layers - sum(counts)):
        counts[draw(st.integers(0, chunks - 1))] += 1
    return tuple(counts)


@st.composite
def engines(draw: st.DrawFn, c: HFConfig, ranks: int = RANKS) -> EnginePlacement:
    """Engines of SGLang on `ranks` ranks, at any stride."""
    tp = draw(st.sampled_from([1, 2, 4, 8]))
    if (c.kv_heads < tp and tp % c.kv_heads) or c.heads % tp:
        tp = 4
    pp = draw(st.sampled_from([1, 2])) if tp * 2 <= ranks and c.architecture not in WITHOUT_PIPELINE else 1
    divisors = [size for size in (1, 2, 4, 8) if tp % size == 0]
    ep = draw(st.sampled_from(divisors)) if c.experts and not c.attention_sinks else 1
    with_adp = ("qwen3", "qwen3_moe", *PARTLY_ROTATED, *LATENT)
    adp = draw(st.sampled_from(divisors)) if c.architecture in with_adp else 1
    stride = draw(st.sampled_from([size for size in (1, 2, 4) if ranks % (tp * pp * size) == 0]))
    return EnginePlacement(EngineLayout(tp=tp, pp=pp, ep=ep, adp=adp), tuple(range(ranks)), stride)


def shard_map(c: HFConfig) -> st.SearchStrategy[ShardMap]:
    """The model in any dialect, on all ranks."""
    return sources(c) | engines(c).map(weight_table(c).shard_map_engine)


@st.composite
def sources(draw: st.DrawFn, c: HFConfig, ranks: int = RANKS) -> ShardMap:
    """The model in any dialect that weights come from, on `ranks` ranks."""
    only_torch = c.attention_sinks or c.indexer
    dialects = ["torch", "torch", "modules", *(() if only_torch else ("transformer_engine",))]
    dialect = draw(st.sampled_from(dialects))
    if dialect == "modules":
        return weight_table(c).shard_map_replicated(range(ranks))
    placement = Placement(draw(layouts(c, ranks)), tuple(range(ranks)))
    return weight_table(c).shard_map_megatron(placement, dialect)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """A plan between random layouts of a random model, on nodes of 2, 4 or 8 ranks."""
    c = draw(configs())
    return plan(draw(sources(c)), draw(shard_map(c)), draw(st.sampled_from([2, 4, 8])))


def numbered(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype = torch.int64) -> dict[str, Tensor]:
    """Every element of the model is another number, from 1 on."""
    tensors, start = {}, 1
    for name, shape in shapes.items():
        count = torch.Size(shape).numel()
        tensors[name] = torch.arange(start, start + count).reshape(shape).to(dtype)
        start += count
    return tensors


def checkpoint(c: HFConfig, dtype: torch.dtype = torch.int64) -> dict[str, Tensor]:
    """The model's tensors, numbered."""
    return numbered({name: shard.shape for name, shard in weight_table(c).huggingface().items()}, dtype)


def assemble(shard: Shard, tensors: Mapping[str, Tensor]) -> Tensor:
    """The shard as loading fills it; asserts that each element is written exactly once, declared padding aside."""
    some = next(iter(tensors.values()))
    values, writes = torch.zeros(shard.shape, dtype=some.dtype), torch.zeros(shard.shape, dtype=torch.int64)
    for piece in shard.pieces:
        at = slices(piece.target)
        space = values[at]
        space.copy_(tensors[piece.tensor][slices(piece.source)].reshape(space.shape))
        writes[at] += 1
    for box in shard.padding:
        writes[slices(box)] += 1
    assert (writes == 1).all()
    return values
