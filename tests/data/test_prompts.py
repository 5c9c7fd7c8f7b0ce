"""Prompts are tokenised as the tokenizer says and visited once an epoch, whatever the interruptions."""

import json
import re
import string
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.helpers.json_lines import data_file
from tests.helpers.machine import PEERS
from tests.helpers.prompts import prompt_set
from tests.helpers.published_rows import write_parquet
from verl_mg.data import PromptFeed, PromptSet
from verl_mg.data.rendering import reply_opening
from verl_mg.engines.trajectory import ConversationTurn
from verl_mg.errors import UserError
from verl_mg.models.tiny_model import character_tokenizer
from verl_mg.roles.reward import SampleTexts

GSM8K = Path(__file__).parents[3] / "shared" / "data" / "gsm8k"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return character_tokenizer(string.printable)


def numbered(folder: Path, count: int, tokenizer: PreTrainedTokenizerFast, **options: Any) -> PromptSet:
    path = data_file(folder, *({"prompt": "x" * (i + 1)} for i in range(count)))
    return prompt_set(path, tokenizer, **{"max_prompt_tokens": 100} | options)


def test_read_prompts_plain_prompt_is_tokenized(tmp_path, tokenizer):
    path = data_file(tmp_path, {"q": "ab", "a": 7}, {"q": "c"})
    prompts = prompt_set(path, tokenizer, prompt_field="q", answer_field="a", instruction="!", max_prompt_tokens=3)
    first, second = prompts
    assert first.tokens == tuple(tokenizer.convert_tokens_to_ids(list("ab!")))
    assert (first.id, first.text, first.answer, first.record) == (0, "ab!", "7", {"q": "ab", "a": 7})
    assert (second.id, second.text, second.answer) == (1, "c!", None)


ADDED = {"<pad> $A": "<pad>, which", "$A <eos>": "add <eos> at the end", "<pad> $A <eos>": "<pad>.*<eos> at the"}


@pytest.mark.parametrize("single", ADDED)
def test_read_prompts_special_tokens_are_those_of_text_and_template(tmp_path, single):
    """What a tokenizer would add to every text, as Llama's and T5's do, is not added, and named."""
    from tokenizers.processors import TemplateProcessing

    tokenizer, lines = character_tokenizer("ab"), []
    special = [("<pad>", 0), ("<eos>", tokenizer.eos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=special)
    path = data_file(tmp_path, {"prompt": "<pad>a"}, {"prompt": "a"}, {"prompt": [{"role": "user", "content": "b"}]})
    prompts = prompt_set(path, tokenizer, max_prompt_tokens=9, report=lines.append)
    texts = [tokenizer.convert_ids_to_tokens(prompt.tokens) for prompt in prompts]
    assert texts == [["<pad>", "a"], ["a"], ["<user>", "b", "<assistant>"]]
    (line,) = lines
    assert re.match(rf"{path}: .*{ADDED[single]}", line)
    assert ("2 of 3 prompts do not begin with <pad>" in line) == single.startswith("<pad>")
    (tmp_path / "bos.py").write_text("def prepare(record):\n    return {'prompt': '<pad>' + record['prompt'][-1:]}\n")
    prepared = data_file(tmp_path, {"prompt": "a"}, {"prompt": "ab"})
    options = {"prepare": f"{tmp_path / 'bos.py'}:prepare", "report": lines.append}
    prompts = prompt_set(prepared, tokenizer, max_prompt_tokens=9, **options)
    assert [tokenizer.convert_ids_to_tokens(prompt.tokens) for prompt in prompts] == [["<pad>", "a"], ["<pad>", "b"]]
    assert not any("do not begin with" in line for line in lines[1:])
    first = prompt_set(data_file(tmp_path, {"prompt": "<pad>a"}), tokenizer, max_prompt_tokens=9, report=lines.append)
    assert first[0].tokens == prompts[0].tokens
    assert len(lines) == 1 + 2 * single.endswith("<eos>")  # the end is named for each file


def test_read_prompts_system_prompt_begins_conversations_that_have_none(tmp_path):
    tokenizer = character_tokenizer("abs")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}|{% endfor %}"
    given = [{"role": "system", "content": "b"}, {"role": "user", "content": "a"}]
    path = data_file(tmp_path, {"prompt": "a"}, {"prompt": given[1:]}, {"prompt": given})
    options = {"max_prompt_tokens": 9, "system_prompt": "s"}
    texts = [prompt.text for prompt in prompt_set(path, tokenizer, chat_template=True, **options)]
    assert texts == ["s|a|", "s|a|", "b|a|"]
    with pytest.raises(UserError, match=r"data\.jsonl:1: data\.system_prompt .* Set data\.chat_template=true"):
        prompt_set(path, tokenizer, **options)


def test_read_prompts_chat_template_describes_the_tools(tmp_path):
    tokenizer = character_tokenizer(string.printable)
    tokenizer.chat_template = (
        "{%- for tool in tools or [] -%}{{- tool['function']['name'] + ';' -}}{%- endfor -%}"
        "{{- messages[0]['content'] -}}"
    )
    tools = [{"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}]
    path = data_file(tmp_path, {"prompt": "1+1"})
    (prompt,) = prompt_set(path, tokenizer, chat_template=True, max_prompt_tokens=10, tools=tools)
    assert prompt.text == "add;1+1"


def test_read_prompts_chat_template_renders_strings_and_messages(tmp_path, tokenizer):
    conversation = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    path = data_file(tmp_path, {"prompt": conversation}, {"prompt": "u"})
    prompts = prompt_set(path, tokenizer, chat_template=True, instruction="!", max_prompt_tokens=10)
    assert [prompt.text for prompt in prompts] == ["<system>s<user>u<assistant>", "<user>u!<assistant>"]
    ours = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=True)
    assert prompts[0].tokens == tuple(ours["input_ids"])


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"question": "a", "id": 1}, "no field 'prompt'.*: question, id"),
        ({"prompt": 3}, "is not a prompt. Write a string or a list of messages"),
        (
            {"prompt": [{"role": "user"}]},
            "message 1, of the user, has neither content nor tool_calls. Write a string or a list of messages",
        ),
        ({"prompt": [{"role": "tool", "content": ""}]}, "unknown role tool"),
        ({"prompt": ""}, "no tokens"),
        ({"prompt": "abcdef"}, "6 tokens, data.max_prompt_tokens is 5. .*data.overlong_prompts=drop"),
        ({"prompt": "a", "answer": ["b"]}, "'answer' is a list"),
    ],
)
def test_read_prompts_bad_prompt_is_named(tmp_path, tokenizer, record, reason):
    path = data_file(tmp_path, {"prompt": "a"}, record)
    with pytest.raises(UserError, match=reason) as caught:
        prompt_set(path, tokenizer, max_prompt_tokens=5)
    assert str(caught.value).startswith(f"{path}:2: ")


def test_read_prompts_missing_template_is_an_error(tmp_path):
    tokenizer = character_tokenizer("a")
    tokenizer.chat_template = None
    with pytest.raises(UserError, match=r"no chat template.*data.chat_template=false"):
        prompt_set(data_file(tmp_path, {"prompt": "a"}), tokenizer, chat_template=True, max_prompt_tokens=5)


def test_read_prompts_overlong_prompts_are_dropped(tmp_path, tokenizer):
    path = data_file(tmp_path, {"prompt": "aaaa"}, {"prompt": "b"}, {"prompt": "cc"})
    prompts = prompt_set(path, tokenizer, max_prompt_tokens=2, overlong_prompts="drop")
    assert (prompts.dropped, len(prompts), [prompt.id for prompt in prompts]) == (1, 2, [1, 2])
    assert prompts[0] is prompts.by_id(1)
    with pytest.raises(KeyError):
        prompts.by_id(0)
    path = data_file(tmp_path, {"prompt": "aaaa"}, {"prompt": "cc"})
    with pytest.raises(UserError, match=r"the shortest has 2\. .*max_prompt_tokens"):
        prompt_set(path, tokenizer, max_prompt_tokens=1, overlong_prompts="drop")


def test_take_every_epoch_has_all_prompts_in_another_order(tmp_path, tokenizer):
    prompts, again = (numbered(tmp_path, 7, tokenizer) for _ in range(2))
    taken = [prompt.id for n in (3, 5, 0, 13) for prompt in prompts.take(n)]
    assert taken == [prompt.id for prompt in again.take(21)]
    epochs = [taken[:7], taken[7:14], taken[14:]]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert [prompt.id for prompt in numbered(tmp_path, 7, tokenizer, seed=1).take(7)] != epochs[0]


@pytest.mark.parametrize("before", [0, 4, 7, 9])
def test_load_state_resumed_sequence_continues(tmp_path, tokenizer, before):
    prompts, resumed = (numbered(tmp_path, 7, tokenizer, seed=3) for _ in range(2))
    prompts.take(before)
    resumed.load_state(json.loads(json.dumps(prompts.state())))
    assert resumed.take(20) == prompts.take(20)


@pytest.mark.parametrize(("count", "seed", "named"), [(6, 3, "prompts=7, now prompts=6"), (7, 4, "seed=3")])
def test_load_state_of_other_data_is_refused(tmp_path, tokenizer, count, seed, named):
    state = numbered(tmp_path, 7, tokenizer, seed=3).state()
    with pytest.raises(UserError, match=named):
        numbered(tmp_path, count, tokenizer, seed=seed).load_state(state)


def test_load_state_of_changed_records_is_refused(tmp_path, tokenizer):
    records = [{"prompt": text, "answer": "a", "other": {"n": 1}} for text in "abc"]
    state = prompt_set(data_file(tmp_path, *records), tokenizer, max_prompt_tokens=9).state()
    path = write_parquet(tmp_path / "data.parquet", records)
    prompt_set(path, tokenizer, max_prompt_tokens=9).load_state(state)  # the same records in another file
    for change in ({"prompt": "d"}, {"answer": "b"}, {"other": {"n": 2}}):
        changed = prompt_set(data_file(tmp_path, records[0] | change, *records[1:]), tokenizer, max_prompt_tokens=9)
        with pytest.raises(UserError, match=r"records of data\.train are others .* Restore the data files"):
            changed.load_state(state)
        changed.load_state({name: value for name, value in state.items() if name != "records"})  # of earlier versions


OPENINGS = {"qwen3": "", "qwen3_5_think": "<think>\n", "qwen3_5_nothink": "<think>\n\n</think>\n\n", "llama3": ""}
OPENINGS |= {"deepseek_r1_distill": "<think>\n", "nemotron_3_nano": "<think>\n", "glm4moe": "", "gptoss": ""}


@pytest.mark.parametrize("name", OPENINGS)
def test_reply_opening_of_templates_of_models_is_what_follows_the_header(name):
    template = PEERS / "trl" / "chat_templates" / f"{name}.jinja"
    if not template.exists():
        pytest.skip("TRL, which has the templates of models, is installed by tools/install/peers.sh")
    tokenizer = character_tokenizer(string.printable, chat_template=template.read_text())
    tokenizer.bos_token = "<unk>"
    assert reply_opening(tokenizer) == OPENINGS[name]


def test_sample_texts_are_what_the_policy_wrote_with_the_opening_of_the_template(tmp_path):
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    tokenizer = character_tokenizer("ab!?", words=["<think>", "</think>"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    tokenizer.chat_template = template + "{% if add_generation_prompt %}<assistant><think>{% endif %}"
    records = [{"prompt": [{"role": "user", "content": "a?"}]}, {"prompt": "a?<think>"}]
    prompts = prompt_set(data_file(tmp_path, *records), tokenizer, max_prompt_tokens=9)
    texts = SampleTexts(PromptFeed(prompts), tokenizer, (tokenizer.eos_token_id,))
    tokens = tokenizer("b</think>!<eos>", add_special_tokens=False)["input_ids"]
    opened, plain = (texts.of_tokens(prompt, tokens, False) for prompt in prompts)
    assert (opened.prompt, opened.response) == ("<user>a?<assistant>", "<think>b</think>!")
    assert (plain.prompt, plain.response, plain.num_tokens) == ("a?<think>", "b</think>!", 4)
    assert texts.of_tokens(prompts[1], tokens[:-1], True).response == "b</think>!"
    # The agent's own messages, of which the template begins the replies, whatever the record's prompt.
    context = tokenizer("<user>a!<assistant><think>", add_special_tokens=False)["input_ids"]
    reply = {"role": "assistant", "content": "!"}
    turns = [
        vars(ConversationTurn(1, "policy", trained, 0, 0, (), reply, start, len(tokens), "stop"))
        for trained, start in ((True, 0), (True, len(context)), (False, 0))
    ]
    segments = [[], [*context, *tokens, *context]]
    conversation = {"turns": turns, "segments": [{}, {}]}
    for prompt in prompts:
        scored = texts.of_conversation(prompt, conversation, segments.__getitem__, False)
        assert (scored.response, scored.num_tokens) == ("<think>b</think>!", 4)
    short, empty = conversation | {"turns": turns[:1]}, conversation | {"turns": []}
    assert texts.of_conversation(prompts[1], short, lambda number: tokens, False).response == "b</think>!"
    assert texts.of_conversation(prompts[1], empty, segments.__getitem__, False).response == ""


@pytest.mark.skipif(not GSM8K.is_dir(), reason=f"GSM8K is not at {GSM8K}")
def test_read_prompts_gsm8k_is_read_as_published(tokenizer, monkeypatch):
    calls, call = list[int](), PreTrainedTokenizerFast.__call__

    def counted(self: PreTrainedTokenizerFast, texts: list[str], **options: Any) -> Any:
        calls.append(len(texts))
        return call(self, texts, **options)

    monkeypatch.setattr(PreTrainedTokenizerFast, "__call__", counted)
    prompts = prompt_set(GSM8K / "train.jsonl", tokenizer, prompt_field="question", max_prompt_tokens=2000)
    assert sum(calls) == 7473 and len(calls) < 100  # one by one takes long
    assert len(prompts) == 7473
    assert all("####" in (prompt.answer or "") for prompt in prompts)
    assert tokenizer.decode(list(prompts[5].tokens)) == prompts[5].record["question"]
