"""What stands on a device together, against numbers counted by hand."""

from dataclasses import replace

import pytest

from tests.planner.tiny_settings import DENSE, tiny
from verl_mg.errors import UserError
from verl_mg.layout import EngineLayout, Layout
from verl_mg.planner.inputs import GIB, AuxiliaryRole
from verl_mg.planner.memory import TrainMemory, rollout_memory, train_memory
from verl_mg.planner.memory_phases import at_rest, awake, engine_limit, problem, syncing, training
from verl_mg.planner.roles import PlannedRole, auxiliary_role
from verl_mg.sharding.weight_table import weight_table

ACTOR = TrainMemory((), {"weights": (10, 20), "gradients": (20, 40), "optimizer states": (5, 5), "activations": (9, 1)})
ALL = tuple(range(8))
CRITIC = AuxiliaryRole("critic", Layout(pp=4), {"weights": (1, 2, 3, 40), "activations": (7, 8, 9, 10)}, 0.0, 0.0, ALL)


def size(parts):
    return sum(parts.values())


def test_each_rank_has_its_own_stages_and_one_role_computes():
    """Ranks 0 to 1, 2 to 3, ... of 8: actor's stages 0, 0, 1, 1, critic's 0, 1, 2, 3."""
    setting = replace(tiny(DENSE), beside=(CRITIC,))
    assert size(training(replace(setting, offload=False), ACTOR)) == 20 + 40 + 5 + 40 + max(1, 10)
    assert size(training(setting, ACTOR)) == 20 + 40 + 5 + 1 + 40, "the actor is away while the critic computes"
    assert size(at_rest(setting, ACTOR)) == 20 + 40 + 5 + 40
    assert size(training(tiny(DENSE), ACTOR)) == 20 + 40 + 5 + 1
    assert size(at_rest(setting, None)) == 40


def test_only_the_actor_leaves_while_samples_are_drawn():
    setting = replace(tiny(DENSE), beside=(CRITIC,))
    assert size(awake(setting, ACTOR)) == 40
    assert size(awake(replace(setting, offload=False), ACTOR)) == 105
    assert size(awake(replace(setting, offload=False, rollout_ranks=4), ACTOR)) == 0


def test_engines_take_their_share_of_what_is_free_when_they_start():
    """All roles are there then, the actor too, though it leaves later."""
    setting = replace(tiny(DENSE), beside=(CRITIC,))
    assert engine_limit(setting, ACTOR) == 74 * GIB - 40
    assert engine_limit(replace(setting, memory_fraction=0.5), ACTOR) == 0.5 * (80 * GIB - 105)
    assert engine_limit(replace(setting, memory_fraction=0.5, rollout_ranks=4), ACTOR) == 0.5 * 80 * GIB
    assert engine_limit(replace(setting, memory_fraction=0.99), ACTOR) == 74 * GIB - 40


def test_engines_that_do_not_sleep_stay_beside_training():
    setting, layout = tiny(DENSE, memory_fraction=0.95, reserve=1.0), Layout.parse("tp2").fit(8)
    train, engine = train_memory(setting, layout), rollout_memory(setting, EngineLayout())
    assert problem(setting, train, engine) is None
    told = problem(replace(setting, sleep=False, memory=1.5), train, engine)
    assert told is not None and told.startswith("training needs") and "the engine's weights and cache" in told


def test_a_share_that_is_too_small_is_named():
    setting = tiny(DENSE, memory_fraction=1e-6)
    told = problem(setting, None, rollout_memory(setting, EngineLayout()))
    assert told is not None and told.endswith("engines take 1e-06 of what is free when they start")


def test_a_role_that_learns_and_one_that_judges():
    setting, layout = tiny(DENSE), Layout.parse("tp2-pp2").fit(8)
    actor = train_memory(setting, layout)
    value = weight_table(setting.weights.config, "value")
    critic = auxiliary_role(setting, PlannedRole("critic", "tp2-pp2", value, True, 64))
    reference = auxiliary_role(setting, PlannedRole("reference", "tp2-pp2", setting.weights, False, 64))
    # The output layer's 32 of 64 rows of 32 elements, against one row of 32.
    assert actor.parts["weights"][1] - critic.parts["weights"][1] == 2 * (32 * 32 - 32)
    assert critic.parts["weights"][0] == actor.parts["weights"][0] == reference.parts["weights"][0]
    assert set(reference.parts) == {"weights", "activations"} and critic.seconds > 0 == reference.seconds
    assert max(reference.parts["activations"]) < max(actor.parts["activations"])
    with pytest.raises(UserError, match="^critic: layout pp3"):
        auxiliary_role(setting, PlannedRole("critic", "pp3", value, True, 64))


def test_roles_on_other_ranks_do_not_add_up():
    """The critic stands on ranks 4 to 7, the actor on 0 to 3."""
    setting = replace(
        tiny(DENSE), beside=(replace(CRITIC, ranks=(4, 5, 6, 7)),), role_ranks=(0, 1, 2, 3), offload=False
    )
    assert size(training(setting, ACTOR)) == 20 + 40 + 5 + 1
    assert size(at_rest(setting, ACTOR)) == 65
    assert size(awake(replace(setting, offload=True), ACTOR)) == 40, "the fullest rank is the critic's last"
    half = replace(setting, beside=(replace(CRITIC, ranks=(2, 3, 4, 5)),))
    assert size(training(half, ACTOR)) == 20 + 40 + 5 + 2 + 8, "its second stage is beside the actor's second"


def test_offloaded_roles_share_a_rank_in_turns():
    setting = replace(tiny(DENSE), beside=(replace(CRITIC, offload=True),))
    assert size(training(setting, ACTOR)) == 20 + 40 + 5 + 1, "the critic waits on the host"
    assert size(awake(setting, ACTOR)) == 0
    assert size(syncing(setting, ACTOR)) == 20, "weights alone move to the engines"
    assert size(syncing(replace(setting, offload=False), ACTOR)) == 65
    assert size(at_rest(setting, ACTOR)) == 105, "when engines start all are there"
