"""Conversations under chat templates that drop reasoning, render tool calls again, or keep everything."""

import string
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.helpers.machine import PEERS
from verl_mg.agents.call import Call, assistant_message
from verl_mg.agents.history import Context, ConversationHistory
from verl_mg.agents.renderer import ConversationRenderer
from verl_mg.agents.tool_calls import ReplyParser
from verl_mg.data.template_options import set_template_options
from verl_mg.engines.engine import Sample
from verl_mg.engines.sampled_support import SampledSupport
from verl_mg.engines.trajectory import NOT_GENERATED
from verl_mg.models.tiny_model import character_tokenizer

MARKS = ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]

TOOL = {"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}
THINKING = """\
{%- set state = namespace(last_question=-1) -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{%- set state.last_question = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- if tools -%}{{- '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' -}}{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{%- set thought = message.reasoning_content or '' -%}
{%- set text = message.content or '' -%}
{%- if not thought and '</think>' in text -%}
{%- set thought = text.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}
{%- set text = text.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if loop.index0 > state.last_question and (loop.last or thought) -%}
{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + text.lstrip('\\n') -}}
{%- else -%}{{- text -}}{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments -}}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- elif message.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
{%- else -%}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""
"""Reasoning as in Qwen3's template: that of replies before the last question of the user is dropped, the last reply has
it even if it is empty, and results of tools are part of a user's turn."""

KEEPING = """\
{%- if tools -%}{{- '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' -}}{%- endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.reasoning_content -%}{{- '<think>' + message.reasoning_content + '</think>' -}}{%- endif -%}
{{- (message.content or '') | trim -}}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments + '}</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""
"""Everything stays as it was, but for spaces around texts and in calls."""


TEMPLATES = PEERS / "trl" / "chat_templates"
"""Templates of models, which TRL has; tools/install/peers.sh installs it."""


def template_of(model: str) -> str:
    """The template of a model, such as qwen3; the test is skipped where TRL is not installed."""
    if not TEMPLATES.exists():
        pytest.skip("TRL, which has the templates of models, is installed by tools/install/peers.sh")
    return (TEMPLATES / f"{model}.jinja").read_text()


def chat_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """A tokenizer of characters, and of the marks of a template."""
    return character_tokenizer(string.printable, MARKS, template)


def merging_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes and merges of them, so that a text has many spellings and a character many tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([THINKING, KEEPING, "ab  ba\n\n\n é {}} <> the answer " * 9], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=template, clean_up_tokenization_spaces=False
    )
    fast.add_tokens(MARKS)
    return fast


def renderer_of(template: str, merges: bool = False, **options: Any) -> ConversationRenderer:
    """A renderer whose replies end with `<|im_end|>`; `options` are those of the template."""
    tokenizer = merging_tokenizer(template) if merges else chat_tokenizer(template)
    set_template_options(options, tokenizer)
    return ConversationRenderer(tokenizer, tokenizer.convert_tokens_to_ids(["<|im_end|>"]))


QWEN3 = ReplyParser(chat_tokenizer(KEEPING), "qwen25", "qwen3")


@dataclass
class Conversation:
    """A session with the log of what an engine was given and has generated."""

    renderer: ConversationRenderer
    parser: ReplyParser
    log: list[tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.history = ConversationHistory(self.renderer)
        self.agents: list[str] = []  # of the entries of the log

    def ask(self, messages: list[dict[str, Any]], tools: tuple[Any, ...] = (), agent: str = "") -> tuple[Call, Context]:
        call = Call(tuple(messages), tools, agent=agent)
        context = self.history.context(call)
        text = self.renderer.decode(context.tokens)
        for mark in ("<|im_start|>", "<|im_end|>"):
            assert text.count(mark) == context.rendered.count(mark), "each message is there once"
        return call, context

    def answer(
        self,
        asked: tuple[Call, Context],
        written: str | list[int],
        ends: bool = True,
        trained: bool = True,
        end: str = "<|im_end|>",
    ) -> dict[str, Any]:
        """Adds a reply, whose policy version is its number, and returns it as a message."""
        call, context = asked
        last = self.renderer.tokens(end)
        spelled = self.renderer.tokens(written) if isinstance(written, str) else tuple(written)
        text = self.renderer.decode(spelled)
        tokens = (*spelled, *(last if ends else ())) or last
        number = len(self.log)
        self.log.append((context.tokens, tokens if trained else ()))
        self.agents.append(call.agent)
        scores, versions = (-0.5 - number,) * len(tokens), (number,) * len(tokens)
        # Each token has two candidates: itself, and the number of the reply.
        ids = torch.tensor([[token, number] for token in tokens], dtype=torch.int32)
        support = SampledSupport(torch.full((len(tokens),), 2, dtype=torch.int32), ids.flatten())
        top = torch.stack([torch.full((len(tokens), 2), scores[0]), ids.float()], 1)
        sample = Sample(0, tokens, scores, versions, "stop" if ends else "length", support=support, top=top)
        parsed = self.parser.parse(text, call.tools, context.rendered)
        message = assistant_message(*parsed[:3])
        self.history.add(call, context, sample, message, trained=trained, truncated=not ends)
        return message

    def check(self) -> None:
        """Each generated token is trained once, behind exactly the tokens that the engine was given."""
        segments = self.history.segments()
        seen: dict[int, int] = {}
        for segment in segments:
            assert segment.tokens and len(segment.tokens) == len(segment.logprobs) == len(segment.policy_versions)
            for version in dict.fromkeys(segment.policy_versions):
                if version == NOT_GENERATED:
                    continue
                positions = [i for i, v in enumerate(segment.policy_versions) if v == version]
                context, generated = self.log[version]
                assert self.agents[version] == segment.agent, "a segment has replies of one agent"
                assert positions == list(range(positions[0], positions[0] + len(generated)))
                assert segment.tokens[: positions[0]] == context
                assert tuple(segment.tokens[i] for i in positions) == generated
                assert {segment.logprobs[i] for i in positions} == {-0.5 - version}
                seen[version] = seen.get(version, 0) + 1
            versions, tokens = torch.tensor(segment.policy_versions), torch.tensor(segment.tokens)
            expected = torch.stack([tokens, versions], 1)[versions != NOT_GENERATED]
            if len(expected):
                assert segment.support.sizes.tolist() == (2 * (versions != NOT_GENERATED)).tolist()
                assert torch.equal(segment.support.ids.view(-1, 2).long(), expected)
                assert torch.equal(segment.top[versions != NOT_GENERATED, 1].long(), expected)
                assert len(segment.top) == len(tokens)
            pairs = zip(segment.logprobs, segment.policy_versions, strict=True)
            assert not any(logprob for logprob, version in pairs if version == NOT_GENERATED)
            if segment.prefix_of is not None:
                source = segments[segment.prefix_of]
                assert source.tokens[: segment.prefix_length] == segment.tokens[: segment.prefix_length]
                assert set(segment.policy_versions[: segment.prefix_length]) <= {NOT_GENERATED}
        assert seen == {number: 1 for number, (_, generated) in enumerate(self.log) if generated}


TEXTS = st.text("ab {}<>\n\"'é", max_size=12)
CALLS = st.sampled_from(
    [
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
        '<tool_call>{"arguments":{"a":1,"b": [2]},"name":"add"}</tool_call>',
        '<think>\nso\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>',
        'so\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": {"b": "<é>"}}}\n</tool_call>',
    ]
)
REPLIES = st.one_of(
    TEXTS,
    CALLS,
    CALLS,
    TEXTS.map(lambda text: f"<think>\n{text}\n</think>\n\nthe answer"),
    st.tuples(TEXTS, TEXTS).map(lambda pair: f"<think>{pair[0]}</think>{pair[1]}"),
    st.sampled_from(["<tool_call>\nnot a call\n</tool_call>", "<think>\nunfinished"]),
)


SPELLINGS = st.lists(st.integers(0, 350), max_size=12)
"""Token ids as a policy may write them: not as the tokenizer would spell their text, and with halves of characters."""
