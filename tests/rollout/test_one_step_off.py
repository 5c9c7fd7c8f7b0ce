"""Engines on ranks of their own draw the next samples while this iteration trains, from weights one iteration old."""

import shutil

import pytest
from pyarrow import parquet

from tests.helpers.engines import SGLANG, VLLM_NIGHTLY
from tests.helpers.tiny_jobs import logged, run_recipe
from tests.helpers.traces import needs_sglang
from tests.rollout.engine_jobs import engine_job, inputs, settings, token_logprobs
from verl_mg.distributed.collectives import all_gather_json
from verl_mg.monitor.metrics import mismatch_metrics, mismatch_statistics, rollout_metrics, rollout_sums
from verl_mg.run.loop import one_iteration

ITERATIONS, PROMPTS, GROUP = 3, 6, 4
OVERRIDES = ["rollout.mode=one_step_off", f"job.iterations={ITERATIONS}", "rollout.max_mismatch=0.001"]


def train_ahead(folder, engine):
    """This rank's part of each iteration; a checkpoint is written after each, and greedy answers come in between."""
    job, recipe = engine_job(folder, "actor.layout=tp2", "rollout.num_ranks=1", *OVERRIDES, engine=engine)
    job.actor.save(folder / "weights-0", folder / "model")
    reported = []
    for iteration in range(1, ITERATIONS + 1):
        trained, update = [], job.actor.update

        def kept(batch, *arguments, trained=trained, update=update, **options):
            trained.append(batch)
            return update(batch, *arguments, **options)

        job.actor.update = kept
        version = job.actor.num_updates
        metrics = one_iteration(recipe, job, iteration)
        sums, statistics = (rollout_sums(job.rollout.train_batches, version), mismatch_statistics(trained))
        metrics |= rollout_metrics(all_gather_json(sums)) | mismatch_metrics(all_gather_json(statistics))
        metrics |= job.rollout.metrics
        job.actor.update = update
        job.actor.save(folder / f"weights-{iteration}", folder / "model")
        greedy = job.rollout.generate_greedy(list(job.prompts)[:1]) if iteration == 2 else None
        rows = trained[0]
        reported.append(
            {
                "prefetching": bool(job.rollout.state().prefetched),
                "metrics": {name: value for name, value in metrics.items() if not name.startswith("time/")},
                "ids": rows["sample_id"].tolist(),
                "versions": rows["policy_versions"][rows["loss_mask"]].unique().tolist(),
                "rows": [(rows.row("tokens", i), rows.row("rollout_logprobs", i)) for i in range(len(rows))],
                "greedy": None if greedy is None else greedy["policy_versions"].unique().tolist(),
            }
        )
    job.close()
    return reported


def off(folder, step, rows):
    """Greatest difference of the engine's log-probs from those of a checkpoint."""
    pairs = [(token_logprobs(folder / f"weights-{step}", tokens), logprobs[1:]) for tokens, logprobs in rows]
    return max((expected - found)[found != 0].abs().max().item() for expected, found in pairs)


@pytest.mark.parametrize("engine", [SGLANG, VLLM_NIGHTLY])
def test_prefetch_generates_with_weights_of_the_iteration_before(ranks, tmp_path, engine):
    folder = inputs(tmp_path, "qwen3")
    results = ranks.run(3, train_ahead, folder, engine)
    for number, reported in enumerate(zip(*results, strict=True)):
        older = min(number, 1)
        # In the last iteration nothing is prefetched.
        assert all(rank["prefetching"] == (number < ITERATIONS - 1) for rank in reported)
        assert {v for rank in reported for v in rank["versions"]} == {number - older}
        ids = sorted(i for rank in reported for i in rank["ids"])
        assert ids == list(range(number * PROMPTS * GROUP, (number + 1) * PROMPTS * GROUP))
        for rank in reported:
            assert rank["metrics"] == reported[0]["metrics"]
        assert reported[0]["metrics"]["rollout/staleness"] == older and reported[0]["metrics"]["actor/grad_norm"] > 0
        rows = [row for rank in reported for row in rank["rows"]]
        assert off(folder, number - older, rows) < 1e-4
        if older:
            assert off(folder, number, rows) > 1e-3
            assert reported[0]["metrics"]["mismatch/max_abs"] > 1e-3
    # An evaluation in between waits for the samples that are drawn, and then for the weights that wait for them.
    assert [rank["greedy"] for reported in results for rank in reported if rank["greedy"]] == [[-1, 2]]


def run_whole(folder):
    ahead = ["rollout.mode=one_step_off", "actor.layout=tp2", "rollout.num_ranks=1", "job.iterations=2"]
    run_recipe("grpo", [*settings(folder), *ahead, "checkpoint.every=1", "job.console=false"])


def drawn(folder, iteration):
    files = (folder / "run" / "samples" / f"{iteration:06d}").iterdir()
    rows = [row for file in files for row in parquet.read_table(file, columns=["sample_id", "prompt_id"]).to_pylist()]
    return sorted((row["sample_id"], row["prompt_id"]) for row in rows)


@pytest.mark.nightly
@needs_sglang
def test_prefetch_after_a_resume_generates_the_same_prompts(ranks, tmp_path):
    folder = inputs(tmp_path, "qwen3")
    ranks.run(3, run_whole, folder)
    before = drawn(folder, 2)
    assert len(before) == PROMPTS * GROUP and before[0][0] == PROMPTS * GROUP
    shutil.rmtree(folder / "run" / "checkpoints" / "000002")
    shutil.rmtree(folder / "run" / "samples" / "000002")
    ranks.run(3, run_whole, folder)
    assert drawn(folder, 2) == before
    lines = logged(folder / "run")
    assert [line["step"] for line in lines] == [1, 2] and lines[1]["actor/grad_norm"] > 0
