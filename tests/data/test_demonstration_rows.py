"""A demonstration is prompt, answer, end; the length says where the answer begins."""

import pytest
from transformers import PreTrainedTokenizerFast

from verl_mg.data import Prompt, demonstration, demonstrations_batch
from verl_mg.errors import UserError
from verl_mg.models.tiny_model import character_tokenizer


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return character_tokenizer("abc")


def prompt(answer: str | None) -> Prompt:
    return Prompt(4, (6, 7), "ab", answer, {"prompt": "ab", "solution": "c"})


def test_demonstration_tokens_are_prompt_answer_and_end(tokenizer: PreTrainedTokenizerFast) -> None:
    tokens, length = demonstration(prompt("ca"), tokenizer, max_tokens=5)
    assert (tokens, length) == ([6, 7, 8, 6, 1], 2)
    assert tokenizer.decode(tokens) == "abca<eos>"


@pytest.mark.parametrize("answer", [None, ""])
def test_demonstration_without_answer_names_the_fields(tokenizer: PreTrainedTokenizerFast, answer: str | None) -> None:
    with pytest.raises(UserError, match=r"data row 5 .*data.answer_field to one of: prompt, solution"):
        demonstration(prompt(answer), tokenizer, max_tokens=5)


def test_demonstration_too_long_names_the_limit(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(UserError, match=r"data row 5 .*6 tokens .* limit is 5"):
        demonstration(prompt("abc"), tokenizer, max_tokens=5)


def test_demonstration_tokenizer_without_eos_is_an_error(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.eos_token = None  # type: ignore[assignment]
    with pytest.raises(UserError, match=r"no eos_token"):
        demonstration(prompt("c"), tokenizer, max_tokens=5)


def test_demonstrations_batch_loss_mask_covers_the_answers(tokenizer: PreTrainedTokenizerFast) -> None:
    prompts = [Prompt(i, (6,) * length, "a" * length, "b" * i, {}) for i, length in ((4, 2), (1, 1), (7, 3))]
    whole = demonstrations_batch(prompts, tokenizer, 20, first_id=10)
    assert [tokenizer.decode(whole.row("tokens", i)) for i in range(3)] == ["aabbbb<eos>", "ab<eos>", "aaabbbbbbb<eos>"]
    learned = [tokenizer.decode(whole.row("tokens", i)[whole.row("loss_mask", i)]) for i in range(3)]
    assert learned == ["bbbb<eos>", "b<eos>", "bbbbbbb<eos>"]
    assert (whole["prompt_id"].tolist(), whole["sample_id"].tolist()) == ([4, 1, 7], [10, 11, 12])
    assert whole["prompt_length"].tolist() == [2, 1, 3]


def test_demonstrations_batch_ranks_have_disjoint_rows(tokenizer: PreTrainedTokenizerFast) -> None:
    prompts = [Prompt(i, (6,), "a", "b" * (i + 1), {}) for i in range(3)]
    shares = [demonstrations_batch(prompts, tokenizer, 20, 10, rank, 4) for rank in range(4)]
    assert [share["sample_id"].tolist() for share in shares] == [[10], [11], [12], []]
    assert [share.total_tokens for share in shares] == [3, 4, 5, 0]


def test_demonstration_error_names_the_line(tokenizer: PreTrainedTokenizerFast) -> None:
    read = Prompt(4, (6, 7), "ab", None, {"solution": "c"}, place="train.jsonl:9")
    with pytest.raises(UserError, match=r"^train\.jsonl:9 \('ab'\): no answer"):
        demonstration(read, tokenizer, max_tokens=5)
