"""Tokenizer of a model directory; code in the directory is not run."""

from __future__ import annotations

import warnings
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from verl_mg.errors import UserError
from verl_mg.models.transformers_module import read_module_config

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
