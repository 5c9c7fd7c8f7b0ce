"""Engine whose turns follow a script, tools around it, and the chat template and tool calls of its tests."""

import json
import string
from collections.abc import Callable, Sequence
from typing import Any

import torch

from verl_mg.agents.tools.builtin import calculator
from verl_mg.agents.tools.multi_turn import MultiTurnEngine
from verl_mg.agents.tools.tool import Tool
from verl_mg.config import RolloutConfig
from verl_mg.engines import Request, RolloutEngine, Sample, Sampling
from verl_mg.engines.engine import Finish
from verl_mg.engines.trajectory import NOT_GENERATED
from verl_mg.job.build_agents import turns_wrapper
from verl_mg.models.tiny_model import character_tokenizer

# Like Qwen's template: adjacent results share a user turn, and a line break follows the end of a turn.
TEMPLATE = """\
{%- for m in messages -%}
{%- if m.role == 'tool' -%}
{%- if messages[loop.index0 - 1].role != 'tool' -%}{{- '<user>' -}}{%- endif -%}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<eos>\\n' -}}{%- endif -%}
{%- else -%}{{- '<' + m.role + '>' + m.content + '<eos>\\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<assistant>' -}}{%- endif -%}"""


def tokenizer_with(template: str | None = TEMPLATE) -> Any:
    """Returns a tokenizer of characters with a chat template."""
    tokenizer: Any = character_tokenizer(string.printable)
    tokenizer.chat_template = template
    return tokenizer


def qwen(name: str, **arguments: Any) -> str:
    """Returns a tool call in Qwen's format."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


TOKENIZER = tokenizer_with()
TOKENIZER.add_tokens(["42"])  # an engine that writes 4 and 2 must not find this in the next context
EOS = 1
PROMPT = (4, 20, 5)


def encode(text: str) -> tuple[int, ...]:
    """A token a character, and the special ones."""
    parts = text.split("42")
    four_two = TOKENIZER.convert_tokens_to_ids(["4", "2"])
    tokens = [*TOKENIZER(parts[0])["input_ids"]]
    for part in parts[1:]:
        tokens += [*four_two, *TOKENIZER(part)["input_ids"]]
    return tuple(tokens)


class Scripted(RolloutEngine):
    """Writes what a script says for a request, at most `per_collect` samples a call, and records its requests.

    A stop token follows the script's text. `held`: ids that are not answered.
    """

    def __init__(self, script: Callable[[Request], str], per_collect: int = 100) -> None:
        self.script, self.per_collect = script, per_collect
        self.requested: list[Request] = []
        self.held: set[int] = set()
        self.version = 0
        self._running: list[tuple[Request, Sampling]] = []
        self._aborted = False

    def num_free_slots(self) -> int:
        return 50 - len(self._running)

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> None:
        self.requested += requests
        if not self._running:
            self._aborted = False
        self._running += [(request, sampling) for request in requests]

    def collect(self, timeout: float) -> list[Sample]:
        if self._aborted:
            ready = list(self._running)
        else:
            ready = [each for each in self._running if each[0].id not in self.held][: self.per_collect]
        self._running = [each for each in self._running if each not in ready]
        samples = [request.prepend_partial(self._write(request, sampling)) for request, sampling in ready]
        self._aborted = False
        return samples

    def abort(self) -> None:
        self._aborted = True

    def health(self) -> bool:
        return True

    def _write(self, request: Request, sampling: Sampling) -> Sample:
        tokens = (*encode(self.script(request)), EOS)
        budget = request.remaining_tokens(sampling)
        assert budget > 0
        finish: Finish = "stop" if len(tokens) <= budget else "length"
        if self._aborted:
            tokens, finish = tokens[:3], "abort"
        tokens = tokens[:budget]
        start = len(request.context)
        logprobs = tuple(-0.01 * (start + t) for t in range(len(tokens)))
        # As if the experts of a token were its position and the version that fed it.
        fed = start + len(tokens) - 1
        routed = torch.stack([torch.arange(fed), torch.full((fed,), self.version)], 1).to(torch.int16)[:, None]
        return Sample(request.id, tokens, logprobs, (self.version,) * len(tokens), finish, routed)


def turns_of(*texts: str) -> Callable[[Request], str]:
    """A script of what each turn says."""
    return lambda request: texts[observations(request)]


def observations(request: Request) -> int:
    versions = request.partial.policy_versions if request.partial else ()
    return sum(v == NOT_GENERATED and (i == 0 or versions[i - 1] != NOT_GENERATED) for i, v in enumerate(versions))


def worded(*results: str) -> tuple[int, ...]:
    """The observation of these results, as the template of the tokenizer has it."""
    texts = "".join(f"\n<tool_response>\n{result}\n</tool_response>" for result in results)
    tokens: list[int] = TOKENIZER(f"\n<user>{texts}<eos>\n<assistant>")["input_ids"]
    return tuple(tokens)


SAMPLING = Sampling(max_new_tokens=1000, stop_token_ids=(EOS,))


def conversations(
    engine: RolloutEngine, tools: Sequence[Any] = (calculator,), reasoning: str | None = None, **options: Any
) -> MultiTurnEngine:
    built = [tool if isinstance(tool, Tool) else Tool.from_function(tool) for tool in tools]
    rollout = RolloutConfig(**{"max_turns": 3, "tool_timeout_s": 60, "reasoning_parser": reasoning} | options)
    return turns_wrapper(rollout, TOKENIZER, built, None)(engine)
