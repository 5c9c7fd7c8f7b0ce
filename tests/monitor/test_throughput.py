"""Rates against counts by hand, on real ranks under layouts that share micro-batches."""

import pytest
import torch
import torch.distributed as dist

from tests.helpers.rank_pool import job_store
from tests.helpers.tiny_jobs import files_of, logged
from tests.run.jobs import GRPO, job, make_inputs
from verl_mg.batch import Batch
from verl_mg.config import load_config
from verl_mg.distributed.collectives import all_gather_json
from verl_mg.job.job import RunningJob
from verl_mg.job.recipe import load_recipe, requested_roles
from verl_mg.models.flops import RowFlops, row_flops
from verl_mg.models.hf_config import read_config
from verl_mg.monitor.metrics import Throughput, model_flops, peak_flops, rates
from verl_mg.sharding.weight_table import weight_table


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """With a layer for each chunk of two stages."""
    return make_inputs(tmp_path_factory.mktemp("inputs"), layers=4)


@pytest.mark.parametrize(
    ("device", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.0),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H20", 148.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA GH200 480GB", 989.4),
    ],
)
def test_peak_flops_known_devices(device, teraflops):
    assert peak_flops(device) == teraflops * 1e12


@pytest.mark.parametrize("device", ["NVIDIA A10G", "NVIDIA L400", "cpu", ""])
def test_peak_flops_unknown_device_is_none(device):
    assert peak_flops(device) is None


def test_model_flops_backward_pass_is_twice_a_forward_pass():
    rows = RowFlops(per_token=10.0, per_pair=2.0)
    forward = (10 * 3 + 2 * 9) + (10 * 5 + 2 * 25)
    assert model_flops(rows, [3, 5], learns=False) == forward
    assert model_flops(rows, [3, 5], learns=True) == 3 * forward
    assert model_flops(rows, [3, 5], learns=True, adapters=True) == 2 * forward
    assert model_flops(rows, [], learns=True) == 0


def test_model_flops_of_shared_prefixes_count_computed_tokens():
    """A row of 5 tokens of which another computes 3: two tokens more, and the pairs that these have."""
    rows = RowFlops(per_token=10.0, per_pair=2.0)
    assert model_flops(rows, [4, 5], learns=True, shared=[0, 3]) == 3 * ((10 * 4 + 2 * 16) + (10 * 2 + 2 * (25 - 9)))


def counts_of_segments(rows):
    batch = Batch.from_rows(rows)
    batch["prefix_length"] = torch.tensor([0, 3, 2][: len(batch)])
    return Throughput([]).take([batch])


def test_throughput_counts_tokens_that_segments_repeat_once():
    """Two segments repeat 3 and 2 of 5 tokens."""
    counts = [counts_of_segments(rows) for rows in ([[1] * 5, [1] * 4, [1] * 6], [[2] * 7])]
    assert rates(counts, 2.0, None)["time/tokens_per_second"] == pytest.approx((5 + 1 + 4 + 7) / 2.0)


def counted(inputs, layout):
    """Rates of a GRPO iteration of two epochs with a peak of 1 TFLOP/s, and the tokens and the prompts of all rows."""
    recipe = load_recipe("recipes/grpo.py")
    common = [
        *files_of(inputs, inputs / "run"),
        f"reward.function={inputs / 'reward.py'}:score",
        "rollout.max_new_tokens=5",
        "rollout.max_mismatch=null",  # whose pass is in the rate too
        "actor.tokens_per_micro_batch=512",
        "reference.tokens_per_micro_batch=512",
        f"actor.layout={layout}",
        f"reference.layout={layout}",
        "algorithm.num_epochs=2",
    ]
    config = load_config(None, [*common, *GRPO], recipe.config)
    run = RunningJob(config, requested_roles(recipe, config), job_store())
    run.start()
    throughput = Throughput([run.actor.runner, run.reference.runner])
    run.begin(1)
    dict(recipe.iteration(run, config.algorithm))
    (batch,) = run.rollout.train_batches
    tokens = [row.tolist() for row in batch["tokens"].split(batch.lengths.tolist())]
    prompts = [tuple(row[:n]) for row, n in zip(tokens, batch["prompt_length"].tolist(), strict=True)]
    every: list[list[tuple[int, tuple[int, ...]]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, list(zip(map(len, tokens), prompts, strict=True)))
    counts = throughput.take(run.rollout.train_batches), throughput.take([])
    metrics, again = (rates(all_gather_json(taken), 2.0, 1e12) for taken in counts)
    run.close()
    return metrics, again, [row for own in every for row in own]


@pytest.mark.parametrize(
    ("layout", "ranks_of"),
    [
        pytest.param("tp1", 1, marks=pytest.mark.nightly),
        ("tp2-pp2", 4),
        ("cp2", 2),
        pytest.param("pp2-vpp2", 2, marks=pytest.mark.nightly),
    ],
)
def test_throughput_counts_every_token_once_in_any_layout(ranks, inputs, layout, ranks_of):
    reported = ranks.run(ranks_of, counted, inputs, layout)
    table = weight_table(read_config(inputs / "model"))
    rows = row_flops(table.config, table.tensor_index)
    for metrics, again, sampled in reported:
        lengths, prompts = zip(*sampled, strict=True)
        assert len(lengths) == 24
        # The first sample of a prompt computes it for the others.
        shared = [len(prompt) if prompt in prompts[:row] else 0 for row, prompt in enumerate(prompts)]
        assert sum(shared) > sum(lengths) / 10
        assert metrics["time/tokens_per_second"] == pytest.approx(sum(lengths) / 2.0)
        assert metrics["time/tokens_per_second_per_rank"] == pytest.approx(sum(lengths) / 2.0 / ranks_of)
        # Two epochs of training, one pass of the actor for old log-probs, one of the reference.
        flops = sum(2 * model_flops(rows, lengths, learns, shared=shared) for learns in (True, False))
        assert metrics["time/mfu"] == pytest.approx(flops / (2.0 * ranks_of * 1e12))
        assert again["time/tokens_per_second"] == again["time/mfu"] == 0


def test_throughput_of_sft_counts_trained_tokens(ranks, inputs, tmp_path):
    overrides = ["algorithm.examples_per_iteration=8", "job.iterations=1", "job.save=false"]
    ranks.run(2, job, "sft", inputs, tmp_path / "run", overrides)
    (line,) = logged(tmp_path / "run")
    seconds = line["time/iteration"]
    tokens = line["time/tokens_per_second"] * seconds
    assert tokens == pytest.approx(round(tokens)) and tokens >= 8 * 4
    assert "time/mfu" not in line  # of a CPU no peak is known
