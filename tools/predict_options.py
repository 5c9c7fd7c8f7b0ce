"""Predicted gain of each option of training, one at a time: until a GPU measures them.

    python -m tools.predict_options [--gpu h100]

Each row is an update of one model and layout with packed rows; the first row of a model is the job without options,
each other row changes what it names. `tools/calibrate_plan.py` has the error of such predictions.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from verl_mg.layout import Layout
from verl_mg.models.hf_config import read_config
from verl_mg.planner.cost import train_seconds, utilization
from verl_mg.planner.efficiency import DEFAULT_GPU, FITTED, gpu
from verl_mg.planner.inputs import GIB, PlanInputs
from verl_mg.planner.memory import train_memory
from verl_mg.planner.training_options import Recompute, training_options
from verl_mg.sharding.weight_table import weight_table

CONFIGS = Path(__file__).parent / "model_configs"


@dataclass(frozen=True)
class Job:
    """An update whose options are varied."""

    model: str
    """Name of tools/model_configs."""
    ranks: int
    """Number of GPUs."""
    layout: str
    """Layout of the actor."""
    tokens: int = 2**20
    """Tokens of an update."""
    micro_batch: int = 8192
    """Tokens of a micro-batch, and of the longest row."""


@dataclass(frozen=True)
class Change:
    """Options of a row of the table."""

    name: str
    """Its name in the table."""
    recompute: Recompute = False
    """Parts of a layer computed again in the backward pass."""
    kernels: str = "transformer_engine"
    """Value of `model.kernels`."""
    megatron: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Section `megatron`."""
    mixtures_only: bool = False
    """Whether it applies to mixtures of experts only."""


JOBS = (
    Job("qwen3_1_7b", 1, "tp1"),
    Job("qwen2_5_7b", 8, "tp2"),
    Job("qwen3_30b_a3b", 8, "ep8"),
    Job("qwen3_235b_a22b", 128, "tp2-pp8-ep16-etp1", 2**22),
    Job("deepseek_v3", 256, "pp16-ep16", 2**22),
)
TRANSFORMER, OPTIMIZER, DDP = "transformer", "optimizer", "ddp"
MOMENTS = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
SHARED_OVERLAP = {"moe_shared_expert_overlap": True}
CHANGES = (
    Change("no option"),
    Change("model.kernels=torch", kernels="torch"),
    Change("recompute=true", True),
    Change("recompute=[layernorm]", ("layernorm",)),
    Change("recompute=[core_attn]", ("core_attn",)),
    Change("recompute=[layernorm, mlp, moe]", ("layernorm", "mlp", "moe")),
    Change("recompute=[moe_act]", ("moe_act",), mixtures_only=True),
    Change("fp8", megatron={TRANSFORMER: {"fp8": "hybrid"}}),
    Change("tp_comm_overlap", megatron={TRANSFORMER: {"tp_comm_overlap": True}}),
    Change("flex dispatcher", megatron={TRANSFORMER: {"moe_token_dispatcher_type": "flex"}}, mixtures_only=True),
    Change(
        "moe_shared_expert_overlap", megatron={TRANSFORMER: {"moe_shared_expert_overlap": True}}, mixtures_only=True
    ),
    Change("overlap of gradients and weights", megatron={DDP: OVERLAP}),
    Change("bf16 gradients", megatron={DDP: {"grad_reduce_in_fp32": False}}),
    Change("bf16 moments", megatron={OPTIMIZER: MOMENTS}),
    Change("optimizer_cpu_offload", megatron={OPTIMIZER: {"optimizer_cpu_offload": True}}),
)


def main() -> None:
    """Prints a table for each job."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default=DEFAULT_GPU, help="a GPU of planner/efficiency.py (default: %(default)s)")
    show(parser.parse_args().gpu)


def show(name: str) -> None:
    """Prints the tables for one kind of GPU."""
    sheet = gpu(name)
    for job in JOBS:
        weights = weight_table(read_config(CONFIGS / f"{job.model}.json"))
        base = PlanInputs(
            weights,
            job.ranks,
            node=sheet.node,
            sequence=job.micro_batch,
            mean_sequence=job.micro_batch / 2,
            micro_batch=job.micro_batch,
            tokens_per_iteration=job.tokens,
            **FITTED.figures(sheet),
        )
        print(f"\n{job.model}, {job.ranks} {name}, {job.layout}: an update of {job.tokens:,} tokens")
        print("| change | tokens/s/GPU | utilization | GiB | time |\n|---|---:|---:|---:|---:|")
        first = 0.0
        for change in CHANGES:
            if change.mixtures_only and weights.config.experts is None:
                continue
            options = training_options(change.kernels, change.megatron, cpu_offload=False)
            inputs = replace(base, recompute=change.recompute, options=options)
            first = _row(inputs, job, change, first)


def _row(inputs: PlanInputs, job: Job, change: Change, first: float) -> float:
    """Prints a row and returns the seconds of the first."""
    layout = Layout.parse(job.layout).fit(job.ranks)
    seconds, memory = train_seconds(inputs, layout), max(train_memory(inputs, layout).totals)
    first = first or seconds
    rate, used = job.tokens / seconds / job.ranks, utilization(inputs, layout, seconds)
    print(f"| {change.name} | {rate:,.0f} | {used:.1%} | {memory / GIB:.1f} | {seconds / first:.2f} |")
    return first


if __name__ == "__main__":
    main()
