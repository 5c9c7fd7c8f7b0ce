"""The teachers that a configuration describes, each with its sources of prompts."""

from __future__ import annotations

from collections.abc import Mapping

from verl_mg.config import Config
from verl_mg.data import PromptFeed
from verl_mg.errors import UserError
from verl_mg.job.build_models import TEACHERS
from verl_mg.roles.context import JobContext
from verl_mg.roles.models import Actor, Policy
from verl_mg.roles.role import Role
from verl_mg.roles.teachers import Teachers


def build_teachers(config: Config, roles: Mapping[str, Role], prompts: PromptFeed, context: JobContext) -> Teachers:
    """Returns the teachers of a job; without any in the configuration, the reference is the teacher of all samples.

    Args:
        config: configuration of the job.
        roles: its model roles by name.
        prompts: its training prompts.
        context: services that the roles of the job share.

    Raises:
        UserError: a source has no teacher or several.
    """
    keys = [f"{TEACHERS}.{name}" for name in config.teachers] or ["reference"]
    policies = {key: role for key in keys if isinstance(role := roles[key], Policy)}
    actor = roles["actor"]
    assert isinstance(actor, Actor) and len(policies) == len(keys)
    number_of = teacher_numbers(config)
    return Teachers(policies, actor, lambda prompt: number_of[prompts.by_id(prompt).source], context)


def teacher_numbers(config: Config) -> dict[str, int]:
    """Returns the number of the teacher of each source of `data.train`; the source of a single file is "".

    Args:
        config: configuration of the job.

    Raises:
        UserError: a source has no teacher or several, or a teacher names another one.
    """
    train, teachers = config.data.train, config.teachers
    sources = list(train) if isinstance(train, dict) else [""]
    number_of: dict[str, int] = {}
    for number, (name, teacher) in enumerate(teachers.items()):
        for source in teacher.sources:
            if source not in sources:
                named = ", ".join(filter(None, sources)) or "none: write data.train as a mapping of sources"
                raise UserError(f"teachers.{name}.sources: no source {source!r}. data.train has {named}.")
            if source in number_of:
                raise UserError(f"teachers.{name}.sources: {source!r} has another teacher already. Name it once.")
            number_of[source] = number
    others = [number for number, teacher in enumerate(teachers.values()) if not teacher.sources] or [0] * (not teachers)
    left = [source for source in sources if source not in number_of]
    if len(others) > 1:
        raise UserError(
            f"teachers.{list(teachers)[others[1]]}.sources: another teacher has none either. Name the sources of all "
            "teachers but one."
        )
    if left and not others:
        raise UserError(f"teachers: the source {left[0]!r} of data.train has none. Add it to the sources of a teacher.")
    return number_of | dict.fromkeys(left, others[0] if others else 0)
