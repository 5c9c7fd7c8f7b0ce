"""Every source of a model folder that names an end of a response is used, and what is not used is said."""

import json
import string

import pytest

from tests.helpers.engines import VLLM_NIGHTLY
from tests.helpers.engines import overrides as overrides_of
from tests.helpers.traces import needs_sglang
from tests.rollout.engine_jobs import inputs as inputs_of_engines
from tests.run.jobs import job, samples_of
from verl_mg.data.stop_tokens import NAMED, read_stop_tokens
from verl_mg.errors import UserError
from verl_mg.models.tiny_model import character_tokenizer
from verl_mg.models.transformers_module import read_tokenizer

PLAIN = "{% for m in messages %}{{ m['role'] + ':' + (m['content'] or '') }}{% endfor %}"
TURNS = "{% for m in messages %}{{ m['content'] }}{{ '<turn_end>\\n' if m['role'] == 'assistant' }}{% endfor %}"
# As harmony: parts of a reply end with one token, the last part with another, and calls of tools with a third.
CHANNELS = """{% for m in messages if m['role'] == 'assistant' %}{{ 'thought<part_end>' }}
{{- m['content'] }}{{ '<call_end>' if m.tool_calls else '<turn_end>' }}{% endfor %}"""
# Begins a message with a special token, ends none, and ignores calls.
OPENED = "{% for m in messages %}{{ '<u>' if m.role == 'user' else '<s>' }}{{ m.content }}{% endfor %}"
STRICT = "{% if messages[-1]['role'] != 'user' %}{{ raise_exception('a question is last') }}{% endif %}"
FOLDERS = {
    "config": ({"eos_token_id": [5, 6]}, None, PLAIN, {1, 5, 6}),
    "generation config": ({"eos_token_id": 1}, {"eos_token_id": [1, 7]}, PLAIN, {1, 7}),
    "one id": ({}, {"eos_token_id": 8}, PLAIN, {1, 8}),
    "template": ({}, None, TURNS, {1, "<turn_end>"}),
    "calls of tools": ({}, None, CHANNELS, {1, "<turn_end>", "<call_end>"}),
    "header": ({}, None, OPENED, {1}),
    "header, without calls": ({}, None, OPENED + "{{ '<turn_end>' if messages[-1].content }}", {1, "<turn_end>"}),
    "template that refuses": ({}, None, STRICT, {1}),
    "name": ({}, None, PLAIN, {1, "<|eom_id|>"}),
}


def folder_of(path, config, generation, template, added=()):
    tokenizer = character_tokenizer(string.printable, chat_template=template)
    tokenizer.add_special_tokens({"additional_special_tokens": [*added]})
    tokenizer.save_pretrained(path)
    fields = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": len(tokenizer)} | config
    (path / "config.json").write_text(json.dumps(fields))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return read_tokenizer(path)


@pytest.mark.parametrize("name", FOLDERS)
def test_token_that_any_source_names_ends_a_response(tmp_path, name):
    config, generation, template, expected = FOLDERS[name]
    added = ["<u>", "<s>", "<part_end>", "<call_end>", "<turn_end>", *(["<|eom_id|>"] if name == "name" else [])]
    tokenizer = folder_of(tmp_path, config, generation, template, added)
    ids = {token if isinstance(token, int) else tokenizer.convert_tokens_to_ids(token) for token in expected}
    assert set(read_stop_tokens(tmp_path, tokenizer).ids) == ids


@needs_sglang
@pytest.mark.nightly
@pytest.mark.parametrize("name", ["config", "generation config"])
def test_ends_of_sglang_itself_are_among_those_of_all_engines(tmp_path, name):
    config, generation, template, _ = FOLDERS[name]
    tokenizer = folder_of(tmp_path, config, generation, template, NAMED)
    ours = set(read_stop_tokens(tmp_path, tokenizer).ids)
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.utils.hf_transformers_utils import attach_additional_stop_token_ids

    attach_additional_stop_token_ids(tokenizer)
    theirs = {*ModelConfig(str(tmp_path)).hf_eos_token_id, *tokenizer.additional_stop_token_ids}
    assert len(theirs) > len(NAMED) and theirs <= ours


def test_stop_tokens_described_for_a_start_name_what_is_not_used(tmp_path):
    generation = {"eos_token_id": [1, 10**6], "temperature": 0.6, "repetition_penalty": 1.05, "top_k": None}
    tokenizer = folder_of(tmp_path, {}, generation, PLAIN)
    stops = read_stop_tokens(tmp_path, tokenizer)
    assert stops.described(tokenizer) == {
        "stop tokens": f"{tokenizer.eos_token} (generation_config.json, tokenizer); not in the vocabulary: 1000000",
        "generation_config.json": "not used: temperature=0.6, repetition_penalty=1.05; the keys of rollout decide",
    }


@pytest.mark.parametrize("value", ["</s>", [1, None], 1.5, True])
def test_end_that_is_no_token_id_is_refused(tmp_path, value):
    tokenizer = folder_of(tmp_path, {}, {"eos_token_id": value}, PLAIN)
    with pytest.raises(UserError, match=r"generation_config\.json: eos_token_id is .*, not a token id or a list"):
        read_stop_tokens(tmp_path, tokenizer)


TOKENIZER_END, TEMPLATE_END, ENDS_OF_FILES = 1, 4, {"config.json": 7, "generation_config.json": [9, 12]}
ANSWERED = "{% for m in messages %}{{ m['content'] }}{{ '<user>' if m['role'] == 'assistant' }}{% endfor %}"  # token 4


@pytest.mark.parametrize(
    "engine", ["hf", pytest.param("sglang", marks=[needs_sglang, pytest.mark.nightly]), VLLM_NIGHTLY]
)
def test_responses_end_at_the_tokens_of_every_source_and_at_no_others_on_each_engine(ranks, tmp_path, engine):
    inputs = inputs_of_engines(tmp_path / "inputs", "qwen3")
    for name, end in ENDS_OF_FILES.items():
        file = inputs / "model" / name
        fields = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(fields | {"eos_token_id": end}))
    (inputs / "model" / "chat_template.jinja").write_text(ANSWERED)
    overrides = [f"reward.function={inputs / 'reward.py'}:digits", "rollout.max_new_tokens=30", "job.iterations=1"]
    overrides += ["algorithm.group_size=16", *overrides_of(engine)]
    ranks.run(1, job, "grpo", inputs, tmp_path / "run", overrides)
    ends = {TOKENIZER_END, TEMPLATE_END, 7, 9, 12}
    found = set()
    for sample in samples_of(tmp_path / "run", 1):
        written = [token for token, own in zip(sample["tokens"], sample["loss_mask"], strict=True) if own]
        assert ends.isdisjoint(written[:-1]) and (written[-1] in ends) == (sample["finish"] == "stop")
        found |= ends & {written[-1]}
    assert found == ends
