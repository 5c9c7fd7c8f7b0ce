"""Samples of agents through a rollout: groups on ranks, rewards, conversations, and a resume."""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore
from transformers import AutoTokenizer

from tests.helpers.rank_pool import job_store
from tests.helpers.split_engine import SplittingEngine
from verl_mg.algorithms.advantages import group_relative, informative, rloo
from verl_mg.batch import Batch
from verl_mg.data import Prompt, PromptFeed, PromptSet
from verl_mg.engines import Sampling
from verl_mg.engines.engine import Request, RolloutEngine, Sample
from verl_mg.engines.trajectory import MAX_SEGMENTS
from verl_mg.rewards import AsyncScorer, Reward, load_reward
from verl_mg.roles.context import JobContext
from verl_mg.roles.reward import RewardRole, SampleTexts
from verl_mg.rollout.engine_group import EngineGroup
from verl_mg.rollout.rollout import LocalRolloutState, RolloutSetup
from verl_mg.rollout.sync_rollout import SyncRollout
from verl_mg.rows.samples import OptionalColumns
from verl_mg.run.sample_state import SampleState

PROMPTS, GROUP = 5, 3
AGENTS = ("solver", "critic")
SCORED: list[str] = []


def response_of(sample: int) -> tuple[int, ...]:
    return tuple(4 + (sample * 7 + place) % 12 for place in range(1 + sample % 5))


def reward_of(sample: Sample) -> Reward | None:
    """Every third sample brings its own reward."""
    return Reward(100.0 + sample.id, {"own": 0.5}, f"answer {sample.id % 2}") if sample.id % 3 == 0 else None


def rewards_of(sample: Sample) -> Reward | None:
    """Every third sample brings a reward for each of the agents."""
    if sample.id % 3:
        return None
    return Reward.by_agent({"critic": Reward(-1.0 * sample.id), "solver": Reward(100.0 + sample.id, {"own": 0.5})})


class InstantEngine(RolloutEngine):
    def __init__(self) -> None:
        self._samples: list[Sample] = []

    def num_free_slots(self) -> int:
        return 4 - len(self._samples)

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> None:
        for request in requests:
            tokens = response_of(request.id)
            logprobs = tuple(-0.1 * place for place in range(len(tokens)))
            self._samples.append(Sample(request.id, tokens, logprobs, (0,) * len(tokens), "stop"))

    def collect(self, timeout: float) -> list[Sample]:
        samples, self._samples = self._samples, []
        return samples

    def abort(self) -> None: ...

    def health(self) -> bool:
        return True


class Group(EngineGroup):
    def __init__(self, engine: RolloutEngine, context: JobContext, rows_are_local: bool) -> None:
        super().__init__([True] * dist.get_world_size(), rows_are_local, context)
        self.engine, self.rows_are_local = engine, rows_are_local

    def update_weights(self, actor): ...


class LengthModel:
    """Reward model whose score is the number of a row's tokens."""

    def compute_scores(self, batch: Batch) -> Tensor:
        return batch.lengths.float()


def make_rollout(
    model: Path, local: bool, name: str, by_model: bool = False, agents: Sequence[str] = (), **options: object
) -> tuple[SyncRollout, RewardRole, PromptFeed]:
    context = JobContext(PrefixStore(name, job_store()))
    tokenizer = AutoTokenizer.from_pretrained(model)
    feed = PromptFeed(PromptSet([Prompt(i, (2,) * (1 + i), f"p{i}", "", {}) for i in range(PROMPTS)]))
    scorer, records = AsyncScorer({"": load_reward(score_agents if agents else score)}), []
    texts = SampleTexts(feed, tokenizer, ())
    if by_model:
        role = RewardRole(None, texts, context, records, LengthModel(), has_agents=True)
    else:
        role = RewardRole(scorer, texts, context, records, has_agents=True, agent_names=agents)
    reward = rewards_of if agents else reward_of
    engine = SplittingEngine(InstantEngine(), tokenizer.decode, reward=reward, agents=agents or ("",))
    setup = RolloutSetup(
        sampling=Sampling(max_new_tokens=9), seed=5, context=context, prompts=feed, records=records, reward=role,
        columns=OptionalColumns(agent_names=agents),
    )  # fmt: skip
    return SyncRollout(Group(engine, context, local), setup, **options), role, feed


def score(sample) -> float:
    SCORED.append(sample.response)
    return float(len(sample.response))


def score_agents(sample) -> dict[str, float | Reward]:
    SCORED.append(sample.response)
    lengths = {name: float(len(reply)) for name, reply in sample.replies.items()}
    return {name: Reward(length, {"own": 0.25}) if name == "solver" else -length for name, length in lengths.items()}


def reported(rollout: SyncRollout, role: RewardRole, batch) -> dict[str, object]:
    rewards = role.wait(batch)
    columns = ("trajectory", "sample_id", "group", "prompt_id", "prefix_of", "prefix_length", "answer", "reward.own")
    (record,) = [record for record in rollout.records if record.batch is batch]
    return {
        **{name: batch[name].nan_to_num(-1).tolist() for name in columns},
        "reward": rewards.tolist(),
        "tokens": [batch.row("tokens", row)[batch.row("loss_mask", row)].tolist() for row in range(len(batch))],
        "conversations": dict(record.conversations),
    }


def generate(model: Path, local: bool) -> tuple[dict[str, object], list[str]]:
    SCORED.clear()
    rollout, role, feed = make_rollout(model, local, "job")
    batch = rollout.generate(feed.next_batch(PROMPTS), GROUP)
    return reported(rollout, role, batch), list(SCORED)


@pytest.mark.parametrize("local", [True, False])
def test_rollout_of_agents_returns_whole_groups_with_their_rewards_and_conversations(ranks, models, local):
    tokenizer = AutoTokenizer.from_pretrained(models["qwen3"])
    results = ranks.run(2, generate, models["qwen3"], local)
    parts = [part for part, _ in results]
    assert all(part["sample_id"] for part in parts)
    groups = [set(part["group"]) for part in parts]
    assert not groups[0] & groups[1] and groups[0] | groups[1] == {GROUP * i for i in range(PROMPTS)}
    rows = {name: [value for part in parts for value in part[name]] for name in parts[0] if name != "conversations"}
    assert len(set(rows["sample_id"])) == len(rows["sample_id"]) > PROMPTS * GROUP
    assert [i // MAX_SEGMENTS for i in rows["sample_id"]] == rows["trajectory"]
    assert [i // GROUP * GROUP for i in rows["trajectory"]] == rows["group"]
    trained: dict[int, tuple[int, ...]] = {}
    numbers: dict[int, set[int]] = {}
    for i, tokens, reward, part, number in zip(
        *(rows[name] for name in ("trajectory", "tokens", "reward", "reward.own", "answer")), strict=True
    ):
        trained[i] = trained.get(i, ()) + tuple(tokens)
        brought = i % 3 == 0
        assert reward == (100 + i if brought else len(tokenizer.decode(response_of(i))))
        assert part == (0.5 if brought else -1)
        numbers.setdefault(i % 2 if brought else -1, set()).add(number)
    assert trained == {i: response_of(i) for i in range(PROMPTS * GROUP)}
    assert all(len(same) == 1 for same in numbers.values()) and len(numbers) == 3 and numbers[-1] == {0}
    scored = [text for _, texts in results for text in texts]
    assert sorted(scored) == sorted(tokenizer.decode(response_of(i)) for i in range(PROMPTS * GROUP) if i % 3)
    for part in parts:
        assert part["conversations"].keys() == set(part["trajectory"])
        for i, text in part["conversations"].items():
            written = json.loads(text)
            assert written["log"] == f"log of {i}" and written["turns"][0]["reply"]["role"] == "assistant"
            assert sum(segment["trained"] for segment in written["segments"]) == len(response_of(i))


def generate_of_agents(model: Path) -> tuple[dict[str, object], list[str]]:
    SCORED.clear()
    rollout, role, feed = make_rollout(model, False, "job", agents=AGENTS)
    batch = rollout.generate(feed.next_batch(PROMPTS), GROUP)
    rows = reported(rollout, role, batch) | {"agent": batch["agent"].tolist()}
    rewards, groups, trajectories = role.wait(batch), batch["group"], batch["trajectory"]
    rows["advantages"] = group_relative(rewards, groups, trajectories).tolist()
    rows["rloo"] = rloo(rewards, groups, trajectories).tolist()
    rows["differ"] = informative(rewards, groups, trajectories).tolist()
    return rows, list(SCORED)


def test_rollout_of_agents_with_names_compares_each_agent_with_itself(ranks, models):
    tokenizer = AutoTokenizer.from_pretrained(models["qwen3"])
    results = ranks.run(2, generate_of_agents, models["qwen3"])
    names = [name for name in results[0][0] if name != "conversations"]
    rows = [
        dict(zip(names, row, strict=True)) for part, _ in results for row in zip(*map(part.get, names), strict=True)
    ]
    replies: dict[tuple[int, int], str] = {}  # the last one of each sample and agent
    for row in sorted(rows, key=lambda row: row["sample_id"]):
        replies[row["sample_id"] // MAX_SEGMENTS, row["agent"]] = tokenizer.decode(row["tokens"])
    assert {agent for _, agent in replies} == {0, 1} and {sample for sample, _ in replies} == set(range(15))
    scores: dict[tuple[int, int], list[float]] = {}
    for (sample, agent), reply in replies.items():
        own = 0 if sample % 3 else 100 + sample if agent == 0 else -sample
        score = own if not sample % 3 else len(reply) if agent == 0 else -len(reply)
        scores.setdefault((sample // GROUP, agent), []).append(score)
        of_agent = [row for row in rows if (row["sample_id"] // MAX_SEGMENTS, row["agent"]) == (sample, agent)]
        assert {row["reward"] for row in of_agent} == {score}
        assert {row["reward.own"] for row in of_agent} == {-1 if agent else 0.25 if sample % 3 else 0.5}
        assert len({row["trajectory"] for row in of_agent}) == 1
    assert len({row["trajectory"] for row in rows}) == len(replies)
    assert len({row["group"] for row in rows}) == len(scores) > PROMPTS
    for row in rows:
        of_group = scores[row["sample_id"] // MAX_SEGMENTS // GROUP, row["agent"]]
        mean, count = sum(of_group) / len(of_group), len(of_group)
        deviation = statistics.stdev(of_group) if count > 1 else 0.0
        assert row["advantages"] == pytest.approx((row["reward"] - mean) / (deviation + 1e-6), abs=1e-4)
        assert row["rloo"] == pytest.approx((row["reward"] - mean) * count / max(count - 1, 1), abs=1e-4)
        assert row["differ"] == (len(set(of_group)) > 1)
    # Every sample is scored once, whatever its agents, and its conversation is where its rows are.
    assert sum(len(scored) for _, scored in results) == PROMPTS * GROUP * 2 // 3
    for part, _ in results:
        assert part["conversations"].keys() == {i // MAX_SEGMENTS for i in part["sample_id"]}


def score_by_model(model: Path) -> dict[str, list[float]]:
    rollout, role, feed = make_rollout(model, False, "job", by_model=True)
    batch = rollout.generate(feed.next_batch(PROMPTS), GROUP)
    rewards = role.wait(batch)
    columns = {name: batch[name].tolist() for name in ("trajectory", "prompt_id")}
    return columns | {"reward": rewards.tolist(), "part": batch["reward.own"].nan_to_num(-1).tolist()}


def test_reward_model_scores_the_last_segment_of_agents_without_a_reward(ranks, models):
    results = ranks.run(2, score_by_model, models["qwen3"])
    rows = [row for result in results for row in zip(*result.values(), strict=True)]
    assert len(rows) > PROMPTS * GROUP
    for i, prompt, reward, part in rows:
        brought = i % 3 == 0
        assert reward == (100 + i if brought else 1 + prompt + len(response_of(i))) and part == (0.5 if brought else -1)


def resume_ready(model: Path, agents: Sequence[str]) -> list[dict[str, object]]:
    """The rows that a prefetch made ready, as they are and after a checkpoint of them."""
    rollout, role, feed = make_rollout(model, False, "job", prefetch=True, agents=agents)
    rollout.start_iteration(1, is_last=False)
    rollout.generate(feed.next_batch(2), GROUP)
    rollout.generate_greedy(feed.peek(1))
    state, local = rollout.state(), rollout.local_state()
    assert local.ready is not None and local.ready.conversations
    again, other_role, other_feed = make_rollout(model, False, "resumed", prefetch=True, agents=agents)
    other_feed.load_state(feed.state())
    again.load(state, local, other_feed.by_id)
    parts = []
    for source, scores, prompts in ((rollout, role, feed), (again, other_role, other_feed)):
        source.start_iteration(2, is_last=True)
        parts.append(reported(source, scores, source.generate(prompts.next_batch(2), GROUP)))
    return parts


@pytest.mark.parametrize("agents", [(), AGENTS])
def test_rollout_of_agents_resumes_with_ready_rows_that_keep_rewards_and_conversations(ranks, models, agents):
    results = ranks.run(2, resume_ready, models["qwen3"], agents)
    for before, after in results:
        assert before == after
    assert sum(len(before["sample_id"]) for before, _ in results) > 2 * GROUP


def resume_for_others(model: Path) -> list[int]:
    """Rows that were ready for agents with names, in a job that has none: prompts of the next call."""
    rollout, _, feed = make_rollout(model, False, "job", prefetch=True, agents=AGENTS)
    rollout.start_iteration(1, is_last=False)
    rollout.generate(feed.next_batch(2), GROUP)
    rollout.generate_greedy(feed.peek(1))
    again, role, other_feed = make_rollout(model, False, "resumed", prefetch=True)
    other_feed.load_state(feed.state())
    again.load(rollout.state(), rollout.local_state(), other_feed.by_id)
    again.start_iteration(2, is_last=True)
    batch = again.generate(other_feed.next_batch(2), GROUP)
    assert "agent" not in batch and len(role.wait(batch)) == len(batch)
    return [*batch["prompt_id"].unique().tolist(), *[prompt.id for prompt in feed.peek(2)]]


def test_rollout_that_resumes_with_other_agents_generates_ready_rows_again(ranks, models):
    ids = ranks.run(2, resume_for_others, models["qwen3"])
    assert {i for of_rank in ids for i in of_rank[:-2]} == set(ids[0][-2:])


def resume_waiting(model: Path, agents: Sequence[str]) -> tuple[dict[str, object], dict[str, object], list[int]]:
    """The rows of a call whose samples waited for it, and the same after their way through a checkpoint."""
    parts, waiting = [], []
    for name, resumes in (("job", False), ("resumed", True)):
        options = {"agents": agents, "extra_prompts": 2, "partial_rollout": True}
        rollout, role, feed = make_rollout(model, False, name, **options)
        rollout.start_iteration(1, is_last=False)
        rollout.generate(feed.next_batch(2), GROUP)
        if resumes:
            state, local = rollout.state(), rollout.local_state()
            waiting = sorted(local.completed)
            texts = {i: SampleState.of(sample).model_dump_json() for i, sample in local.completed.items()}
            states = {i: SampleState.model_validate_json(text) for i, text in texts.items()}
            back = {i: state.to_sample("completed", {}, {}) for i, state in states.items()}
            assert back == dict(local.completed)
            old_feed = feed
            rollout, role, feed = make_rollout(model, False, "loaded", **options)
            feed.load_state(old_feed.state())
            rollout.load(state, LocalRolloutState(back), feed.by_id)
        rollout.start_iteration(2, is_last=True)
        parts.append(reported(rollout, role, rollout.generate([], GROUP)))
    return parts[0], parts[1], waiting


@pytest.mark.parametrize("agents", [(), AGENTS])
def test_rollout_of_agents_resumes_with_complete_samples_that_keep_their_rewards(ranks, models, agents):
    ((before, after, waiting),) = ranks.run(1, resume_waiting, models["qwen3"], agents)
    assert before == after and waiting and any(i % 3 == 0 for i in waiting)
