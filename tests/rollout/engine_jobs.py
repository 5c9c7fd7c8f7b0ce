"""GRPO jobs with SGLang or vLLM for tests: inputs, the job, one iteration and the oracle of its answers."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from tests.helpers import engines
from tests.helpers.rank_pool import job_store
from tests.helpers.tiny_jobs import DIGITS, RECIPES, files_of, write_sums
from verl_mg.config import load_config
from verl_mg.errors import UserError
from verl_mg.job.job import RunningJob
from verl_mg.job.recipe import Recipe, load_recipe
from verl_mg.models.tiny_model import make_tiny_model

NEW_TOKENS = 10
BYTES = ("bytes_sent", "bytes_received", "bytes_lower_bound")
Report = dict[str, object]


def inputs(
    folder: Path,
    architecture: str,
    positions: int = 64,
    unused: int = 0,
    tie_embeddings: bool = False,
    hidden: int = 32,
) -> Path:
    """A model wide enough that no engine pads it on the CPU, prompts, and a reward that a random model can earn.

    The more unused characters it knows, the longer its answers are.
    """
    make_tiny_model(
        folder / "model",
        architecture,
        characters="0123456789+-*=() abcdefg" + "".join(chr(0x4E00 + i) for i in range(unused)),
        hidden=hidden,
        heads=4,
        kv_heads=2,
        head_dim=32,
        ffn=128,
        max_positions=positions,
        tie_embeddings=tie_embeddings,
        init_std=0.2,
        perturb=True,
        seed=3,
    )
    write_sums(folder)
    (folder / "reward.py").write_text(DIGITS)
    return folder


def settings(folder: Path, engine: str = "sglang") -> list[str]:
    """Of a GRPO job with engines of this kind."""
    return [
        *files_of(folder, folder / "run"),
        f"reward.function={folder / 'reward.py'}:digits",
        "actor.optimizer.lr=3e-3",
        *engines.overrides(engine),
        "rollout.max_running_requests=32",
        f"rollout.max_new_tokens={NEW_TOKENS}",
        "algorithm.prompts_per_iteration=6",
        "algorithm.group_size=4",
    ]


def engine_job(
    folder: Path, *overrides: str, engine: str = "sglang", recipe_name: str = "grpo"
) -> tuple[RunningJob, Recipe]:
    """The job, as the command line builds it."""
    recipe = load_recipe(RECIPES / f"{recipe_name}.py")
    config = load_config(None, [*settings(folder, engine), *overrides], recipe.config)
    job = RunningJob(config, recipe.roles(config.algorithm), job_store())
    job.start()
    return job, recipe


def complaint(folder: Path, *overrides: str) -> str:
    """The error that refuses the job; "" where it is built."""
    try:
        engine_job(folder, *overrides)
    except UserError as error:
        return str(error)
    return ""


def train(folder: Path, *overrides: str, updates: int = 2, engine: str = "sglang") -> list[Report]:
    """A checkpoint and what this rank saw of each iteration of a job, with its bytes on the wire."""
    job, recipe = engine_job(folder, *overrides, engine=engine)
    reports = []
    for update in range(updates):
        report = trained_once(job, recipe, folder, f"checkpoint-{update}")
        reports.append(report | {"bytes": [job.rollout.metrics.get(f"weight_sync/{name}") for name in BYTES]})
    job.close()  # else it would look after its servers during later tests
    return reports


def trained_once(job: RunningJob, recipe: Recipe, folder: Path, checkpoint: str) -> Report:
    """One iteration, then a checkpoint of this name and the engine's greedy answers: what this rank saw."""
    metrics = recipe.iteration(job, job.config.algorithm)
    produced = job.rollout.train_batches.pop()
    job.actor.save(folder / checkpoint, folder / "model")
    greedy = job.rollout.generate_greedy(list(job.prompts)[:5])
    return {
        "checkpoint": checkpoint,
        "rows": [greedy.row("tokens", i).tolist() for i in range(len(greedy))],
        "logprobs": [greedy.row("rollout_logprobs", i).tolist() for i in range(len(greedy))],
        "prompts": greedy["prompt_length"].tolist(),
        "grad_norm": metrics["actor/grad_norm"],
        "sync": [job.rollout.metrics.get(f"weight_sync/{key}") for key in ("bytes_received", "bytes_lower_bound")],
        "versions": produced["policy_versions"][produced["loss_mask"]].unique().tolist(),
        "ids": produced["sample_id"].tolist(),
        "mismatch": (produced["old_logprobs"] - produced["rollout_logprobs"]).abs().max().item(),
    }


def token_logprobs(checkpoint: Path, tokens: Sequence[int]) -> torch.Tensor:
    """Log-probs of all tokens but the first, by `transformers` on a checkpoint."""
    model, ids = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32), torch.as_tensor(tokens)
    with torch.no_grad():
        return model(ids[None]).logits[0].log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]


def checked_answers(folder: Path, reported: Sequence[Report]) -> list[tuple[list[int], list[float]]]:
    """(prompt, log-probs) of the greedy answers of all ranks, which are those of `transformers` on the checkpoint."""
    checkpoint = folder / reported[0]["checkpoint"]
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    answers = []
    for rank in reported:
        for row, logprobs, length in zip(rank["rows"], rank["logprobs"], rank["prompts"], strict=True):
            prompt, answer = row[:length], row[length:]
            expected = model.generate(
                torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=1, pad_token_id=0
            )[0, length:]
            assert answer == expected.tolist()
            oracle = token_logprobs(checkpoint, row)[length - 1 :]
            torch.testing.assert_close(torch.tensor(logprobs[length:]), oracle, atol=1e-4, rtol=0)
            answers.append((prompt, logprobs))
    return answers


def check_versions(folder: Path, row: dict[str, torch.Tensor]) -> set[int]:
    """Each token's log-prob is that of the weights of its version; returns the versions that wrote a sample."""
    versions = row["policy_versions"]
    written = set(versions[versions >= 0].tolist())
    for version in written:
        expected, of_version = token_logprobs(folder / f"weights-{version}", row["tokens"]), (versions == version)[1:]
        found = row["rollout_logprobs"][1:]
        torch.testing.assert_close(found[of_version], expected[of_version], atol=1e-4, rtol=0)
    return written


def checked_steps(folder: Path, results: Sequence[Sequence[Report]]) -> Iterator[Sequence[Report]]:
    """What all ranks report of each `trained_once`: it trains, and its answers are its checkpoint's and new ones."""
    before = None
    for reported in zip(*results, strict=True):
        assert reported[0]["grad_norm"] > 0 and all(rank["mismatch"] < 1e-4 for rank in reported)
        answers = checked_answers(folder, reported)
        assert len(answers) == 5 and answers != before  # an update shows, and nothing of the last weights is cached
        before = answers
        yield reported
