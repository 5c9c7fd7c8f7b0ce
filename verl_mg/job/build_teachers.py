"""The teachers that a configuration describes, each with its sources of prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from verl_mg.config import Config, TeacherConfig
from verl_mg.data import PromptFeed
from verl_mg.data.prompts import teacher_prompt
from verl_mg.engines.scoring_server import ScoringServer
from verl_mg.errors import UserError
from verl_mg.job.recipe import TEACHERS
from verl_mg.models.transformers_module import read_any_config, read_tokenizer
from verl_mg.roles.context import JobContext
from verl_mg.roles.models import Actor, Policy
from verl_mg.roles.role import Role
from verl_mg.roles.teacher_rows import OtherPrompts, OtherTokens, ReadingTeacher, RemoteTeacher, RowReader, Teacher
from verl_mg.roles.teachers import Teachers
from verl_mg.servers.info import read_key

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def build_teachers(
    config: Config,
    roles: Mapping[str, Role],
    prompts: PromptFeed,
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[dict[str, Any]],
    stop_token_ids: Sequence[int],
    context: JobContext,
) -> Teachers:
    """Returns the teachers of a job; without any in the configuration, the reference is the teacher of all samples.

    `roles` are the model roles by name, and `tools` the schemas that a chat template describes to the model.
    `stop_token_ids` end a response. UserError if a source has no teacher or several, or a server cannot be used.
    """
    actor, number_of = roles["actor"], teacher_numbers(config)
    assert isinstance(actor, Actor)
    # Only these have the weights of their directories, from which the actor's ranks read the output layers.
    loaded = [f"{TEACHERS}.{name}" for name, section in config.teachers.items() if section.has_model]
    if not config.teachers and not config.reference.refresh_every:
        loaded = ["reference"]
    fixed = {key: policy_of(roles, key) for key in loaded}
    teachers: dict[str, Teacher] = {} if config.teachers else {"reference": policy_of(roles, "reference")}
    read = partial(_row_reader, config, prompts, tokenizer, tools, frozenset(stop_token_ids))
    for name, section in config.teachers.items():
        key = f"{TEACHERS}.{name}"
        model = key if section.has_model else section.weights
        teacher: Teacher = remote_teacher(config, name, section.url) if section.url else policy_of(roles, model)
        if section.prompt or section.tokenizer:
            teacher = ReadingTeacher(teacher, read(key, section), section.tokenizer is not None)
        teachers[key] = teacher
    return Teachers(teachers, fixed, actor, lambda prompt: number_of[prompts.by_id(prompt).source], context)


def _row_reader(
    config: Config,
    prompts: PromptFeed,
    student: PreTrainedTokenizerBase,
    tools: Sequence[dict[str, Any]],
    stops: frozenset[int],
    key: str,
    section: TeacherConfig,
) -> RowReader:
    tokenizer = read_tokenizer(section.tokenizer) if section.tokenizer else student

    @cache  # all samples of a prompt, in every iteration, have the same tokens
    def tokens_of(prompt_id: int) -> list[int]:
        return teacher_prompt(prompts.by_id(prompt_id), section.prompt, tokenizer, f"{key}.prompt", tools)

    for prompt in prompts.first(1):
        tokens_of(prompt.id)  # an unknown field is an error before the job begins
    model = read_any_config(config.model.path)
    if section.tokenizer is None:
        return OtherPrompts(tokens_of, model.max_positions, f"{key}.prompt")
    return OtherTokens(tokens_of, student, tokenizer, stops, f"{key}.tokenizer")


def policy_of(roles: Mapping[str, Role], name: str) -> Policy:
    """Returns a policy among the model roles."""
    role = roles[name]
    assert isinstance(role, Policy)
    return role


def remote_teacher(config: Config, name: str, url: str) -> RemoteTeacher:
    """Returns the client of a teacher on a server."""
    section, key = config.teachers[name], f"{TEACHERS}.{name}"
    if (temperature := config.rollout.temperature) not in (0.0, 1.0):
        raise UserError(
            f"{key}.url: servers return log-probs at temperature 1, and the policy's are at rollout.temperature="
            f"{temperature}. Write rollout.temperature=1."
        )
    api_key = read_key(f"{key}.api_key_env", section.api_key_env)
    vocab = read_any_config(config.model.path).vocab
    server = ScoringServer.at(f"{key}.url", url, section.protocol, vocab, section.served_model, api_key)
    return RemoteTeacher(server, section.parallel)


def teacher_numbers(config: Config) -> dict[str, int]:
    """Returns the number of the teacher of each source of `data.train`; the source of a single file is ""."""
    # Sources math, code and chat, teachers a of math and b without sources: {math: 0, code: 1, chat: 1}.
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
