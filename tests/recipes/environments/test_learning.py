"""A tiny model of random weights learns by the endpoint alone, in environments of other programs."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.json_lines import write_lines
from tests.helpers.tiny_jobs import Metrics
from tests.recipes.tiny_runs import Goal, tiny_run
from verl_mg.models.tiny_model import make_tiny_model
from verl_mg.recipes.tasks import repeat_digit

NUMBERS = range(5)
CALLS = [f'<tool_call>\n{{"name": "double", "arguments": {{"n": {n}}}}}\n</tool_call>' for n in NUMBERS]
"""Calls that are one token each."""
TEMPLATE = """\
{%- for message in messages -%}
{{- '<assistant>' if message.role == 'assistant' else '<user>' -}}{{- message.content or '' -}}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>\\n{"name": "double", "arguments": ' + call.function.arguments + '}\\n</tool_call>' -}}
{%- endfor -%}
{%- if message.role == 'assistant' -%}{{- eos_token -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<assistant>' -}}{%- endif -%}"""
SCRIPTS = Path(__file__).parents[2] / "recipes" / "agents"
pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module", params=[0, 1])
def seed(request) -> int:
    return int(request.param)


@pytest.fixture
def learn(ranks, tmp_path, seed) -> Callable[..., Metrics]:
    """Trains on records with GRPO, prints the curve of the reward, and returns the lines of the metrics."""

    def run(name: str, records: list[dict[str, object]], *overrides: str, iterations: int = 60) -> Metrics:
        repeat_digit.make(tmp_path, seed)
        write_lines(tmp_path / "data" / "train.jsonl", records)
        settings = [
            "data.test=null",
            "data.chat_template=true",
            f"job.seed={seed}",
            f"job.iterations={iterations}",
            "job.save=false",
            "algorithm.prompts_per_iteration=16",
            "rollout.agent_concurrency=16",
            *overrides,
        ]
        lines = tiny_run(ranks, "grpo", tmp_path, tmp_path / "run", settings)
        curve = [round(line["reward/mean"], 2) for line in lines]
        print(f"\n{name}, seed {seed}: {' '.join(map(str, curve))}")
        return lines

    return run


def test_policy_learns_to_use_a_calculator_by_mcp(learn, start_script, tmp_path, seed):
    url = start_script(str(SCRIPTS / "calculator.py"))
    model = make_tiny_model(
        tmp_path / "caller", "qwen3", characters="0123456789=", words=CALLS, chat_template=TEMPLATE, hidden=64, ffn=128,
        max_positions=64, init_std=0.06, seed=seed,
    )  # fmt: skip
    lines = learn(
        "calculator",
        [{"prompt": f"{n}=", "answer": str(2 * n)} for n in NUMBERS for _ in range(20)],
        f"model.path={model}",
        f"rollout.agent={SCRIPTS / 'calculator.py'}:run",
        f"rollout.agent_options={json.dumps({'url': url})}",
    )
    Goal("reward/mean", (0.0, 0.3), 1.0, 0.15).check(lines)


def test_policy_learns_a_text_game_by_the_protocol_of_openenv(learn, start_server):
    url = start_server("openenv", str(SCRIPTS / "digit_game.py"), "--digits", "4")
    lines = learn(
        "text game",
        [{"prompt": "=", "seed": number} for number in range(200)],
        "rollout.agent=openenv",
        f"rollout.agent_options={json.dumps({'url': url, 'reset_fields': ['seed'], 'max_tokens': 3})}",
    )
    Goal("reward/mean", (0.0, 0.25), 1.0, 0.15).check(lines)


def test_policy_learns_both_parts_of_a_game_by_the_reward_of_each(learn):
    digits = [f"{a}{b}" for a in NUMBERS for b in NUMBERS]
    lines = learn(
        "signals",
        [{"prompt": f"{pair}="} for pair in digits],
        f"rollout.agent={SCRIPTS / 'signals.py'}:run",
        "rollout.agent_names=[caller, guesser]",
        iterations=80,
    )
    for name in ("caller", "guesser"):
        print(name, *(round(line[f"reward/agent/{name}"], 2) for line in lines))
    Goal("reward/agent/caller", (0.0, 0.2), 1.0, 0.3).check(lines)
    Goal("reward/agent/guesser", (-5.0, -3.0), 5.0, 3.0).check(lines)


def test_policy_learns_to_repair_its_answer_by_a_command_in_the_sandbox(learn):
    digits = [f"{a}{b}" for a in range(10) for b in range(3)]
    lines = learn(
        "repair",
        [{"prompt": f"{pair}=", "answer": pair[1] * 2} for pair in digits],
        "rollout.agent_command=python3 repair_agent.py",
        f"rollout.agent_options={json.dumps({'folder': str(SCRIPTS), 'show_answer': True})}",
        "algorithm.prompts_per_iteration=8",
        "rollout.agent_concurrency=4",
        iterations=30,
    )
    Goal("reward/mean", (0.0, 0.25), 1.0, 0.2).check(lines)
