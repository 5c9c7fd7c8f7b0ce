"""Data of other frameworks is read as it is: fields of prompt and answer, messages with nulls, and what is reported."""

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.helpers.json_lines import data_file
from tests.helpers.prompts import prompt_set
from tests.helpers.published_rows import write_parquet
from verl_mg.data import demonstration, read_records
from verl_mg.errors import UserError
from verl_mg.models.tiny_model import character_tokenizer

TEMPLATE = (
    "{%- for m in messages -%}{%- if 'tool_calls' in m -%}[{{- m.tool_calls | tojson -}}]{%- endif -%}"
    "<{{- m.role -}}>{{- m.content -}}{%- endfor -%}<assistant>"
)
"""Template that sees whether a message has a field, as some models' do, and prints contents that are not text."""
USER = {"role": "user", "content": "1+1="}
ASSISTANT = {"role": "assistant", "content": "2"}
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [USER],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"split": "train", "index": 0, "answer": "1+1=2 #### 2", "question": "1+1="},
    "agent_name": "single_turn_agent",
}
"""Record of verl's examples/data_preprocess/gsm8k.py."""


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = character_tokenizer("".join(map(chr, range(32, 127))))
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def read(path: Path, tokenizer: PreTrainedTokenizerFast, **options: Any) -> tuple[list[tuple[str, str | None]], str]:
    """Texts with answers, and the lines that were reported."""
    reported: list[str] = []
    prompts = prompt_set(path, tokenizer, max_prompt_tokens=500, report=reported.append, **options)
    return [(prompt.text, prompt.answer) for prompt in prompts], "; ".join(reported)


def test_read_prompts_parquet_of_verl_is_read_without_options(tmp_path, tokenizer):
    path = write_parquet(
        tmp_path / "data.parquet", [VERL, VERL | {"prompt": [{"role": "system", "content": "s"}, USER]}]
    )
    read_, reported = read(path, tokenizer)
    assert read_ == [("<user>1+1=<assistant>", "2"), ("<system>s<user>1+1=<assistant>", "2")]
    assert reported == f"{path}: prompts from 'prompt', answers from 'reward_model.ground_truth'"
    assert prompt_set(path, tokenizer, max_prompt_tokens=50)[0].record == VERL


@pytest.mark.parametrize(
    ("truth", "answer"),
    [
        ({"target": ["Ä", "b"]}, '{"target": ["Ä", "b"]}'),
        (["a", "b"], '["a", "b"]'),
        (7, "7"),
        (True, "True"),
        (Decimal("7.50"), "7.50"),
        ("", ""),
    ],
)
def test_read_prompts_ground_truth_of_other_types_is_text(tmp_path, tokenizer, truth, answer):
    path = write_parquet(tmp_path / "data.parquet", [VERL | {"reward_model": {"style": "rule", "ground_truth": truth}}])
    assert read(path, tokenizer)[0] == [("<user>1+1=<assistant>", answer)]


@pytest.mark.parametrize("prompt", ["1+1=", [USER]])
def test_read_prompts_jsonl_of_slime_is_read_without_options(tmp_path, tokenizer, prompt):
    path = data_file(tmp_path, {"prompt": prompt, "label": "2", "metadata": {"rm_type": "math"}}, {"prompt": "x"})
    read_, reported = read(path, tokenizer)
    assert read_ == [("1+1=" if prompt == "1+1=" else "<user>1+1=<assistant>", "2"), ("x", None)]
    assert reported == f"{path}: prompts from 'prompt', answers from 'label'"


def test_read_prompts_parquet_of_verl_without_images_in_its_column_is_read(tmp_path, tokenizer):
    path = write_parquet(tmp_path / "data.parquet", [VERL | {"images": []}, VERL | {"images": None}])
    assert read(path, tokenizer)[0][0][1] == "2"


def test_read_prompts_messages_end_with_their_answer(tmp_path, tokenizer):
    path = data_file(tmp_path, {"messages": [USER, ASSISTANT]}, {"messages": [USER, ASSISTANT, USER]})
    read_, reported = read(path, tokenizer)
    assert read_ == [("<user>1+1=<assistant>", "2"), ("<user>1+1=<assistant>2<user>1+1=<assistant>", None)]
    assert reported == f"{path}: prompts from 'messages', answers from the last assistant message of 'messages'"
    first, second = prompt_set(path, tokenizer, max_prompt_tokens=50)
    tokens, length = demonstration(first, tokenizer, 50)
    assert tokenizer.decode(tokens[length:-1]) == "2"
    with pytest.raises(UserError, match=r":2 .*no answer to learn from"):
        demonstration(second, tokenizer, 50)


def test_read_prompts_messages_with_an_answer_field_keep_it(tmp_path, tokenizer):
    path = data_file(tmp_path, {"messages": [USER, ASSISTANT], "answer": "two"})
    assert read(path, tokenizer) == (
        [("<user>1+1=<assistant>", "two")],
        f"{path}: prompts from 'messages', answers from 'answer'",
    )


def test_read_prompts_usual_fields_take_precedence_silently(tmp_path, tokenizer):
    path = data_file(tmp_path, {"label": "l", "messages": [USER]}, VERL | {"prompt": "p", "answer": "a"})
    with pytest.raises(UserError, match=r":1: no field 'prompt'"):  # found for the file, not for each line
        read(path, tokenizer)
    assert read(data_file(tmp_path, VERL | {"prompt": "p", "answer": "a", "label": "l"}), tokenizer) == (
        [("p", "a")],
        "",
    )


def test_read_prompts_configured_fields_are_never_replaced(tmp_path, tokenizer):
    path = data_file(tmp_path, VERL | {"label": "l", "extra_info.answer": "literal"}, VERL | {"label": "l"})
    for answer_field, answers in (
        ("label", ["l", "l"]),
        ("extra_info.answer", ["literal", "1+1=2 #### 2"]),
        ("extra_info.index", ["0", "0"]),
        ("answer", [None, None]),
    ):
        read_, reported = read(path, tokenizer, answer_field=answer_field, prompt_field="extra_info.question")
        assert (read_, reported) == ([("1+1=", answer) for answer in answers], "")
    messages = data_file(tmp_path, {"messages": [USER, ASSISTANT]})
    assert read(messages, tokenizer, prompt_field="messages")[0] == [("<user>1+1=<assistant>", "2")]


@pytest.mark.parametrize(
    ("record", "options", "reason"),
    [
        (VERL, {"answer_field": "reward_model.truth"}, r"data.answer_field to one of: .*reward_model.ground_truth"),
        (VERL, {"prompt_field": "extra_info.q"}, r"data.prompt_field to one of: .*extra_info.question"),
        ({"question": "q"}, {}, "no field 'prompt'. Set data.prompt_field to one of: question"),
        ({"prompt": "q", "answer": {"a": 1}}, {}, r"'answer' is a dict. .*data.answer_field to one of: .*answer\.a"),
        ({"messages": [ASSISTANT]}, {}, r"\[\] is not a prompt"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, {}, "part of type 'image_url'"),
        ({"messages": [{"role": "user", "content": ["text"]}]}, {}, "part of type 'str'"),
        (VERL | {"images": [{"bytes": "a"}]}, {}, "the record has 'images', which the model does not read"),
    ],
)
def test_read_prompts_other_layout_is_named(tmp_path, tokenizer, record, options, reason):
    path = data_file(tmp_path, record)
    with pytest.raises(UserError, match=reason) as caught:
        read(path, tokenizer, **options)
    assert str(caught.value).startswith(f"{path}:1: ")


def test_read_prompts_parquet_messages_render_as_the_same_json(tmp_path, tokenizer):
    """Parquet gives all messages the fields of each: those that are null there are absent in the JSON."""
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": null}'}}
    conversation = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": [{"type": "text", "text": "3"}], "tool_call_id": "c", "name": "add"},
    ]
    other = [{"role": "user", "content": [{"type": "text", "text": "z"}]}]
    records = [{"messages": conversation}, {"messages": other}]
    json_texts, _ = read(data_file(tmp_path, *records), tokenizer)
    assert json_texts[0][0] == f"<user>ab[{json.dumps([call])}]<assistant>None<tool>3<assistant>"
    path = write_parquet(tmp_path / "data.parquet", [*records])
    assert read(path, tokenizer)[0] == json_texts
    for_agents = prompt_set(path, tokenizer, max_prompt_tokens=500)[0].messages
    texts = [{"content": "ab"}, {"content": None}, {"content": "3"}]
    assert for_agents == [message | text for message, text in zip(conversation, texts, strict=True)]


def test_read_prompts_calls_without_content_are_messages(tmp_path, tokenizer):
    path = data_file(tmp_path, {"prompt": [USER, {"role": "assistant", "tool_calls": []}, USER]})
    assert read(path, tokenizer)[0][0][0] == "<user>1+1=[[]]<assistant>None<user>1+1=<assistant>"


RECORDS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "ü\u2028\n", "list": [None]}]


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_read_records_blank_lines_are_skipped(tmp_path, suffix):
    lines = "\n   \n\n".join(json.dumps(record, ensure_ascii=False) for record in RECORDS)
    assert read_records(written(tmp_path / f"data{suffix}", lines + "\n")) == RECORDS


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [('{"a": 1}\n\n{"a": \n', 3, "not JSON"), ('{"a": 1}\n[1]\n', 2, "a JSON list, not an object")],
)
def test_read_records_bad_line_is_named(tmp_path, text, line, reason):
    path = written(tmp_path / "data.jsonl", text)
    with pytest.raises(UserError) as caught:
        read_records(path)
    assert str(caught.value).startswith(f"{path}:{line}: {reason}")
    assert '{"prompt": "..."}' in str(caught.value)


def test_read_records_invalid_utf8_is_named(tmp_path):
    (tmp_path / "data.jsonl").write_bytes(b'{"a": 1}\n{"a": "\xff"}\n')
    with pytest.raises(UserError, match=r"data\.jsonl:2: not UTF-8"):
        read_records(tmp_path / "data.jsonl")


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("missing.jsonl", None, "no such data file"),
        ("data.csv", "a,b\n", r"ends in '\.csv'"),
        ("empty.jsonl", "\n \n", "contains no records"),
        ("data.parquet", "no parquet", "not a readable Parquet file"),
    ],
)
def test_read_records_bad_file_is_named(tmp_path, name, text, reason):
    path = tmp_path / name if text is None else written(tmp_path / name, text)
    with pytest.raises(UserError, match=reason) as caught:
        read_records(path)
    assert str(caught.value).startswith(str(path))
