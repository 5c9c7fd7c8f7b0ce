"""The access of an agent to the policy: a URL and a key, the messages of its prompt, and its options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

POLICY = "policy"
"""Name of the model that agents are given."""


@dataclass(frozen=True)
class Session:
    """Access of an agent to the policy for one sample; the agent may use any client of OpenAI or Anthropic.

    Requests by the URL are answered until the agent returns. Every reply is trained, except those to models that
    `rollout.agent_trained` leaves out.
    """

    base_url: str
    """URL for clients of OpenAI, with `/v1`."""
    api_key: str
    """Key for this session alone."""
    messages: list[dict[str, Any]]
    """Messages of the prompt."""
    options: dict[str, Any]
    """Options of the job, `rollout.agent_options`."""
    write_log: Callable[[str], None]
    """Function that `log` calls."""
    model: str = POLICY
    """Name of the model to write in requests; any name is accepted."""

    @property
    def anthropic_base_url(self) -> str:
        """Returns the URL for clients of Anthropic, which add `/v1` themselves."""
        return self.base_url.removesuffix("/v1")

    def log(self, text: str) -> None:
        """Adds text to the agent's log, which `verl-mg view` shows with the conversation."""
        self.write_log(text)
