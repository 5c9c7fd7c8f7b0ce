"""GRPO jobs with an engine on one rank, and how far the engine's answers are from those of `transformers`."""

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.helpers.rank_pool import job_store
from tests.helpers.tiny_jobs import DIGITS, RECIPES, write_sums
from tests.rollout.engine_jobs import settings, trained_once
from verl_mg import quickstart
from verl_mg.config import load_config
from verl_mg.job.job import RunningJob
from verl_mg.job.recipe import load_recipe
from verl_mg.models.tiny_model import make_tiny_model

CHARACTERS = "0123456789+-*=() abcdefg"
CACHE_TOKENS = 2**14
UPDATES = 2
FP8_LARGEST = 448.0
GROUP = 128  # rows and columns of a block, or columns of a group, with one scale
Values = Callable[[Tensor], Tensor]
Reported = list[dict[str, Any]]


def served_model(folder: Path, seed: int = 3) -> Path:
    """A model of whole blocks, and heads of a width that the kernels of every engine have."""
    sizes = {"hidden": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "ffn": 512, "max_positions": 128}
    return make_tiny_model(folder, "qwen3", characters=CHARACTERS, init_std=0.1, perturb=True, seed=seed, **sizes)


def make_inputs(folder: Path) -> Path:
    """A model, prompts and a reward."""
    served_model(folder / "model")
    write_sums(folder)
    (folder / "reward.py").write_text(DIGITS)
    return folder


def updates(folder: Path, overrides: Sequence[str], engine: str) -> Reported:
    """What the rank saw in some iterations: after each the engine's greedy answers."""
    return _train(folder, None, [*settings(folder, engine), *overrides])


def updates_of_quickstart(folder: Path, overrides: Sequence[str]) -> Reported:
    """The same of the quickstart's own configuration, from random weights, with SGLang."""
    model = quickstart.make_model(folder / "model")
    quickstart.write_sums(folder / "data")
    files = [f"data.{name}={folder / 'data' / name}.jsonl" for name in ("train", "test")]
    own = [f"model.path={model}", f"job.output={folder / 'run'}", *files, "rollout.engine=sglang"]
    return _train(folder, RECIPES / "configs" / "quickstart_grpo.yaml", [*own, *overrides])


def _train(folder: Path, file: Path | None, overrides: Sequence[str]) -> Reported:
    recipe = load_recipe(RECIPES / "grpo.py")
    config = load_config(file, [*overrides, "job.console=false"], recipe.config)
    with closing(RunningJob(config, recipe.roles(config.algorithm), job_store())) as job:
        job.start()
        return [trained_once(job, recipe, folder, f"update-{number}") for number in range(UPDATES)]


def errors(folder: Path, seen: dict[str, Any], values: Values | None = None) -> Tensor:
    """Differences of the answers' log-probs from `transformers` with the saved weights, passed through `values`."""
    model = AutoModelForCausalLM.from_pretrained(folder / seen["checkpoint"], dtype=torch.float32)
    for name, weight in model.named_parameters():
        if values and name.endswith("_proj.weight"):
            weight.data = values(weight.data.bfloat16())
    found = []
    for row, logprobs, length in zip(seen["rows"], seen["logprobs"], seen["prompts"], strict=True):
        with torch.no_grad():
            scores = model(torch.tensor([row])).logits[0].log_softmax(-1)[length - 1 : -1]
        expected = scores.gather(1, torch.tensor(row[length:])[:, None])[:, 0]
        found.append((torch.tensor(logprobs[length:]) - expected).abs())
    return torch.cat(found)


def through_blocks(weight: Tensor) -> Tensor:
    rows, columns = weight.shape
    blocks = weight.float().view(rows // GROUP, GROUP, columns // GROUP, GROUP)
    scales = blocks.abs().amax((1, 3), keepdim=True) / FP8_LARGEST
    return ((blocks / scales).to(torch.float8_e4m3fn).float() * scales).view(rows, columns)


def through_channels(weight: Tensor) -> Tensor:
    scales = weight.float().abs().amax(1, keepdim=True) / FP8_LARGEST
    return (weight.float() / scales).to(torch.float8_e4m3fn).float() * scales


def through_integers(weight: Tensor) -> Tensor:
    groups = weight.unflatten(1, (-1, GROUP))
    scales = groups.abs().amax(-1, keepdim=True) / 7.5
    return ((groups / scales).clamp(-8, 7).round().float() * scales.float()).flatten(1)


def through_powers_of_two(weight: Tensor) -> Tensor:
    blocks = weight.float().unflatten(1, (-1, 32))
    scales = (blocks.abs().amax(-1, keepdim=True) / FP8_LARGEST).log2().ceil().exp2()
    return ((blocks / scales).to(torch.float8_e4m3fn).float() * scales).flatten(1)


QUANTIZED: dict[str, Values] = {
    "fp8_block": through_blocks,
    "fp8_channel": through_channels,
    "mxfp8": through_powers_of_two,
    "int4": through_integers,
}
"""Forms of weights in quantized engines, by `rollout.wire`."""


def shown(name: str, reported: Reported, found: Sequence[Tensor]) -> None:
    """Prints what was measured: a test's output has it also where the test passes."""
    for seen, error in zip(reported, found, strict=True):
        figures = f"error mean {error.mean():.5f}, max {error.max():.5f}, of {len(error)} tokens"
        print(f"{name}: {figures}; mismatch {seen['mismatch']:.5f}")
