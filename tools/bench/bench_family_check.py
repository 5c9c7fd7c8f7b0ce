"""Measures what the check of a family costs: of narrow copies, and of a model of 1B parameters as it starts.

    python -m tools.bench.bench_family_check [--layers 16] [--hidden 2048] [--ffn 8192] [--vocab 100352] [--rounds 3]

The families are some of each kind of layers, with the sizes that `transformers` gives them by default. The model has
the sizes of OLMo-2-0425-1B, random weights in bfloat16, and is frozen, as a reference is. On one rank, with as many
threads as torch uses by default. Prints medians over the rounds.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tools.bench.harness import options_of
from verl_mg.fsdp.family_check import FamilyCheck
from verl_mg.fsdp.mesh import MeshGroups
from verl_mg.fsdp.model_runner import FsdpRunner
from verl_mg.layout import Layout, Placement
from verl_mg.training.model_spec import ModelSpec

FAMILIES = ("olmo2", "gpt2", "bloom", "qwen3_next", "nemotron_h", "jamba", "deepseek_v4")
LONGEST_ROW = 1024


class TimedRunner(FsdpRunner):
    """Runner that knows how long the check of its real module took."""

    seconds = 0.0

    def _check_module(self, where: str) -> None:
        started = time.perf_counter()
        super()._check_module(where)
        self.seconds = time.perf_counter() - started


def seconds_of(work: Callable[[], object], rounds: int) -> float:
    """Returns the median of the seconds of a function, after a first call."""
    seconds = []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def main() -> None:
    """Prints a line for each family, and one for the model."""
    options = options_of(__doc__, layers=16, hidden=2048, ffn=8192, vocab=100352, rounds=3).parse_args()
    folder = Path(tempfile.mkdtemp(prefix="family-"))
    for name in FAMILIES:
        CONFIG_MAPPING[name]().save_pretrained(folder / name)
        seconds = seconds_of(lambda: FamilyCheck(folder / name, "language", LONGEST_ROW).form(), options.rounds)  # noqa: B023
        print(f"{name}: {seconds:.2f} s", flush=True)
    heads = options.hidden // 128
    sizes = {"hidden_size": options.hidden, "intermediate_size": options.ffn, "num_hidden_layers": options.layers}
    config = CONFIG_MAPPING["olmo2"](
        **sizes, num_attention_heads=heads, num_key_value_heads=heads, vocab_size=options.vocab
    )
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    module.to_empty(device="cpu")
    for parameter in module.parameters():
        parameter.detach().normal_(0, 0.02)
    module.save_pretrained(folder / "model")
    count = sum(parameter.numel() for parameter in module.parameters())
    del module
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 1), rank=0, world_size=1)
    groups = MeshGroups(Placement.on(Layout.parse("tp1"), 1))
    starts = []
    for _ in range(options.rounds):
        started = time.perf_counter()
        runner = TimedRunner(ModelSpec(folder / "model", torch.bfloat16, trained=False), groups)
        starts.append((time.perf_counter() - started, runner.seconds))
        del runner
    start, check = (statistics.median(each[column] for each in starts) for column in (0, 1))
    narrow = seconds_of(lambda: FamilyCheck(folder / "model", "language", LONGEST_ROW).form(), options.rounds)
    print(
        f"{count / 1e9:.2f}B parameters, {os.cpu_count()} cores: built, loaded and checked in {start:.1f} s, of which "
        f"{narrow:.2f} s for the narrow copy and {check:.2f} s for passes of the real module"
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
