"""Rollouts on engines in the ranks' processes: weights, rows, scores, pending groups, errors."""

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.helpers.tiny_models import tiny_model
from tests.rollout.rollout_roles import TEXTS, make_prompts, make_roles
from verl_mg.errors import UserError
from verl_mg.rewards import Reward


@pytest.fixture(
    scope="module",
    params=[
        "qwen3",
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("gemma2", "gpt_oss", "llama", "qwen2")),
    ],
)
def model(request, tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("models") / request.param, request.param)


# -- weights


def three_iterations(model: Path, layout: str) -> dict[str, object]:
    roles = make_roles(model, layout)
    actor, rollout = roles.actor, roles.rollout
    differences, drifts, samples, versions = [], [], {}, []
    for _ in range(3):
        batch = rollout.generate(make_prompts(model), num_samples=3)
        old = actor.compute_logprobs(batch)
        differences.append((old - batch["rollout_logprobs"])[batch["loss_mask"]].abs().tolist())
        batch["advantages"] = batch.expand_to_tokens((batch["sample_id"] % 3 - 1).float())
        actor.update(batch, lambda inputs: (-inputs["advantages"] * inputs.logprobs, {}), "token-mean")
        # Before the transfer the engine is an update behind: this shows that the difference measures anything.
        drifts.append((actor.compute_logprobs(batch) - batch["rollout_logprobs"])[batch["loss_mask"]].abs().tolist())
        rollout.update_weights(actor)
        versions += batch["policy_version"].tolist()
        samples |= {int(s): batch.row("tokens", i).tolist() for i, s in enumerate(batch["sample_id"])}
    return {"differences": differences, "drifts": drifts, "samples": samples, "versions": versions}


@pytest.mark.parametrize("layout,count", [pytest.param("tp1", 2, marks=pytest.mark.nightly), ("tp2-pp2", 4)])
def test_rollout_logprobs_after_update_weights_equal_the_actors(ranks, model, layout, count):
    results = ranks.run(count, three_iterations, model, layout)
    for iteration in range(3):
        differences = [x for result in results for x in result["differences"][iteration]]
        assert differences and sum(differences) / len(differences) < 1e-5
    drift = [x for result in results for values in result["drifts"] for x in values]
    assert sum(drift) / len(drift) > 1e-3
    assert {v for result in results for v in result["versions"]} == {0, 1, 2}


def shared_bytes(model: Path, layout: str) -> tuple[float, float]:
    """Which part of the engine's weights is the actor's memory, and how many bytes the transfer counted."""
    roles = make_roles(model, layout)
    actor_memory = {tensor.untyped_storage().data_ptr() for tensor in roles.actor.runner.parameters().values()}
    weights = roles.rollout._engines.engine.parameters().values()
    shared = sum(tensor.nbytes for tensor in weights if tensor.untyped_storage().data_ptr() in actor_memory)
    metrics = roles.rollout.metrics
    assert metrics["weight_sync/bytes_received"] == metrics["weight_sync/bytes_lower_bound"]
    return shared / sum(tensor.nbytes for tensor in weights), metrics["weight_sync/bytes_received"]


def test_hf_engine_on_a_rank_with_the_whole_model_shares_its_memory(ranks, model):
    for part, received in ranks.run(2, shared_bytes, model, "tp1"):
        assert part > 0.6 and received == 0
    for part, received in ranks.run(2, shared_bytes, model, "tp2"):
        assert part < 0.1 and received > 0


def test_rollout_on_another_number_of_ranks_generates_the_same_samples(ranks, model):
    runs = [ranks.run(count, three_iterations, model, layout) for count, layout in ((1, "tp1"), (3, "tp1"))]
    alone, shared = ({k: v for result in run for k, v in result["samples"].items()} for run in runs)
    assert len(alone) == 45 and alone.keys() == shared.keys()
    # The first iteration is before any update: its samples are bitwise the same.
    assert {i: alone[i] for i in range(15)} == {i: shared[i] for i in range(15)}


# -- rows and scores


def _lengths(sample) -> Reward:
    letters = sum(c.isalpha() for c in sample.response)
    return Reward(len(sample.response) / 4, {"letters": letters}, sample.response or None)


def generate_and_score(model: Path) -> dict[str, object]:
    roles = make_roles(model, reward=f"{__name__}:_lengths")
    greedy = roles.rollout.generate_greedy(make_prompts(model))
    batch = roles.rollout.generate(make_prompts(model), num_samples=2)
    # The sample ids of the greedy responses are used again: only the scores tell them apart.
    assert "reward" not in batch and "answer" not in batch
    reward, greedy_reward = roles.reward.wait(batch), roles.reward.wait(greedy)
    # Rows that the recipe has moved to other places still have their scores.
    reversed_rows = torch.arange(len(batch)).flip(0)
    selection = batch.select_columns(["generated_by", "score_id"]).select(reversed_rows)
    assert torch.equal(roles.reward.wait(selection), reward[reversed_rows])
    texts = [roles.reward.sample(batch, row) for row in range(len(batch))]
    recorded, recorded_greedy = roles.rollout.records[1].received, roles.rollout.records[0].received
    assert torch.equal(recorded["reward"], reward) and torch.equal(recorded_greedy["reward"], greedy_reward)
    assert "score_id" not in recorded and "generated_by" not in recorded
    return {
        "groups": batch["group"].tolist(),
        "ids": batch["sample_id"].tolist(),
        "prompts": batch["prompt_id"].tolist(),
        "greedy": greedy["prompt_id"].tolist(),
        "reward": reward.tolist(),
        "part": batch["reward.letters"].tolist(),
        "answer": batch["answer"].tolist(),
        "greedy_reward": greedy_reward.tolist(),
        "greedy_texts": [roles.reward.sample(greedy, row).response for row in range(len(greedy))],
        "texts": [(s.prompt, s.response, s.answer, s.finish) for s in texts],
        "masked": [int(batch.row("loss_mask", i).sum()) for i in range(len(batch))],
        "truncated": batch["truncated"].tolist(),
        "logprobs_outside": batch["rollout_logprobs"][~batch["loss_mask"]].abs().sum().item(),
    }


def test_generate_and_wait_return_rows_with_their_scores(ranks, model):
    results = ranks.run(2, generate_and_score, model)
    ids = [i for result in results for i in result["ids"]]
    assert ids == list(range(10))
    assert [g for result in results for g in result["groups"]] == [i // 2 * 2 for i in ids]
    assert [p for result in results for p in result["prompts"]] == [10 + i // 2 for i in ids]
    assert [p for result in results for p in result["greedy"]] == [10, 11, 12, 13, 14]
    answers: dict[str, int] = {}
    for result in results:
        assert result["logprobs_outside"] == 0
        assert result["greedy_reward"] == [len(text) / 4 for text in result["greedy_texts"]]
        columns = ("prompts", "texts", "masked", "truncated", "reward", "part", "answer")
        for prompt_id, text, masked, truncated, reward, part, number in zip(*(result[c] for c in columns), strict=True):
            prompt, response, answer, finish = text
            assert (prompt, answer) == (TEXTS[prompt_id - 10], str(prompt_id - 10))
            assert truncated == (finish == "length") and (not truncated or masked == 9)
            assert reward == len(response) / 4 and part == sum(c.isalpha() for c in response)
            assert answers.setdefault(response, number) == number
    assert len(set(answers.values())) == len(answers) > 5 and answers.get("", 0) == 0


STARTED: list[float] = []


def _slow(sample) -> float:
    STARTED.append(time.monotonic())
    time.sleep(0.02)
    return float(len(sample.response))


def score_while_generating(model: Path) -> tuple[int, int]:
    """How many samples there are, and how many of them were being scored before the last one was complete."""
    STARTED.clear()
    roles = make_roles(model, reward=f"{__name__}:_slow", max_running_requests=4)
    engine, completed = roles.rollout._engines.engine, []
    collect = engine.collect

    def watched(seconds: float):
        deadline = time.monotonic() + 300
        while len(STARTED) < len(completed) and time.monotonic() < deadline:
            time.sleep(0.001)  # the engine waits for the threads of the reward, which may be slower
        samples = collect(seconds)
        completed.extend([time.monotonic()] * len(samples))
        return samples

    engine.collect = watched
    batch = roles.rollout.generate(make_prompts(model), num_samples=8)
    roles.reward.wait(batch)
    return len(completed), sum(begin < completed[-1] for begin in STARTED)


def test_reward_functions_run_while_samples_are_generated(ranks, model):
    results = ranks.run(2, score_while_generating, model)
    assert sum(count for count, _ in results) == 5 * 8
    assert all(early >= count - 4 for count, early in results)  # the last four are complete at the same time


def _fails(sample) -> float:
    raise ValueError("no score today")


class EngineError(Exception):
    """An engine's failure."""


def errors_of(model: Path) -> dict[str, str]:
    """The call in which a failing reward, and a failing engine, raise."""
    raised = {}
    roles = make_roles(model, reward=f"{__name__}:_fails")
    batch = roles.rollout.generate(make_prompts(model), num_samples=2)
    try:
        roles.reward.wait(batch)
    except UserError as error:
        raised["wait"] = str(error)

    def fail(timeout: float):
        raise EngineError("the engine fails")

    roles.rollout._engines.engine.collect = fail
    try:
        roles.rollout.generate(make_prompts(model))
    except EngineError as error:
        raised["generate"] = str(error)
    return raised


def test_errors_are_raised_by_the_call_that_needs_the_result(ranks, tmp_path):
    (raised,) = ranks.run(1, errors_of, tiny_model(tmp_path / "model", "qwen3"))
    assert "no score today" in raised["wait"] and raised["generate"] == "the engine fails"


# -- pending groups


def keep_two_of_five(model: Path) -> list[list[tuple[int, int, list[int]]]]:
    """Two of five prompts are returned, twice, from batches smaller than the work; then the rest."""
    roles = make_roles(model, max_running_requests=4, extra_prompts=3, partial_rollout=True)
    actor, rollout = roles.actor, roles.rollout
    calls = []
    for number in range(3):
        requested = roles.feed.next_batch(2) if number < 2 else []
        batch = rollout.generate(requested, num_samples=3)
        calls.append(
            [
                (int(batch["sample_id"][i]), int(batch["group"][i]), batch.row("policy_versions", i).unique().tolist())
                for i in range(len(batch))
            ]
        )
        assert len(rollout.state().groups) == (3, 3, 0)[number]
        before = dict(rollout.metrics)
        assert len(rollout.generate_greedy(make_prompts(model)[:2])) == (2 if dist.get_world_size() == 1 else 1)
        assert rollout.metrics == before  # the metrics of an iteration are not those of its evaluation
        actor.num_updates += 1
        rollout.update_weights(actor)
    return calls


@pytest.mark.parametrize("count", [1, 2])
def test_extra_prompts_with_partial_rollout_return_every_sample_once(ranks, model, count):
    results = ranks.run(count, keep_two_of_five, model)
    calls = [[row for result in results for row in result[number]] for number in range(3)]
    for rows, groups in zip(calls, (2, 2, 3), strict=True):
        assert len({group for _, group, _ in rows}) == groups and len(rows) == 3 * groups
    assert sorted(i for rows in calls for i, _, _ in rows) == list(range(21))
    assert all(version <= number for number, rows in enumerate(calls) for *_, seen in rows for version in seen)


# -- prefetch


def tokens_of(batch) -> list[tuple[int, list[int]]]:
    return [(int(i), batch.row("tokens", row).tolist()) for row, i in enumerate(batch["sample_id"])]


def prefetch(model: Path) -> dict[str, object]:
    """Three iterations with prefetched samples, an evaluation, and a resume from each state in between.

    The engine shares the ranks of the actor, which does not train meanwhile.
    """
    options = {"reward": f"{__name__}:_lengths", "prefetch": True}
    roles = make_roles(model, **options)
    rollout, reported = roles.rollout, {"tokens": [], "states": [], "versions": []}

    def state_name() -> str:
        return "in flight" if rollout._in_flight else "ready" if rollout._ready is not None else "idle"

    for iteration in (1, 2, 3):
        rollout.start_iteration(iteration, is_last=iteration == 3)
        batch = rollout.generate(roles.feed.next_batch(2), num_samples=2)
        batch["reward"] = roles.reward.wait(batch)
        lengths = torch.tensor([len(roles.reward.sample(batch, row).response) / 4 for row in range(len(batch))])
        assert torch.equal(batch["reward"], lengths)
        reported["tokens"].append(tokens_of(batch))
        reported["versions"].append(sorted(set(batch["policy_version"].tolist())))
        reported["states"].append(state_name())
        roles.actor.num_updates += 1
        rollout.update_weights(roles.actor)
        assert rollout._engines.version == iteration - (1 if iteration < 3 else 0)  # deferred while in flight
        if iteration == 2:
            greedy = rollout.generate_greedy(make_prompts(model)[:2])
            reported["states"].append(state_name())
            assert roles.reward.wait(greedy).shape == (len(greedy),) and rollout._engines.version == 2
        if iteration < 3:
            resumed = make_roles(model, job=f"resumed {iteration}", **options)
            resumed.feed.load_state(roles.feed.state())
            resumed.rollout.load(rollout.state(), rollout.local_state(), resumed.feed.by_id)
            resumed.rollout.update_weights(resumed.actor)
            resumed.rollout.start_generating()
            resumed.rollout.start_iteration(iteration + 1, is_last=True)
            again = resumed.rollout.generate(resumed.feed.next_batch(2), num_samples=2)
            assert len(resumed.reward.wait(again)) == len(again)
            reported[f"resumed {iteration}"] = tokens_of(again)
    return reported


def test_prefetch_returns_the_next_prompts_and_survives_a_resume(ranks, tmp_path):
    results = ranks.run(2, prefetch, tiny_model(tmp_path / "model", "qwen3"))
    for result in results:
        assert result["states"] == ["in flight", "in flight", "ready", "idle"]
    ids = [i for iteration in range(3) for result in results for i, _ in result["tokens"][iteration]]
    assert ids == list(range(12))
    # The second batch was generated by the first weights, and the third by the second ones at the latest.
    assert all(v <= iteration for r in results for iteration, seen in enumerate(r["versions"]) for v in seen)
    # The weights are the same in this test, so a resume generates the same samples, in flight or ready.
    for iteration in (1, 2):
        again = sorted(row for result in results for row in result[f"resumed {iteration}"])
        assert again == sorted(row for result in results for row in result["tokens"][iteration])


def request_others(model: Path) -> list[str]:
    """The errors of calls after a prefetch that are not those that were prefetched."""
    roles = make_roles(model, prefetch=True)
    roles.rollout.start_iteration(1, is_last=False)
    roles.rollout.generate(roles.feed.next_batch(2), num_samples=2)
    errors = []
    prefetched = roles.feed.next_batch(2)
    for prompts, samples in ((prefetched, 3), (prefetched[:1], 2), (prefetched[::-1], 2)):
        with pytest.raises(UserError) as caught:
            roles.rollout.generate(prompts, num_samples=samples)
        errors.append(str(caught.value))
    roles.rollout.start_iteration(2, is_last=True)
    assert len(roles.rollout.generate(prefetched, num_samples=2)) == 4
    return errors


def test_generate_after_prefetch_of_other_prompts_raises(ranks, tmp_path):
    (errors,) = ranks.run(1, request_others, tiny_model(tmp_path / "model", "qwen3"))
    assert all(error.startswith("rollout.mode=one_step_off: 2 samples of each of 2 prompts were") for error in errors)
