"""The same numbers as verl 0.9.1 where both define the same function.

Random inputs of odd lengths in float64; masks have holes, as tool observations leave them. Skipped without verl.
"""

import ast
from collections.abc import Callable
from textwrap import dedent
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.algorithms import verl_peer
from tests.helpers.machine import PEERS
from verl_mg.algorithms import advantages, kl, losses
from verl_mg.algorithms.aggregation import MODES, aggregate, normalizer
from verl_mg.algorithms.correction import (
    CRITERIA,
    drifted_sequences,
    importance_weights,
    log_ratios,
    rejected,
    weight_sums,
)

ROWS, WIDTH = 8, 9
GROUPS = torch.tensor([4, 4, 1, 4, 1, 7, 7, 1])
SAMPLES = torch.arange(len(GROUPS))
LENGTHS = torch.tensor([5, 9, 1, 7, 3, 8, 2, 6])
IDS = torch.arange(ROWS).repeat_interleave(WIDTH)
Table = dict[str, Tensor]


@pytest.fixture(scope="module")
def verl() -> ModuleType:
    return verl_peer.module_of_verl("core_algos")


def table(seed: int, holes: bool = True) -> Table:
    """(n, T) columns, advantages that are equal in a row, and a mask of which each row has at least one."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    mask = torch.arange(WIDTH) < LENGTHS[:, None]
    if holes:
        mask &= torch.rand(ROWS, WIDTH, generator=generator) < 0.7
        mask[torch.arange(ROWS), LENGTHS - 1] = True
    old = -noise(ROWS, WIDTH).abs() - 0.5
    names = ("rewards", "values", "returns", "token_advantages")
    return {
        "old": old,
        "logprobs": old + 0.4 * noise(ROWS, WIDTH),
        "advantages": noise(ROWS, 1).expand(ROWS, WIDTH).clone(),
        "mask": mask,
        **{name: noise(ROWS, WIDTH) for name in names},
    }


def scores_of(t: Table) -> tuple[Tensor, Tensor]:
    """A score for each row, and the (n, T) rewards that verl reads it from."""
    scores = t["rewards"][:, 0].contiguous()
    return scores, advantages.token_rewards(scores, t["mask"])


def same(found: Tensor, theirs: Tensor, mask: Tensor | None = None) -> None:
    if mask is not None:
        found, theirs = found[mask], theirs[mask]
    assert theirs.abs().max() > 1e-3
    torch.testing.assert_close(found, theirs.double(), rtol=1e-6, atol=1e-7)


def same_and_gradients(leaves: list[Tensor], *values: Tensor) -> None:
    """The values and their gradients, each by its leaf."""
    same(*values)
    same(*(torch.autograd.grad(value.sum(), leaf)[0] for value, leaf in zip(values, leaves, strict=True)))


# -- advantages


@pytest.mark.parametrize("seed", range(3))
def test_group_advantages_of_random_rows_equal_verl(verl, seed):
    t = table(seed)
    scores, rewards = scores_of(t)
    mask, lengths, index = t["mask"].double(), t["mask"].sum(1), GROUPS.numpy()
    for ours, theirs in (
        (advantages.group_relative(scores, GROUPS, SAMPLES), verl.compute_grpo_outcome_advantage(rewards, mask, index)),
        (
            advantages.group_relative(scores, GROUPS, SAMPLES, False),
            verl.compute_grpo_outcome_advantage(rewards, mask, index, norm_adv_by_std_in_grpo=False),
        ),
        (advantages.rloo(scores, GROUPS, SAMPLES), verl.compute_rloo_outcome_advantage(rewards, mask, index)),
        (
            advantages.rloo(scores, GROUPS, SAMPLES),
            verl.compute_rloo_vectorized_outcome_advantage(rewards, mask, index),
        ),
        (advantages.opo(scores, lengths, GROUPS, SAMPLES), verl.compute_opo_outcome_advantage(rewards, mask, index)),
    ):
        same(ours[:, None].expand_as(mask), theirs[0], t["mask"])
    greedy = t["values"][:, 0]
    theirs = verl.compute_remax_outcome_advantage(rewards, greedy, mask)[0]
    same(advantages.remax(scores, greedy)[:, None].expand_as(mask), theirs, t["mask"])


def test_gdpo_of_samples_of_one_token_equals_verl(verl):
    """Of more tokens verl whitens over all tokens, so a long sample counts more than a short one; ours over samples."""
    t = table(0)
    first, second = t["rewards"][:, 0], t["values"][:, 0]
    summed = advantages.gdpo([first, second], [1.0, 0.3], GROUPS, SAMPLES)
    one = torch.ones(ROWS, dtype=torch.bool)
    theirs = verl.compute_gdpo_outcome_advantage(
        torch.zeros(ROWS, 1),
        torch.ones(ROWS, 1),
        GROUPS.numpy(),
        config={"gdpo_reward_keys": ["right", "short"], "gdpo_reward_weights": [1.0, 0.3]},
        non_tensor_batch={"right": first.numpy(), "short": second.numpy()},
        batch={"prompts": torch.zeros(ROWS, 2), "attention_mask": torch.ones(ROWS, 3, dtype=torch.int64)},
    )[0]
    torch.testing.assert_close(whitened(summed, one).float()[:, None], theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_token_advantages_of_random_rows_equal_verl(verl, seed):
    t = table(seed)
    rewards, mask = t["rewards"], t["mask"]
    ours, returns = advantages.gae(rewards, t["values"], mask, 0.9, 0.8)
    theirs = verl.compute_gae_advantage_return(rewards, t["values"], mask.double(), 0.9, 0.8)
    same(whitened(ours, mask), theirs[0], mask)
    same(returns, theirs[1], mask)

    ours = advantages.discounted_returns(rewards, mask, 0.9)
    config = SimpleNamespace(gamma=0.9)
    theirs = verl.compute_reinforce_plus_plus_outcome_advantage(rewards, mask.double(), config=config)
    same(whitened(ours, mask), theirs[0])
    same(ours, theirs[1])

    scores, last = scores_of(t)
    ours = torch.where(mask, advantages.group_relative(scores, GROUPS, SAMPLES, False)[:, None], 0.0)
    theirs = verl.compute_reinforce_plus_plus_baseline_outcome_advantage(last, mask.double(), GROUPS.numpy())
    same(whitened(ours, mask), theirs[0])


@pytest.mark.parametrize("weighted", [False, True])
def test_optimal_token_baseline_of_random_rows_equals_verl(verl, weighted):
    # That of turns takes the tokens of the policy one after another, as ours does; the other one without holes too.
    for seed, holes in ((0, True), (1, False)):
        t = table(seed, holes)
        squares = t["old"].exp().square() + 0.05 * t["values"].square()
        weights = t["returns"].abs() if weighted else None
        given = (
            torch.where(t["mask"], t["rewards"], 0.0),
            t["mask"].double(),
            GROUPS.numpy(),
            t["old"],
            squares,
            weights,
        )
        ours = advantages.optimal_token_baseline(t["rewards"], t["mask"], GROUPS, t["old"], squares, weights)
        theirs = [verl.compute_multi_turn_optimal_token_baseline_advantage]
        theirs += [] if holes else [verl.compute_optimal_token_baseline_advantage]
        for function in theirs:
            same(ours, function(*given)[0], t["mask"])


def whitened(values: Tensor, mask: Tensor) -> Tensor:
    return advantages.whiten(values, mask, advantages.moments(values, mask))


@pytest.mark.parametrize("kind", ["pow", "max_min", "max_random"])
def test_resampling_weights_of_random_scores_equal_verl(verl, kind):
    scores, rewards = scores_of(table(0))
    data = SimpleNamespace(batch=Columns(token_level_scores=rewards), non_tensor_batch={}, meta_info={})
    with mock.patch.object(torch, "multinomial", return_value=torch.arange(ROWS)) as draw:
        verl.compute_pf_ppo_reweight_data(data, kind, 2.0)
    same(advantages.resampling_weights(scores, GROUPS, kind, 2.0), draw.call_args.args[0])


class Columns(dict[str, Tensor]):
    batch_size = (ROWS,)


# -- KL


@pytest.mark.parametrize("kind", ["k1", "abs", "k2", "k3", "k1+", "k3+"])
def test_kl_penalty_of_each_estimator_equals_verl(verl, kind):
    t = table(1)
    ours, theirs = leaves = [t["logprobs"].clone().requires_grad_() for _ in range(2)]
    same_and_gradients(leaves, kl.penalty(ours, t["old"], kind), verl.kl_penalty(theirs, t["old"], kind))


def test_adaptive_kl_coefficient_over_iterations_equals_verl(verl):
    controller = verl.AdaptiveKLController(0.2, 6.0, 10_000)
    ours = 0.2
    for observed in (3.0, 6.5, 20.0, 5.9):
        controller.update(observed, 256)
        ours = kl.adapted(ours, observed, 6.0, 10_000, 256)
        assert ours == pytest.approx(controller.value, rel=1e-12)


# -- losses


def whole_batch(mask: Tensor) -> dict[str, Any]:
    """The arguments of verl's aggregation that depend on the global batch."""
    known = {"batch_num_tokens": int(mask.sum()), "global_batch_size": int(mask.any(1).sum())}
    return {"dp_size": 1, "loss_scale_factor": WIDTH, **known}


def configuration(verl: ModuleType, mask: Tensor, **policy_loss: float) -> Any:
    """verl's settings of a loss, with the numbers of the global batch in them."""
    options = verl.ActorConfig.__dataclass_fields__["policy_loss"].default_factory(**policy_loss)
    config = verl.ActorConfig(
        strategy="megatron", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_high=0.28, policy_loss=options
    )
    config.global_batch_info.update(whole_batch(mask))
    return config


LOSSES: dict[str, tuple[Callable[..., tuple[Tensor, losses.Metrics]], bool, tuple[float | str, ...]]] = {
    "vanilla": (losses.clipped_policy_loss, False, (0.2, 0.28, 3.0)),
    "cispo": (losses.cispo_loss, False, (0.2, 0.28)),
    "sapo": (losses.sapo_loss, False, (1.0, 1.05)),
    "dppo_tv": (losses.dppo_loss, False, ("tv", 0.2, 0.28, 3.0)),
    "dppo_kl": (losses.dppo_loss, False, ("kl", 0.2, 0.28, 3.0)),
    "gspo": (losses.gspo_loss, True, (0.2, 0.28)),
    "geo_mean": (losses.gmpo_loss, True, (0.2, 0.28)),
}


def our_loss(name: str, t: Table, new: Tensor, mode: str) -> Tensor:
    mask = t["mask"].flatten()
    given = [new.flatten(), t["old"].flatten(), t["advantages"].flatten(), mask]
    if name == "gpg":
        loss = losses.gpg_loss(given[0], given[2], mask)[0]
    else:
        function, sequences, options = LOSSES[name]
        loss = function(*given, *([IDS] if sequences else []), *options)[0]
    return aggregate(loss, mask, IDS, mode, normalizer(mode, int(mask.sum()), ROWS, WIDTH))


def their_loss(verl: ModuleType, name: str, t: Table, new: Tensor, mode: str) -> Tensor:
    columns = (t["old"], new, t["advantages"], t["mask"].double())
    return verl.get_policy_loss_fn(name)(*columns, mode, configuration(verl, t["mask"]))[0]


def loss_modes() -> list[tuple[str, str]]:
    """Each loss with the aggregations that verl knows of it, one for SAPO and GMPO."""
    only = {"sapo": ("seq-mean-token-mean",), "geo_mean": ("seq-mean-token-mean",)}
    return [(name, mode) for name in (*LOSSES, "gpg") for mode in only.get(name, MODES)]


@pytest.mark.parametrize(("name", "mode"), loss_modes())
def test_policy_losses_of_random_tokens_equal_verl(verl, name, mode):
    for seed in range(3):
        t = table(seed)
        ours, theirs = leaves = [t["logprobs"].clone().requires_grad_() for _ in range(2)]
        same_and_gradients(leaves, our_loss(name, t, ours, mode), their_loss(verl, name, t, theirs, mode))


def test_value_loss_of_random_tokens_equals_verl(verl):
    t = table(2)
    old = t["values"] + 0.3 * t["rewards"]
    mask = t["mask"].flatten()
    ours, theirs = leaves = [t["values"].clone().requires_grad_() for _ in range(2)]
    loss, metrics = losses.value_loss(ours.flatten(), old.flatten(), t["returns"].flatten(), mask, 0.2)
    value = aggregate(loss, mask, IDS, "token-mean", float(mask.sum()))
    their_value, cut = verl.compute_value_loss(theirs, t["returns"], old, t["mask"].double(), 0.2)
    same_and_gradients(leaves, value, their_value)
    assert 0 < cut.item() == pytest.approx(metrics["value_clip_fraction"].sum().item() / int(mask.sum()))


@pytest.mark.parametrize("mode", MODES)
def test_aggregation_of_each_mode_equals_verl(verl, mode):
    t = table(0)
    mask, loss = t["mask"], t["rewards"]
    mask[3] = False
    tokens, rows = int(mask.sum()), int(mask.any(1).sum())
    ours = aggregate(loss.flatten(), mask.flatten(), IDS, mode, normalizer(mode, tokens, rows, WIDTH))
    same(ours, verl.agg_loss(loss, mask.double(), mode, **whole_batch(mask)))


# -- Clip-Cov and KL-Cov


def our_covariances(t: Table) -> Tensor:
    columns = t["logprobs"], t["token_advantages"]
    sums = [advantages.moments(column, t["mask"]) for column in columns]
    return losses.covariances(*(column.flatten() for column in columns), t["mask"].flatten(), *sums)


def cov_loss(verl: ModuleType, name: str, t: Table, **options: float) -> Tensor:
    config = configuration(verl, t["mask"], **options)
    columns = (t["old"], t["logprobs"], t["token_advantages"], t["mask"].double())
    return verl.get_policy_loss_fn(name)(*columns, "token-mean", config)[0]


def test_kl_cov_of_random_tokens_equals_verl(verl):
    t = table(3)
    theirs = cov_loss(verl, "kl_cov", t, kl_cov_ratio=0.2, ppo_kl_coef=0.7)
    mask, found = t["mask"].flatten(), our_covariances(t)
    count = losses.share_count(int(mask.sum()), 0.2)
    chosen = losses.tokens_at_least(found, mask, found[mask].topk(count).values[-1].item())
    given = (t[name].flatten() for name in ("logprobs", "old", "token_advantages"))
    loss, _ = losses.kl_cov_loss(*given, mask, chosen, 0.7)
    same(aggregate(loss, mask, IDS, "token-mean", float(mask.sum())), theirs)


def test_clip_cov_of_random_tokens_equals_verl(verl):
    # A share of all tokens: every candidate is cut, and no chance is left. verl does not cut what PPO clips already.
    t = table(3)
    theirs = cov_loss(verl, "clip_cov", t, clip_cov_ratio=1.0, clip_cov_lb=0.1, clip_cov_ub=0.8)
    mask = t["mask"].flatten()
    given = [t[name].flatten() for name in ("logprobs", "old", "token_advantages")]
    _, metrics = losses.clipped_policy_loss(*given, mask, 0.2, 0.28)
    clipped = (metrics["clip_fraction_low"] + metrics["clip_fraction_high"]).bool()
    cut = losses.tokens_between(our_covariances(t), mask & ~clipped, 0.1, 0.8)
    loss, _ = losses.clip_cov_loss(*given, mask, cut, 0.2, 0.28)
    assert cut.sum() >= 3
    same(aggregate(loss, mask, IDS, "token-mean", float(mask.sum())), theirs)


# -- off-policy correction


@pytest.fixture(scope="module")
def rollout_correction() -> ModuleType:
    return verl_peer.module_of_verl("rollout_corr_helper")


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("ratio", "low"), [("token", None), ("token", 0.6), ("sequence", None), ("sequence", 0.3)])
def test_importance_weights_of_random_rows_equal_verl(rollout_correction, ratio, low, normalize):
    t = table(4)
    mask = t["mask"].flatten()
    difference = log_ratios(t["logprobs"].flatten(), t["old"].flatten(), mask)
    found, _ = importance_weights(ratio, difference, mask, IDS, low, 1.5)
    if normalize:
        total, count = weight_sums(ratio, found, mask, IDS).tolist()
        found = found * (count / total)
    bounds = 1.5 if low is None else f"{low}_1.5"
    theirs, _ = rollout_correction.compute_rollout_correction_weights(
        difference.view(ROWS, WIDTH), t["mask"].float(), ratio, bounds, normalize
    )
    same(found.double(), theirs.flatten())


@pytest.mark.parametrize("criterion", CRITERIA)
def test_rejections_of_random_rows_equal_verl(rollout_correction, criterion):
    t = table(5)
    mask = t["mask"].flatten()
    difference = log_ratios(t["logprobs"].flatten(), t["old"].flatten(), mask)
    low, high = (0.8, 1.3) if criterion.endswith("k1") else (0.0, 0.1)
    # verl bounds the inverse ratio.
    bounds = f"{1 / high}_{1 / low}" if low else str(high)
    name = criterion.replace("sequence", "seq").replace("-", "_")
    kept, _ = rollout_correction.compute_rollout_rejection_mask(
        difference.view(ROWS, WIDTH), t["mask"].float(), name, bounds
    )
    found = rejected(criterion, difference, mask, IDS, low, high)
    assert torch.equal(found, mask & ~kept.flatten().bool()) and 0 < found.sum() < mask.sum()


FILE = PEERS / "trl" / "trainer" / "grpo_trainer.py"


def their_mask(*arguments: torch.Tensor, delta: float) -> torch.Tensor:
    """GRPOTrainer.get_off_policy_mask, compiled from its source: to import TRL takes seconds."""
    if not FILE.exists():
        pytest.skip("TRL is not installed; run tools/install/peers.sh to compare with it")
    source = FILE.read_text(encoding="utf-8")
    (function,) = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name == "get_off_policy_mask"
    ]
    namespace = {"torch": torch}
    exec(dedent(ast.get_source_segment(source, function) or ""), namespace)
    return SimpleNamespace(**namespace).get_off_policy_mask(*arguments, delta)


def test_off_policy_sequence_masking_of_random_rows_equals_trl():
    generator = torch.Generator().manual_seed(2)
    new, noise = torch.randn(2, 40, 9, generator=generator, dtype=torch.float64)
    rollout, advantages = new + 0.5 * noise, torch.randn(40, 1, generator=generator).expand(40, 9)
    mask = torch.rand(40, 9, generator=generator) < 0.7
    kept = their_mask(advantages[:, :1], new, rollout, mask.double(), delta=0.1).bool().expand(40, 9)
    ids = torch.arange(40).repeat_interleave(9)
    flat = (column.flatten() for column in (new, rollout, advantages, mask))
    found = drifted_sequences(*flat, ids, 0.1).view(40, 9)
    assert torch.equal(found, ~kept & mask) and 3 < found.any(1).sum() < 37
