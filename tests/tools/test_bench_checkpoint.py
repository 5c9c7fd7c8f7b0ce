"""Tests of the checkpoint benchmark with a tiny model: the state that every method reads is compared bitwise."""

import re
from pathlib import Path

import pytest
import torch

from tests.helpers.rank_pool import RankError, job_store
from tests.tools.tool import tool
from tools.bench import bench_checkpoint
from verl_mg.job.recipe import load_recipe
from verl_mg.models.hf_config import read_config
from verl_mg.run.loop import one_iteration
from verl_mg.sharding.weight_table import weight_table

TINY = {"hidden": 64, "layers": 2}


@pytest.mark.nightly
def test_bench_checkpoint_of_all_methods_restores_state() -> None:
    options = (f"--{name}={value}" for name, value in (TINY | {"rounds": 1}).items())
    printed = tool("bench.bench_checkpoint", *options)
    lines = [line.strip("| ").split(" | ") for line in printed.splitlines() if re.match(r"\| \w", line)]
    rows = {what: [float(cell.split()[0]) for cell in cells] for what, *cells in lines}
    places = ("tp2 x dp2", "tp4 x dp1", "tp1 x dp4")
    assert rows.keys() >= {"training waits, s", "on disk, MiB", *(f"read under {place}, s" for place in places)}
    ours, *others = rows["sent, MiB"]
    moments_and_weights = rows["on disk, MiB"][0]
    # One of two data-parallel ranks sends at least its half; our method sends only digests.
    assert all(sent > moments_and_weights / 2 for sent in others) and ours < moments_and_weights / 100


def compare(folder: Path, spoil: str | None) -> int:
    """Returns the number of elements that were compared."""
    recipe = load_recipe(bench_checkpoint.RECIPE)
    job = bench_checkpoint._job(recipe, folder, "tp1", job_store())
    one_iteration(recipe, job, 1)
    truth = folder / str(spoil)
    bench_checkpoint._keep(job.actor, truth)
    held = list(bench_checkpoint._held(job.actor))
    if spoil:
        part = next(part for part in held if part.namespace == spoil)
        bench_checkpoint._whole(job.actor, truth, part).view(torch.int32)[-1] ^= 1
    bench_checkpoint._verify("a method", job.actor, truth)
    return sum(part.values.numel() for part in held)


def test_bench_checkpoint_verify_given_one_flipped_bit_raises(ranks, tmp_path):
    bench_checkpoint._write_inputs(tmp_path, **TINY)
    (compared,) = ranks.run(1, compare, tmp_path, None)
    parameters = weight_table(read_config(tmp_path / "model")).huggingface().values()
    assert compared == 4 * sum(torch.Size(whole.shape).numel() for whole in parameters)
    for namespace in ("weights", "exp_avg", "exp_avg_sq"):
        with pytest.raises(RankError, match=rf"a method, tp1: {namespace}\|.* differs from the saved value"):
            ranks.run(1, compare, tmp_path, namespace)
