"""Runs agents with a time limit and retries, and turns what they return into a reward."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any

from verl_mg.agents.agent import Agent, Session
from verl_mg.agents.sessions import OpenSession, Sessions
from verl_mg.config.roles import RolloutConfig
from verl_mg.engines.engine import Finish, Request, Sample, Sampling
from verl_mg.errors import UserError
from verl_mg.images import RowImages
from verl_mg.rewards.reward import Reward
from verl_mg.rewards.reward import Sample as Task
from verl_mg.rewards.sample import wrong_agents

REWARD = "reward"  # entry of a returned mapping that is the reward; the others are its parts
# Parts of a reward, each of which becomes a metric of the job; programs of the policy may have written them.
MAX_PARTS = 100


class AgentRunner:
    """Runs one agent for each sample, with a session of the server at `url`."""

    def __init__(self, agent: Agent, config: RolloutConfig, sessions: Sessions, url: str) -> None:
        self._agent, self._config, self._sessions, self._url = agent, config, sessions, url

    async def run(self, request: Request, sampling: Sampling) -> Sample:
        """Runs the agent until an attempt succeeds, reaches the time limit, or none is left.

        The sample has the trajectory of the last attempt; its own tokens are empty. Only `UserError`, an option that is
        wrong for all samples, and cancellation are raised.
        """
        for attempt in range(self._config.agent_retries + 1):
            session = self._sessions.open(request, sampling)
            reward: Reward | None = Reward(self._config.agent_failure_reward)
            error = ""
            finish: Finish = "stop"
            try:
                async with asyncio.timeout(self._config.agent_timeout_s) as limit:
                    result = await self._call(session)
                    self._sessions.close(session)  # then no agent has a further turn, whose reward would be missing
                    reward = self._as_reward(result, session)
            except UserError:
                raise  # an option of the job is wrong, so every agent would fail
            except (Exception, SystemExit, asyncio.CancelledError) as failure:  # user code may raise anything
                if _is_cancelled():  # the sample is aborted, whatever the agent makes of it
                    raise asyncio.CancelledError from failure
                if limit.expired():
                    error, finish = f"the agent took longer than {self._config.agent_timeout_s:g} s", "timeout"
                else:
                    error = " ".join(f"{type(failure).__name__}: {failure}".split())[:1000]
                session.write_log(f"attempt {attempt + 1} failed: {error}")
            finally:
                # Before the trajectory is read: requests that are still running can add nothing any more.
                self._sessions.close(session)
            if not error or finish == "timeout" or attempt == self._config.agent_retries:
                break
        return Sample(request.id, (), (), (), finish, trajectory=session.trajectory(reward, error))

    async def _call(self, session: OpenSession) -> Any:
        prompt = session.request.origin
        assert prompt is not None
        given = Session(
            f"{self._url}/sessions/{session.id}/v1",
            session.key,
            _with_images(prompt.messages, prompt.load_images()),
            self._config.agent_options,
            session.write_log,
            agents=self._sessions.agents,
        )
        task = Task(prompt.text, "", prompt.answer, prompt.record, "stop")
        return await self._agent(given, task)

    def _as_reward(self, result: Any, session: OpenSession) -> Reward | None:
        """Returns what an agent returned as a reward; ValueError where it is none, or not one of all agents."""
        reward = _as_reward(result)
        acting = {turn.model for turn in session.turns if turn.trained} if self._sessions.agents else set()
        if reward is not None and (wrong := wrong_agents(reward, acting, self._sessions.agents)):
            raise ValueError(f"the reward of the agent: {wrong}")
        return reward


def _with_images(messages: Sequence[Mapping[str, Any]], images: RowImages) -> list[dict[str, Any]]:
    """Returns messages as OpenAI's chat completions write them, each part of type image as the next image in base64."""
    left = iter(images)

    def part(given: dict[str, Any]) -> dict[str, Any]:
        is_image = given["type"] == "image"
        return {"type": "image_url", "image_url": {"url": next(left).data_url}} if is_image else given

    filled = [dict(message) for message in messages]
    for message in filled if images else ():
        if isinstance(message.get("content"), list):
            message["content"] = list(map(part, message["content"]))
    return filled


def _is_cancelled() -> bool:
    # Whether this task is cancelled, as opposed to one that its agent waits for.
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _as_reward(result: Any) -> Reward | None:
    """Returns what an agent returned as a reward; ValueError where it is none."""
    if result is None:
        return None
    parts: dict[str, float] = {}
    if isinstance(result, dict):
        result, parts = _unpacked(result)
    agents = result.agents if isinstance(result, Reward) else result
    if not isinstance(agents, Mapping) or not agents:
        return _of_one(result, parts)
    # What describes the episode is a part of the reward of each of its agents.
    unpacked = {name: _unpacked(each) if isinstance(each, dict) else (each, {}) for name, each in agents.items()}
    return Reward.by_agent({str(name): _of_one(each, parts | more) for name, (each, more) in unpacked.items()})


def _unpacked(result: Mapping[str, Any]) -> tuple[Any, dict[str, float]]:
    """Returns the reward of a mapping, and its parts."""
    if REWARD not in result:
        raise ValueError(f"the agent returned a mapping without '{REWARD}': {result!r:.200}")
    numbers = {name: value for name, value in result.items() if isinstance(value, Real) and name != REWARD}
    return result[REWARD], {str(name): float(value) for name, value in numbers.items()}


def _of_one(result: Any, parts: Mapping[str, float]) -> Reward:
    reward = result if isinstance(result, Reward) else Reward(result)
    reward = replace(reward, parts={**parts, **reward.parts})
    # Each part becomes a metric, whose name is printed and written to files.
    if len(reward.parts) > MAX_PARTS or not all(map(str.isprintable, reward.parts)):
        raise ValueError(f"the reward has more than {MAX_PARTS} parts, or one whose name cannot be printed")
    for value in (reward.value, *reward.parts.values()):
        if not isinstance(value, Real) or not math.isfinite(value):
            raise ValueError(f"the agent returned {value!r:.80}, which is not a finite number")
    return Reward(float(reward.value), dict(reward.parts), reward.answer)
