"""Whole jobs whose samples are made by agents."""

import json
import statistics
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.helpers.engines import SGLANG, VLLM
from tests.helpers.engines import overrides as of_engine
from tests.helpers.tiny_jobs import logged
from tests.helpers.traces import needs_sglang
from tests.recipes.tiny_runs import tiny_run
from tools.bench import wide_repeat_digit
from verl_mg.engines.trajectory import MAX_SEGMENTS
from verl_mg.errors import UserError
from verl_mg.monitor.sample_reader import SampleReader
from verl_mg.monitor.sample_schema import fingerprint

AGENT = Path(__file__).parent / "agents" / "two_questions.py"
SIGNALS = AGENT.with_name("signals.py")
SEPARATE = [*of_engine("sglang"), "rollout.num_ranks=1", "actor.layout=tp1"]
SETTINGS = [
    f"rollout.agent={AGENT}:run",
    "data.test=null",
    "data.chat_template=true",
    "job.save=false",
    "algorithm.prompts_per_iteration=4",
    "algorithm.group_size=4",
]


def recorded(output: Path, iteration: int) -> list[dict]:
    files = sorted((output / "samples" / f"{iteration:06d}").glob("*.parquet"))
    return [row for file in files for row in pq.read_table(file).to_pylist()]


def check(lines: list[dict], output: Path) -> None:
    assert len(lines) == 2 and all(line["actor/grad_norm"] > 0 for line in lines)
    for line in lines:
        rows = recorded(output, line["step"])
        rewards = {row["trajectory"]: row["reward"] for row in rows}
        assert len(rewards) == 16 and len(rows) == 32, "two rows of each trajectory"
        assert line["reward/mean"] == pytest.approx(sum(rewards.values()) / 16, abs=1e-6)
        conversations = [json.loads(row["conversation"]) for row in rows if row["conversation"]]
        assert len(conversations) == 16
        for conversation in conversations:
            assert not conversation["error"] and conversation["log"].startswith("replies")
            assert [turn["segment"] for turn in conversation["turns"]] == [0, 1]
            assert [segment["prefix_of"] for segment in conversation["segments"]] == [None, 0]
        trained = sum(sum(row["loss_mask"]) for row in rows)
        assert trained == sum(turn["tokens"] for c in conversations for turn in c["turns"])


def test_grpo_with_agents_trains_every_segment(ranks, tasks, tmp_path):
    lines = tiny_run(ranks, "grpo", tasks(0), tmp_path / "run", [*SETTINGS, "job.iterations=2"])
    check(lines, tmp_path / "run")


@pytest.mark.parametrize("name", ["dapo", "gspo", "pf_ppo", "ppo", "prime"])
def test_samples_of_agents_without_a_request_count_and_train_nothing(ranks, tasks, tmp_path, name):
    overrides = [*SETTINGS[1:], f"rollout.agent={AGENT.with_name('silent.py')}:run", "rollout.agent_failure_reward=-3"]
    if name == "dapo":
        overrides += ["algorithm.max_sampling_rounds=1", "algorithm.overlong_buffer=2"]
    if "ppo" in name:
        overrides.append("algorithm.critic_warmup=0")
    tiny_run(ranks, name, tasks(0), tmp_path / "run", [*overrides, "job.iterations=1"])
    (line,) = logged(tmp_path / "run")
    rows = recorded(tmp_path / "run", 1)
    silent = [row for row in rows if not any(row["loss_mask"])]
    assert sorted(row["reward"] for row in silent) == [-3] * 4 + [0.5] * 4 and len(rows) == 8 + 2 * 8
    assert all(row["response"] == "" and row["prompt_length"] == len(row["tokens"]) for row in silent)
    rewards = {row["trajectory"]: row["reward"] for row in rows}
    assert line["reward/mean"] == pytest.approx(sum(rewards.values()) / 16) and line["response/samples"] == 16
    assert line["actor/grad_norm"] > 0
    errors = [json.loads(row["conversation"])["error"] for row in silent]
    assert sorted(errors) == [""] * 4 + ["ConnectionError: the environment did not start"] * 4


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("grpo", ["data.test={path}/data/test.jsonl", "evaluation.prompts=2", "evaluation.every=1"]),
        pytest.param(
            "dapo",
            ["algorithm.dynamic_sampling=streaming", "rollout.mode=async", *SEPARATE],
            marks=[needs_sglang, pytest.mark.nightly],
        ),
        *(
            pytest.param(name, overrides, marks=pytest.mark.nightly)
            for name, overrides in [
                ("dapo", ["algorithm.max_sampling_rounds=3"]),
                ("dapo", ["algorithm.max_sampling_rounds=3", "algorithm.dynamic_sampling=streaming"]),
                ("grpo", ["rollout.agent_command={command}"]),
                ("grpo", ["rollout.agent_trained=[guesser]"]),
                *((name, ["algorithm.critic_warmup=0"]) for name in ("pf_ppo", "ppo")),
                *((name, []) for name in ("prime", "remax", "rloo", "opo")),
            ]
        ),
    ],
)
def test_jobs_of_agents_with_names_compare_each_with_itself(ranks, tasks, tmp_path, name, overrides):
    command = "python3 signals.py" if any("command" in override for override in overrides) else ""
    agent = [f"rollout.agent_options={{folder: {SIGNALS.parent}}}"] if command else [f"rollout.agent={SIGNALS}:run"]
    given = [override.format(path=tasks(0), command=command) for override in overrides]
    settings = [
        *SETTINGS[1:],
        *agent,
        "rollout.agent_names=[caller, guesser]",
        "job.iterations=1",
        "job.seed=6",  # each agent has a reward other than the least
        *given,
    ]
    lines = tiny_run(ranks, name, tasks(0), tmp_path / "run", settings)
    only_guesser = "rollout.agent_trained=[guesser]" in overrides
    for line in (line for line in lines if line["step"]):
        assert line["actor/grad_norm"] > 0
        rows = [row for row in recorded(tmp_path / "run", line["step"]) if name != "grpo" or row.get("advantages")]
        rewards = {(row["sample_id"] // MAX_SEGMENTS, row["agent"]): row["reward"] for row in rows}
        assert {agent for _, agent in rewards} == ({1} if only_guesser else {0, 1})
        if name != "grpo":
            continue
        # All of an iteration is trained: 16 episodes, of which each agent has a part.
        assert len(rewards) == len(rows) == 16 * (1 if only_guesser else 2)
        conversations = [json.loads(row["conversation"]) for row in rows if row["conversation"]]
        assert len(conversations) == 16 and all(len(each["turns"]) == 2 for each in conversations)
        for row in rows:
            place = row["sample_id"] // MAX_SEGMENTS // 4
            group = [rewards[key] for key in rewards if key[0] // 4 == place and key[1] == row["agent"]]
            expected = (row["reward"] - statistics.fmean(group)) / (statistics.stdev(group) + 1e-6)
            found = {value for value, is_trained in zip(row["advantages"], row["loss_mask"], strict=True) if is_trained}
            assert sorted(found) == pytest.approx([expected], abs=1e-4)
        for number, agent in enumerate(("caller", "guesser")):
            of_agent = [reward for (_, other), reward in rewards.items() if other == number]
            if of_agent:
                assert line[f"reward/agent/{agent}"] == pytest.approx(statistics.fmean(of_agent), abs=1e-6)
    if "evaluation.every=1" in overrides:
        refused = (
            r"rollout\.agent_names: .* with \[caller, guesser\], not \[guesser, caller\]\. Write rollout\.agent_names="
        )
        with pytest.raises(UserError, match=refused):
            SampleReader(tmp_path / "run").check(
                range(1, 2), name, fingerprint(tasks(0) / "model"), ["guesser", "caller"]
            )
        caller, guesser = (lines[-1][f"eval/reward/agent/{agent}"] for agent in ("caller", "guesser"))
        assert 0 <= caller <= 1 and -5 <= guesser <= 5
        assert lines[-1]["eval/reward"] == pytest.approx((caller + guesser) / 2)


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("engine", [SGLANG, VLLM])
def test_grpo_with_agents_and_real_engines_trains_every_segment(ranks, tmp_path, engine, mode):
    wide_repeat_digit.make(tmp_path / "task", hidden=64, layers=2)  # vLLM has no narrow heads on the CPU
    chosen = [*of_engine(engine), "rollout.num_ranks=1", "actor.layout=tp1", f"rollout.mode={mode}"]
    lines = tiny_run(ranks, "grpo", tmp_path / "task", tmp_path / "run", [*SETTINGS, *chosen, "job.iterations=2"])
    check(lines, tmp_path / "run")
