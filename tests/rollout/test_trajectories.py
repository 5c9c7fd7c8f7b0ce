"""Samples of agents through a rollout: groups on ranks, rewards, conversations, and a resume."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore
from transformers import AutoTokenizer

from tests.helpers.rank_pool import job_store
from tests.helpers.split_engine import SplittingEngine
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
from verl_mg.run.sample_state import SampleState

PROMPTS, GROUP = 5, 3
SCORED: list[str] = []


def response_of(sample: int) -> tuple[int, ...]:
    return tuple(4 + (sample * 7 + place) % 12 for place in range(1 + sample % 5))


def reward_of(sample: Sample) -> Reward | None:
    """Every third sample brings its own reward."""
    return Reward(100.0 + sample.id, {"own": 0.5}, f"answer {sample.id % 2}") if sample.id % 3 == 0 else None


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
    model: Path, local: bool, name: str, by_model: bool = False, **options: object
) -> tuple[SyncRollout, RewardRole, PromptFeed]:
    context = JobContext(PrefixStore(name, job_store()))
    tokenizer = AutoTokenizer.from_pretrained(model)
    feed = PromptFeed(PromptSet([Prompt(i, (2,) * (1 + i), f"p{i}", "", {}) for i in range(PROMPTS)]))
    scorer, records = AsyncScorer({"": load_reward(score)}), []
    texts = SampleTexts(feed, tokenizer, ())
    if by_model:
        role = RewardRole(None, texts, context, records, LengthModel(), has_agents=True)
    else:
        role = RewardRole(scorer, texts, context, records, has_agents=True)
    engine = SplittingEngine(InstantEngine(), tokenizer.decode, reward=reward_of)
    sampling = Sampling(max_new_tokens=9)
    setup = RolloutSetup(sampling=sampling, seed=5, context=context, prompts=feed, records=records, reward=role)
    return SyncRollout(Group(engine, context, local), setup, **options), role, feed


def score(sample) -> float:
    SCORED.append(sample.response)
    return float(len(sample.response))


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


def resume_ready(model: Path) -> list[dict[str, object]]:
    """The rows that a prefetch made ready, as they are and after a checkpoint of them."""
    rollout, role, feed = make_rollout(model, False, "job", prefetch=True)
    rollout.start_iteration(1, is_last=False)
    rollout.generate(feed.next_batch(2), GROUP)
    rollout.generate_greedy(feed.peek(1))
    state, local = rollout.state(), rollout.local_state()
    assert local.ready is not None and local.ready.conversations
    again, other_role, other_feed = make_rollout(model, False, "resumed", prefetch=True)
    other_feed.load_state(feed.state())
    again.load(state, local, other_feed.by_id)
    parts = []
    for source, scores, prompts in ((rollout, role, feed), (again, other_role, other_feed)):
        source.start_iteration(2, is_last=True)
        parts.append(reported(source, scores, source.generate(prompts.next_batch(2), GROUP)))
    return parts


def test_rollout_of_agents_resumes_with_ready_rows_that_keep_rewards_and_conversations(ranks, models):
    results = ranks.run(2, resume_ready, models["qwen3"])
    for before, after in results:
        assert before == after
    assert sum(len(before["sample_id"]) for before, _ in results) > 2 * GROUP


def resume_waiting(model: Path) -> tuple[dict[str, object], dict[str, object], list[int]]:
    """The rows of a call whose samples waited for it, and the same after their way through a checkpoint."""
    parts, waiting = [], []
    for name, resumes in (("job", False), ("resumed", True)):
        rollout, role, feed = make_rollout(model, False, name, extra_prompts=2, partial_rollout=True)
        rollout.start_iteration(1, is_last=False)
        rollout.generate(feed.next_batch(2), GROUP)
        if resumes:
            state, local = rollout.state(), rollout.local_state()
            waiting = sorted(local.completed)
            texts = {i: SampleState.of(sample).model_dump_json() for i, sample in local.completed.items()}
            back = {i: SampleState.model_validate_json(text).to_sample({}, {}) for i, text in texts.items()}
            assert back == dict(local.completed)
            old_feed = feed
            rollout, role, feed = make_rollout(model, False, "loaded", extra_prompts=2, partial_rollout=True)
            feed.load_state(old_feed.state())
            rollout.load(state, LocalRolloutState(back), feed.by_id)
        rollout.start_iteration(2, is_last=True)
        parts.append(reported(rollout, role, rollout.generate([], GROUP)))
    return parts[0], parts[1], waiting


def test_rollout_of_agents_resumes_with_complete_samples_that_keep_their_rewards(ranks, models):
    ((before, after, waiting),) = ranks.run(1, resume_waiting, models["qwen3"])
    assert before == after and waiting and any(i % 3 == 0 for i in waiting)
