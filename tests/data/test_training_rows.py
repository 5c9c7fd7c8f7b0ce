"""Rows of demonstrations and of preference pairs."""

import string
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.helpers.json_lines import write_lines
from tests.helpers.prompts import prompt_set
from verl_mg.data import Prompt, demonstration, demonstrations_batch, pairs_batch, preference
from verl_mg.errors import UserError
from verl_mg.models.tiny_model import character_tokenizer


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return character_tokenizer("abc")


def prompt(answer: str | None) -> Prompt:
    return Prompt(4, (6, 7), "ab", answer, {"prompt": "ab", "solution": "c"})


@pytest.mark.parametrize("answer", [None, ""])
def test_demonstration_without_answer_names_the_fields(tokenizer, answer):
    with pytest.raises(UserError, match=r"data row 5 .*data.answer_field to one of: prompt, solution"):
        demonstration(prompt(answer), tokenizer, max_tokens=5)


def test_demonstration_too_long_names_the_limit(tokenizer):
    with pytest.raises(UserError, match=r"data row 5 .*6 tokens .* limit is 5"):
        demonstration(prompt("abc"), tokenizer, max_tokens=5)


def test_demonstration_tokenizer_without_eos_is_an_error(tokenizer):
    tokenizer.eos_token = None  # type: ignore[assignment]
    with pytest.raises(UserError, match=r"no eos_token"):
        demonstration(prompt("c"), tokenizer, max_tokens=5)


def test_demonstrations_batch_loss_mask_covers_the_answers(tokenizer):
    prompts = [Prompt(i, (6,) * length, "a" * length, "b" * i, {}) for i, length in ((4, 2), (1, 1), (7, 3))]
    whole = demonstrations_batch(prompts, tokenizer, 20, first_id=10)
    assert [tokenizer.decode(whole.row("tokens", i)) for i in range(3)] == ["aabbbb<eos>", "ab<eos>", "aaabbbbbbb<eos>"]
    learned = [tokenizer.decode(whole.row("tokens", i)[whole.row("loss_mask", i)]) for i in range(3)]
    assert learned == ["bbbb<eos>", "b<eos>", "bbbbbbb<eos>"]
    assert (whole["prompt_id"].tolist(), whole["sample_id"].tolist()) == ([4, 1, 7], [10, 11, 12])
    assert whole["prompt_length"].tolist() == [2, 1, 3]


def test_demonstrations_batch_ranks_have_disjoint_rows(tokenizer):
    prompts = [Prompt(i, (6,), "a", "b" * (i + 1), {}) for i in range(3)]
    shares = [demonstrations_batch(prompts, tokenizer, 20, 10, rank, 4) for rank in range(4)]
    assert [share["sample_id"].tolist() for share in shares] == [[10], [11], [12], []]
    assert [share.total_tokens for share in shares] == [3, 4, 5, 0]


USER = {"role": "user", "content": "1+1"}
GOOD, BAD = {"role": "assistant", "content": "2"}, {"role": "assistant", "content": "11"}


@pytest.fixture(scope="module")
def printable() -> PreTrainedTokenizerFast:
    return character_tokenizer(string.printable)


def read(folder: Path, printable: PreTrainedTokenizerFast, *records: dict[str, Any], **options: Any) -> list[Prompt]:
    path = write_lines(folder / "pairs.jsonl", records)
    return list(prompt_set(path, printable, max_prompt_tokens=100, **options))


@pytest.mark.parametrize(
    ("record", "options"),
    [
        ({"prompt": "1+1", "chosen": "2", "rejected": "11"}, {"chat_template": True}),
        ({"prompt": [USER], "chosen": "2", "rejected": "11"}, {}),
        ({"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}, {}),
        ({"prompt": "1+1", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, {"chat_template": True}),
        ({"chosen": [USER, GOOD], "rejected": [USER, BAD]}, {}),
        ({"prompt": "no", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, {"prompt_field": "chosen"}),
        ({"prompt": None, "chosen": [USER, GOOD], "rejected": [USER, BAD]}, {}),
    ],
)
def test_preference_every_form_equals_the_rendered_conversation(tmp_path, printable, record, options):
    (prompt,) = read(tmp_path, printable, record, **options)
    chosen, rejected, length = preference(prompt, printable, 20)
    for tokens, answer in ((chosen, GOOD), (rejected, BAD)):
        whole = printable.apply_chat_template([USER, answer], return_dict=True)["input_ids"]
        assert tokens == whole
    assert printable.decode(chosen[length:]) == "2<eos>"
    assert printable.decode(rejected[length:]) == "11<eos>"
    assert tuple(chosen[:length]) == tuple(rejected[:length]) == prompt.tokens


def test_preference_plain_text_and_named_fields_are_read(tmp_path, printable):
    (prompt,) = read(tmp_path, printable, {"q": "ab", "yes": "c", "no": "de"}, prompt_field="q")
    chosen, rejected, length = preference(prompt, printable, 5, "yes", "no")
    assert (printable.decode(chosen), printable.decode(rejected), length) == ("abc<eos>", "abde<eos>", 2)


def test_preference_conversations_answer_the_last_turn(tmp_path, printable):
    turns = [{"role": "system", "content": "s"}, USER, GOOD, {"role": "user", "content": "+1"}]
    (prompt,) = read(tmp_path, printable, {"chosen": [*turns, GOOD], "rejected": [*turns, BAD]})
    assert prompt.text == "<system>s<user>1+1<assistant>2<eos><user>+1<assistant>"
    chosen, _, length = preference(prompt, printable, 50)
    assert printable.decode(chosen[length:]) == "2<eos>"


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"chosen": "a"}, r"no field 'rejected'. Set data.rejected_field to one of: chosen, prompt"),
        ({"chosen": "a", "rejected": ""}, "'rejected' is not an answer: ''. Write a string, or messages"),
        ({"chosen": "a", "rejected": 3}, "'rejected' is not an answer: 3"),
        ({"chosen": [USER], "rejected": [BAD]}, "'chosen' is not an answer"),
        ({"chosen": [USER, GOOD], "rejected": [BAD]}, "differ before their last message"),
        ({"chosen": [USER, GOOD], "rejected": [USER, BAD]}, r"longer conversation .*'1\+1'.*data.prompt_field=chosen"),
        ({"chosen": "a" * 9, "rejected": "b"}, "13 tokens with its answer, and the limit is 12"),
    ],
)
def test_preference_bad_pair_is_named(tmp_path, printable, record, reason):
    good = {"prompt": "p", "chosen": "a", "rejected": "b"}
    first, second = read(tmp_path, printable, good, {"prompt": "abc"} | record)
    preference(first, printable, 12)
    with pytest.raises(UserError, match=reason) as caught:
        preference(second, printable, 12)
    assert str(caught.value).startswith(f"{tmp_path}/pairs.jsonl:2 ")


def test_preference_template_may_strip_messages(printable):
    requested = {"role": "user", "content": " 1+1\n"}
    record = {"chosen": [requested, GOOD], "rejected": [requested, BAD]}
    _, _, length = preference(Prompt(0, (7, 8), "<user>1+1<assistant>", None, record), printable, 9)
    assert length == 2


def test_prompt_of_different_conversations_are_refused(tmp_path, printable):
    other = {"role": "user", "content": "1+2"}
    with pytest.raises(UserError, match=r"pairs\.jsonl:1: 'chosen' and 'rejected' differ before their last"):
        read(tmp_path, printable, {"chosen": [USER, GOOD], "rejected": [other, BAD]})
    with pytest.raises(UserError, match=r"pairs\.jsonl:1: no field 'prompt'"):
        read(tmp_path, printable, {"chosen": [GOOD], "rejected": [BAD]})


def test_pairs_batch_chosen_row_precedes_rejected_row(tmp_path, printable):
    records = [{"prompt": "ab"[:n], "chosen": "c" * n, "rejected": "de"} for n in (1, 2)]
    prompts = read(tmp_path, printable, *records)
    batch = pairs_batch(prompts[::-1], printable, 10, first_pair=5)
    texts = [printable.decode(batch.row("tokens", i)) for i in range(4)]
    assert texts == ["abcc<eos>", "abde<eos>", "ac<eos>", "ade<eos>"]
    learned = [printable.decode(batch.row("tokens", i)[batch.row("loss_mask", i)]) for i in range(4)]
    assert learned == ["cc<eos>", "de<eos>", "c<eos>", "de<eos>"]
    columns = {name: batch[name].tolist() for name in ("sample_id", "pair", "group", "prompt_id", "prompt_length")}
    assert columns == {
        "sample_id": [10, 11, 12, 13],
        "pair": [5, 5, 6, 6],
        "group": [5, 5, 6, 6],
        "prompt_id": [1, 1, 0, 0],
        "prompt_length": [2, 2, 1, 1],
    }
    assert batch["chosen"].tolist() == [True, False, True, False]


def test_pairs_batch_ranks_have_disjoint_pairs(tmp_path, printable):
    records = [{"prompt": "p" * (i + 1), "chosen": "c", "rejected": "de"} for i in range(3)]
    prompts = read(tmp_path, printable, *records)
    whole = pairs_batch(prompts, printable, 10, 0)
    shares = [pairs_batch(prompts, printable, 10, 0, rank=rank, ranks=4) for rank in range(4)]
    assert [share["pair"].tolist() for share in shares] == [[0, 0], [1, 1], [2, 2], []]
    kinds = [{name: share.kind(name) for name in share.names()} for share in (whole, *shares)]
    assert all(kind == kinds[0] for kind in kinds)
    joined = whole.concat(shares)
    assert joined["tokens"].tolist() == whole["tokens"].tolist()
