"""Memory of roles that share a device, against numbers counted by hand."""

from dataclasses import replace

import pytest

from tests.planner.tiny_inputs import DENSE, tiny
from verl_mg.errors import UserError
from verl_mg.layout import EngineLayout, Layout
from verl_mg.planner.command import auxiliary_role
from verl_mg.planner.inputs import GIB, AuxiliaryRole
from verl_mg.planner.memory import TrainMemory, rollout_memory, train_memory
from verl_mg.planner.memory_phases import awake, engine_limit, problem, syncing, training
from verl_mg.sharding.weight_table import weight_table

ACTOR = TrainMemory((), {"weights": (10, 20), "gradients": (20, 40), "optimizer states": (5, 5), "activations": (9, 1)})
ALL = tuple(range(8))
PARTS = {"weights": (1, 2, 3, 40), "activations": (7, 8, 9, 10)}
CRITIC = AuxiliaryRole("critic", Layout(pp=4), ranks=ALL, parts=PARTS)


def size(parts):
    return sum(parts.values())


def test_training_counts_stages_of_each_rank_and_one_computing_role():
    """Ranks 0 to 1, 2 to 3, ... of 8: actor's stages 0, 0, 1, 1, critic's 0, 1, 2, 3."""
    inputs = replace(tiny(DENSE), auxiliary_roles=(CRITIC,))
    assert size(training(replace(inputs, offload=False), ACTOR)) == 20 + 40 + 5 + 40 + max(1, 10)
    assert size(training(inputs, ACTOR)) == 20 + 40 + 5 + 1 + 40, "the actor is away while the critic computes"
    assert size(training(tiny(DENSE), ACTOR)) == 20 + 40 + 5 + 1


def test_awake_excludes_only_offloaded_actor():
    inputs = replace(tiny(DENSE), auxiliary_roles=(CRITIC,))
    assert size(awake(inputs, ACTOR)) == 40
    assert size(awake(replace(inputs, offload=False), ACTOR)) == 105
    assert size(awake(replace(inputs, offload=False, rollout_ranks=4), ACTOR)) == 0


def test_engine_limit_is_fraction_of_free_memory_at_start():
    """The actor has left then; with offload=false it stays, with its optimizer states."""
    inputs = replace(tiny(DENSE), auxiliary_roles=(CRITIC,))
    assert engine_limit(inputs, ACTOR) == 74 * GIB - 40
    assert engine_limit(replace(inputs, memory_fraction=0.5), ACTOR) == 0.5 * (80 * GIB - 40)
    assert engine_limit(replace(inputs, memory_fraction=0.5, offload=False), ACTOR) == 0.5 * (80 * GIB - 105)
    assert engine_limit(replace(inputs, memory_fraction=0.5, rollout_ranks=4), ACTOR) == 0.5 * 80 * GIB
    assert engine_limit(replace(inputs, memory_fraction=0.99), ACTOR) == 74 * GIB - 40


def test_problem_engines_without_sleep_add_to_training():
    inputs, layout = tiny(DENSE, memory_fraction=0.95, reserve=1.0), Layout.parse("tp2").fit(8)
    train, engine = train_memory(inputs, layout), rollout_memory(inputs, EngineLayout())
    assert problem(inputs, train, engine) is None
    message = problem(replace(inputs, sleep=False, memory=1.5), train, engine)
    assert (
        message is not None and message.startswith("training: it needs") and "the engine's weights and cache" in message
    )


def test_problem_memory_fraction_too_small_is_named():
    inputs = tiny(DENSE, memory_fraction=1e-6)
    message = problem(inputs, None, rollout_memory(inputs, EngineLayout()))
    assert message is not None and message.endswith("engines take 1e-06 of the memory that is free when they start")


def test_auxiliary_role_trained_and_frozen_parts():
    inputs, layout = tiny(DENSE), Layout.parse("tp2-pp2").fit(8)
    actor = train_memory(inputs, layout)
    value = weight_table(inputs.weights.config, "value")
    critic = auxiliary_role(inputs, AuxiliaryRole("critic", Layout.parse("tp2-pp2"), True, 64), value)
    reference = auxiliary_role(inputs, AuxiliaryRole("reference", Layout.parse("tp2-pp2"), False, 64), inputs.weights)
    # The output layer's 32 of 64 rows of 32 elements, against one row of 32.
    assert actor.parts["weights"][1] - critic.parts["weights"][1] == 2 * (32 * 32 - 32)
    assert critic.parts["weights"][0] == actor.parts["weights"][0] == reference.parts["weights"][0]
    assert set(reference.parts) == {"weights", "activations"} and critic.update_seconds > 0 == reference.update_seconds
    assert max(reference.parts["activations"]) < max(actor.parts["activations"])
    with pytest.raises(UserError, match="^critic: layout pp3"):
        auxiliary_role(inputs, AuxiliaryRole("critic", Layout.parse("pp3"), True, 64), value)


def test_training_roles_on_disjoint_ranks_do_not_add_up():
    """The critic is on ranks 4 to 7, the actor on 0 to 3."""
    inputs = replace(
        tiny(DENSE), auxiliary_roles=(replace(CRITIC, ranks=(4, 5, 6, 7)),), role_ranks=(0, 1, 2, 3), offload=False
    )
    assert size(training(inputs, ACTOR)) == 20 + 40 + 5 + 1
    assert size(awake(replace(inputs, offload=True), ACTOR)) == 40, "the fullest rank is the critic's last"
    half = replace(inputs, auxiliary_roles=(replace(CRITIC, ranks=(2, 3, 4, 5)),))
    assert size(training(half, ACTOR)) == 20 + 40 + 5 + 2 + 8, "its second stage shares ranks with the actor's second"


def test_training_offloaded_roles_share_a_rank_in_turns():
    inputs = replace(tiny(DENSE), auxiliary_roles=(replace(CRITIC, offload=True),))
    assert size(training(inputs, ACTOR)) == 20 + 40 + 5 + 1, "the critic waits on the host"
    assert size(awake(inputs, ACTOR)) == 0
    assert size(syncing(inputs, ACTOR)) == 20, "weights alone move to the engines"
    assert size(syncing(replace(inputs, offload=False), ACTOR)) == 65
