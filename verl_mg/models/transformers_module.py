"""Module of `transformers` for a model directory, without its weights."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from verl_mg.errors import UserError
from verl_mg.models.hf_families import SAME_AS

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def read_module_config(model: str | Path) -> PretrainedConfig:
    """Reads the config.json of a Hugging Face directory by `transformers`; code in the directory is not run."""
    from transformers import CONFIG_MAPPING, AutoConfig

    path = Path(model) / "config.json"
    if not path.exists():
        raise UserError(f"{path}: missing. Set model.path or --model to a Hugging Face directory.")
    with _as_user_error(path):
        raw = json.loads(path.read_text(encoding="utf-8"))
        if kind := SAME_AS.get(raw.get("model_type")):  # transformers does not know the name, and would run its code
            raw.pop("auto_map", None)
            return CONFIG_MAPPING[kind].from_dict(raw | {"model_type": kind})
        return AutoConfig.from_pretrained(model, local_files_only=True, trust_remote_code=False)


def has_images(config: PretrainedConfig) -> bool:
    """Returns whether a model takes images besides text."""
    return getattr(config, "vision_config", None) is not None


def module_class(config: PretrainedConfig) -> Any:
    """Returns the class of `transformers` that builds the language model, with its vision tower where it has one."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if has_images(config) else AutoModelForCausalLM


def meta_module(config: PretrainedConfig, where: str | Path, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """Returns the module on the device "meta", where it has shapes but no memory."""
    with _as_user_error(Path(where) / "config.json"), torch.device("meta"):
        module: PreTrainedModel = module_class(config).from_config(config, dtype=dtype, trust_remote_code=False)
    return module


@contextmanager
def _as_user_error(path: Path) -> Iterator[None]:
    """Turns the exceptions of a library that cannot load a model into UserErrors of one line."""
    import transformers

    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"{path}: transformers {transformers.__version__} cannot load it ({type(error).__name__}: "
            f"{reason.removesuffix('.')}). Use a model that it supports without further code."
        ) from error


# A vocabulary by itself, as Kimi-K2 and Moonlight have it, and a whole tokenizer.
RANKS_FILE, WHOLE_FILE = "tiktoken.model", "tokenizer.json"


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
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            model_dir, config=config, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # transformers raises many kinds for a broken folder
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{model_dir}: no readable tokenizer ({reason}). Add {WHOLE_FILE} to it.") from error
    if len(tokenizer) <= len(tokenizer.all_special_ids):  # what transformers makes of a folder without one
        raise UserError(f"{model_dir}: no tokenizer. Add {WHOLE_FILE} to it.")
    return tokenizer
