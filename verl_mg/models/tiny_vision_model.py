"""Tiny random vision-language models in the Hugging Face layout, with their processors."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from verl_mg.errors import UserError
from verl_mg.models.attention_config import LAYER_TYPES
from verl_mg.models.tiny_model import (
    character_tokenizer,
    common_fields,
    linear_attention_fields,
    mixture_fields,
    perturb_vectors,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, ProcessorMixin

# Side of a patch of the Qwen models in pixels, which SGLang requires, and patches along a side of the square that
# becomes one token.
PATCH, MERGE = 14, 2
GEMMA_PATCH, GEMMA_SIDE = 4, 16  # side of a patch of Gemma 3, and side to which its images are scaled, in pixels
GEMMA_TOKENS = (GEMMA_SIDE // GEMMA_PATCH // MERGE) ** 2  # tokens of an image of Gemma 3
QWEN_WORDS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
GEMMA_WORDS = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
ARCHITECTURES = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "gemma3", "qwen3_5", "qwen3_5_moe")
# Experts of a mixture, less wide than a feed-forward layer.
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
LINEAR = ("qwen3_5", "qwen3_5_moe")  # architectures with linear attention in every other layer

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<' + message['role'] + '>' -}}
{%- if message['content'] is string -%}{{- message['content'] -}}
{%- else -%}{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}{{- 'IMAGE' -}}{%- else -%}{{- part['text'] -}}{%- endif -%}
{%- endfor -%}{%- endif -%}
{%- if message['role'] == 'assistant' -%}{{- eos_token -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<assistant>' -}}{%- endif -%}"""


def make_tiny_vision_model(
    folder: str | Path,
    architecture: str,
    *,
    characters: str = string.printable,
    words: Sequence[str] = (),
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    ffn: int = 128,
    vision_hidden: int = 32,
    vision_layers: int = 2,
    tie_embeddings: bool = False,
    max_positions: int = 1024,
    init_std: float = 0.02,
    perturb: bool = False,
    seed: int = 0,
) -> Path:
    """Writes a randomly initialised vision-language model, its tokenizer and its processor into a folder.

    A square of 28 x 28 pixels is one token of the Qwen models; of Gemma 3, which scales images to 16 x 16 pixels, each
    image is 4 tokens. Every other layer of Qwen3.5 has linear attention; its mixture has 4 experts, half as wide as
    `ffn`, of which 2 process a token. The same arguments give the same bytes.
    """
    from transformers import AutoConfig, AutoModelForImageTextToText

    if architecture not in ARCHITECTURES:
        raise UserError(f"unknown architecture '{architecture}'. Choose from {', '.join(ARCHITECTURES)}.")
    gemma = architecture == "gemma3"
    image = GEMMA_WORDS["boi_token"] if gemma else "".join(QWEN_WORDS[i] for i in (0, 2, 1))
    special = tuple(GEMMA_WORDS.values()) if gemma else QWEN_WORDS
    template = CHAT_TEMPLATE.replace("IMAGE", image)
    tokenizer = character_tokenizer(characters, (*special, *words), template, named=GEMMA_WORDS if gemma else {})
    ids = {word: int(tokenizer.convert_tokens_to_ids(word)) for word in special}
    text = common_fields(tokenizer, hidden, ffn, layers, heads, max_positions, init_std)
    text |= {"num_key_value_heads": kv_heads, "head_dim": hidden // heads}
    if architecture in LINEAR:
        kinds = [LAYER_TYPES[layer % 2] for layer in range(layers)]
        text |= linear_attention_fields(heads, text["head_dim"] // 2)
        text |= {"layer_types": kinds, "full_attention_interval": 2}  # SGLang reads the latter
        text |= mixture_fields(f"{architecture}_text", 4, ffn // 2)
    fields = _gemma(text, ids) if gemma else _qwen(architecture, text, ids, tie_embeddings)
    fields["vision_config"] |= _vision(architecture, vision_hidden, vision_layers, hidden, init_std)
    config = AutoConfig.for_model(architecture, initializer_range=init_std, **fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.dim() > 1 and not parameter.any():  # Gemma's projection of features would hide the image
                torch.nn.init.normal_(parameter, std=init_std)
        if perturb:
            perturb_vectors(model)
    model.save_pretrained(folder)
    _processor(architecture, tokenizer).save_pretrained(folder)
    return Path(folder)


def _qwen(architecture: str, text: dict[str, Any], ids: Mapping[str, int], tied: bool) -> dict[str, Any]:
    half = text["head_dim"] // (8 if architecture in LINEAR else 2)
    sections = [half - 2 * (half // 3), half // 3, half // 3]
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections}
    if architecture in LINEAR:
        rope["partial_rotary_factor"] = 0.25
    if architecture != "qwen2_5_vl":
        rope["mrope_interleaved"] = True
    if architecture == "qwen3_vl_moe":
        text |= EXPERTS
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    return {
        "text_config": text | {"rope_parameters": rope, "tie_word_embeddings": tied},
        "vision_config": {"patch_size": PATCH, "spatial_merge_size": MERGE},
        "tie_word_embeddings": tied,
        **dict(zip(names, (ids[word] for word in QWEN_WORDS), strict=True)),
    }


def _gemma(text: dict[str, Any], ids: Mapping[str, int]) -> dict[str, Any]:
    return {
        "text_config": text | {"sliding_window": 8, "query_pre_attn_scalar": text["head_dim"]},
        "vision_config": {"model_type": "siglip_vision_model"},
        "mm_tokens_per_image": GEMMA_TOKENS,
        "boi_token_index": ids[GEMMA_WORDS["boi_token"]],
        "eoi_token_index": ids[GEMMA_WORDS["eoi_token"]],
        "image_token_index": ids[GEMMA_WORDS["image_token"]],
        "eos_token_id": text["eos_token_id"],
    }


def _vision(architecture: str, width: int, layers: int, hidden: int, init_std: float) -> dict[str, Any]:
    if architecture == "gemma3":
        sizes = {"hidden_size": width, "intermediate_size": 2 * width, "patch_size": GEMMA_PATCH}
        return sizes | {
            "image_size": GEMMA_SIDE,
            "num_hidden_layers": layers,
            "num_attention_heads": 2,
            "vision_use_head": False,
        }
    common: dict[str, Any] = {"depth": layers, "hidden_size": width, "intermediate_size": 2 * width, "num_heads": 2}
    common |= {"out_hidden_size": hidden, "initializer_range": init_std}
    if architecture == "qwen2_5_vl":
        return common | {"window_size": PATCH * MERGE * 2, "fullatt_block_indexes": [layers - 1]}
    common["num_position_embeddings"] = 64
    return common | {"deepstack_visual_indexes": [] if architecture in LINEAR else [0]}


def _processor(architecture: str, tokenizer: PreTrainedTokenizerFast) -> ProcessorMixin:
    import transformers

    template = tokenizer.chat_template
    if architecture == "gemma3":
        scaling = transformers.Gemma3ImageProcessor(size={"height": GEMMA_SIDE, "width": GEMMA_SIDE})
        return transformers.Gemma3Processor(scaling, tokenizer, chat_template=template, image_seq_length=GEMMA_TOKENS)
    size = {"shortest_edge": (PATCH * MERGE) ** 2, "longest_edge": 1024**2}
    images = transformers.Qwen2VLImageProcessor(size=size, patch_size=PATCH, merge_size=MERGE)
    if architecture == "qwen2_5_vl":
        videos: Any = transformers.Qwen2VLVideoProcessor(size=size, patch_size=PATCH, merge_size=MERGE)
        return transformers.Qwen2_5_VLProcessor(images, tokenizer, videos, chat_template=template)
    videos = transformers.Qwen3VLVideoProcessor(size=size, patch_size=PATCH, merge_size=MERGE)
    return transformers.Qwen3VLProcessor(images, tokenizer, videos, chat_template=template)
