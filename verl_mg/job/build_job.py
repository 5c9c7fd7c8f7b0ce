"""Builds what a job has: after the checks the data, then models, teachers, rewards and engines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from verl_mg.agents.tool_calls import unread_reasoning
from verl_mg.agents.tools.load import load_tools
from verl_mg.agents.tools.multi_turn import MultiTurnEngine
from verl_mg.agents.tools.tool import Tool
from verl_mg.config import Config
from verl_mg.config.effects import check_effects
from verl_mg.data import Prompt, PromptFeed, Prompts, longest_row, read_prompts, reward_key
from verl_mg.data.image_processor import ImageProcessor
from verl_mg.data.images import ImageLimits
from verl_mg.data.stop_tokens import StopTokens, read_stop_tokens
from verl_mg.data.template_options import check_options_are_used, set_template_options
from verl_mg.engines import RolloutEngine
from verl_mg.engines.request_tracker import routed_shape
from verl_mg.engines.stop_strings import decoder
from verl_mg.errors import UserError
from verl_mg.job.build_agents import agent_wrapper, turns_wrapper
from verl_mg.job.build_engines import build_engine_group, start_imports, training_sampling, with_stop_strings
from verl_mg.job.build_models import ModelRoleBuilder
from verl_mg.job.build_teachers import build_teachers
from verl_mg.job.engine_checks import check_engines, check_job
from verl_mg.job.engine_tables import actor_table
from verl_mg.job.evaluation import EvaluationSet, evaluation_sets
from verl_mg.job.recipe import TEACHERS
from verl_mg.models.hf_config import HFConfig
from verl_mg.models.transformers_module import read_any_config, read_tokenizer
from verl_mg.phase_timer import PhaseTimer
from verl_mg.rewards import load_rewards
from verl_mg.roles.context import JobContext
from verl_mg.roles.models import Actor, Reference, RewardModel
from verl_mg.roles.reward import RewardRole, SampleTexts
from verl_mg.roles.role import Role
from verl_mg.roles.teachers import Teachers
from verl_mg.rollout.async_rollout import AsyncRollout
from verl_mg.rollout.engine_group import EngineGroup, InFlightEngineGroup, WrapEngine
from verl_mg.rollout.groups import StalenessBound
from verl_mg.rollout.mismatch_check import MismatchCheck
from verl_mg.rollout.rollout import Rollout, RolloutSetup, RolloutSource
from verl_mg.rollout.sync_rollout import SyncRollout
from verl_mg.rows.samples import OptionalColumns, RolloutRecord

if TYPE_CHECKING:
    from torch.distributed import Store
    from transformers import PreTrainedTokenizerBase

    from verl_mg.engines.process_engine import ImportingProcess


@dataclass(frozen=True)
class JobData:
    """The data that a job works on, and what is read of the model's directory to read it."""

    tokenizer: PreTrainedTokenizerBase
    processor: ImageProcessor | None
    model: HFConfig
    stops: StopTokens
    tools: Sequence[Tool]
    sets: Sequence[EvaluationSet]
    prompts: PromptFeed
    test_prompts: Prompts | None
    sample_texts: SampleTexts

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """Schemas of the tools, as prompts and agents render them."""
        return [tool.schema for tool in self.tools]


@dataclass
class JobParts:
    """The parts of a job; a part that the recipe does not request is None."""

    context: JobContext
    data: JobData
    roles: Mapping[str, Role]
    teachers: Teachers | None
    reward: RewardRole | None
    rollout: RolloutSource | None = None
    engines: EngineGroup | None = None
    check: MismatchCheck | None = None
    multi_turn: MultiTurnEngine | None = None

    def close(self) -> None:
        """Stops the engines, and releases the tools and the reward functions."""
        for part in (self.rollout, self.multi_turn, self.reward):
            if part is not None:
                part.close()


def build_job(
    config: Config,
    roles: Set[str],
    store: Store,
    timer: PhaseTimer,
    rollout: Callable[[], RolloutSource] | None,
    *,
    learns: bool,
    from_checkpoint: bool,
    evaluates_only: bool,
    starts_engines: bool,
) -> JobParts:
    """Builds the parts of the requested roles, see `RunningJob`; all ranks call it together."""
    context = JobContext(store, timer)
    torch.manual_seed(config.job.seed)
    # Checks come first, because a wrong key should cost seconds, not the time of loading models.
    with context.timer("checks"):
        if not evaluates_only:  # a configuration of evaluations is that of the run, or has few keys
            check_effects(config, set(roles))
        has_engines = "rollout" in roles and rollout is None
        models = _checked_models(config, roles, context, learns, from_checkpoint, has_engines)
        # Engines import their libraries while this process reads data and weights.
        importing = start_imports(config, actor_table(config)) if has_engines and starts_engines else None
    try:
        with context.timer("data"):
            data = _read_data(config, evaluates_only)
            models.check_images(roles, data.prompts)
        # Models before engines: an engine sizes its cache by the memory that is free when it starts.
        teachers = None
        with context.timer("models"):
            built = {name: models.build(name) for name in models.model_roles(roles)}
            if config.reference.refresh_every and "reference" in roles:
                _follow_actor(built)
            if TEACHERS in roles:
                teachers = build_teachers(
                    config, built, data.prompts, data.tokenizer, data.schemas, data.stops.ids, context
                )
        records: list[RolloutRecord] = []
        with context.timer("rewards"):
            reward = _build_reward(config, data, built, context, records) if "reward" in roles else None
        parts = JobParts(context, data, built, teachers, reward)
        if "rollout" in roles and starts_engines:
            with context.timer("engines"):
                prompts = () if evaluates_only else data.prompts
                parts.rollout = (
                    rollout() if rollout else _build_rollout(config, parts, prompts, records, learns, importing)
                )
    except BaseException:
        if importing:
            importing.close()
        raise
    return parts


def _checked_models(
    config: Config, roles: Set[str], context: JobContext, learns: bool, from_checkpoint: bool, has_engines: bool
) -> ModelRoleBuilder:
    """Checks what can be checked without data and models, and returns the builder of the models."""
    ranks = dist.get_world_size()
    training = ranks - check_job(config, ranks).separate_ranks if has_engines else ranks
    models = ModelRoleBuilder(config, training, context, learns, from_checkpoint)
    models.check(roles, f" with rollout.num_ranks={ranks - training}" if training < ranks else "")
    if has_engines:
        check_engines(config, actor_table(config), ranks)
    return models


def _read_data(config: Config, evaluates_only: bool) -> JobData:
    path, sets = config.model.path, evaluation_sets(config)
    tokenizer, processor = read_tokenizer(path), ImageProcessor.read(path)
    set_template_options(config.rollout.chat_template_options, tokenizer, processor)
    model, stops = read_any_config(path), read_stop_tokens(path, tokenizer)
    tools = load_tools(config.rollout.tools)
    report = print if config.job.console and dist.get_rank() == 0 else None
    if report and (warning := unread_reasoning(config.rollout, tokenizer)):
        report(warning)
    options: dict[str, Any] = {"seed": config.job.seed, "report": report, "processor": processor}
    options["tools"] = [tool.schema for tool in tools]
    test_prompts: Prompts | None = None
    if config.data.test is not None:
        test_prompts = read_prompts(config.data, "test", tokenizer, **options)
    if not evaluates_only:
        prompts = PromptFeed(read_prompts(config.data, "train", tokenizer, **options))
    else:
        assert test_prompts is not None
        prompts = PromptFeed(test_prompts)
    if config.rollout.chat_template_options and not (config.rollout.has_agents or tools):
        check_options_are_used([*prompts, *(test_prompts or ())])
    texts = SampleTexts(prompts, tokenizer, stops.ids)
    return JobData(tokenizer, processor, model, stops, tools, sets, prompts, test_prompts, texts)


def _follow_actor(roles: Mapping[str, Role]) -> None:
    reference, actor = roles["reference"], roles["actor"]
    assert isinstance(reference, Reference) and isinstance(actor, Actor)
    try:
        reference.follow(actor)
    except UserError as error:
        raise UserError(
            f"reference.refresh_every: the weights of the actor do not fit the reference ({error}). "
            "Leave it out, or reference.path."
        ) from None


def _build_reward(
    config: Config, data: JobData, roles: Mapping[str, Role], context: JobContext, records: list[RolloutRecord]
) -> RewardRole:
    model = roles["frozen_reward_model"] if config.reward.from_model else None
    assert model is None or isinstance(model, RewardModel)
    of_sources = {
        reward_key(which, name): load_rewards(source.reward)
        for which in ("train", "test")
        if isinstance(sources := getattr(config.data, which), dict)
        for name, source in sources.items()
        if source.reward
    }
    scorer = None if config.reward.from_model else load_rewards(config.reward)
    has_agents, names = config.rollout.has_agents, config.rollout.agent_names
    return RewardRole(scorer, data.sample_texts, context, records, model, has_agents, of_sources, names)


def _build_rollout(
    job: Config,
    parts: JobParts,
    prompts: Iterable[Prompt],
    records: list[RolloutRecord],
    learns: bool,
    importing: ImportingProcess | None,
) -> Rollout:
    """Builds the engines and the rollout; `prompts` are those that are trained on."""
    config, data, actor = job.rollout, parts.data, parts.roles["actor"]
    assert isinstance(actor, Actor)
    model, decode, new_tokens = data.model, decoder(data.tokenizer), config.max_new_tokens
    longest = longest_row(prompts, {}, new_tokens, model.max_positions)
    of_test = {of_set.name: int(of_set.sampling["max_new_tokens"]) for of_set in data.sets}
    longest_test = longest_row(data.test_prompts or (), of_test, new_tokens, model.max_positions)
    excluded = data.processor.placeholder_ids if data.processor else ()
    sampling = training_sampling(job, model.vocab, data.stops.ids, excluded)
    wrap = _wrapper(job, parts)
    if job.ends_at_strings:
        wrap = with_stop_strings(decode, wrap)
    parts.engines = engines = build_engine_group(
        job, actor, parts.context, wrap, data.processor, decode, longest or None, importing
    )
    routed = routed_shape(job.model.path) if config.replay_routing else None
    selecting = len(model.indexer.selecting) if config.replay_selections and model.indexer else 0
    columns = OptionalColumns(routed, num_selecting=selecting, agent_names=config.agent_names)
    if learns:
        parts.check = MismatchCheck.of(job, actor, data.prompts, longest, sampling, columns)
    setup = RolloutSetup(
        sampling=sampling,
        seed=job.job.seed,
        context=parts.context,
        prompts=data.prompts,
        records=records,
        reward=parts.reward,
        columns=columns,
        longest=max(longest, longest_test, 1) if config.fixed_requests is None else None,
        check=parts.check,
    )
    if config.mode == "async":
        assert isinstance(engines, InFlightEngineGroup)  # `check_engines` has refused others
        return AsyncRollout(engines, setup, StalenessBound(config.max_staleness, config.stale))
    return SyncRollout(
        engines,
        setup,
        extra_prompts=config.extra_prompts,
        prefetch=config.mode == "one_step_off",
        partial_rollout=config.partial_rollout,
        deterministic=job.job.deterministic,
    )


def _wrapper(job: Config, parts: JobParts) -> WrapEngine:
    """Returns a function that adds to an engine the agents or tools that the configuration names, if any."""
    config, data = job.rollout, parts.data
    if config.has_agents:
        limits = ImageLimits(job.data.max_image_pixels, job.data.max_images)
        return agent_wrapper(config, data.tokenizer, data.stops.ids, data.model.max_positions, data.processor, limits)
    if not data.tools:
        return lambda engine: engine
    turns = turns_wrapper(config, data.tokenizer, data.tools, data.processor)

    def with_turns(engine: RolloutEngine) -> RolloutEngine:
        parts.multi_turn = turns(engine)
        return parts.multi_turn

    return with_turns
