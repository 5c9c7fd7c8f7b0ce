"""Roles of one job in different dtypes: each computes, trains and is exported as in a job of its dtype alone."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from tests.helpers.rank_pool import job_store
from tests.helpers.tiny_jobs import DIGITS, RECIPES, files_of, write_sums
from tests.helpers.tiny_models import random_rows, tiny_model
from verl_mg.config import load_config
from verl_mg.job.job import RunningJob
from verl_mg.job.recipe import load_recipe, requested_roles
from verl_mg.models.hf_config import read_config
from verl_mg.stores.records import MODEL
from verl_mg.training.loss_inputs import LossInputs, LossOutput

ROWS = 6
MIXED = ["model.dtype=bfloat16", "critic.dtype=float32", "reward_model.dtype=float32"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    tiny_model(folder / "model", "qwen3")
    write_sums(folder, right=2)
    (folder / "reward.py").write_text(DIGITS)
    return folder


def square_loss(tokens: LossInputs) -> LossOutput:
    return (tokens.values - tokens["noise"]) ** 2, {}


def computed(inputs: Path, output: Path, overrides: list[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """What the roles of a PPO job compute for the same rows, and the dtypes that they have."""
    recipe = load_recipe(RECIPES / "ppo.py")
    given = [*files_of(inputs, output), "reward.from_model=true", "rollout.max_new_tokens=5", "critic.layout=tp2"]
    given += ["algorithm.kl.coefficient=0.1", "critic.optimizer.lr=0.1", "critic.optimizer.eps=0.1"]
    config = load_config(None, [*given, f"reward_model.path={inputs / 'model'}", *overrides], recipe.config)
    job = RunningJob(config, requested_roles(recipe, config), job_store())
    job.start()
    every = random_rows(ROWS, read_config(inputs / "model").vocab)
    batch = every.select(torch.arange(ROWS)[dist.get_rank() :: dist.get_world_size()])
    results = {
        "scores": job.frozen_reward_model.compute_scores(batch),
        "values": job.critic.compute_values(batch),
        "logprobs": job.actor.compute_logprobs(batch),
        "reference": job.reference.compute_logprobs(batch),
    }
    metrics = job.critic.update(batch, square_loss, "token-mean")
    assert metrics["critic/grad_norm"] > 0
    job.critic.save(output / "critic", inputs / "model")
    job.actor.save(output / MODEL, inputs / "model")
    dtypes = {name: str(next(iter(role.runner.parameters().values())).dtype) for name, role in job.roles.items()}
    engine = job.rollout._engines.engine  # type: ignore[attr-defined]
    dtypes["engine"] = str(next(iter(engine.parameters().values())).dtype)
    job.close()
    return results, dtypes


@pytest.fixture(scope="module")
def float32(ranks, inputs, tmp_path_factory) -> tuple[list, Path]:
    folder = tmp_path_factory.mktemp("float32")
    return ranks.run(2, computed, inputs, folder, []), folder


def test_float32_critic_and_reward_model_of_a_bfloat16_actor_compute_as_in_a_float32_job(
    ranks, inputs, float32, tmp_path
):
    expected, folder = float32
    found = ranks.run(2, computed, inputs, tmp_path, MIXED)
    for (one, dtypes), (other, _) in zip(found, expected, strict=True):
        assert torch.equal(one["scores"], other["scores"]) and other["scores"].abs().min() > 0
        assert torch.equal(one["values"], other["values"]) and other["values"].any()
        for name in ("logprobs", "reference"):  # the rounding of bfloat16, no more
            assert 1e-4 < (one[name] - other[name]).abs().max() < 0.2
        half = ("actor", "reference", "engine")
        assert dtypes == {name: "torch.bfloat16" if name in half else "torch.float32" for name in dtypes}
    after, alone = (load_file(path / "critic" / "model.safetensors") for path in (tmp_path, folder))
    assert after.keys() == alone.keys() and all(torch.equal(weight, alone[name]) for name, weight in after.items())
    for name, dtype in (("critic", "float32"), (MODEL, "bfloat16")):
        assert json.loads((tmp_path / name / "config.json").read_text())["dtype"] == dtype
        weights = load_file(tmp_path / name / "model.safetensors").values()
        assert {weight.dtype for weight in weights} == {getattr(torch, dtype)}


@pytest.mark.nightly
def test_bfloat16_reference_of_a_float32_actor_computes_in_bfloat16(ranks, inputs, float32, tmp_path):
    for (one, dtypes), (other, _) in zip(
        ranks.run(2, computed, inputs, tmp_path, ["reference.dtype=bfloat16"]), float32[0], strict=True
    ):
        assert dtypes["reference"] == "torch.bfloat16" and dtypes["actor"] == dtypes["engine"] == "torch.float32"
        assert torch.equal(one["logprobs"], other["logprobs"])
        assert 1e-4 < (one["reference"] - other["reference"]).abs().max() < 0.2
