"""Every loss through Megatron: the same value and gradient under any layout, micro-batch and order of the rows."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.helpers.roles import build_role
from tests.helpers.tiny_models import nightly, oracle, oracle_outputs, random_rows, tiny_model
from tests.megatron.training import Parts, assembled, gradients_here
from verl_mg.algorithms import losses
from verl_mg.algorithms.correction import drifted_sequences
from verl_mg.algorithms.losses import Metrics
from verl_mg.batch import Batch
from verl_mg.config import OptimizerConfig
from verl_mg.layout import Layout, Placement
from verl_mg.megatron.model_runner import MegatronRunner
from verl_mg.megatron.process_groups import ParallelGroups
from verl_mg.models.hf_config import read_config
from verl_mg.roles.models import Actor, Critic, TrainableRewardModel, TrainableRole
from verl_mg.sharding.boxes import slices
from verl_mg.training.loss_inputs import LossInputs

COUNT = 8
BY_SEQUENCE, BY_TOKEN = "seq-mean-token-mean", "token-mean"
Loss = Callable[[LossInputs], tuple[Tensor, Metrics]]


def given(*names: str) -> Callable[[LossInputs], list[Tensor]]:
    return lambda tokens: [tokens.mask if name == "mask" else tokens[name] for name in names]


POLICY = given("old_logprobs", "advantages", "mask")


def of_policy(loss: Callable[..., tuple[Tensor, Metrics]], *names: str, **numbers: float | str) -> Loss:
    """A loss of log-probs, old log-probs, advantages and mask, of further columns, and of numbers."""

    def call(tokens: LossInputs) -> tuple[Tensor, Metrics]:
        more = [tokens.sequence_ids if name == "sequence_ids" else tokens[name] for name in names]
        return loss(tokens.logprobs, *POLICY(tokens), *more, **numbers)

    return call


def masked_loss(tokens: LossInputs) -> tuple[Tensor, Metrics]:
    loss, metrics = losses.clipped_policy_loss(tokens.logprobs, *POLICY(tokens), **CLIPS)
    drifted = drifted_sequences(tokens.logprobs, *POLICY(tokens), tokens.sequence_ids, 0.01)
    return torch.where(drifted, 0.0, loss), metrics | {"opsm_masked": drifted.to(loss.dtype)}


CLIPS = {"clip_low": 0.1, "clip_high": 0.15}
LOSSES: dict[str, tuple[type[TrainableRole], str, Loss]] = {
    "clipped_policy_loss": (Actor, BY_TOKEN, of_policy(losses.clipped_policy_loss, dual_clip=1.5, **CLIPS)),
    "cispo_loss": (Actor, BY_TOKEN, of_policy(losses.cispo_loss, **CLIPS)),
    "dppo_loss": (Actor, BY_TOKEN, of_policy(losses.dppo_loss, divergence="kl", limit_low=0.02, limit_high=0.03)),
    "clipped_policy_loss, off-policy sequence masking": (Actor, BY_TOKEN, masked_loss),
    "sapo_loss": (Actor, BY_SEQUENCE, of_policy(losses.sapo_loss)),
    "gspo_loss": (
        Actor,
        BY_SEQUENCE,
        of_policy(losses.gspo_loss, "sequence_ids", clip_low=0.05, clip_high=0.05, dual_clip=1.1),
    ),
    "gmpo_loss": (Actor, BY_SEQUENCE, of_policy(losses.gmpo_loss, "sequence_ids", dual_clip=1.1, **CLIPS)),
    "clip_cov_loss": (Actor, BY_TOKEN, of_policy(losses.clip_cov_loss, "chosen_tokens", **CLIPS)),
    "kl_cov_loss": (Actor, BY_TOKEN, of_policy(losses.kl_cov_loss, "chosen_tokens", coefficient=1.0)),
    "gpg_loss": (Actor, BY_TOKEN, lambda t: losses.gpg_loss(t.logprobs, t["advantages"], t.mask)),
    "sft_loss": (Actor, BY_TOKEN, lambda t: losses.sft_loss(t.logprobs, t.mask)),
    "imitation_loss": (Actor, BY_TOKEN, lambda t: losses.imitation_loss(t.logprobs, t["advantages"], t.mask)),
    "dpo_loss": (
        Actor,
        BY_SEQUENCE,
        lambda t: losses.dpo_loss(t.logprobs, *given("ref_logprobs", "mask", "pair", "chosen")(t), beta=0.3),
    ),
    "prime_loss": (
        Actor,
        BY_SEQUENCE,
        lambda t: losses.prime_loss(t.logprobs, t["ref_logprobs"], t.mask, t.sequence_ids, t["right"], beta=0.3),
    ),
    "value_loss": (
        Critic,
        BY_TOKEN,
        lambda t: losses.value_loss(t.values, *given("old_values", "returns", "mask")(t), clip=0.2),
    ),
    "bradley_terry_loss": (
        TrainableRewardModel,
        BY_SEQUENCE,
        lambda t: losses.bradley_terry_loss(t.values, *given("mask", "pair", "chosen")(t)),
    ),
}
# With a budget of 1 every row, or pair, is a micro-batch of its own.
SPLITS = [
    ("tp1", 1, 1),
    ("tp1", 2, 40),
    *nightly(("cp2", 2, 20)),
    ("tp2-cp2", 4, 40),
    ("pp2", 4, 40),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("losses") / "model", "qwen3", layers=2)


def rows(model: Path) -> Batch:
    """The same on every rank, with all columns that a loss may ask for; masks have holes."""
    batch = random_rows(COUNT, read_config(model).vocab, longest=14)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        own, _ = oracle_outputs(oracle(model), batch, 1.0)
    batch["sample_id"] = torch.arange(COUNT)
    batch["pair"], batch["chosen"] = torch.arange(COUNT) // 2, torch.arange(COUNT) % 2 == 0
    batch["right"] = (torch.arange(COUNT) % 3 == 0).float()
    batch["loss_mask"] &= (torch.rand(batch.total_tokens, generator=generator) < 0.8) | batch.last
    batch["old_logprobs"], batch["ref_logprobs"] = own + batch["noise"], own - batch["noise"]
    batch["chosen_tokens"] = torch.rand(batch.total_tokens, generator=generator) < 0.3
    batch["old_values"], batch["returns"] = batch["noise"], batch["noise"] * 2 - 0.5
    return batch


def gradients_of_all(model: Path, layout: str, budget: int, turned: bool) -> dict[str, tuple[dict[str, float], Parts]]:
    """Metrics and this rank's gradients of each loss; no step is taken. turned: the ranks hold the rows otherwise."""
    groups = ParallelGroups(Placement.on(Layout.parse(layout), dist.get_world_size()))
    order = torch.arange(COUNT).flip(0) if turned else torch.arange(COUNT)
    mine = rows(model).select(order[dist.get_rank() :: dist.get_world_size()])
    found: dict[str, tuple[dict[str, float], Parts]] = {}
    for kind in (Actor, Critic, TrainableRewardModel):
        role = build_role(kind, model, groups, tokens_per_micro_batch=budget, optimizer=OptimizerConfig(clip_grad=0.0))
        seen: list[Parts] = []

        def look(runner: MegatronRunner, seen: list[Parts]) -> tuple[bool, float, int]:
            seen.append(gradients_here(runner))
            return True, 0.0, 0

        role.trainer.optimizer.step = partial(look, role.runner, seen)
        for name, (needs, mode, loss) in LOSSES.items():
            if needs is kind:
                batch = mine.select(range(len(mine)))
                if kind is TrainableRewardModel:
                    batch["loss_mask"] = batch.last
                found[name] = role.update(batch, loss, mode), seen.pop()
    return found


def test_losses_are_all_in_this_test():
    assert {name for name in losses.__all__ if name.endswith("_loss")} == {name.split(",")[0] for name in LOSSES}


@pytest.fixture(scope="module")
def alone(ranks, model) -> dict[str, tuple[dict[str, float], dict[str, Tensor]]]:
    """All rows in one micro-batch of one rank."""
    (result,) = ranks.run(1, gradients_of_all, model, "tp1", 4096, False)
    return {name: (metrics, assembled(parts)) for name, (metrics, parts) in result.items()}


@pytest.mark.parametrize(("layout", "count", "budget"), SPLITS)
def test_loss_values_and_gradients_do_not_depend_on_layout_and_micro_batches(
    ranks, model, alone, layout, count, budget
):
    results = ranks.run(count, gradients_of_all, model, layout, budget, budget == 40)
    for name, (expected, whole) in alone.items():
        largest = max(values.abs().max() for values in whole.values())
        assert largest > 1e-4, f"{name} has no gradient"
        for result in results:
            metrics, parts = result[name]
            for metric, value in expected.items():
                assert metrics[metric] == pytest.approx(value, rel=1e-5, abs=1e-6), (name, metric)
            for tensor, box, values in parts:
                error = (values.reshape(whole[tensor][slices(box)].shape) - whole[tensor][slices(box)]).abs().max()
                assert error < 1e-5 * largest, f"{name}: {tensor} is {error / largest:.1e} of the largest off"
