"""Tiny random models in the Hugging Face layout, for tests and first runs without a download."""

import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from verl_mg.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
ROLES = ("system", "user", "assistant")

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] not in ['system', 'user', 'assistant'] -%}
{{- raise_exception('unknown role ' + message['role'] + '; write system, user or assistant') -}}
{%- endif -%}
{{- '<' + message['role'] + '>' + message['content'] -}}
{%- if message['role'] == 'assistant' -%}{{- eos_token -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<assistant>' -}}{%- endif -%}"""

# Architecture (the model_type of transformers) -> what its config needs beyond the common fields.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": False, "mlp_bias": False},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {"attention_bias": False, "use_sliding_window": False},
    "qwen3_moe": {"attention_bias": False, "use_sliding_window": False, "norm_topk_prob": True},
    "mixtral": {},
    "deepseek_v2": {"attention_bias": False, "n_group": 1, "topk_group": 1},
    "deepseek_v3": {"attention_bias": False, "n_group": 1, "topk_group": 1},
    "glm4_moe": {"n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0},
    "glm4_moe_lite": {"attention_bias": False, "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0},
    "deepseek_v32": {"attention_bias": False, "n_group": 1, "topk_group": 1},
    "glm_moe_dsa": {"attention_bias": False, "n_group": 1, "topk_group": 1, "indexer_rope_interleave": True},
    "minimax_m2": {
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
    },
    "gemma2": {},
    "qwen3_next": {"attention_bias": False, "norm_topk_prob": True},
    "qwen3_5_text": {"attention_bias": False},
    "qwen3_5_moe_text": {"attention_bias": False},
    "granite": {
        "attention_bias": False,
        "mlp_bias": False,
        "embedding_multiplier": 2.0,
        "attention_multiplier": 0.25,
        "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
    },
    "olmo2": {"attention_bias": False},
    "granitemoe": {"attention_bias": False, "embedding_multiplier": 2.0, "logits_scaling": 2.0},
    "phi3": {},
    "gpt2": {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0},
    "gpt_oss": {},
}
SPARSE = ("deepseek_v32", "glm_moe_dsa")
LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", *SPARSE)
WITH_SHARED_EXPERTS = (*LATENT, "glm4_moe")
# Architectures without dense layers, whose experts have the width of the model's field `intermediate_size`.
WIDE_EXPERTS = ("mixtral", "gpt_oss", "minimax_m2", "granitemoe")
LINEAR = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
COUNT_OF_EXPERTS = {
    **dict.fromkeys(("qwen3_moe", "qwen3_next", "qwen3_5_moe_text"), "num_experts"),
    **dict.fromkeys(WIDE_EXPERTS, "num_local_experts"),
    **dict.fromkeys(WITH_SHARED_EXPERTS, "n_routed_experts"),
}


def character_tokenizer(
    characters: str,
    words: Sequence[str] = (),
    chat_template: str = CHAT_TEMPLATE,
    named: Mapping[str, str] | None = None,
) -> "PreTrainedTokenizerFast":
    """Returns a tokenizer with one token for each character, and a chat template; decoding restores the text exactly.

    Token ids: `<pad>` 0, `<eos>` 1, `<unk>` 2, the role markers `<system>` `<user>` `<assistant>` 3 to 5,
    then the distinct characters in the given order, and after them `words`; a character beyond ASCII adds the bytes
    that it is merged from. Other characters become `<unk>`. `named` are words that the tokenizer has as attributes,
    such as `image_token`, by their names.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # Byte-level BPE, not a word list: AutoTokenizer reads any tokenizer in the directory of a Qwen2 model as that kind.
    spelling = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    markers = [f"<{role}>" for role in ROLES]
    pieces = [PAD, EOS, UNK, *markers]
    merges: list[tuple[str, str]] = []
    for character in dict.fromkeys(characters):
        (spelled, _), *_ = spelling.pre_tokenize_str(character)
        pieces += [*spelled, *(spelled[:end] for end in range(2, len(spelled) + 1))]
        merges += [(spelled[:end], spelled[end]) for end in range(1, len(spelled))]
    vocabulary = {word: i for i, word in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.BPE(vocabulary, list(dict.fromkeys(merges)), unk_token=UNK))
    tokenizer.pre_tokenizer = spelling
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        extra_special_tokens=markers,
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
        model_specific_special_tokens=dict(named or {}),
    )
    fast.add_tokens(list(words))
    return fast


def make_tiny_model(
    folder: str | Path,
    architecture: str,
    *,
    characters: str = string.printable,
    words: Sequence[str] = (),
    chat_template: str = CHAT_TEMPLATE,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    ffn: int = 128,
    experts: int = 4,
    shared_experts: int = 1,
    dense_layers: int = 0,
    q_rank: int = 0,
    tie_embeddings: bool = False,
    rope_scaling: dict[str, Any] | None = None,
    max_positions: int = 1024,
    fields: Mapping[str, Any] | None = None,
    init_std: float = 0.02,
    perturb: bool = False,
    seed: int = 0,
) -> Path:
    """Writes a randomly initialised causal language model and its character tokenizer into a folder.

    The folder then contains config.json, generation_config.json, model.safetensors (float32) and the
    tokenizer's files; the vocabulary is exactly the tokenizer's, unpadded. The same arguments give the
    same bytes. Sizes that follow from others: a head is `hidden // heads` wide; latent attention rotates half as
    many additional elements, compresses keys and values to `hidden // 2`, and has no `kv_heads`; linear attention has
    `heads` value heads and half as many key heads, each half as wide. Of the `experts` 2 process a token; they are half
    as wide as `ffn`, except in `WIDE_EXPERTS`. `perturb` changes norms and biases, see `perturb_vectors`.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    if architecture not in ARCHITECTURES:
        raise UserError(f"unknown architecture '{architecture}'. Choose from {', '.join(ARCHITECTURES)}.")
    if heads % kv_heads or (head_dim is None and hidden % heads):
        raise UserError(
            f"heads={heads} must be a multiple of kv_heads={kv_heads}, and hidden={hidden} of heads "
            "unless head_dim is given"
        )
    tokenizer = character_tokenizer(characters, words, chat_template)
    width = head_dim or hidden // heads
    attention: dict[str, Any] = {"num_key_value_heads": kv_heads, "head_dim": width}
    if architecture in LATENT:
        attention = {"num_key_value_heads": heads, "kv_lora_rank": hidden // 2, "q_lora_rank": q_rank or None}
        attention |= {"qk_nope_head_dim": width, "qk_rope_head_dim": width // 2, "v_head_dim": width}
    if architecture in SPARSE:
        attention |= {"q_lora_rank": q_rank or hidden // 2}
        attention |= {"index_n_heads": 2 * heads, "index_head_dim": width, "index_topk": 8}
    if architecture in LINEAR:
        attention |= linear_attention_fields(heads, width // 2)
    rope = {"rope_type": "default", "rope_theta": 10000.0} | (rope_scaling or {})
    mixture = mixture_fields(architecture, experts, ffn // 2, shared_experts, dense_layers, layers)
    common = common_fields(tokenizer, hidden, ffn, layers, heads, max_positions, init_std)
    common |= {"tie_word_embeddings": tie_embeddings, "rope_parameters": rope}
    given = common | attention | mixture | dict(fields or {})
    config = AutoConfig.for_model(architecture, **ARCHITECTURES[architecture] | given)
    # The caller's generator stays as it is: a test that makes a model draws the same numbers as before.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        if perturb:
            perturb_vectors(model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Path(folder)


def common_fields(
    tokenizer: "PreTrainedTokenizerFast", hidden: int, ffn: int, layers: int, heads: int, positions: int, std: float
) -> dict[str, Any]:
    """Returns the fields of a config.json that every language model has."""
    return {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": positions,
        "initializer_range": std,
    }


def linear_attention_fields(heads: int, width: int) -> dict[str, Any]:
    """Returns the fields of linear attention in a config.json; `heads`: value heads, twice as many as key heads."""
    return {
        "linear_num_key_heads": heads // 2,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": width,
        "linear_value_head_dim": width,
    }


def mixture_fields(
    architecture: str, experts: int, width: int, shared: int = 1, dense_layers: int = 0, layers: int = 0
) -> dict[str, Any]:
    """Returns the fields of a mixture of experts in a config.json; {} for an architecture without."""
    if architecture not in COUNT_OF_EXPERTS:
        return {}
    fields: dict[str, Any] = {COUNT_OF_EXPERTS[architecture]: experts, "num_experts_per_tok": 2}
    if architecture not in WIDE_EXPERTS:
        fields["moe_intermediate_size"] = width
    if architecture in WITH_SHARED_EXPERTS:
        fields |= {"n_shared_experts": shared, "first_k_dense_replace": dense_layers}
    if architecture in LINEAR:
        fields |= {"shared_expert_intermediate_size": width * shared}
    if architecture in ("glm4_moe_lite", *SPARSE):
        fields["mlp_layer_types"] = ["dense"] * dense_layers + ["sparse"] * (layers - dense_layers)
    return fields


CHOICES = 2  # values of a table of integers: every table of things to choose from has two


@torch.no_grad()
def perturb_vectors(model: torch.nn.Module, std: float = 0.05) -> None:
    """Varies what starts at one or zero, so that a comparison of two models covers it: norms, biases and tables."""
    for name, tensor in model.state_dict().items():  # a router's bias is a buffer
        if not tensor.is_floating_point():
            tensor.random_(CHOICES)
        elif tensor.dim() == 1 or name.endswith("_bias"):
            tensor.add_(torch.randn_like(tensor), alpha=std)
        if name.endswith(".A_log"):  # slower decay, so that the state of linear attention lasts for several tokens
            tensor.sub_(3.0)
