"""The agents that a configuration describes, around the engines of a job."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from verl_mg.agents.agent import Agent
from verl_mg.agents.command import run_command
from verl_mg.agents.engine import AgentEngine
from verl_mg.agents.renderer import ConversationRenderer
from verl_mg.agents.tool_calls import ReplyParser
from verl_mg.agents.tools.chat_format import ToolCallFormat
from verl_mg.agents.tools.multi_turn import MultiTurnEngine
from verl_mg.agents.tools.tool import Tool
from verl_mg.config.roles import RolloutConfig
from verl_mg.data.images import ImageLimits
from verl_mg.engines.engine import RolloutEngine
from verl_mg.errors import UserError
from verl_mg.import_function import RECIPES, load_function
from verl_mg.rollout.engine_group import WrapEngine

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl_mg.data.image_processor import ImageProcessor


def agent_wrapper(
    rollout: RolloutConfig,
    tokenizer: PreTrainedTokenizerBase,
    stop_token_ids: Sequence[int],
    max_positions: int,
    processor: ImageProcessor | None,
    image_limits: ImageLimits,
) -> WrapEngine:
    """Returns a function that starts agents around an engine, whose contexts have at most `max_positions` tokens.

    UserError if there is no such agent, the tokenizer has no chat template, or SGLang no such parser.
    """
    agent = load_agent(rollout)
    renderer = ConversationRenderer(tokenizer, stop_token_ids, processor)
    parser = ReplyParser(tokenizer, rollout.tool_call_parser, rollout.reasoning_parser)

    def wrap(engine: RolloutEngine) -> RolloutEngine:
        limits = image_limits if processor else None
        return AgentEngine(engine, agent, rollout, renderer, parser, max_positions, limits)

    return wrap


def turns_wrapper(
    rollout: RolloutConfig, tokenizer: PreTrainedTokenizerBase, tools: Sequence[Tool], processor: ImageProcessor | None
) -> Callable[[RolloutEngine], MultiTurnEngine]:
    """Returns a function that adds turns with tools to an engine."""
    dialogue = ToolCallFormat(tokenizer, tools, rollout.tool_call_parser, rollout.reasoning_parser, processor)

    def wrap(engine: RolloutEngine) -> MultiTurnEngine:
        return MultiTurnEngine(
            engine, dialogue, tools, max_turns=rollout.max_turns, tool_timeout=rollout.tool_timeout_s
        )

    return wrap


def load_agent(rollout: RolloutConfig) -> Agent:
    """Returns the agent of `rollout.agent`, which may be a name of `recipes/environments/`, or of its command."""
    if rollout.agent_command:
        return functools.partial(run_command, rollout.agent_command, timeout=rollout.agent_timeout_s)
    assert rollout.agent is not None
    shipped = RECIPES / "environments" / f"{rollout.agent}.py"
    name = f"verl_mg.recipes.environments.{rollout.agent}:run" if shipped.is_file() else rollout.agent
    agent = load_function(name, "agent")
    if not inspect.iscoroutinefunction(agent):
        raise UserError(
            f"rollout.agent={rollout.agent}: not an async function. Write it as `async def run(session, sample)`."
        )
    return agent
