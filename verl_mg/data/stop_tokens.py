"""The tokens that end a response: every source that a model folder has, for all engines alike.

config.json 2, generation_config.json [2, 7], tokenizer 2, chat template "... answer<turn_end>\\n" with <turn_end> = 7:
StopTokens({2: ("config.json", "generation_config.json", "tokenizer"), 7: ("generation_config.json", "chat template")})
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_mg.data.rendering import common_length, render_conversation
from verl_mg.errors import UserError
from verl_mg.models.transformers_module import read_module_config

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENERATION_CONFIG = "generation_config.json"
# Tokens at which SGLang ends wherever it has a tokenizer, even where no file of the model names them.
NAMED = ("<|eom_id|>", "<|content_model_end_sampling|>", "<|ifm|im_end|>")
# Fields that change how tokens are drawn; the keys of `rollout` decide instead, for all engines.
DRAWING = ("do_sample", "temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty", "num_beams")
_USER = {"role": "user", "content": "a"}
_ANSWERS = ({"role": "assistant", "content": "b"}, {"role": "assistant", "content": "c"})
_CALL = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {"a": "b"}}}
_CALLING = {"role": "assistant", "content": "", "tool_calls": [_CALL]}


@dataclass(frozen=True)
class StopTokens:
    """Tokens that end a response, with the sources that name them."""

    sources: Mapping[int, tuple[str, ...]]
    never_drawn: tuple[int, ...] = ()  # ids that a file names, but the vocabulary does not have
    not_used: Mapping[str, Any] | None = None  # fields of generation_config.json about drawing

    @property
    def ids(self) -> tuple[int, ...]:
        """Returns the token ids in ascending order."""
        return tuple(sorted(self.sources))

    def described(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
        """Returns rows of the table of a start: what ends a response, and what of the model folder is not used."""
        named = [f"{tokenizer.convert_ids_to_tokens(id)} ({', '.join(self.sources[id])})" for id in self.ids]
        rows = {"stop tokens": "; ".join(named) or "none"}
        if self.never_drawn:
            rows["stop tokens"] += f"; not in the vocabulary: {', '.join(map(str, self.never_drawn))}"
        if self.not_used:
            fields = ", ".join(f"{name}={value}" for name, value in self.not_used.items())
            rows[GENERATION_CONFIG] = f"not used: {fields}; the keys of rollout decide"
        return rows


def read_stop_tokens(model_dir: str | Path, tokenizer: PreTrainedTokenizerBase) -> StopTokens:
    """Returns the tokens that end a response of a model; UserError for a generation_config.json that is not valid."""
    # transformers' class, since an engine reads defaults of the class where config.json has no end.
    config, generation = read_module_config(model_dir), _generation_config(Path(model_dir))
    text = config.get_text_config(decoder=True)
    named = [
        ("config.json", [*_ids(getattr(config, "eos_token_id", None)), *_ids(getattr(text, "eos_token_id", None))]),
        (GENERATION_CONFIG, _ids(generation.get("eos_token_id"), str(Path(model_dir) / GENERATION_CONFIG))),
        ("tokenizer", _ids(tokenizer.eos_token_id)),
        ("chat template", list(_ends_of_template(tokenizer))),
        ("name", [id for token, id in tokenizer.get_added_vocab().items() if token in NAMED]),
    ]
    sources: dict[int, tuple[str, ...]] = {}
    for source, ids in named:
        for id in dict.fromkeys(ids):
            sources[id] = (*sources.get(id, ()), source)
    known = {id: of for id, of in sources.items() if 0 <= id < text.vocab_size}
    drawing = {name: generation[name] for name in DRAWING if generation.get(name) is not None}
    return StopTokens(known, tuple(sorted(sources.keys() - known.keys())), drawing)


def end_of_turn(tokens: Sequence[int], start: int, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Returns the position after the special token that ends a turn; white space may follow it. None without one."""
    special = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    last = next((i for i in reversed(range(start, len(tokens))) if tokens[i] in special), None)
    return None if last is None or str(tokenizer.decode(list(tokens[last + 1 :]))).strip() else last + 1


def _ends_of_template(tokenizer: PreTrainedTokenizerBase) -> Iterator[int]:
    """Yields the tokens with which the chat template ends an answer, and a call of a tool."""
    texts: list[str] = []
    for reply in (*_ANSWERS, _CALLING):
        with contextlib.suppress(UserError):  # no template, or one that rejects such a reply
            texts.append(render_conversation([_USER, reply], tokenizer, "", for_reply=False))
    # The header, which may be a special token itself, is what all replies begin with.
    header = texts[0][: common_length(*texts[:2])] if texts else ""
    for text in texts[1:]:
        tokens = tokenizer(text[common_length(header, text) :], add_special_tokens=False)["input_ids"]
        if end := end_of_turn(tokens, 0, tokenizer):
            yield tokens[end - 1]


def _generation_config(model_dir: Path) -> dict[str, Any]:
    path = model_dir / GENERATION_CONFIG
    if not path.exists():
        return {}
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not a readable JSON file ({error}). Download the model again.") from None
    if not isinstance(fields, dict):
        raise UserError(f"{path}: a {type(fields).__name__}, not an object with fields. Download the model again.")
    return fields


def _ids(value: Any, where: str = "config.json") -> list[int]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(id) is not int for id in ids):
        raise UserError(f"{where}: eos_token_id is {value!r}, not a token id or a list of them. Correct it.")
    return ids
