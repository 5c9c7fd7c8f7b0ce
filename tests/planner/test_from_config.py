"""What a plan does not see of a configuration, it says."""

import pytest

from verl_mg.config import load_config
from verl_mg.layout import Layout
from verl_mg.planner.from_config import PlanRequest, plan_request
from verl_mg.recipes import gkd, ppo

PLANNED = ["model.path=m", "data.train=t.jsonl", "model.dtype=bfloat16", "rollout.engine=sglang"]
UNSEEN = {
    "actor.lora={rank: 4}": "actor.lora: counted as if all weights were trained, and the reference's separate",
    "rollout.adapters=true": "rollout.adapters: the weight sync is counted as the first one, later ones send only",
    "reference.dynamic_context=true": "reference.dynamic_context: counted as if every row were sharded over all",
}


def request(*overrides: str) -> PlanRequest:
    config = load_config(None, [*PLANNED, *overrides], ppo.Config)
    return plan_request(config, ppo.roles(config.algorithm))


def notes(*overrides: str) -> tuple[str, ...]:
    config = load_config(None, [*PLANNED, "algorithm.kl.coefficient=0.1", *overrides], ppo.Config)
    return plan_request(config, ppo.roles(config.algorithm)).notes


@pytest.mark.parametrize(("override", "note"), UNSEEN.items())
def test_plan_request_uncounted_setting_adds_note(override, note):
    (found,) = notes(override)
    assert found.startswith(note)


def test_plan_request_has_the_teachers_on_ranks_of_the_job():
    teachers = "teachers={math: {path: t, layout: tp2}, far: {url: 'http://h:1'}}"
    config = load_config(None, [*PLANNED, teachers], gkd.Config)
    request = plan_request(config, gkd.roles(config.algorithm))
    (role,) = request.roles
    assert (role.name, role.layout, role.model, role.is_trained) == ("teachers.math", Layout(tp=2), "t", False)
    assert request.notes == (
        "algorithm.divergence: the teachers' output layers on the actor's last stage are not counted",
    )


def test_plan_request_plain_job_has_no_notes():
    assert notes() == ()


def test_plan_request_has_wire_and_delta_of_the_rollout():
    assert (
        request("rollout.wire=fp8_block", "rollout.delta=true").fields.items()
        >= {
            "wire": "fp8_block",
            "delta": True,
        }.items()
    )
