"""Plays an episode in an environment of verifiers (verifiers 0.4), which tools/serve_verifiers.py serves.

    here --POST /run {base_url, api_key, model, task}--> server of the environment --chat completions--> policy

verifiers cannot be installed with SGLang, so the server runs in a separate Python environment. It also writes the data:
`python tools/serve_verifiers.py --env ENV --write-tasks train.jsonl`. The harness of the environment makes the
requests, and its task gives the reward.
"""

from __future__ import annotations

from dataclasses import dataclass

from verl_mg.agents.agent import AgentError, Result, Session, read_options
from verl_mg.errors import UserError
from verl_mg.recipes.environments.environment_server import post_run
from verl_mg.rewards.reward import Sample


@dataclass(frozen=True)
class VerifiersOptions:
    """Options of an episode in an environment of verifiers."""

    url: str
    """Address of the server, http or https."""
    max_tokens: int | None = None
    """Largest number of tokens of a reply; null for no limit but that of the sample."""


async def run(session: Session, sample: Sample) -> Result:
    """Plays an episode with the `task` of the record; the metrics of the task are parts of the reward."""
    options = read_options(VerifiersOptions, session.options)
    if not isinstance(sample.record.get("task"), dict):
        raise UserError(
            f"record of {sample.prompt[:60]!r}: it has no `task` of verifiers. Write the data by "
            "tools/serve_verifiers.py --write-tasks."
        )
    request = {
        "base_url": session.base_url,
        "api_key": session.api_key,
        "model": session.model,
        "task": sample.record["task"],
        "max_tokens": options.max_tokens,
    }
    result = await post_run(options.url, request)
    errors = "; ".join(result["errors"])
    if errors:
        session.log(errors)
    if result["reward"] is None or errors:
        raise AgentError(f"{options.url}: {errors or 'no reward'}")
    return {**result["metrics"], "reward": result["reward"]}
