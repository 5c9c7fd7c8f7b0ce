"""Module of `transformers` for a model directory without its weights, its sizes, and the tokenizer."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import lru_cache
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_mg.errors import UserError, one_line
from verl_mg.lazy_import import lazy_import
from verl_mg.models.hf_config import ExpertsConfig, HFConfig, read_config, read_json, weight_map
from verl_mg.models.hf_families import SAME_AS

if TYPE_CHECKING:
    import safetensors
    import torch
    import transformers
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
else:
    safetensors = lazy_import("safetensors")
    torch = lazy_import("torch")
    transformers = lazy_import("transformers")

# A vocabulary by itself, as Kimi-K2 and Moonlight have it, and a whole tokenizer.
RANKS_FILE, WHOLE_FILE = "tiktoken.model", "tokenizer.json"
# Names of fields that configurations use for the same size, the more common ones first.
COUNT_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_OF_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts")
WIDTH_OF_EXPERT = ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size")
SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
Shapes = dict[str, tuple[int, ...]]
BLOCKS, SCALES = "_blocks", "_scales"  # ends of the names of the two tensors that are one in MXFP4
ELEMENTS_OF_BYTE = 2  # elements of a byte of MXFP4


def read_module_config(model: str | Path) -> PretrainedConfig:
    """Reads the config.json of a Hugging Face directory by `transformers`; code in the directory is not run."""
    path = Path(model) / "config.json"
    if not path.exists():
        raise UserError(f"{path}: missing. Set model.path or --model to a Hugging Face directory.")
    with _as_user_error(path):
        raw = read_json(path)
        if kind := SAME_AS.get(raw.get("model_type")):  # transformers does not know the name, and would run its code
            raw.pop("auto_map", None)
            return transformers.CONFIG_MAPPING[kind].from_dict(raw | {"model_type": kind})
        state = path.stat()
        # A copy, which modules change.
        return deepcopy(_module_config(Path(model), state.st_mtime_ns, state.st_size, state.st_ino))


@lru_cache(maxsize=8)  # tokenizer, stop tokens, rotary frequencies and the engine hf read it
def _module_config(model: Path, *state: int) -> PretrainedConfig:
    return transformers.AutoConfig.from_pretrained(model, local_files_only=True, trust_remote_code=False)


def has_images(config: PretrainedConfig) -> bool:
    """Returns whether a model takes images besides text."""
    return getattr(config, "vision_config", None) is not None


def module_class(config: PretrainedConfig) -> Any:
    """Returns the class of `transformers` that builds the language model, with its vision tower where it has one."""
    with_images = has_images(config) and type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return transformers.AutoModelForImageTextToText if with_images else transformers.AutoModelForCausalLM


def takes(module: nn.Module, argument: str) -> bool:
    """Returns whether a module's `forward` has an argument of a name."""
    parameters = signature(module.forward).parameters
    return argument in parameters or any(each.kind is Parameter.VAR_KEYWORD for each in parameters.values())


def meta_module(config: PretrainedConfig, where: str | Path, dtype: torch.dtype | str = "bfloat16") -> PreTrainedModel:
    """Returns the module on the device "meta", where it has shapes but no memory."""
    with _as_user_error(Path(where) / "config.json"), torch.device("meta"):
        module: PreTrainedModel = module_class(config).from_config(config, dtype=dtype, trust_remote_code=False)
    return module


@contextmanager
def _as_user_error(path: Path) -> Iterator[None]:
    """Turns the exceptions of a library that cannot load a model into UserErrors of one line."""
    try:
        yield
    except Exception as error:
        raise UserError(
            f"{path}: transformers {transformers.__version__} cannot load it ({one_line(error)}). "
            "Use a model that it supports without further code."
        ) from error


def read_tokenizer(model_dir: Path) -> PreTrainedTokenizerBase:
    """Reads the tokenizer and the chat template of a Hugging Face directory."""
    # `transformers` has only the vocabulary then, and splits texts by a general pattern: the model's own is in code.
    if (model_dir / RANKS_FILE).exists() and not (model_dir / WHOLE_FILE).exists():
        warnings.warn(
            f"{model_dir / RANKS_FILE}: read with a general pattern for splitting texts, since the model's own is in "
            f"code that is not run: some texts get other tokens than in pretraining. Add a {WHOLE_FILE}.",
            stacklevel=2,
        )
    config = read_module_config(model_dir)
    try:
        tokenizer: PreTrainedTokenizerBase = transformers.AutoTokenizer.from_pretrained(
            model_dir, config=config, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # transformers raises many kinds for a broken folder
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{model_dir}: no readable tokenizer ({reason}). Add {WHOLE_FILE} to it.") from error
    if len(tokenizer) <= len(tokenizer.all_special_ids):  # what transformers makes of a folder without one
        raise UserError(f"{model_dir}: no tokenizer. Add {WHOLE_FILE} to it.")
    return tokenizer


def read_any_config(model_dir: str | Path) -> HFConfig:
    """Reads the sizes of a model directory: of a family with a weight table, or of any model of `transformers`."""
    try:
        return read_config(model_dir)
    except UserError:  # of another family, or a variant that only `transformers` has
        config = read_module_config(model_dir)
    layers = frozenset(range(getattr(config.get_text_config(decoder=True), "num_hidden_layers", 0)))
    return module_config(config, model_dir, bool(getattr(config, "tie_word_embeddings", False)), layers)


def module_config(config: PretrainedConfig, where: str | Path, tied: bool, mixtures: frozenset[int]) -> HFConfig:
    """Returns the sizes of a language model, of its text part where it has others."""
    text = text_fields(config)

    def size(name: str) -> int:
        value = text.get(name)
        if not isinstance(value, int):
            raise UserError(
                f"{Path(where) / 'config.json'}: {name} is {value!r} in the configuration of "
                f"{config.model_type!r}, not a number. Use a language model."
            )
        return value

    # A family whose layers have a state only has no heads of attention.
    hidden, heads = size("hidden_size"), text.get("num_attention_heads") or 1
    if not isinstance(heads, int):
        size("num_attention_heads")
    head_dim = text.get("head_dim") or hidden // heads
    kv_heads = text.get("num_key_value_heads")
    return HFConfig(
        architecture=config.model_type,
        layers=size("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads if isinstance(kv_heads, int) else heads,
        head_dim=head_dim,
        rotary_dim=int(head_dim * (text.get("partial_rotary_factor") or 1.0)),
        ffn=_first(text, ("intermediate_size", "ffn_dim", "n_inner")) or 4 * hidden,
        vocab=size("vocab_size"),
        tied=tied,
        qkv_bias=False,
        qk_norm=False,
        norm_eps=text.get("rms_norm_eps") or text.get("layer_norm_eps") or 1e-6,
        max_positions=_first(text, ("max_position_embeddings", "n_positions")) or 2048,
        attention_scale=1 / math.sqrt(head_dim),
        experts=_experts(text, mixtures),
    )


def text_fields(config: PretrainedConfig) -> dict[str, Any]:
    """Returns the fields of a configuration's text part by the names that most families give them.

    A field that differs by layer has the value that most layers have: as an attribute it has none.
    """
    text = config.get_text_config(decoder=True)
    fields: dict[str, Any] = text.to_dict()
    fields |= {usual: fields[name] for usual, name in text.attribute_map.items() if name in fields}
    # Some families compute a size from other fields.
    return fields | {name: getattr(text, name, None) for name in SIZES if fields.get(name) is None}


def _experts(text: dict[str, Any], mixtures: frozenset[int]) -> ExpertsConfig | None:
    count, top_k, width = (_first(text, names) for names in (COUNT_OF_EXPERTS, EXPERTS_OF_TOKEN, WIDTH_OF_EXPERT))
    if not (count and top_k and width and mixtures):
        return None
    shared = text.get("shared_expert_intermediate_size")
    shared = shared or width * (_first(text, ("n_shared_experts", "moe_num_shared_experts")) or 0)
    return ExpertsConfig(
        count=count, ffn=width, top_k=top_k, shared_ffn=shared, router_bias=False, normalized=False, layers=mixtures
    )


def _first(text: dict[str, Any], names: tuple[str, ...]) -> int | None:
    # By type: a field may be None, or a list with a value for each layer.
    return next((value for name in names if isinstance(value := text.get(name), int)), None)


def checkpoint_shapes(model_dir: str | Path, module: PreTrainedModel | None = None) -> Shapes:
    """Returns names and shapes of the checkpoint's tensors, sorted; the module's where no safetensors file exists."""
    model_dir = Path(model_dir)
    shapes: Shapes = {}
    for file in _opened(model_dir):
        shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    # Tensors in MXFP4 have the name and shape that they have after dequantization.
    shapes = _unpacked(shapes)
    if not shapes:
        shapes = _saved_shapes(module if module is not None else meta_module(read_module_config(model_dir), model_dir))
    return dict(sorted(shapes.items()))


def stored_dtypes(model_dir: Path, names: frozenset[str]) -> dict[str, torch.dtype]:
    """Returns the dtypes in which the files of a directory have tensors, of those that they have."""
    dtypes: dict[str, torch.dtype] = {}
    for file in _opened(model_dir) if names else ():
        for name in names.intersection(file.keys()):
            part = file.get_slice(name)
            dtypes[name] = (part[:0] if part.get_shape() else part[()]).dtype  # without reading the values
    return dtypes


def _opened(model_dir: Path) -> Iterator[Any]:
    """Yields each weight file of a directory, opened; UserError for one that is not readable."""
    files = weight_map(model_dir)
    paths = model_dir.glob("*.safetensors") if files is None else (model_dir / name for name in set(files.values()))
    for path in sorted(paths):
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                yield file
        except (OSError, safetensors.SafetensorError) as error:
            raise UserError(f"{path}: not a readable safetensors file ({error}). Download the model again.") from None


def _unpacked(shapes: Shapes) -> Shapes:
    """Replaces blocks (experts, rows, n, bytes) of MXFP4 and their scales by (experts, columns, rows)."""
    result = dict(shapes)
    for name, shape in shapes.items():
        stack = name.removesuffix(BLOCKS)
        if stack != name and len(shape) == 4 and stack + SCALES in shapes:
            del result[name], result[stack + SCALES]
            result[stack] = (shape[0], shape[2] * shape[3] * ELEMENTS_OF_BYTE, shape[1])
    return result


def _saved_shapes(module: PreTrainedModel) -> Shapes:
    """Returns the tensors that `save_pretrained` would write: it does the same to the state dict."""
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    kept = remove_tied_weights_from_state_dict(module.state_dict(), module)
    return {name: tuple(tensor.shape) for name, tensor in revert_weight_conversion(module, kept).items()}
