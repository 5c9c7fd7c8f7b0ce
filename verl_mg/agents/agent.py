"""The interface of agents: `async def run(session, sample) -> Reward | float | dict | None`.

A dict has the key "reward"; its other numbers are parts of the reward. Where agents have names, that reward may be a
mapping of such results by name. None leaves the sample to the job's reward.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

from verl_mg.errors import UserError
from verl_mg.rewards.reward import Reward, Sample

Result = Reward | float | dict[str, Any] | None
Options = TypeVar("Options")
_ADAPTER = functools.cache(TypeAdapter)


class AgentError(Exception):
    """Failure of an agent or its environment; the message is one line."""

    def __str__(self) -> str:
        return " ".join(super().__str__().split())


POLICY = "policy"  # name of the model that agents are given


@dataclass(frozen=True)
class Session:
    """Access of an agent to the policy for one sample; the agent may use any client of OpenAI or Anthropic.

    Requests by the URL are answered until the agent returns. Every reply is trained, except those to models that
    `rollout.agent_trained` leaves out.
    """

    base_url: str  # URL for clients of OpenAI, with `/v1`
    api_key: str  # key of this session; no other session accepts it
    messages: list[dict[str, Any]]
    options: dict[str, Any]  # options of the job, `rollout.agent_options`
    log: Callable[[str], None]  # adds text to the agent's log, which `verl-mg view` shows with the conversation
    model: str = POLICY  # name of the model to write in requests; without `agents` any name is accepted
    agents: tuple[str, ...] = ()  # names of the agents of the episode, `rollout.agent_names`

    def agent(self, name: str) -> Session:
        """Returns the access of one of the agents: requests that name its `model` are its turns.

        UserError for a name that is not in `rollout.agent_names`.
        """
        if name not in self.agents:
            names = f"has {', '.join(self.agents)}" if self.agents else "is empty"
            raise UserError(f"rollout.agent_names: it {names}, and the agent names {name!r:.60}. Add this name.")
        return replace(self, model=name)

    @property
    def anthropic_base_url(self) -> str:
        """Returns the URL for clients of Anthropic, which add `/v1` themselves."""
        return self.base_url.removesuffix("/v1")


# Function of a user that returns a `Result`. The sample has no response yet.
Agent = Callable[[Session, Sample], Awaitable[Any]]


def read_options(kind: type[Options], options: Mapping[str, Any]) -> Options:
    """Makes a dataclass from `rollout.agent_options`; UserError for an unknown, missing or wrongly typed option."""
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    if unknown := [name for name in options if name not in known]:
        raise UserError(f"rollout.agent_options.{unknown[0]}: unknown. Use {', '.join(known)}.")
    for name, field in known.items():
        if name not in options and field.default is MISSING and field.default_factory is MISSING:
            raise UserError(f"rollout.agent_options.{name}: missing. Set it for this agent.")
    types = get_type_hints(kind)
    for name, value in options.items():
        try:
            _ADAPTER(types[name]).validate_python(value, strict=True)
        except ValidationError as error:
            problem = error.errors()[0]
            place = ".".join(map(str, (name, *problem["loc"])))
            raise UserError(f"rollout.agent_options.{place}: {problem['msg']}. Correct it.") from None
    return kind(**options)
