"""Rollouts after a weight sync: the trainer and the engine agree, whatever the layout."""

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoTokenizer

from tests.rank_pool import job_context
from tests.tiny_models import TRAINED, tiny_model
from verl_mg.config import OptimizerConfig
from verl_mg.data.prompts import Prompt
from verl_mg.layout import Layout, Placement
from verl_mg.megatron.process_groups import ParallelGroups
from verl_mg.rewards import AsyncScorer, Reward, load_reward
from verl_mg.roles.engine_group import HFEngineGroup
from verl_mg.roles.models import Actor
from verl_mg.roles.reward import RewardRole
from verl_mg.roles.rollout import Rollout
from verl_mg.rollout import Sampling
from verl_mg.rollout.hf.engine import HFEngine

TEXTS = ["12+3=", "7*(8-2)=", "a b c", "(1)", "99-98+97="]


def prompts(model: Path) -> list[Prompt]:
    tokenizer = AutoTokenizer.from_pretrained(model)
    return [Prompt(10 + i, tuple(tokenizer(t)["input_ids"]), t, str(i), {"n": i}) for i, t in enumerate(TEXTS)]


def roles(
    model: Path, layout: str, scorer: RewardRole | None = None, max_running_requests: int = 256
) -> tuple[Actor, Rollout]:
    actor = Actor(
        model,
        ParallelGroups(Placement.on(Layout.parse(layout), dist.get_world_size())),
        job_context(),
        dtype=torch.float32,
        temperature=0.9,
        tokens_per_micro_batch=60,
        optimizer=OptimizerConfig(lr=3e-3),
    )
    engine = HFEngine(model, "cpu", torch.float32, max_running_requests=max_running_requests, load_weights=False)
    sampling = Sampling(max_new_tokens=9, temperature=0.9, stop_token_ids=(1,))
    context = job_context()
    return actor, Rollout(HFEngineGroup(engine, context), sampling, seed=5, context=context, scorer=scorer)


def scorer_of(model: Path, reward: str) -> RewardRole:
    panel = AsyncScorer({"": load_reward(f"{__name__}:{reward}")})
    return RewardRole(panel, _ById(prompts(model)), AutoTokenizer.from_pretrained(model))


def three_iterations(model: Path, layout: str) -> dict[str, object]:
    actor, rollout = roles(model, layout)
    rollout.sync(actor)
    differences, drifts, samples, versions = [], [], {}, []
    for _ in range(3):
        batch = rollout.generate(prompts(model), samples=3)
        old = actor.compute_logprobs(batch)
        differences.append((old - batch["rollout_logprobs"])[batch["loss_mask"]].abs().tolist())
        batch["advantages"] = batch.expand_to_tokens((batch["sample_id"] % 3 - 1).float())
        actor.update(batch, lambda tokens: (-tokens["advantages"] * tokens.logprobs, {}), "token-mean")
        # Before the sync the engine is an update behind: the difference shows that it measures anything.
        drifts.append((actor.compute_logprobs(batch) - batch["rollout_logprobs"])[batch["loss_mask"]].abs().tolist())
        rollout.sync(actor)
        versions += batch["policy_version"].tolist()
        samples |= {int(s): batch.row("tokens", i).tolist() for i, s in enumerate(batch["sample_id"])}
    return {"differences": differences, "drifts": drifts, "samples": samples, "versions": versions}


@pytest.fixture(scope="module", params=TRAINED)
def model(request, tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("models") / request.param, request.param)


@pytest.mark.parametrize("layout,count", [("tp1", 2), ("tp2-pp2", 4)])
def test_rollout_and_training_log_probs_agree_right_after_a_sync(ranks, model, layout, count):
    results = ranks.run(count, three_iterations, model, layout)
    for iteration in range(3):
        found = [x for result in results for x in result["differences"][iteration]]
        assert found and sum(found) / len(found) < 1e-5
    drift = [x for result in results for per in result["drifts"] for x in per]
    assert sum(drift) / len(drift) > 1e-3
    assert {v for result in results for v in result["versions"]} == {0, 1, 2}


def shared_bytes(model: Path, layout: str) -> tuple[float, float]:
    """Which part of the engine's weights is the actor's memory, and what the sync says that it moved."""
    actor, rollout = roles(model, layout)
    rollout.sync(actor)
    own = {tensor.untyped_storage().data_ptr() for tensor in actor.runner.parameters().values()}
    held = rollout._fleet.engine.parameters().values()
    inside = sum(tensor.nbytes for tensor in held if tensor.untyped_storage().data_ptr() in own)
    assert rollout.metrics["sync/bytes_received"] == rollout.metrics["sync/bytes_lower_bound"]
    return inside / sum(tensor.nbytes for tensor in held), rollout.metrics["sync/bytes_received"]


def test_an_engine_beside_the_whole_model_shares_its_memory(ranks, model):
    for part, received in ranks.run(2, shared_bytes, model, "tp1"):
        assert part > 0.6 and received == 0
    for part, received in ranks.run(2, shared_bytes, model, "tp2"):
        assert part < 0.1 and received > 0


def test_samples_do_not_depend_on_the_number_of_ranks(ranks, model):
    runs = [ranks.run(count, three_iterations, model, layout) for count, layout in ((1, "tp1"), (3, "tp1"))]
    alone, shared = ({k: v for result in run for k, v in result["samples"].items()} for run in runs)
    assert len(alone) == 45 and alone.keys() == shared.keys()
    # The first iteration is before any update: its samples are bitwise the same.
    assert {i: alone[i] for i in range(15)} == {i: shared[i] for i in range(15)}


def generated(model: Path) -> dict[str, object]:
    scorer = scorer_of(model, "_lengths")
    actor, rollout = roles(model, "tp1", scorer)
    rollout.sync(actor)
    greedy = rollout.greedy(prompts(model))
    batch = rollout.generate(prompts(model), samples=2)
    reward = scorer(batch)
    texts = [scorer.sample(batch, row) for row in range(len(batch))]
    return {
        "groups": batch["group"].tolist(),
        "ids": batch["sample_id"].tolist(),
        "prompts": batch["prompt_id"].tolist(),
        "greedy": greedy["prompt_id"].tolist(),
        "reward": reward.tolist(),
        "part": batch["reward.letters"].tolist(),
        "answer": batch["answer"].tolist(),
        "greedy_reward": scorer(greedy).tolist(),
        "texts": [(s.prompt, s.response, s.answer, s.finish) for s in texts],
        "masked": [int(batch.row("loss_mask", i).sum()) for i in range(len(batch))],
        "truncated": batch["truncated"].tolist(),
        "logprobs_outside": batch["rollout_logprobs"][~batch["loss_mask"]].abs().sum().item(),
    }


def kept(model: Path) -> list[list[tuple[int, int, list[int]]]]:
    """Two prompts of five are kept, twice, from batches smaller than the work; then the rest is done."""
    actor, _ = roles(model, "tp1")
    engine = HFEngine(model, "cpu", torch.float32, max_running_requests=4, load_weights=False)
    context = job_context()
    rollout = Rollout(HFEngineGroup(engine, context), Sampling(max_new_tokens=9), seed=5, context=context, partial=True)
    rollout.sync(actor)
    calls = []
    for number, asked in enumerate((prompts(model), prompts(model)[:2], [])):
        batch = rollout.generate(asked, samples=3, keep=2 if asked else None)
        calls.append(
            [
                (int(batch["sample_id"][i]), int(batch["group"][i]), batch.row("policy_versions", i).unique().tolist())
                for i in range(len(batch))
            ]
        )
        assert rollout.unfinished == (3, 3, 0)[number]
        before = dict(rollout.metrics)
        assert len(rollout.greedy(prompts(model)[:2])) == (2 if dist.get_world_size() == 1 else 1)
        assert rollout.metrics == before  # what is told of an iteration is not of its evaluation
        actor.num_updates += 1
        rollout.sync(actor)
    return calls


@pytest.mark.parametrize("count", [1, 2])
def test_prompts_that_are_not_kept_go_on_in_the_next_call(ranks, model, count):
    results = ranks.run(count, kept, model)
    calls = [[row for result in results for row in result[number]] for number in range(3)]
    for rows, groups in zip(calls, (2, 2, 3), strict=True):
        assert len({group for _, group, _ in rows}) == groups and len(rows) == 3 * groups
    assert sorted(i for rows in calls for i, _, _ in rows) == list(range(21))
    assert all(version <= number for number, rows in enumerate(calls) for *_, found in rows for version in found)


class _ById:
    def __init__(self, found: list[Prompt]) -> None:
        self.by_id = {prompt.id: prompt for prompt in found}.__getitem__


def _lengths(sample) -> Reward:
    letters = sum(c.isalpha() for c in sample.response)
    return Reward(len(sample.response) / 4, {"letters": letters}, sample.response or None)


def test_rows_are_spread_and_scored_where_they_lie(ranks, model):
    results = ranks.run(2, generated, model)
    ids = [i for result in results for i in result["ids"]]
    assert ids == list(range(10))
    assert [g for result in results for g in result["groups"]] == [i // 2 * 2 for i in ids]
    assert [p for result in results for p in result["prompts"]] == [10 + i // 2 for i in ids]
    assert [p for result in results for p in result["greedy"]] == [10, 11, 12, 13, 14]
    found: dict[str, int] = {}
    for result in results:
        assert result["logprobs_outside"] == 0 and len(result["greedy_reward"]) == len(result["greedy"])
        columns = ("prompts", "texts", "masked", "truncated", "reward", "part", "answer")
        for prompt_id, text, masked, truncated, reward, part, number in zip(*(result[c] for c in columns), strict=True):
            prompt, response, answer, finish = text
            assert (prompt, answer) == (TEXTS[prompt_id - 10], str(prompt_id - 10))
            assert truncated == (finish == "length") and (not truncated or masked == 9)
            assert reward == len(response) / 4 and part == sum(c.isalpha() for c in response)
            assert found.setdefault(response, number) == number
    assert len(set(found.values())) == len(found) > 5 and found.get("", 0) == 0


BEGUN: list[float] = []


def _slow(sample) -> float:
    BEGUN.append(time.monotonic())
    time.sleep(0.02)
    return float(len(sample.response))


def scored_meanwhile(model: Path) -> tuple[int, list[float]]:
    """How many samples were looked at before the last one was written."""
    BEGUN.clear()
    scorer = scorer_of(model, "_slow")
    actor, rollout = roles(model, "tp1", scorer, max_running_requests=4)
    rollout.sync(actor)
    engine, seen = rollout._fleet.engine, []
    collect = engine.collect

    def watched(seconds: float):
        samples = collect(seconds)
        seen.extend([time.monotonic()] * len(samples))
        return samples

    engine.collect = watched
    batch = rollout.generate(prompts(model), samples=8)
    return sum(begun < seen[-1] for begun in BEGUN), batch["reward"].tolist()


def test_samples_are_scored_while_others_are_being_written(ranks, model):
    for early, rewards in ranks.run(2, scored_meanwhile, model):
        assert early >= 4 and len(rewards) in (16, 24)
