"""Tests of the benchmark of one GPU with a tiny model on the CPU: the complete program."""

import json
import re
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from tests.helpers.launched import finished
from tools.bench import bench_gpu
from verl_mg.models.hf_config import read_config
from verl_mg.planner.inputs import read_hardware_profile
from verl_mg.sharding.weight_table import weight_table


@pytest.mark.nightly
def test_bench_gpu_tiny_reports_every_part(tmp_path):
    report, measured = tmp_path / "benchmarks" / "cpu.md", tmp_path / "cpu.json"
    options = ["--tiny", "--repeats", "1", "--output", str(report), "--measured", str(measured)]
    finished(["-m", "tools.bench.bench_gpu", *options]).completed()
    text = report.read_text()
    assert text.startswith("# One device: qwen3_1_7b, tiny")
    for row in (
        r"bf16 product of 128 x 128 matrices \| [\d.e+-]+ TFLOP/s",
        r"only products, forward and backward \| [\d.]+ ms",
        r"... with gradients \| [\d.]+ ms, [\d.]+ of the products",
        r"... largest difference \| 0 nats",
        r"kernels \| torch",
        r"inference pass \| \d+ tokens/s, [\d.e+-]+ TFLOP/s",
        r"update \| \d+ tokens/s, [\d.e+-]+ TFLOP/s",
        r"in an update: \S.* \| [\d.]+% of [\d.]+ s",
        r"offload to the host \| [\d.e+-]+ GB/s",
        r"offload to the device \| [\d.e+-]+ GB/s",
        r"memory that the plan predicts \| \d+\.\d\d GiB \(weights",
        r"weight sync \| \d+\.\d{4} s, [\d.e+-]+ GB/s of weights",
        r"rollout, engine hf \| \d+ tokens/s \(4 samples of 8 tokens",
    ):
        assert re.search(rf"^\| {row}", text, re.M), row
    assert re.search(r"^- .*torch 2\.\d+.*, NCCL .*, megatron-core 0\.\d+", text, re.M)
    assert "failed" not in text and str(tmp_path) not in text
    assert read_hardware_profile(measured).keys() == {"flops", "memory_bandwidth"}


def test_bench_gpu_with_failing_part_keeps_the_others(tmp_path, capsys):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(bench_gpu.MODEL.read_text()) | bench_gpu.TINY_SHAPE))
    bench = bench_gpu.Bench(tmp_path, SimpleNamespace(), bench_gpu.TINY, 1, weight_table(read_config(config)))

    def part(_: bench_gpu.Bench, error: Exception) -> Iterator[bench_gpu.Row]:
        yield "first", "1 s"
        raise error

    report = bench_gpu.Report(tmp_path / "report.md", "tiny", bench)
    report.add("Small", partial(part, error=torch.OutOfMemoryError("CUDA out of memory.\nand much more")))
    assert not report.failed
    report.add("One", partial(part, error=RuntimeError("wrong\nand much more")))
    report.add("Two", lambda _: iter([("second", "2 s")]))
    text = (tmp_path / "report.md").read_text()
    assert "| first | 1 s |\n| out of memory | CUDA out of memory. |\n" in text
    assert "| first | 1 s |\n| failed | RuntimeError: wrong |\n" in text and "| second | 2 s |" in text
    assert report.failed and "Traceback" in capsys.readouterr().err
