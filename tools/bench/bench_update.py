"""Compares an update and log-probs with an earlier commit's in turn, and with the limit of the machine.

    python -m tools.bench.bench_update [--before COMMIT] [--models dense moe moe_large] [--rounds 7] [--threads 1]

Both sides train the same random model on the same rows in float32 on one CPU rank, each in its own process; they take
turns, and the figures are medians over the rounds after a warm-up. The earlier code is read from git. Losses of
both sides are compared, so that what is timed is the same computation.

The limit, see `machine_limit`, is measured in the same processes after each step: forward and backward pass against the
matrix products of the weights only, the optimizer's step against a copy of the memory that it reads and writes, and
attention over the packed rows against one row of as many FLOPs. Kernels that are no products are named with their
seconds. On a GPU the same figure is the share of the peak in the report of `bench_gpu`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
BEFORE = "5d637872"
"""Last commit with attention row by row, and activations of dense layers by parts."""
COMMON = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}
MIXTURE = COMMON | {"num_experts": 64, "norm_topk_prob": True}
SMALL = {"hidden_size": 128, "head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
LARGE = {"hidden_size": 256, "head_dim": 32}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen3", COMMON),
    "moe": ("qwen3_moe", MIXTURE | SMALL | {"num_experts_per_tok": 4, "moe_intermediate_size": 64}),
    "moe_large": ("qwen3_moe", MIXTURE | LARGE | {"num_experts_per_tok": 8, "moe_intermediate_size": 96}),
}
"""Architecture, and fields of config.json. The products of an expert are small in `moe` and larger in `moe_large`."""
SHARES: dict[str, Callable[[dict[str, Any]], float]] = {
    "only products of weights, of forward and backward pass": lambda s: s["products"] / (s["update"] - s["optimizer"]),
    "only a copy of memory, of the optimizer's step": lambda s: s["copy"] / s["optimizer"],
    "one row of the same FLOPs, of attention over packed rows": lambda s: s["one row"] / s["packed"],
}
"""Shares of the machine's limit, of the figures of a step."""
ROWS, LONGEST = 16, 384
"""Rows of an update, and tokens of the longest."""


def main() -> None:
    """Prints a line for each model."""
    options = _options()
    if options.worker:
        _serve(Path(options.worker))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        earlier = _checkout(options.before, folder / "earlier")
        for model in options.models:
            path = make_model(folder / model, *MODELS[model])
            sides = {"before": _Worker(earlier, path, options.threads), "now": _Worker(ROOT, path, options.threads)}
            rounds = [{side: worker.step() for side, worker in sides.items()} for _ in range(options.rounds + 1)]
            for worker in sides.values():
                worker.end()
            _report(model, rounds)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", default=BEFORE, help="commit to compare with")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def make_model(folder: Path, architecture: str, fields: dict[str, Any]) -> Path:
    """Writes a model with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **fields)).save_pretrained(folder)
    return folder


def _checkout(commit: str, folder: Path) -> Path:
    """Writes the files of a commit to a folder."""
    archive = subprocess.run(["git", "archive", commit, "verl_mg"], cwd=ROOT, capture_output=True, check=False)
    if archive.returncode:
        sys.exit(
            f"error: git archive {commit}: {archive.stderr.decode().strip()}. Fetch the whole history of the project."
        )
    with tarfile.open(fileobj=BytesIO(archive.stdout)) as tar:
        tar.extractall(folder, filter="data")
    return folder


class _Worker:
    """Process that trains with the code of a folder."""

    def __init__(self, code: Path, model: Path, threads: int) -> None:
        path = f"{code}{os.pathsep}{ROOT}"  # the benchmark's own modules are of this commit
        environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, __file__, "--worker", str(model)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, env=environment, cwd=code, **pipes)

    def step(self) -> dict[str, Any]:
        """Runs one step and returns its figures."""
        assert self._process.stdin and self._process.stdout
        print("step", file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"error: the process of {self._process.args} has ended")
        figures: dict[str, Any] = json.loads(line)
        return figures

    def end(self) -> None:
        """Closes the input of the process and waits for its end."""
        self._process.communicate()


def _serve(model: Path) -> None:
    """Trains one step for each line of standard input."""
    sys.path.pop(0)  # this file's folder; the code is that of PYTHONPATH
    import torch

    from tools.bench.machine_limit import Operations, attention, copy_alone, products_alone
    from verl_mg.algorithms.losses import clipped_policy_loss
    from verl_mg.batch import Batch
    from verl_mg.config import OptimizerConfig
    from verl_mg.distributed.world import World
    from verl_mg.layout import Layout, Placement
    from verl_mg.megatron.model_runner import MegatronRunner
    from verl_mg.megatron.process_groups import ParallelGroups
    from verl_mg.megatron.trainer import MegatronTrainer
    from verl_mg.training.model_spec import ModelSpec
    from verl_mg.training.trainer import MiniBatch, Objective

    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    World.join()  # takes all cores
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    runner = MegatronRunner(
        ModelSpec(model, torch.float32), ParallelGroups(Placement(Layout.parse("tp1").fit(1), (0,)))
    )
    trainer = MegatronTrainer(runner, OptimizerConfig(lr=1e-4))
    draw = torch.Generator().manual_seed(0)
    lengths = (torch.rand(ROWS, generator=draw) ** 2 * (LONGEST - 64)).long() + 64
    total = int(lengths.sum())
    rows = Batch(lengths)
    rows["tokens"] = torch.randint(runner.table.config.vocab, (total,), generator=draw)
    rows["loss_mask"] = rows.positions >= 32
    rows["advantages"] = torch.randn(total, generator=draw)
    scored = int(rows["loss_mask"].sum())
    micro_batches = rows.split([ROWS // 2, ROWS - ROWS // 2])

    def loss(tokens: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return clipped_policy_loss(
            tokens.logprobs, tokens.logprobs.detach(), tokens["advantages"], tokens.mask, 0.2, 0.2
        )

    mini_batch = MiniBatch(micro_batches, None, scored, 0)
    step, optimizer = trainer.optimizer.step, []

    def timed_step() -> Any:
        begin = time.process_time()
        result = step()
        optimizer.append(time.process_time() - begin)
        return result

    trainer.optimizer.step = timed_step
    update = partial(trainer.update, mini_batch, Objective(loss, "token-mean", 1.0))
    update()  # moments are made
    config = runner.table.config
    with Operations() as operations:
        update()
    rows_alone = attention(lengths[: ROWS // 2], config.heads, config.kv_heads, config.head_dim)
    weights = sum(weight.numel() for weight in runner.parameters().values())
    alone = {"products": products_alone(operations.products), "copy": copy_alone(weights), **rows_alone}
    for _ in sys.stdin:
        inference, _ = _seconds(partial(runner.infer, micro_batches, 1.0))
        whole, metrics = _seconds(update)
        figures = {"inference": inference, "update": whole, "optimizer": optimizer[-1], "norm": metrics["grad_norm"]}
        figures |= {name: _seconds(compute)[0] for name, compute in alone.items()}
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(
            json.dumps(figures | {"tokens": total, "peak": peak, "lost": operations.lost(12)}), file=output, flush=True
        )


def _seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    """Returns the CPU seconds of some work, and its result."""
    begin = time.process_time()
    result = work()
    return time.process_time() - begin, result


def _report(model: str, rounds: list[dict[str, dict[str, Any]]]) -> None:
    differences = [abs(pair["now"]["norm"] / pair["before"]["norm"] - 1) for pair in rounds]
    counted = rounds[1:]
    print(f"{model}: {counted[0]['now']['tokens']:.0f} tokens, gradient norms differ by at most {max(differences):.1e}")
    for part in ("update", "inference"):
        before, now = (statistics.median(pair[side][part] for pair in counted) for side in ("before", "now"))
        ratio = statistics.median(pair["before"][part] / pair["now"][part] for pair in counted)
        print(f"  {part:10} {before:7.3f} s before, {now:7.3f} s now: {ratio:.2f} times faster")
    before, now = (rounds[-1][side]["peak"] for side in ("before", "now"))
    print(f"  peak memory {before:.0f} MiB before, {now:.0f} MiB now: {now / before:.2f} times")
    for name, share in SHARES.items():
        shares = {side: statistics.median(share(pair[side]) for pair in counted) for side in ("before", "now")}
        print(f"  {name}: {shares['before']:.2f} before, {shares['now']:.2f} now")
    passes = statistics.median(pair["now"]["update"] for pair in counted)
    print(f"  kernels that are no products, now, in ms of {1000 * passes:.0f}:")
    print("   ", ", ".join(f"{name} {1000 * spent:.1f} ({calls})" for name, calls, spent in rounds[-1]["now"]["lost"]))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
