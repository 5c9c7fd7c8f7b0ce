"""Memory of a job by phase: the plan of its configuration, as `verl-mg plan` computes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from verl_mg.config import Config
from verl_mg.layout import EngineLayout
from verl_mg.planner.command import plan_inputs
from verl_mg.planner.from_config import plan_request
from verl_mg.planner.inputs import GIB
from verl_mg.planner.memory import fit_layout, rollout_memory, train_memory
from verl_mg.planner.memory_phases import engine_limit, phases, problem


@dataclass(frozen=True)
class JobMemory:
    """Planned memory of the fullest rank."""

    phases: Mapping[str, float]  # bytes by phase, without the KV cache
    problem: str | None  # the phase that does not fit the device


def job_memory(config: Config, roles: set[str], ranks: int, node: int, device_bytes: int | None) -> JobMemory:
    """Plans the memory of a job, on devices of this size; UserError for a job that cannot be planned."""
    job = plan_request(config, roles)
    assert job.model and job.train and job.rollout
    given = job.fields | {"ranks": ranks, "node": node}
    if device_bytes is not None:
        given["memory"] = device_bytes / GIB
    inputs = plan_inputs(job, job.model, given, lambda _: job.roles)
    train = train_memory(inputs, fit_layout(inputs, job.train))
    rollout = rollout_memory(inputs, EngineLayout.parse(job.rollout), engine_limit(inputs, train))
    too_large = None if device_bytes is None else problem(inputs, train, rollout)
    return JobMemory(phases(inputs, train, rollout), too_large)
