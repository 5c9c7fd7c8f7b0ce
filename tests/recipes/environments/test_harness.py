"""A harness of others, unchanged: episodes of mini-swe-agent in the sandbox, with a tiny model and real commands."""

import functools
import json
import string
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.agents.agent_runs import runner_of, trained_runs
from tests.agents.conversations import KEEPING, MARKS
from tests.helpers.traces import needs_sglang
from verl_mg.agents.command import run_command
from verl_mg.engines.hf.engine import HFEngine
from verl_mg.engines.trajectory import NOT_GENERATED
from verl_mg.models.tiny_model import make_tiny_model

pytestmark = [pytest.mark.nightly, needs_sglang]

EPISODES, POSITIONS = 32, 8192
COMMANDS = ["ls", "pwd", "echo hello", "cat missing", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"]
CALLS = [
    "<tool_call>\n" + json.dumps({"name": "bash", "arguments": {"command": c}}) + "\n</tool_call>" for c in COMMANDS
]
"""Calls that are one token each, or a model of random weights would never write one."""


def test_mini_swe_agent_episodes_are_recorded_exactly(python_of, tmp_path):
    python = python_of("mini_swe_agent")
    model = make_tiny_model(
        tmp_path / "model", "qwen2", characters=string.printable, words=[*MARKS, *CALLS], chat_template=KEEPING,
        hidden=32, ffn=64, max_positions=POSITIONS, init_std=0.02,
    )  # fmt: skip
    settings = {
        "model.model_kwargs.max_tokens": 60,
        "agent.step_limit": 4,
        "agent.system_template": "You have a shell.",
        "agent.instance_template": "Do this: {{task}}",
    }
    command = [python, "-m", "minisweagent.run.mini", "-m", "openai/policy", "-t", "list the files", "-y"]
    command += ["--exit-immediately", "-o", "trajectory.json", "-c", "mini.yaml"]
    command += [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
    samples, engine = runner_of(model, POSITIONS)(
        HFEngine(model, "cpu", torch.float32),
        functools.partial(run_command, command, timeout=1500.0),
        EPISODES,
        tokens=1000,
        timeout=1500.0,
        concurrency=4,
        paths=[str(Path(python).parents[1]), sys.base_prefix],
        environment={"MSWEA_COST_TRACKING": "ignore_errors", "MSWEA_CONFIGURED": "true",
                     "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        memory_mb=4096,
        processes=128,
    )  # fmt: skip
    trajectories = [sample.trajectory for sample in samples if sample.trajectory]
    assert len(trajectories) == EPISODES
    errors = {t.error for t in trajectories if t.error}
    assert not errors, (errors, trajectories[0].log[-2000:])
    assert sorted(trained_runs(samples)) == sorted(engine.log)
    turns = [len(t.turns) for t in trajectories]
    calls = [turn for t in trajectories for turn in t.turns if turn.reply.get("tool_calls")]
    results = [m["content"] for t in trajectories for turn in t.turns for m in turn.messages if m["role"] == "tool"]
    segments = [len(t.segments) for t in trajectories]
    print(f"\n{sum(turns)} turns, {len(calls)} with calls, {len(results)} results, segments {segments}")
    assert max(turns) >= 3 and len(calls) > 10 and any('"returncode": 0' in result for result in results)
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for trajectory in trajectories:
        for segment in trajectory.segments:
            mask = torch.tensor(segment.policy_versions) != NOT_GENERATED
            assert not torch.tensor(segment.logprobs)[~mask].any(), "observations have loss 0"
            tokens = torch.tensor([segment.tokens])
            scores = whole(tokens).logits[0].log_softmax(-1)[:-1].gather(1, tokens[0, 1:, None])[:, 0]
            torch.testing.assert_close(
                torch.tensor(segment.logprobs)[1:][mask[1:]], scores[mask[1:]], atol=1e-4, rtol=0
            )
