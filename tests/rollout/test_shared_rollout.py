"""Two real engines under one rollout: shared work, cut and continued groups, a killed engine."""

import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from tests.helpers.engines import SGLANG, VLLM_NIGHTLY, process_of, workers_of
from tests.helpers.rank_pool import job_store
from tests.rollout.engine_jobs import engine_job, inputs, token_logprobs
from verl_mg.batch import Batch
from verl_mg.data.prompts import Prompt
from verl_mg.engines.engine import Request, Sampling
from verl_mg.job.job import RunningJob
from verl_mg.rollout.work_queue import StaticShare
from verl_mg.weight_sync import transfer_plan

TOKENS = 90
LOGIT = 9.0
KEPT, ASKED, SAMPLES = 4, 7, 3


def talk_long_of_digits(folder: Path) -> None:
    """A model that goes on with digits after a digit, for about 50 tokens, and with letters after a letter, for 8.

    Digits and letters have an axis of their own, that only the token before moves along; and prompts for it.
    """
    file = folder / "model" / "model.safetensors"
    weights = load_file(file)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    kinds = [tokenizer.convert_tokens_to_ids(list(characters)) for characters in ("0123456789", "abcdefg")]
    embedding, head = weights["model.embed_tokens.weight"].zero_(), weights["lm_head.weight"].zero_()
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()
        elif name == "model.norm.weight":
            weight.fill_(1.0)
    scale = embedding.shape[1] ** 0.5  # of a normalised vector along one axis
    for axis, (tokens, mean_length) in enumerate(zip(kinds, (50, 8), strict=True)):
        embedding[tokens, axis] = 1.0
        head[tokens, axis] = LOGIT / scale
        head[tokenizer.eos_token_id, axis] = (LOGIT + math.log(len(tokens) / (mean_length - 1))) / scale
    save_file(weights, file, {"format": "pt"})
    texts = [f"{i:02}" for i in range(20)] + [f"{'abcdefg'[i % 7]}{'abcdefg'[i // 7]}" for i in range(20)]
    # The first half of every thirty is of digits, the second of letters.
    lines = [{"prompt": text, "answer": ""} for text in texts[:15] + texts[20:35] + texts[15:20] + texts[35:]]
    (folder / "sums.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def rows(batch: Batch) -> list[dict[str, object]]:
    return [
        {
            "id": int(batch["sample_id"][i]),
            "group": int(batch["group"][i]),
            "prompt": int(batch["prompt_id"][i]),
            "tokens": batch.row("tokens", i).tolist(),
            "versions": batch.row("policy_versions", i)[batch.row("loss_mask", i)].tolist(),
            "logprobs": batch.row("rollout_logprobs", i).tolist(),
            "length": int(batch["prompt_length"][i]),
        }
        for i in range(len(batch))
    ]


def generated(job: RunningJob, prompts: list[Prompt], fixed: bool) -> dict[str, object]:
    """Generates the same prompts, from a shared queue or in fixed shares."""
    engines = job.rollout._engines
    engines.share = StaticShare(dist.get_rank(), engines.num_engines) if fixed else None
    batch = job.rollout.generate(prompts, num_samples=4)
    engines.share = None
    names = ("time/busiest_engine", "rollout/load_imbalance")
    return {"rows": rows(batch), "busiest": [job.rollout.metrics[name] for name in names]}


def partial(job: RunningJob) -> list[list[dict[str, object]]]:
    """Prompts beyond those that are kept; then an update of the weights; then the rest continues."""
    calls = []
    for number in range(3):
        calls.append(rows(job.rollout.generate(job.prompts.next_batch(KEPT), num_samples=SAMPLES)))
        with torch.no_grad():
            for parameter in job.actor.runner.parameters().values():
                parameter.mul_(1.01)
        job.actor.num_updates = number + 1
        job.rollout.update_weights(job.actor)
    # The rest, and nothing beside it.
    calls.append(rows(job.rollout.generate([], num_samples=SAMPLES)))
    return calls


def updated_with_death(job: RunningJob) -> int:
    """The engine of rank 0 is killed in the middle of a transfer in chunks: how many of them this rank's engine got."""
    engines, loads = job.rollout._engines, []
    load = engines.engine.load

    def load_and_die(*arguments: object) -> int:
        loads.append(load(*arguments))
        if dist.get_rank() == 0:
            process_of(engines.engine).kill()
        return loads[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer_plan, "CHUNK_BYTES", 2**14)
        patch.setattr(engines.engine, "load", load_and_die)
        engines._sync._planned.cache_clear()
        job.rollout.update_weights(job.actor)
    return len(loads)


def killed(job: RunningJob) -> dict[str, object]:
    """The process of rank 1's engine that computes is killed with samples half drawn; rank 0 starts none before."""
    engine, store = job.rollout._engines.engine, job_store()
    submit, victims = engine.submit, workers_of(engine)
    submitted, in_flight = [], []

    def submit_and_kill(requests: Sequence[Request], sampling: Sampling) -> None:
        submit(requests, sampling)
        submitted.extend(requests)
        # Where one is complete, those that were submitted with it are on their way.
        if not in_flight and len(submitted) > len(engine._running):
            in_flight.append(len(engine._running))
            (victim,) = victims
            victim.kill()
            store.set("killed", "")

    def submit_late(requests: Sequence[Request], sampling: Sampling) -> None:
        store.wait(["killed"])
        submit(requests, sampling)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "submit", submit_and_kill if dist.get_rank() == 1 else submit_late)
        batch = job.rollout.generate(list(job.prompts)[:8], num_samples=4)
    deaths = job.rollout.metrics["rollout/engine_deaths"]
    greedy = job.rollout.generate_greedy(list(job.prompts)[:6])
    loads = updated_with_death(job)
    again = job.rollout.generate_greedy(list(job.prompts)[:6])
    return {
        "rows": rows(batch),
        "greedy": rows(greedy),
        "again": rows(again),
        "in_flight": in_flight,
        "deaths": deaths,
        "loads": loads,
    }


def trials(folder: Path, engine: str) -> dict[str, object]:
    job, _ = engine_job(
        folder,
        "actor.layout=tp2",
        "rollout.layout=tp1",
        "rollout.max_running_requests=8",
        f"rollout.max_new_tokens={TOKENS}",
        "rollout.partial_rollout=true",
        engine=engine,
    )
    prompts = list(job.prompts)[:30]
    reported: dict[str, object] = {
        "shared": generated(job, prompts, fixed=False),
        "fixed": generated(job, prompts, fixed=True),
    }
    job.rollout._extra_prompts = ASKED - KEPT
    reported["partial"] = partial(job)
    job.rollout._extra_prompts = 0
    reported["killed"] = killed(job)
    job.actor.save(folder / "trained", folder / "model")
    return reported


@pytest.fixture(scope="module", params=[SGLANG, VLLM_NIGHTLY])
def reported(ranks, tmp_path_factory, request):
    folder = inputs(tmp_path_factory.mktemp("shared"), "qwen3", positions=200)
    talk_long_of_digits(folder)
    return folder, ranks.run(2, trials, folder, request.param)


def everywhere(results, *path):
    found = []
    for result in results:
        for key in path:
            result = result[key]
        found += result
    return found


def test_dynamic_queue_balances_the_load_of_engines_and_keeps_the_order_of_rows(reported):
    _, results = reported
    samples = everywhere(results, "shared", "rows")
    assert [row["id"] for row in samples] == list(range(120)) and len(results[0]["shared"]["rows"]) == 60
    assert all(row["group"] == row["id"] // 4 * 4 for row in samples)
    lengths = sorted((len(row["versions"]) for row in samples), reverse=True)
    assert sum(lengths[:30]) > 0.5 * sum(lengths)  # a quarter of them has most of the tokens
    (shared, shared_tokens), (fixed, fixed_tokens) = (results[0][name]["busiest"] for name in ("shared", "fixed"))
    print(f"busiest engine over mean: {shared:.3f} in seconds, {shared_tokens:.3f} in tokens; "
          f"of fixed shares {fixed:.3f}, {fixed_tokens:.3f}")  # fmt: skip
    # An engine that other programs slow down has fewer tokens, not more seconds.
    assert 1.0 <= min(shared, shared_tokens) < 1.3 < fixed_tokens
    assert shared_tokens < fixed_tokens


def test_partial_rollout_resumes_groups_with_the_version_of_each_token(reported):
    _, results = reported
    calls = [[row for result in results for row in result["partial"][number]] for number in range(4)]
    for rows_of_call in calls[:3]:
        groups = Counter(row["group"] for row in rows_of_call)
        assert len(groups) == KEPT and set(groups.values()) == {SAMPLES}
    everything = [row for rows_of_call in calls for row in rows_of_call]
    ids = [row["id"] for row in everything]
    assert len(ids) == len(set(ids)) and len({row["group"] for row in everything}) == len(ids) / SAMPLES
    requested = ASKED + 2 * KEPT  # each later call asks for as many prompts as the one before returned
    assert len(ids) == requested * SAMPLES
    versions = {version for row in everything for version in row["versions"]}
    assert {0, 1, 2} <= versions <= {0, 1, 2, 3}  # nothing may be left to write for the last call
    mixed = [row for row in everything if len(set(row["versions"])) > 1]
    assert mixed and all(row["versions"] == sorted(row["versions"]) for row in mixed)
    for number, rows_of_call in enumerate(calls):
        assert all(version <= number for row in rows_of_call for version in row["versions"])


def test_killed_engine_restarts_without_losing_samples(reported):
    folder, results = reported
    (in_flight,) = everywhere(results, "killed", "in_flight")
    assert in_flight >= 8 and results[0]["killed"]["deaths"] == 1
    assert 0 < results[0]["killed"]["loads"] < results[1]["killed"]["loads"], "it ended in the middle of the transfer"
    ids = sorted(everywhere(results, "killed", "rows"), key=lambda row: row["id"])
    first = ids[0]["id"]
    assert [row["id"] for row in ids] == list(range(first, first + 32))
    assert Counter(row["prompt"] for row in ids) == dict.fromkeys({row["prompt"] for row in ids}, 4)
    # The engine that was started anew has the weights of now.
    for row in [*everywhere(results, "killed", "greedy"), *everywhere(results, "killed", "again"), *ids[::3]]:
        expected = token_logprobs(folder / "trained", row["tokens"])[row["length"] - 1 :]
        torch.testing.assert_close(torch.tensor(row["logprobs"][row["length"] :]), expected, atol=1e-4, rtol=0)
