"""Plays an episode of NeMo Gym (nemo-gym 0.4): a request to /run of one of its agent servers.

    here --POST /run--> agent server --> resources server (tools, reward)
                             |--> model server verl_mg_policy --> policy of the sample

Gym's model servers have one URL for all requests, so Gym is started with that of tools/nemo_gym, which takes the
sample's URL from the request's metadata. The data are Gym's lines with a `prompt` in addition, which the policy does
not read; a record without `responses_create_params` is a request with its prompt as the input.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl_mg.agents.agent import AgentError, Result, Session, read_options
from verl_mg.recipes.environments.environment_server import post_run
from verl_mg.rewards.reward import Sample

PARAMETERS = "responses_create_params"


@dataclass(frozen=True)
class NemoGymOptions:
    """Options of an episode of NeMo Gym."""

    url: str
    """Address of the agent server, http or https."""
    max_tokens: int | None = None
    """Largest number of tokens of a reply; null for that of the record, or no limit but that of the sample."""


async def run(session: Session, sample: Sample) -> Result:
    """Plays an episode with a record that is a line of Gym's data; the response's other numbers are reward parts."""
    options = read_options(NemoGymOptions, session.options)
    parameters: dict[str, Any] = {"input": session.messages, **sample.record.get(PARAMETERS, {})}
    if options.max_tokens is not None:
        parameters["max_output_tokens"] = options.max_tokens
    parameters["metadata"] = {
        **(parameters.get("metadata") or {}),
        "verl_mg_base_url": session.base_url,
        "verl_mg_api_key": session.api_key,
        "verl_mg_model": session.model,
    }
    result = await post_run(options.url, {**sample.record, PARAMETERS: parameters})
    numbers = {name: value for name, value in result.items() if isinstance(value, int | float)}
    if "reward" not in numbers:
        raise AgentError(f"{options.url}/run: the response has no reward, only {', '.join(result)}")
    return {name: float(value) for name, value in numbers.items() if not name.startswith("_")}
