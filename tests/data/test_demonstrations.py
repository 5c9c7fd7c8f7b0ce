"""A demonstration is prompt, answer, end; the length says where the answer begins."""

import pytest
from transformers import PreTrainedTokenizerFast

from verl_mg.data import Prompt, demonstration
from verl_mg.errors import UserError
from verl_mg.tiny import character_tokenizer


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return character_tokenizer("abc")


def prompt(answer: str | None) -> Prompt:
    return Prompt(4, (6, 7), "ab", answer, {"prompt": "ab", "solution": "c"})


def test_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    tokens, length = demonstration(prompt("ca"), tokenizer, max_tokens=5)
    assert (tokens, length) == ([6, 7, 8, 6, 1], 2)
    assert tokenizer.decode(tokens) == "abca<eos>"


@pytest.mark.parametrize("answer", [None, ""])
def test_no_answer(tokenizer: PreTrainedTokenizerFast, answer: str | None) -> None:
    with pytest.raises(UserError, match=r"data row 5 .*data.answer_field to one of: prompt, solution"):
        demonstration(prompt(answer), tokenizer, max_tokens=5)


def test_too_long(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(UserError, match=r"data row 5 .*6 tokens .* limit is 5"):
        demonstration(prompt("abc"), tokenizer, max_tokens=5)


def test_no_end(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.eos_token = None  # type: ignore[assignment]
    with pytest.raises(UserError, match=r"no eos_token"):
        demonstration(prompt("c"), tokenizer, max_tokens=5)
