"""Measures a dense model on one GPU: vocabulary, training, inference, weight sync and rollout; and predicted memory.

    python -m tools.bench.bench_gpu [--output runs/bench_gpu.md] [--measured h200.json] [--repeats 5] [--part NAME]
        [--tiny]

The model has the shape of Qwen3-1.7B and random bf16 weights, so nothing is downloaded; `--model` names another
config.json. Roles, engines and the weight sync are a job's, on one rank; engines are SGLang's if it is installed. Every
figure is the median of `--repeats` repeats after a warm-up, and the device is synchronized before the clock is read.
The report contains the error of a part that fails, and the other parts still run; measurements are written after each
part. `--part` selects parts. `--measured` writes a file for `verl-mg plan --measured`. `--tiny` runs the same program
with a model that a CPU computes in seconds.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import platform as machine
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed import PrefixStore

from tools.bench.update_profile import Row, offload_rows, update_rows
from tools.bench.vocabulary import Vocabulary
from verl_mg import device
from verl_mg.algorithms.losses import clipped_policy_loss
from verl_mg.batch import Batch
from verl_mg.config import Config
from verl_mg.data import Prompt, PromptFeed, PromptSet
from verl_mg.distributed.world import World
from verl_mg.doctor import installed_versions
from verl_mg.engines import Sampling
from verl_mg.job.build_engines import build_engine_group
from verl_mg.job.build_models import ModelRoleBuilder
from verl_mg.layout import Layout
from verl_mg.megatron.transformer_config import resolve_kernels
from verl_mg.models.flops import row_flops
from verl_mg.models.hf_config import read_config
from verl_mg.monitor.metrics import device_peak, model_flops
from verl_mg.planner.inputs import GIB, PlanInputs
from verl_mg.planner.memory import train_memory
from verl_mg.roles.context import JobContext
from verl_mg.roles.models import Actor
from verl_mg.rollout.rollout import RolloutSetup
from verl_mg.rollout.sync_rollout import SyncRollout
from verl_mg.sharding.megatron import Kernels
from verl_mg.sharding.weight_table import WeightTable, weight_table
from verl_mg.training.loss_inputs import LossInputs

PARTS = ("device", "vocabulary", "kept", "recomputed", "rollout", "torch")
"""Names of the parts, by what they measure: the device, the output layer against its products and Liger, training
with activations kept, with layers recomputed, weight sync and rollout, training with torch's kernels where others are
the default."""
MODEL = Path(__file__).parents[1] / "model_configs" / "qwen3_1_7b.json"
TINY_SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


@dataclass(frozen=True)
class Work:
    """Sizes of the work that is measured."""

    tokens: int = 131072
    """Tokens of an update."""
    longest: int = 8192
    """Tokens of the longest row of an update."""
    micro_batch: int = 16384
    """Tokens of a micro-batch."""
    prompts: int = 64
    """Prompts of a rollout."""
    samples: int = 4
    """Samples of each prompt."""
    prompt_tokens: int = 256
    """Tokens of each prompt."""
    new_tokens: int = 512
    """Tokens of each response."""
    width: int = 8192
    """Rows and columns of the matrices of the device test."""
    copied: int = 2**32
    """Bytes of the copies of the device test."""


TINY = Work(2048, 128, 512, prompts=2, samples=2, prompt_tokens=8, new_tokens=8, width=128, copied=2**20)


@dataclass
class Bench:
    """Setting and results that all parts share."""

    folder: Path
    """Folder of the model and of outputs."""
    world: World
    """Process group of this rank."""
    work: Work
    """Sizes of the work."""
    repeats: int
    """Counted repeats of each measurement."""
    weights: WeightTable
    """Weights of the model."""
    figures: dict[str, float] = field(default_factory=dict)
    """Hardware figures for `verl-mg plan --measured`."""

    def seconds(self, work: Callable[[], Any], repeats: int | None = None) -> float:
        """Returns the median seconds, after a warm-up."""
        taken = []
        for _ in range((repeats or self.repeats) + 1):
            _synchronize()
            started = time.perf_counter()
            work()
            _synchronize()
            taken.append(time.perf_counter() - started)
        return statistics.median(taken[1:])

    def config(self, recompute: bool = False, kernels: Literal["auto", Kernels] = "auto") -> Config:
        engine = "sglang" if torch.cuda.is_available() and importlib.util.find_spec("sglang") else "hf"
        tree = {
            "model": {"path": self.folder / "model", "dtype": "bfloat16", "kernels": kernels},
            "data": {"train": "none"},
            "actor": {"tokens_per_micro_batch": self.work.micro_batch, "recompute": recompute},
            "rollout": {"engine": engine, "max_new_tokens": self.work.new_tokens, "sleep": False},
            "job": {"output": self.folder},
        }
        return Config.model_validate(tree)

    @property
    def weight_bytes(self) -> int:
        return PlanInputs(self.weights, ranks=1, node=1).size.bytes


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 1 if a part failed, otherwise 0."""
    options = _options(arguments)
    work = TINY if options.tiny else Work()
    world = World.join()
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as folder:
        tree = json.loads(options.model.read_text()) | (TINY_SHAPE if options.tiny else {})
        bench = Bench(Path(folder), world, work, options.repeats, write_model(Path(folder) / "model", tree))
        report = Report(options.output, options.model.stem + (", tiny" if options.tiny else ""), bench)
        parts: dict[str, tuple[str, Callable[[Bench], Iterator[Row]]]] = {
            "device": ("The device", device_part),
            "vocabulary": ("The vocabulary", vocabulary_part),
            "kept": ("Training, activations kept", partial(training_part, recompute=False)),
            "recomputed": ("Training, layers recomputed", partial(training_part, recompute=True)),
            "rollout": ("Weight sync and rollout", rollout_part),
            "torch": ("Training, torch's kernels", partial(training_part, recompute=False, kernels="torch")),
        }
        if resolve_kernels("auto", torch.bfloat16) == "torch":
            del parts["torch"]  # they are the default
        for name, (title, part) in parts.items():
            if name not in (options.part or PARTS):
                continue
            report.add(title, part)
            _tidy()
            if options.measured and bench.figures:
                options.measured.write_text(json.dumps(bench.figures, indent=2) + "\n", encoding="utf-8")
    world.shut_down()
    return 1 if report.failed else 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="a Markdown file for the report, which is also printed")
    parser.add_argument("--measured", type=Path, help="a JSON file for verl-mg plan")
    parser.add_argument("--model", type=Path, default=MODEL, help="a config.json (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--part", action="append", choices=PARTS, help="only this part (repeatable)")
    parser.add_argument("--tiny", action="store_true", help="a small model for the CPU, to test the program")
    return parser.parse_args(arguments)


def write_model(folder: Path, tree: dict[str, Any]) -> WeightTable:
    """Writes a model with random bf16 weights: matrices with standard deviation 0.02, ones elsewhere."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(tree))
    weights = weight_table(read_config(folder))
    torch.manual_seed(0)
    tensors: dict[str, Tensor] = {}
    for name, shard in weights.huggingface().items():
        values = torch.ones(shard.shape, dtype=torch.bfloat16, device=device.current_device())
        tensors[name] = (values.normal_(std=0.02) if len(shard.shape) > 1 else values).cpu()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return weights


# -- the parts


def device_part(bench: Bench) -> Iterator[Row]:
    """Measures the hardware, independently of the model."""
    gpu, width = device.current_device(), bench.work.width
    left, right = (torch.randn(width, width, device=gpu, dtype=torch.bfloat16) for _ in range(2))
    teraflops = 2 * width**3 / bench.seconds(lambda: left @ right) / 1e12
    bench.figures["flops"] = teraflops
    yield f"bf16 product of {width} x {width} matrices", f"{teraflops:.4g} TFLOP/s"
    source = torch.zeros(bench.work.copied, dtype=torch.uint8, device=gpu)
    target = torch.empty_like(source)
    bench.figures["memory_bandwidth"] = 2 * len(source) / bench.seconds(lambda: target.copy_(source)) / 1e9
    yield "copy within the device's memory", f"{bench.figures['memory_bandwidth']:.4g} GB/s read and written"
    if torch.cuda.is_available():
        bench.figures["memory"] = torch.cuda.get_device_properties(gpu).total_memory / GIB
        host = torch.empty(len(source), dtype=torch.uint8, pin_memory=True)
        bench.figures["host"] = len(source) / bench.seconds(lambda: host.copy_(source)) / 1e9
        yield "copy to pinned memory of the host", f"{bench.figures['host']:.1f} GB/s"


def vocabulary_part(bench: Bench) -> Iterator[Row]:
    """Measures log-probs, entropies and gradients of one micro-batch."""
    config, tokens = bench.weights.config, bench.work.micro_batch
    yield "micro-batch", f"{tokens} tokens, hidden size {config.hidden}, vocabulary {config.vocab}"
    yield from Vocabulary(tokens, config.hidden, config.vocab, device.current_device(), bench.seconds).rows()


def training_part(bench: Bench, recompute: bool, kernels: Literal["auto", Kernels] = "auto") -> Iterator[Row]:
    """Measures updates and inference passes on packed rows without padding."""
    context = JobContext(bench.world.store)
    actor: Actor = ModelRoleBuilder(bench.config(recompute, kernels), 1, context).build("actor")
    yield "kernels", resolve_kernels(kernels, torch.bfloat16)
    rows = row_batch(bench)
    lengths, flops = rows.lengths.tolist(), row_flops(bench.weights.config, bench.weights.tensor_index)
    yield "rows", f"{len(rows)} of {min(lengths)} to {max(lengths)} tokens, {sum(lengths)} together"

    def infer() -> None:
        rows["old_logprobs"] = actor.compute_logprobs(rows)

    seconds = bench.seconds(infer)
    yield "inference pass", _rates(sum(lengths), model_flops(flops, lengths, learns=False), seconds)
    setting = PlanInputs(
        bench.weights,
        ranks=1,
        node=1,
        sequence=max(lengths),
        micro_batch=bench.work.micro_batch,
        tokens_per_iteration=sum(lengths),
        recompute=recompute,
    )
    planned = train_memory(setting, Layout().fit(1))
    parts = ", ".join(f"{name} {size[0] / GIB:.2f}" for name, size in planned.parts.items())
    yield "memory that the plan predicts", f"{planned.totals[0] / GIB:.2f} GiB ({parts})"
    with peak_memory() as peak:
        seconds = bench.seconds(lambda: dict(actor.update(rows, policy_loss, "token-mean")))
    yield "update", _rates(sum(lengths), model_flops(flops, lengths, learns=True), seconds)
    if peak:
        ratio = peak[0] / planned.totals[0]
        yield "peak memory of the updates", f"{peak[0] / GIB:.2f} GiB, {ratio:.2f} of the prediction"
        yield "... reserved by torch", f"{peak[1] / GIB:.2f} GiB"
    if not recompute:
        yield from update_rows(lambda: dict(actor.update(rows, policy_loss, "token-mean")))
        yield from offload_rows(actor, bench.repeats)


def rollout_part(bench: Bench) -> Iterator[Row]:
    """Measures the weight sync into the engine, and generation of samples that all have the maximum length."""
    config, work = bench.config(), bench.work
    context = JobContext(PrefixStore("bench", bench.world.store))
    actor: Actor = ModelRoleBuilder(config, 1, context).build("actor")
    engines = build_engine_group(config, actor, context, lambda engine: engine)
    draw = torch.Generator().manual_seed(0)
    texts = torch.randint(bench.weights.config.vocab, (work.prompts, work.prompt_tokens), generator=draw).tolist()
    prompts = [Prompt(i, tuple(tokens), "", None, {}) for i, tokens in enumerate(texts)]
    feed, records = PromptFeed(PromptSet(prompts)), []
    sampling = Sampling(max_new_tokens=work.new_tokens)
    setup = RolloutSetup(sampling=sampling, seed=0, context=context, prompts=feed, records=records)
    rollout = SyncRollout(engines, setup)
    try:
        seconds = bench.seconds(lambda: rollout.update_weights(actor))
        rate = bench.weight_bytes / seconds / 1e9
        yield "weight sync", f"{seconds:.4f} s, {rate:.4g} GB/s of weights ({bench.weight_bytes / GIB:.2f} GiB)"
        received, least = (rollout.metrics[f"weight_sync/bytes_{name}"] for name in ("received", "lower_bound"))
        yield "... from other ranks", f"{received:.0f} bytes, at least {least:.0f}"
        seconds = bench.seconds(lambda: rollout.generate(prompts, work.samples), min(bench.repeats, 3))
        written = work.prompts * work.samples * work.new_tokens
        what = f"{work.prompts * work.samples} samples of {work.new_tokens} tokens after {work.prompt_tokens}"
        yield f"rollout, engine {config.rollout.engine}", f"{written / seconds:.0f} tokens/s ({what}, {seconds:.2f} s)"
    finally:
        rollout.close()


# -- helpers of the parts


def row_batch(bench: Bench) -> Batch:
    """Returns rows with a heavy tail of lengths: most are short, the longest has the maximum length."""
    draw, work = torch.Generator().manual_seed(0), bench.work
    lengths: list[int] = [work.longest]
    while sum(lengths) < work.tokens:
        length = float(torch.randn((), generator=draw).mul(0.9).exp()) * work.longest / 8
        lengths.append(int(min(max(length, 16), work.longest, work.tokens - sum(lengths) + 16)))
    tokens = torch.randint(bench.weights.config.vocab, (sum(lengths),), generator=draw)
    batch = Batch(lengths, {"tokens": tokens})
    batch["loss_mask"] = batch.positions >= 8
    batch["sample_id"] = torch.arange(len(batch))
    batch["advantages"] = batch.expand_to_tokens(torch.randn(len(batch), generator=draw))
    return batch


def policy_loss(tokens: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    return clipped_policy_loss(tokens.logprobs, tokens["old_logprobs"], tokens["advantages"], tokens.mask, 0.2, 0.2)


@contextmanager
def peak_memory() -> Iterator[list[int]]:
    """Fills the list with the peak bytes of tensors and the peak bytes reserved by torch; on the CPU it stays empty."""
    peak: list[int] = []
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    yield peak
    if torch.cuda.is_available():
        peak += [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]


def _rates(tokens: int, flops: float, seconds: float) -> str:
    peak = device_peak()
    share = f", {flops / seconds / peak:.1%} of {peak / 1e12:.0f}" if peak else ""
    return f"{tokens / seconds:.0f} tokens/s, {flops / seconds / 1e12:.3g} TFLOP/s{share} ({seconds:.3f} s)"


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _tidy() -> None:
    gc.collect()  # models and optimizers are cycles
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class Report:
    """Markdown report that is extended part by part."""

    def __init__(self, file: Path | None, model: str, bench: Bench) -> None:
        self._file, self._bench, self.failed = file, bench, False
        parameters = bench.weight_bytes / 2e9
        self._text = f"# One device: {model}, {parameters:.2f} billion parameters in bf16\n"
        self._text += "".join(f"\n- {line}" for line in _hardware())
        self._text += f"\n- medians of {bench.repeats} repeats after a warm-up; TFLOP/s by the model's own arithmetic\n"
        print(self._text, flush=True)

    def add(self, title: str, part: Callable[[Bench], Iterator[Row]]) -> None:
        """Runs a part and writes its rows, including those before a failure."""
        text = f"\n## {title}\n\n| | |\n|---|---|\n"
        try:
            for name, value in part(self._bench):
                text += f"| {name} | {value} |\n"
        except torch.OutOfMemoryError as error:  # a figure too: another GPU, or another plan, has more
            text += f"| out of memory | {str(error).splitlines()[0]} |\n"
        except Exception as error:
            traceback.print_exc()
            text += f"| failed | {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''} |\n"
            self.failed = True
        print(text, flush=True)
        self._text += text
        if self._file:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.write_text(self._text, encoding="utf-8")


def _hardware() -> Iterator[str]:
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(device.current_device())
        yield f"{properties.name}, {properties.total_memory / GIB:.0f} GiB, CUDA {torch.version.cuda}"
    yield f"{os.cpu_count()} cores of {machine.machine()}, {torch.get_num_threads()} threads"
    yield ", ".join(f"{name} {version}" for name, version in installed_versions().items())


if __name__ == "__main__":
    sys.exit(main())
