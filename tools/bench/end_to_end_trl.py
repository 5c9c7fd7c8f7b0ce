"""TRL's side of bench_end_to_end.py, and the task that both sides run.

    python -m tools.bench.end_to_end_trl FOLDER WORKLOAD-AS-JSON

Settings: TRL's fastest for one CPU and equal work. One generation batch, one forward and backward pass and one
optimizer step per iteration; float32, sdpa, no dropout, no activation checkpointing, no reference model (beta=0), no
second pass for old log-probs (TRL omits it if a batch is used once), nothing saved or reported. Generation is
`generate` of transformers.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl_mg.rewards import Sample

MODEL, PROMPTS = "model", "prompts.jsonl"


@dataclass(frozen=True)
class Workload:
    """Amount of work that both sides do."""

    prompts: int
    """Prompts per iteration."""
    group: int
    """Samples of each prompt."""
    tokens: int
    """Maximum length of a response, in tokens."""
    iterations: int
    """Iterations, including the warm-up."""
    seed: int
    """Seed of sampling."""
    temperature: float = 1.0
    """Sampling temperature."""
    lr: float = 1e-6
    """Learning rate, so small that the lengths of responses do not change."""

    def json(self) -> str:
        return json.dumps(asdict(self))


def share_of_digits(text: str) -> float:
    return sum(character.isdigit() for character in text) / max(len(text), 1)


def score(sample: Sample) -> float:
    """Returns the reward, as a reward function of verl_mg."""
    return share_of_digits(sample.response)


def arguments(folder: Path, work: Workload, ranks: int) -> dict[str, Any]:
    """Returns arguments of `GRPOConfig` that equal the configuration that bench_end_to_end.py writes for verl_mg."""
    return {
        "output_dir": str(folder / "trl"),
        "max_steps": work.iterations,
        "per_device_train_batch_size": work.prompts * work.group // ranks,
        "gradient_accumulation_steps": 1,
        "steps_per_generation": 1,
        "num_iterations": 1,
        "num_generations": work.group,
        "max_completion_length": work.tokens,
        "temperature": work.temperature,
        "top_p": 1.0,
        "top_k": 0,
        "loss_type": "grpo",
        "beta": 0.0,
        "epsilon": 0.2,
        "learning_rate": work.lr,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "seed": work.seed,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_dropout": True,
        "model_init_kwargs": {"dtype": "float32", "attn_implementation": "sdpa"},
        "ddp_find_unused_parameters": False,
        "dataloader_pin_memory": False,
        "eval_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "logging_steps": 1,
        "disable_tqdm": True,
    }


def main(folder: Path, work: Workload) -> None:
    """Prints "step N" after each iteration, and at the end one JSON line: lengths and seconds of generation."""
    # Last in the search path: the folder also contains packages named tests and scripts.
    sys.path.append(str(Path(sys.prefix) / "peers"))
    from accelerate import PartialState
    from accelerate.utils import gather_object
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    lengths: list[list[int]] = []
    seconds: list[float] = []

    def reward(completions: list[str], completion_ids: list[list[int]], **_: object) -> list[float]:
        lengths.append([len(ids) for ids in completion_ids])
        return [share_of_digits(text) for text in completions]

    class Steps(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.is_world_process_zero:
                print(f"step {state.global_step}", flush=True)

    class Timed(GRPOTrainer):
        def _generate_single_turn(self, *args: Any, **options: Any) -> Any:
            started = time.perf_counter()
            result = super()._generate_single_turn(*args, **options)
            seconds.append(time.perf_counter() - started)
            return result

    ranks = PartialState(cpu=True).num_processes
    records = [json.loads(line) for line in (folder / PROMPTS).read_text(encoding="utf-8").splitlines()]
    trainer = Timed(
        model=str(folder / MODEL),
        reward_funcs=reward,
        args=GRPOConfig(**arguments(folder, work, ranks)),
        train_dataset=Dataset.from_list([{"prompt": record["prompt"]} for record in records]),
        callbacks=[Steps()],
    )
    trainer.train()
    results = gather_object([{"lengths": lengths, "seconds": seconds}])
    if trainer.accelerator.is_main_process:
        together = [list(chain(*parts)) for parts in zip(*(result["lengths"] for result in results), strict=True)]
        slowest = [max(parts) for parts in zip(*(result["seconds"] for result in results), strict=True)]
        print(json.dumps({"lengths": together, "generation": slowest}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Workload(**json.loads(sys.argv[2])))
