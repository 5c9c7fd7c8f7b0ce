"""Helpers of recipes/common: KL penalty and its adaptation, off-policy weights, batches of several rollouts."""

from importlib import import_module
from itertools import pairwise

import pytest
import torch
from pydantic import ValidationError

from tests.helpers.tiny_jobs import RECIPES
from tests.recipes.scripted_job import ScriptedJob, rows
from tests.recipes.tiny_runs import tiny_run
from verl_mg.algorithms.kl import adapted
from verl_mg.batch import Batch
from verl_mg.errors import UserError
from verl_mg.recipes import dapo, gdpo, gigpo, grpo, maxrl, mt_grpo, pass_at_k, pf_ppo
from verl_mg.recipes.common.kl import (
    KLConfig,
    adapt_kl,
    add_kl_loss,
    rewards_with_kl,
    token_rewards_with_kl,
    with_current_kl,
)
from verl_mg.recipes.common.off_policy import (
    COLUMNS,
    OffPolicyConfig,
    add_off_policy_weights,
    apply_off_policy_weights,
)
from verl_mg.recipes.common.reward_parts import weighted_parts
from verl_mg.recipes.common.rows import concat_rollouts, is_turn_of_data, response_lengths
from verl_mg.training.loss_inputs import LossInputs

COEFFICIENT = 0.5


def scored_batch() -> Batch:
    """Two rows with one token of prompt; the reference's log-probs of the others are 1, 2 and 3 nats lower."""
    batch = Batch.from_rows([(5, 6, 7), (5, 8)])
    batch["loss_mask"] = torch.tensor([False, True, True, False, True])
    batch["old_logprobs"] = torch.tensor([9.0, -1.0, -1.0, 9.0, -1.0])
    batch["ref_logprobs"] = torch.tensor([0.0, -2.0, -3.0, 0.0, -4.0])
    batch["rollout_logprobs"] = torch.tensor([0.0, -1.0, -3.0, 0.0, 1.0])
    batch["reward"] = torch.tensor([1.0, -1.0])
    return batch


def loss_inputs(**columns: torch.Tensor) -> LossInputs:
    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    return LossInputs(logprobs[None], torch.ones(2, dtype=torch.bool), torch.zeros(2, dtype=torch.int64), columns)


def test_rewards_with_kl_in_reward_subtract_the_penalty_of_each_token():
    kl = KLConfig(coefficient=COEFFICIENT, placement="reward", estimator="k1")
    rewards, mask = token_rewards_with_kl(scored_batch(), kl)
    assert mask.tolist() == [[False, True, True], [False, True, False]]
    assert rewards.tolist() == [[0.0, -0.5, 1.0 - 1.0], [0.0, -1.0 - 1.5, 0.0]]
    assert rewards_with_kl(scored_batch(), kl).tolist() == [-0.5, -2.5]


@pytest.mark.parametrize("kl", [KLConfig(), KLConfig(coefficient=COEFFICIENT, placement="loss", estimator="k1")])
def test_rewards_with_kl_not_in_reward_are_unchanged(kl):
    assert rewards_with_kl(scored_batch(), kl).tolist() == [1.0, -1.0]
    assert token_rewards_with_kl(scored_batch(), kl)[0].tolist() == [[0.0, 0.0, 1.0], [0.0, -1.0, 0.0]]


@pytest.mark.parametrize(("placement", "weight"), [("loss", COEFFICIENT), ("reward", 0.0)])
def test_kl_loss_by_placement_is_added_in_the_loss_only(placement, weight):
    inputs = loss_inputs(ref_logprobs=torch.tensor([-2.0, -4.0]))
    kl = KLConfig(coefficient=COEFFICIENT, placement=placement, estimator="k1")
    loss, metrics = add_kl_loss((torch.ones(2), {}), inputs, kl)
    assert loss.tolist() == [1 + weight * 1, 1 + weight * 3]
    assert ("kl" in metrics) == (placement == "loss")


def test_off_policy_weights_disabled_leave_batch_and_loss():
    batch, loss = scored_batch(), torch.ones(2)
    add_off_policy_weights(batch, OffPolicyConfig(), torch.clone)
    assert "correction" not in batch
    assert apply_off_policy_weights((loss, {}), loss_inputs(), OffPolicyConfig())[0] is loss


def test_off_policy_weights_enabled_scale_the_loss_and_are_reported():
    batch, off_policy = scored_batch(), OffPolicyConfig(weight="token", high=2.0)
    add_off_policy_weights(batch, off_policy, torch.clone)
    assert batch["correction"].tolist() == pytest.approx([0.0, 1.0, 2.0, 0.0, torch.e**-2])
    assert batch["correction_above"].tolist() == [0.0, 0.0, 1.0, 0.0, 0.0]
    columns = {name: batch[name][1:3] for name in COLUMNS}
    loss, metrics = apply_off_policy_weights((torch.full((2,), 3.0), {}), loss_inputs(**columns), off_policy)
    assert loss.tolist() == [3.0, 6.0] and metrics == columns


def test_weight_and_rejections_together_multiply_after_the_weights_are_normalized():
    # The differences are 0, 2 and -2: the second token has the weight 2, and its sequence is rejected.
    batch, rejection = scored_batch(), {"sequence-max-k2": 1.9}
    off_policy = OffPolicyConfig(weight="token", high=2.0, normalize=True, rejection=rejection)
    seen = []
    add_off_policy_weights(batch, off_policy, lambda sums: seen.append(sums.tolist()) or sums * 2)
    assert seen == [[pytest.approx(3 + torch.e**-2), 3]]
    assert batch["correction"].tolist() == [0.0] * 5 and batch["correction_rejected"].tolist() == [0, 1, 1, 0, 1]
    for bounds, kept in (([0.5, 8.0], [1.0, 2.0, 0.0]), ([0.1, 1.5], [1.0, 0.0, torch.e**-2])):
        criterion = {"token-k1": bounds}
        both = OffPolicyConfig.model_validate({"weight": "token", "normalize": True, "rejection": criterion})
        add_off_policy_weights(batch, both, torch.clone)
        mean = (3 + torch.e**-2) / 3
        assert batch["correction"][[1, 2, 4]].tolist() == pytest.approx([weight / mean for weight in kept])


@pytest.mark.parametrize(
    ("recipe", "values", "message"),
    [
        (pass_at_k, {"group_size": 8, "k": 9}, "it is larger than group_size"),
        (dapo, {"dynamic_sampling": "streaming", "max_sampling_rounds": None}, "needs dynamic_sampling=rounds"),
        (pf_ppo, {"group_size": 4, "buffer_samples": 3}, "buffer_samples 3 is less than a group"),
    ],
)
def test_values_of_a_recipe_that_contradict_are_refused(recipe, values, message):
    with pytest.raises(ValidationError, match=message):
        recipe.Config(**values)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"low": 0.5}, "low is of the weight, and there is none"),
        ({"high": 3.0, "rejection": {"token-k1": [0.5, 2]}}, "high is of the weight"),
        ({"normalize": True}, "normalize is of the weight"),
        ({"weight": "token", "low": 1.5}, "less than or equal to 1"),
        ({"rejection": {"token-k1": 2.0}}, "token-k1 has two bounds of a ratio, around 1"),
        ({"rejection": {"sequence-sum-k1": [1.2, 2.0]}}, "sequence-sum-k1 has two bounds"),
        ({"rejection": {"sequence-mean-k3": [0.5, 2.0]}}, "sequence-mean-k3 has one upper bound, in nats"),
        ({"rejection": {"token-k2": 0}}, "token-k2 has one upper bound"),
        ({"rejection": {"sequence-max-k1": [0.5, 2.0]}}, "'sequence-max-k2' or 'sequence-max-k3'"),
    ],
)
def test_off_policy_keys_that_do_not_fit_are_refused(keys, message):
    with pytest.raises(ValueError, match=message):
        OffPolicyConfig.model_validate(keys)


POLICY_RECIPES = {
    file.stem: import_module(f"verl_mg.recipes.{file.stem}")
    for file in sorted(RECIPES.glob("[!_]*.py"))
    if "def policy_loss" in file.read_text()
}
CLIPPED = [name for name, recipe in POLICY_RECIPES.items() if "dual_clip" in recipe.Config.model_fields]


def policy_loss(name: str, advantage: float, **options: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of a recipe for two tokens with ratio e, and the gradient of its sum by log-probs and entropies."""
    recipe = POLICY_RECIPES[name]
    columns = {column: torch.zeros(2) for column in ("values", "returns", "right", "cut", "penalized")}
    columns |= {"cut": columns["cut"].bool(), "penalized": columns["penalized"].bool()}
    columns |= {"old_logprobs": torch.full((2,), -2.0), "advantages": torch.full((2,), advantage)}
    output = torch.tensor([[-1.0, -1.0], [0.5, 2.0]], requires_grad=True)
    inputs = LossInputs(output, torch.ones(2, dtype=torch.bool), torch.zeros(2, dtype=torch.int64), columns)
    loss, _ = recipe.policy_loss(inputs, recipe.Config(**options))
    (gradient,) = torch.autograd.grad(loss.sum(), output)
    return loss.detach(), gradient


def drawn_tokens(k: int, **off_policy: object) -> tuple[LossInputs, torch.Tensor, OffPolicyConfig]:
    """Each token of a vocabulary of 5 as the only response to one prompt, with how likely a sampler draws it.

    The sampler differs from the policy, whose logits have the gradient; all advantages are 1.5."""
    logits, noise = torch.randn(2, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    q, logprobs = (logits + 0.6 * noise).log_softmax(0), logits.requires_grad_().log_softmax(0)
    top = q.topk(k)
    batch = Batch.from_rows([(9, token) for token in range(5)])
    batch["loss_mask"] = torch.tensor([False, True] * 5)
    batch["rollout_logprobs"] = torch.stack([torch.zeros(5), q], 1).flatten()
    batch["sampler_top"] = torch.stack([top.values, top.indices]).expand(10, 2, k)
    own = torch.cat([logprobs.detach()[:, None], logprobs.detach()[top.indices].expand(5, k)], 1)
    batch["old_logprobs"] = torch.stack([torch.zeros_like(own), own], 1).flatten(0, 1)
    config = OffPolicyConfig.model_validate({"score_centering": k, **off_policy})
    add_off_policy_weights(batch, config, torch.clone)
    columns = {name: batch[name][1::2] for name in batch.names()}
    columns |= {"advantages": torch.full((5,), 1.5)} | dict.fromkeys(("cut", "penalized"), torch.zeros(5).bool())
    output = torch.cat([torch.stack([logprobs, logprobs * 0]), logprobs[top.indices, None].expand(k, 5)])
    inputs = LossInputs(output, torch.ones(5).bool(), torch.arange(5), columns | {"right": torch.zeros(5)})
    return inputs, logits, config


CENTRED = [name for name, recipe in POLICY_RECIPES.items() if "off_policy" in recipe.Config.model_fields]


@pytest.mark.parametrize("name", CENTRED)
def test_score_centering_of_every_recipe_leaves_no_gradient_of_a_constant_advantage(name):
    # Before the first step, over all that the sampler may draw: only differences of advantages teach anything.
    recipe = POLICY_RECIPES[name]
    compared = {"old_logprobs": "recompute"} if "old_logprobs" in recipe.Config.model_fields else {}
    for options in (
        {},
        {"weight": "token", "high": 1.1},
        {"weight": "geometric", "low": 0.6, "high": 1.5},
        {"weight": "sequence", "high": 1.1, "normalize": True},
        {"rejection": {"token-k2": 0.05}},
    ):
        inputs, logits, centred = drawn_tokens(5, **options)
        norms = []
        for off_policy in (centred, OffPolicyConfig.model_validate(options)):
            loss, metrics = recipe.policy_loss(inputs, recipe.Config(off_policy=off_policy, **compared))
            assert (metrics.keys() >= {"centering_mass", "centering_drift"}) == (off_policy is centred)
            total = (loss * inputs["rollout_logprobs"].exp()).sum()
            norms.append(torch.autograd.grad(total, logits, retain_graph=True)[0].norm().item())
        assert norms[0] < 1e-6 and norms[1] > 0.01, (options, norms)


def test_score_centering_leaves_out_rejected_sequences_and_has_the_scale_of_the_weights():
    rejection = {"sequence-mean-k2": 0.05}
    for options in ({"rejection": rejection}, {"weight": "token", "normalize": True, "rejection": rejection}):
        inputs, _, _ = drawn_tokens(3, **options)
        rejected = inputs["correction_rejected"].bool()
        assert rejected.any() and not rejected.all()
        assert torch.equal((inputs["centering"] == 0).all(1), rejected)
    plain, scaled = (drawn_tokens(3, weight="token", normalize=choice)[0] for choice in (False, True))
    factors = scaled["correction"] / plain["correction"]
    assert abs(factors[0] - 1) > 0.01
    assert torch.allclose(scaled["centering"], plain["centering"] * factors[:, None])


@pytest.mark.parametrize("name", POLICY_RECIPES)
def test_entropy_coefficient_of_every_recipe_subtracts_the_entropy(name):
    (without, gradient), (loss, with_bonus) = (policy_loss(name, 1.0, entropy_coefficient=c) for c in (0.0, 0.5))
    assert torch.allclose(loss, without - torch.tensor([0.25, 1.0]))
    assert gradient[1].tolist() == [0, 0] and with_bonus[1].tolist() == [-0.5, -0.5]
    assert torch.equal(gradient[0], with_bonus[0])


@pytest.mark.parametrize("name", CLIPPED)
def test_dual_clip_of_every_recipe_bounds_losses_of_negative_advantages(name):
    for advantage in (1.0, -1.0):
        (loss, gradient), (bounded, cut) = (policy_loss(name, advantage, dual_clip=dual) for dual in (None, 1.5))
        if advantage > 0:
            assert torch.equal(bounded, loss) and torch.equal(gradient, cut)
        else:
            assert loss.tolist() == pytest.approx([torch.e] * 2) and bounded.tolist() == pytest.approx([1.5] * 2)
            assert gradient[0].all() and not cut.any()


def test_recipes_with_a_clip_have_a_dual_clip():
    # CISPO bounds the weight at both ends whatever the advantage is.
    clips = {name for name, recipe in POLICY_RECIPES.items() if "clip_high" in recipe.Config.model_fields}
    assert clips - set(CLIPPED) == {"cispo", "distillation"} and len(CLIPPED) == 20
    assert all("entropy_coefficient" in recipe.Config.model_fields for recipe in POLICY_RECIPES.values())


def test_off_policy_sequence_masking_excludes_bad_drifted_responses():
    rollout, advantages = torch.tensor([-0.2, -0.4]), torch.tensor([-1.0, -1.0])
    loss = torch.full((2,), 3.0)
    for delta, masked in ((0.5, 1.0), (0.8, 0.0)):  # the mean log-ratio is 0.7
        inputs = loss_inputs(rollout_logprobs=rollout, advantages=advantages)
        found, metrics = apply_off_policy_weights((loss, {}), inputs, OffPolicyConfig(opsm_delta=delta))
        assert found.tolist() == [3.0 * (1 - masked)] * 2 and metrics["opsm_masked"].tolist() == [masked] * 2


def test_off_policy_sequence_masking_in_a_run_begins_with_the_second_update(ranks, tasks, tmp_path):
    overrides = ["algorithm.prompts_per_iteration=8", "algorithm.group_size=4", "job.iterations=1", "job.save=false"]
    updates = ["algorithm.num_epochs=2", "algorithm.off_policy.opsm_delta=0.001", "actor.optimizer.warmup_steps=0"]
    (line,) = tiny_run(ranks, "grpo", tasks(0), tmp_path / "run", [*overrides, *updates])
    # Of two epochs the first one is on the policy that has sampled; in the second one bad responses have drifted.
    assert 0.05 < line["actor/opsm_masked"] < 0.5


def test_parts_of_the_reward_are_all_or_those_with_weights():
    batch = rows([0, 1], [0, 0], [1.0, 0.0])
    with pytest.raises(UserError, match=r"^algorithm\.rewards: the reward has no parts"):
        weighted_parts(batch, {})
    for name, values in (("format", [0.0, 1.0]), ("right", [1.0, 0.0])):
        batch[f"reward.{name}"] = torch.tensor(values)
    rewards, weights = weighted_parts(batch, {})
    assert [reward.tolist() for reward in rewards] == [[0, 1], [1, 0]] and weights == [1.0, 1.0]
    rewards, weights = weighted_parts(batch, {"right": 2.0})
    assert [reward.tolist() for reward in rewards] == [[1, 0]] and weights == [2.0]
    with pytest.raises(UserError, match=r"^algorithm\.rewards\.wrong: .* Write one of format, right$"):
        weighted_parts(batch, {"wrong": 1.0})


@pytest.mark.parametrize("recipe", [gdpo, gigpo, maxrl, mt_grpo, pass_at_k])
def test_penalty_in_the_reward_is_refused_where_it_has_no_meaning(recipe):
    assert recipe.Config(kl=KLConfig(coefficient=0.1)).kl.in_loss
    with pytest.raises(ValueError, match=r"kl\.placement=reward has no meaning in this recipe"):
        recipe.Config(kl=KLConfig(coefficient=0.1, placement="reward"))


def reference_calls(coefficient: float) -> list[str]:
    job = ScriptedJob(lambda round_: rows([0, 1], [0, 0], [0.0, 1.0]))
    grpo.iteration(job, grpo.Config(kl=KLConfig(coefficient=coefficient)))
    return job.reference.calls


def test_reference_without_penalty_is_not_called(ranks):
    assert ranks.run(1, reference_calls, 0.0) == [[]]
    assert ranks.run(1, reference_calls, COEFFICIENT) == [["compute_logprobs"]]


def test_kl_coefficient_with_target_moves_towards_it(ranks, tasks, tmp_path):
    overrides = ["algorithm.prompts_per_iteration=8", "algorithm.group_size=4", "job.iterations=10", "job.save=false"]
    horizon, target = 64, 0.02
    kl = [f"algorithm.kl.{key}" for key in ("coefficient=0.1", f"target={target}", f"horizon={horizon}")]
    lines = tiny_run(ranks, "grpo", tasks(0), tmp_path / "run", [*overrides, *kl])
    pairs = [(line["kl/coefficient"], line["kl/mean"]) for line in lines]
    # The policy begins at the reference and leaves it: the coefficient falls, then rises.
    assert pairs[0] == (0.1, 0.0) and max(mean for _, mean in pairs) > target
    for (coefficient, mean), (following, _) in pairwise(pairs):
        assert following == pytest.approx(adapted(coefficient, mean, target, horizon, 32))
        assert (following > coefficient) == (mean > target)


def test_current_kl_by_state_takes_the_adapted_coefficient_with_a_target_only():
    with_target = grpo.Config(kl=KLConfig(coefficient=0.3, target=0.1))
    assert with_current_kl(with_target, {}).kl.coefficient == 0.3
    state = {"kl_coefficient": 0.7}
    assert with_current_kl(with_target, state).kl.coefficient == 0.7
    # An earlier start of the run with a target does not affect a resumed run without one.
    assert with_current_kl(grpo.Config(kl=KLConfig(coefficient=0.3)), state).kl.coefficient == 0.3
    assert not with_current_kl(grpo.Config(kl=KLConfig(target=0.1)), state).kl.enabled


def test_kl_coefficient_adapted_beyond_its_bounds_stays_at_them():
    kl = KLConfig(coefficient=0.3, target=0.1, horizon=1, min_coefficient=0.25, max_coefficient=0.5)
    state: dict[str, float | Batch] = {}
    for mean, expected in ((9, 0.42), (9, 0.5), (0, 0.3), (0, 0.25), (0.1, 0.25), (9, 0.35), (9, 0.49), (9, 0.5)):
        current = with_current_kl(grpo.Config(kl=kl), state).kl
        adapt_kl(current, torch.tensor([4.0, 4.0 * mean, 2.0], dtype=torch.float64), state)
        assert state["kl_coefficient"] == pytest.approx(expected)
    # A run that is resumed with other bounds begins within them.
    lower = kl.model_copy(update={"coefficient": 0.25, "max_coefficient": 0.4})
    assert with_current_kl(grpo.Config(kl=lower), state).kl.coefficient == 0.4


def test_kl_bounds_that_cannot_hold_are_refused():
    with pytest.raises(ValueError, match="Write a target too"):
        KLConfig(coefficient=0.3, max_coefficient=1.0)
    for bound in ({"max_coefficient": 0.2}, {"min_coefficient": 0.4}):
        with pytest.raises(ValueError, match="not from min_coefficient to max_coefficient"):
            KLConfig(coefficient=0.3, target=0.1, **bound)


def test_adapt_kl_without_target_reports_and_keeps_no_state():
    state: dict[str, float | Batch] = {}
    metrics = adapt_kl(KLConfig(coefficient=0.3), torch.tensor([4.0, 2.0, 2.0], dtype=torch.float64), state)
    assert metrics == {"kl/mean": 0.5, "kl/coefficient": 0.3} and not state


def test_kl_config_partly_written_keeps_the_defaults_of_the_recipe():
    config = pf_ppo.Config.model_validate({"kl": {"coefficient": 0.01}})
    assert (config.kl.coefficient, config.kl.placement, config.kl.estimator) == (0.01, "reward", "k1")


def test_concat_rollouts_with_other_reward_parts_keeps_common_columns():
    first, second = rows([0], [0], [1.0]), rows([1], [0], [0.0])
    first["reward.format"] = torch.tensor([1.0])
    second["extra"] = torch.tensor([1.0])
    whole = concat_rollouts([first, second])
    assert whole["sample_id"].tolist() == [0, 1]
    assert "reward.format" not in whole and "extra" not in whole and "loss_mask" in whole


def test_concat_rollouts_of_a_round_without_samples_keeps_columns_of_agents():
    nothing, agents = rows([], [], []), rows([1], [0], [0.0])
    agents["prefix_of"] = agents["sample_id"].clone()
    for batches in ([nothing, agents], [agents, nothing, nothing]):
        assert concat_rollouts(batches)["prefix_of"].tolist() == [1]
    assert not len(concat_rollouts([nothing, nothing]))


def test_response_lengths_of_agents_count_generated_tokens():
    batch = Batch.from_rows([[1, 2, 3, 4], [1, 2, 5], [1, 6, 7, 8, 9]])
    batch["prompt_length"] = torch.tensor([1, 2, 2])
    assert response_lengths(batch).tolist() == [3, 1, 3]
    batch["sample_id"] = batch["prefix_of"] = torch.tensor([9, 10, 3])
    batch["trajectory"] = torch.tensor([4, 4, 1])
    batch["policy_versions"] = torch.tensor([-1, 0, -1, 1, -1, -1, 2, -1, -1, 0, -1, 0])
    assert response_lengths(batch).tolist() == [3, 3, 2]


def test_turns_of_data_are_spread_evenly():
    turns = [[is_turn_of_data(i, fraction, "sync") for i in range(1, 9)] for fraction in (0.0, 0.25, 0.5, 1.0)]
    assert [sum(of) for of in turns] == [0, 2, 4, 8]
    assert [i for i, turn in enumerate(turns[1], start=1) if turn] == [4, 8]
    with pytest.raises(UserError, match=r"data_fraction=0.5: turns of samples and data need rollout.mode=sync"):
        is_turn_of_data(1, 0.5, "async")
    assert is_turn_of_data(1, 1.0, "async") and not is_turn_of_data(1, 0.0, "async")
