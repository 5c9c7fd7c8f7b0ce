"""The interface of agents: `async def run(session, sample) -> Reward | float | dict | None`.

A dict has the key "reward"; its other numbers are parts of the reward. None leaves the sample to the job's reward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, Protocol, TypeVar

from verl_mg.errors import UserError
from verl_mg.rewards.reward import Reward

Result = Reward | float | dict[str, Any] | None
Options = TypeVar("Options")


class AgentError(Exception):
    """An agent, or its environment, that failed; the message is one line."""

    def __str__(self) -> str:
        return " ".join(super().__str__().split())


class AgentSession(Protocol):
    """The policy as an agent reaches it, for one sample."""

    @property
    def base_url(self) -> str:
        """URL of the endpoint for clients of OpenAI's API; it ends in /v1."""

    @property
    def anthropic_base_url(self) -> str:
        """The same for clients of Anthropic's API, which append /v1 themselves."""

    @property
    def api_key(self) -> str:
        """Key of the endpoint, valid for this sample."""

    @property
    def model(self) -> str:
        """Name of the policy as a model of the endpoint."""

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The prompt as messages of OpenAI's chat completions."""

    @property
    def options(self) -> dict[str, Any]:
        """The configuration's `rollout.agent_options`."""

    def log(self, text: str) -> None:
        """Adds text to the log of the sample."""


class AgentSample(Protocol):
    """The prompt and its record."""

    @property
    def prompt(self) -> str:
        """Text of the prompt, before any template."""

    @property
    def answer(self) -> str | None:
        """Answer of the record; None where it has none."""

    @property
    def record(self) -> dict[str, Any]:
        """Record of the data file with the prompt."""


def read_options(kind: type[Options], options: Mapping[str, Any]) -> Options:
    """Makes a dataclass from `rollout.agent_options`.

    Args:
        kind: the dataclass; its fields are the options.
        options: values by name.

    Raises:
        UserError: an option is unknown or missing.
    """
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    if unknown := [name for name in options if name not in known]:
        raise UserError(f"rollout.agent_options.{unknown[0]}: unknown. Use {', '.join(known)}.")
    for name, field in known.items():
        if name not in options and field.default is MISSING and field.default_factory is MISSING:
            raise UserError(f"rollout.agent_options.{name}: missing. Set it for this agent.")
    return kind(**options)
