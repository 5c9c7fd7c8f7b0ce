"""Tiny models as Hugging Face directories, made once a test session, and `transformers` as the oracle for them."""

import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from io import BytesIO
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import PIL.Image
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from verl_mg.batch import Batch
from verl_mg.images import Image
from verl_mg.models.hf_config import read_config
from verl_mg.models.tiny_model import make_tiny_model
from verl_mg.models.tiny_vision_model import make_tiny_vision_model

CHARACTERS = "0123456789+-*=() abcdefg"

VARIANTS = {
    "llama": {"rope_scaling": {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                               "original_max_position_embeddings": 16}},
    "qwen2": {"tie_embeddings": True},
    "qwen3": {"head_dim": 12},
    "qwen3_moe": {"head_dim": 12},
    "mixtral": {},
    "deepseek_v2": {"shared_experts": 2, "dense_layers": 1, "experts": 8,
                    "fields": {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1,
                               "routed_scaling_factor": 1.7}},
    "deepseek_v3": {"shared_experts": 2, "dense_layers": 1, "experts": 8, "q_rank": 12,
                    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.7,
                                     "original_max_position_embeddings": 16},
                    "fields": {"n_group": 4, "topk_group": 2}},
    "glm4_moe": {"head_dim": 12, "shared_experts": 1, "dense_layers": 1, "experts": 8,
                 "fields": {"attention_bias": True, "use_qk_norm": True, "routed_scaling_factor": 1.7}},
    "glm4_moe_lite": {"shared_experts": 1, "dense_layers": 1, "experts": 8, "q_rank": 12,
                      "fields": {"routed_scaling_factor": 1.7}},
    "deepseek_v32": {"shared_experts": 1, "dense_layers": 1, "experts": 8, "q_rank": 12,
                     "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.7,
                                      "original_max_position_embeddings": 16},
                     "fields": {"n_group": 4, "topk_group": 2}},
    # Every second layer shares the selection of the one before it.
    "glm_moe_dsa": {"shared_experts": 1, "dense_layers": 1, "experts": 8, "q_rank": 12,
                    "fields": {"index_topk_freq": 2, "index_skip_topk_offset": 1}},
    "minimax_m2": {"head_dim": 12, "experts": 8, "fields": {"rotary_dim": 8}},
    "gemma2": {"tie_embeddings": True, "head_dim": 12, "fields": {"sliding_window": 5, "attn_logit_softcapping": 0.5,
                                                               "final_logit_softcapping": 3.0}},
    "gpt_oss": {"head_dim": 12,
                "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
                                 "truncate": False, "original_max_position_embeddings": 16},
                "fields": {"sliding_window": 5, "swiglu_limit": 0.7}},
    # Smaller weights: rounding grows less where queries and keys are divided by their lengths.
    "qwen3_next": {"head_dim": 16, "init_std": 0.1, "fields": {"full_attention_interval": 2,
                                                               "linear_value_head_dim": 6}},
    "qwen3_5_text": {"head_dim": 16, "init_std": 0.1, "fields": {"full_attention_interval": 2,
                                                                 "linear_key_head_dim": 6}},
    "qwen3_5_moe_text": {"head_dim": 16, "init_std": 0.1, "fields": {"full_attention_interval": 2,
                                                                     "shared_expert_intermediate_size": 20}},
}  # fmt: skip
TRAINED = ("llama", "qwen2", "qwen3", "gemma2")
"""The dense ones."""
MIXTURES = ("qwen3_moe", "mixtral", "glm4_moe", "gpt_oss", "minimax_m2")
"""The mixtures of experts without latent attention."""
LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
"""Those with it."""
SPARSE = ("deepseek_v32", "glm_moe_dsa")
"""Those whose tokens attend to 8 selected ones."""
LINEAR = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Those with linear attention."""


def daily_of(names: Iterable[str], *daily: str) -> list[Any]:
    """Parameters of a test that runs with some daily and with the others nightly."""
    return [name if name in daily else nightly(name)[0] for name in names]


def nightly(*cases: Any) -> list[Any]:
    """Parameters of a test that runs nightly; a tuple has several."""
    marks = pytest.mark.nightly
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks) for case in cases]


def tiny_model(folder: Path, architecture: str, layers: int = 4, ffn: int = 56, **fields: Any) -> Path:
    """A few layers, an odd vocabulary, weights large enough that every part of the network shows in the output."""
    variant = {"init_std": 0.2} | VARIANTS[architecture]
    make_tiny_model(
        folder,
        architecture,
        characters=CHARACTERS,
        hidden=32,
        layers=layers,
        heads=4,
        kv_heads=2,
        ffn=ffn,
        max_positions=64,
        perturb=True,
        seed=3,
        **variant | {"fields": variant.get("fields", {}) | fields},
    )
    return folder


def tiny_model_with_multi_token_layer(folder: Path, architecture: str, layers: int = 2, **options: Any) -> Path:
    """A model with a layer of multi-token prediction: the last layer of one with a layer more, which is in `layers`.

    Qwen3-Next and Qwen3.5 have other names for it, and no copies of embedding and output layer.
    """
    if is_qwen := architecture in LINEAR:
        options["layer_types"] = ["linear_attention"] * (layers - 1) + ["full_attention"] * 2
    source = tiny_model(folder / "layers", architecture, layers + 1, **options)
    whole = Path(shutil.copytree(source, folder / "whole"))
    config, tensors = json.loads((whole / "config.json").read_text()), load_file(whole / "model.safetensors")
    hidden, prefix = config["hidden_size"], f"model.layers.{layers}."
    generator = torch.Generator().manual_seed(1)
    if is_qwen:
        changed = {"layer_types": config["layer_types"][:layers], "mtp_num_hidden_layers": 1}
        tensors = {name.replace(prefix, "mtp.layers.0."): tensor for name, tensor in tensors.items()}
        prefix, norms, one = "mtp.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"), 0
    else:
        changed, one = {"num_nextn_predict_layers": 1}, 1
        norms = ("enorm", "hnorm", "shared_head.norm")
        tensors[prefix + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[prefix + "shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    for name in norms:
        tensors[f"{prefix}{name}.weight"] = one + 0.1 * torch.randn(hidden, generator=generator)
    projection = "fc" if is_qwen else "eh_proj"
    tensors[f"{prefix}{projection}.weight"] = 0.2 * torch.randn(hidden, 2 * hidden, generator=generator)
    (whole / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers} | changed))
    save_file(tensors, whole / "model.safetensors", {"format": "pt"})
    return whole


@contextmanager
def uninitialized_memory_is_nan() -> Iterator[None]:
    """Otherwise it may contain the right weights: those of a model that this process had before."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def unstacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a checkpoint as the weight table has them: gpt-oss's experts one by one, matrices (out, in)."""
    result = {}
    for name, tensor in tensors.items():
        prefix, found, part = name.rpartition(".experts.")
        if not found or not part.startswith(("gate_up_proj", "down_proj")):
            result[name] = tensor
            continue
        for expert, values in enumerate(tensor):
            result[f"{prefix}.experts.{expert}.{part}"] = values.mT if values.dim() == 2 else values
    return result


@cache
def oracle(folder: Path) -> torch.nn.Module:
    """The model as `transformers` runs it."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def random_rows(count: int, vocab: int, longest: int = 20, seed: int = 0) -> Batch:
    """Rows of 3 to `longest` tokens and what a GRPO update needs.

    Token 0, the padding, does not occur: `transformers` keeps its embedding at zero and gives it no gradient.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, longest + 1, (count,), generator=generator)
    total = int(lengths.sum())
    batch = Batch(lengths, {"tokens": torch.randint(1, vocab, (total,), generator=generator)})
    batch["sample_id"] = torch.arange(count) * 7 % 1009
    batch["prompt_length"] = torch.randint(1, 3, (count,), generator=generator)
    batch["loss_mask"] = batch.positions >= batch.expand_to_tokens(batch["prompt_length"])
    batch["advantages"] = batch.expand_to_tokens(torch.randn(count, generator=generator))
    batch["noise"] = torch.randn(total, generator=generator) * 0.3
    return batch


def rows_for(model: Path, count: int = 9) -> Batch:
    """The same random rows of a model's vocabulary on every rank, with candidates."""
    vocab = read_config(model).vocab
    return with_candidates(random_rows(count, vocab), vocab)


def with_candidates(batch: Batch, vocab: int, seed: int = 0) -> Batch:
    """Adds candidates of half of the tokens under the loss mask, the tokens among them."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, vocab // 2, (batch.total_tokens,), generator=generator, dtype=torch.int32)
    sizes *= batch["loss_mask"] & (torch.rand(batch.total_tokens, generator=generator) < 0.5)
    orders = [torch.randperm(vocab, generator=generator, dtype=torch.int32) for _ in range(batch.total_tokens)]
    own = zip(orders, batch["tokens"].tolist(), sizes.tolist(), strict=True)
    batch["support_sizes"] = sizes
    batch["support_ids"] = torch.cat([torch.cat([ids.new_tensor([t]), ids[ids != t]])[:size] for ids, t, size in own])
    return batch


def rows_of_rank(batch: Batch) -> Batch:
    """Every n-th row of a batch, for this rank of n."""
    return batch.select(range(dist.get_rank(), len(batch), dist.get_world_size()))


def oracle_outputs(model: torch.nn.Module, batch: Batch, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of every token given those before it, as token columns, row by row, with gradients.

    Where the batch has candidates, of the distributions over them.
    """
    logprobs, entropies = [], []
    sizes = batch["support_sizes"] if "support_sizes" in batch else torch.zeros(batch.total_tokens, dtype=torch.int32)
    ids = batch["support_ids"].long().split(sizes.tolist()) if "support_sizes" in batch else ()
    for row in range(len(batch)):
        tokens, limits = batch.row("tokens", row), sizes.split(batch.lengths.tolist())[row]
        logits = (model(tokens[None]).logits[0].float() / temperature)[:-1]
        allowed = torch.ones_like(logits, dtype=torch.bool)
        for place in limits[1:].nonzero().flatten().tolist():
            allowed[place] = False
            allowed[place, ids[int(batch.offsets[row]) + place + 1]] = True
        log_p = torch.where(allowed, logits, -torch.inf).log_softmax(-1)
        logprobs.append(torch.cat([torch.zeros(1), log_p.gather(1, tokens[1:, None]).squeeze(1)]))
        terms = torch.where(allowed, log_p.exp() * torch.where(allowed, log_p, 0.0), 0.0)
        entropies.append(torch.cat([torch.zeros(1), -terms.sum(-1)]))
    return torch.cat(logprobs), torch.cat(entropies)


@cache
def vision_model(architecture: str, hidden: int = 64, seed: int = 3) -> Path:
    """A directory of a tiny vision-language model with its processor, made once a session."""
    folder = Path(mkdtemp(prefix="verl_mg_vision_")) / architecture
    # An odd vocabulary, and weights large enough that images show in the output.
    options = {"characters": CHARACTERS, "init_std": 0.2, "perturb": True}
    return make_tiny_vision_model(folder, architecture, hidden=hidden, seed=seed, **options)


def published_mixture(folder: Path) -> Path:
    """A tiny Qwen3-VL mixture as those are published: the files stack the experts' matrices, transposed."""
    shutil.copytree(vision_model("qwen3_vl_moe"), folder)
    tensors = load_file(folder / "model.safetensors")
    transposed = {name: t.mT.contiguous() if ".experts." in name else t for name, t in tensors.items()}
    save_file(transposed, folder / "model.safetensors", {"format": "pt"})
    return folder


def noise_image(width: int, height: int, seed: int) -> Image:
    """A PNG file of random pixels."""
    pixels = torch.randint(256, (height, width, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    file = BytesIO()
    PIL.Image.fromarray(pixels.numpy()).save(file, "PNG")
    return Image(file.getvalue())
