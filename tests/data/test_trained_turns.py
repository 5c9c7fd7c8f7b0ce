"""Chosen turns of conversations are trained behind the tokens that they would be generated behind, up to their end."""

import string
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.helpers.json_lines import write_lines
from tests.helpers.machine import PEERS
from verl_mg.config import DataConfig
from verl_mg.data import demonstrations_batch, num_demonstrations, read_prompts
from verl_mg.data.trained_turns import trained_rows
from verl_mg.errors import UserError
from verl_mg.models.tiny_model import character_tokenizer

TEMPLATES = PEERS / "trl" / "chat_templates"
"""Templates of models, and their variants that mark what is generated, for `return_assistant_tokens_mask`."""
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"]
SPECIAL += ["<end_of_turn>", "<start_of_turn>"]

MARKED = """\
{%- for message in messages -%}
{{- '<' + message['role'] + '>' -}}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{- message['content'] + eos_token -}}{%- endgeneration -%}{{- '\\n' -}}
{%- else -%}{{- message['content'] + '\\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<assistant>' -}}{%- endif -%}"""


def tokenizer_of(template: str) -> PreTrainedTokenizerFast:
    tokenizer = character_tokenizer(string.printable, chat_template=template)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.bos_token = "<unk>"
    return tokenizer


def peer(name: str) -> str:
    if not TEMPLATES.exists():
        pytest.skip("TRL, which has the templates of models, is installed by tools/install/peers.sh")
    return (TEMPLATES / f"{name}.jinja").read_text()


def says(role: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content} | fields


def talk(*flags: dict[str, Any]) -> list[dict[str, Any]]:
    """Three questions and answers, the answers with `flags`."""
    turns = zip("abc", "xyz", flags or ({}, {}, {}), strict=True)
    messages = [(says("user", question), says("assistant", answer * 3, **of)) for question, answer, of in turns]
    return [says("system", "s"), *(message for pair in messages for message in pair)]


def learned(conversation: Any, tokenizer: PreTrainedTokenizerFast, loss_on: Any = "all", **options: Any) -> list[Any]:
    """For each row its text, and the text of each turn that it trains."""
    rows = trained_rows(conversation, loss_on, tokenizer, "train.jsonl:3", **options)
    return [
        (tokenizer.decode(row.tokens), [tokenizer.decode(row.tokens[start:end]) for start, end in row.spans])
        for row in rows
    ]


@pytest.mark.parametrize(
    ("loss_on", "flags", "turns"),
    [
        ("last", [{}, {}, {}], ["zzz<eos>"]),
        ("all", [{}, {}, {}], ["xxx<eos>", "yyy<eos>", "zzz<eos>"]),
        ("all", [{"weight": 0}, {"weight": 1}, {"train": None}], ["yyy<eos>", "zzz<eos>"]),
        ("flagged", [{"train": True}, {}, {"train": False}], ["xxx<eos>"]),
        ("flagged", [{}, {"weight": 1.0}, {"weight": 0}], ["yyy<eos>"]),
    ],
)
def test_trained_rows_chosen_turns_are_learned_alone(loss_on, flags, turns):
    conversation = talk(*flags)
    ((text, found),) = learned(conversation, tokenizer_of(MARKED), loss_on)
    assert found == turns
    assert text.startswith("<system>s\n<user>a\n<assistant>xxx<eos>")
    assert text.endswith(turns[-1])


@pytest.mark.parametrize("name", ["", "qwen2_5", "llama3", "gemma3", "qwen3_instruct_2507"])
def test_trained_rows_equal_the_mask_of_the_template(name):
    tokenizer, conversation = tokenizer_of(peer(name) if name else MARKED), talk()
    (row,) = trained_rows(conversation, "all", tokenizer, "here")
    marked = peer(f"{name}_training") if name else MARKED
    theirs = tokenizer.apply_chat_template(
        conversation, chat_template=marked, return_assistant_tokens_mask=True, return_dict=True, tokenize=True
    )
    ids, mask = theirs["input_ids"], [bool(learned) for learned in theirs["assistant_masks"]]
    assert list(row.tokens) == ids[: len(row.tokens)]
    assert ids == tokenizer.apply_chat_template(conversation, return_dict=True)["input_ids"]
    trained = [token for token, learned in zip(row.tokens, row.mask, strict=True) if learned]
    marked_ones = [token for token, learned in zip(ids, mask, strict=True) if learned]
    assert sum(row.mask) == 12
    # Some of the marked templates also count line breaks around a turn, which is not generated.
    (newline,) = tokenizer("\n")["input_ids"]
    assert trained == [token for token in marked_ones if token != newline]
    assert all(theirs for ours, theirs in zip(row.mask, mask, strict=False) if ours)


def test_trained_rows_without_earlier_thinking_have_the_context_of_each_turn():
    tokenizer = tokenizer_of(peer("qwen3"))
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    conversation = [
        says("user", "a"),
        says("assistant", "ok", reasoning_content="hm"),
        says("user", "b"),
        says("assistant", None, reasoning_content="go", tool_calls=[call]),
        says("tool", "7"),
        says("assistant", "done", reasoning_content="so"),
    ]
    first, second = learned(conversation, tokenizer)
    assert first[1] == ["<think>\nhm\n</think>\n\nok<|im_end|>"]
    assert "hm" not in second[0]
    assert second[1] == [
        '<think>\ngo\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call><|im_end|>',
        "<think>\nso\n</think>\n\ndone<|im_end|>",
    ]
    whole = tokenizer.apply_chat_template(conversation, return_dict=True)["input_ids"]
    (last,) = trained_rows(conversation, "last", tokenizer, "here")
    assert [*last.tokens] == whole[:-1]  # without the line break
    prompt = tokenizer.apply_chat_template(conversation[:-1], add_generation_prompt=True, return_dict=True)
    assert last.spans == ((len(prompt["input_ids"]), len(last.tokens)),)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert '"name": "f", "parameters"' in learned(conversation, tokenizer, "last", tools=tools)[0][0]


def test_trained_rows_where_a_token_spans_context_and_turn_keep_the_context():
    """A policy continues the tokens of its context, whatever the tokenizer makes of the whole text."""
    from tokenizers import Tokenizer, models

    vocabulary = {"<eos>": 0, "u": 1, ":": 2, "x": 3, ":x": 4, "y": 5}
    bpe = Tokenizer(models.BPE(vocabulary, [(":", "x")]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content + (':' if m.role == 'user' else eos_token) }}{% endfor %}"
    )
    conversation = [says("user", "u"), says("assistant", "x"), says("user", "u"), says("assistant", "y")]
    first, second = trained_rows(conversation, "all", tokenizer, "here")
    assert (first.tokens, first.spans) == ((1, 2, 3, 0), ((2, 4),))
    assert (second.tokens, second.spans) == ((1, 4, 0, 1, 2, 5, 0), ((5, 7),))


@pytest.mark.parametrize(
    ("conversation", "loss_on", "wrong"),
    [
        ("text", "all", "'text' is not a conversation"),
        ([says("user", "a")], "all", r"no assistant message, and data\.loss_on is all"),
        (talk(), "flagged", "no assistant message with train: true or weight: 1"),
        ([says("user", "a", train=True), says("assistant", "b")], "all", "message 1: train is True, but its role is"),
        ([says("user", "a"), says("assistant", "b", weight=0.5)], "all", r"message 2: weight is 0\.5\. Write one of"),
        ([says("assistant", "b")], "all", "message 1 is the assistant's, with nothing before it"),
        ([says("user", [{"type": "image"}]), says("assistant", "b")], "all", r"a conversation with images, .*=answer"),
    ],
)
def test_trained_rows_error_names_the_line_and_the_message(conversation, loss_on, wrong):
    with pytest.raises(UserError, match=rf"^train\.jsonl:3: {wrong}"):
        learned(conversation, tokenizer_of(MARKED), loss_on)


@pytest.mark.parametrize(
    ("template", "wrong"),
    [
        (MARKED.replace("'<assistant>'", "'<assistant>think:'"), "message 3, .* not begin with .*generation prompt"),
        (MARKED.replace("+ eos_token", ""), "message 3 does not end with a special token"),
    ],
)
def test_trained_rows_template_that_does_not_fit_is_an_error(template, wrong):
    with pytest.raises(UserError, match=rf"^train\.jsonl:3: {wrong}"):
        learned(talk(), tokenizer_of(template), "all")


def test_demonstrations_batch_of_turns_has_each_row_once(tmp_path):
    tokenizer = tokenizer_of(peer("qwen3"))
    thinking = [says("user", "a"), says("assistant", "x", reasoning_content="t")] * 2
    file = write_lines(tmp_path / "train.jsonl", ({"chat": chat} for chat in (talk(), thinking, talk())))
    data = {"train": file, "prompt_field": "chat", "loss_on": "all", "max_prompt_tokens": 200}
    prompts = list(read_prompts(DataConfig.model_validate(data), "train", tokenizer))
    assert prompts[1].text.endswith("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n")
    count = num_demonstrations(prompts)
    whole = demonstrations_batch(prompts, tokenizer, 999, first_id=5)
    assert whole["sample_id"].tolist() == list(range(5, 5 + count))
    expected = [row for prompt in prompts for row in prompt.turns]
    assert [tuple(whole.row("tokens", i).tolist()) for i in range(count)] == [row.tokens for row in expected]
    assert [whole.row("loss_mask", i).tolist() for i in range(count)] == [row.mask for row in expected]
    assert whole["prompt_length"].tolist() == [row.spans[0][0] for row in expected]
    shares = [demonstrations_batch(prompts, tokenizer, 999, 5, rank, 4) for rank in range(4)]
    assert sorted(i for share in shares for i in share["sample_id"].tolist()) == whole["sample_id"].tolist()
    with pytest.raises(UserError, match=r"train\.jsonl:1 .*the limit is 20\. Lower data\.max_prompt_tokens"):
        demonstrations_batch(prompts, tokenizer, 20, 5)


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ({"content": None}, "message 2, of the assistant, has neither content nor tool_calls"),
        ({"content": None, "tool_calls": None}, "message 2, of the assistant, has neither content nor tool_calls"),
        ({"content": None, "tool_calls": []}, "message 2 is empty, so an empty reply would be learned"),
        ({"content": ""}, "message 2 is empty, so an empty reply would be learned"),
        ({"content": 5}, "the content of a message is a int. Write a text"),
    ],
)
def test_read_prompts_replies_without_content_are_refused(tmp_path, reply, reason):
    messages = [says("user", "a"), {"role": "assistant"} | reply]
    file = write_lines(tmp_path / "train.jsonl", [{"messages": messages}])
    with pytest.raises(UserError, match=rf"train\.jsonl:1: {reason}"):
        read_prompts(DataConfig(train=file, loss_on="all"), "train", tokenizer_of(MARKED))


def test_trained_rows_calls_without_content_are_learned():
    template = MARKED.replace("message['content'] + eos_token", "(message['tool_calls'] | tojson) + eos_token")
    calls = [{"function": {"name": "f", "arguments": {}}}]
    ((_, turns),) = learned([says("user", "a"), says("assistant", None, tool_calls=calls)], tokenizer_of(template))
    assert turns == ['[{"function": {"name": "f", "arguments": {}}}]<eos>']


def test_read_prompts_overlong_conversations_follow_the_key(tmp_path):
    tokenizer = tokenizer_of(MARKED)
    file = write_lines(tmp_path / "train.jsonl", ({"messages": chat} for chat in (talk(), talk()[:3])))
    data = {"train": file, "test": file, "loss_on": "all", "max_prompt_tokens": 22}
    with pytest.raises(UserError, match=r"train\.jsonl:1: the conversation has 29 tokens, .*overlong_prompts=drop"):
        read_prompts(DataConfig.model_validate(data), "train", tokenizer)
    config = DataConfig.model_validate(data | {"overlong_prompts": "drop"})
    assert [prompt.id for prompt in read_prompts(config, "train", tokenizer)] == [1]
    assert [prompt.turns for prompt in read_prompts(config, "test", tokenizer)] == [()]
