"""Arguments and results of rewards: `Sample` and `Reward`.

Sample(prompt="2+3=", response="5", answer="5", record={"prompt": "2+3=", "answer": "5"},
       finish="stop", num_tokens=2)        the tokens of "5" and the end of sequence
Reward(value=1.0, parts={"correct": 1.0}, answer="5")
Reward.by_agent({"solver": Reward(1.0), "critic": Reward(0.5)})      its value is their mean, 0.75
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Sample:
    """A response of the policy to be scored."""

    prompt: str
    response: str
    """Text of the policy, of an agent its last reply: without the end token, after what the chat template began of the
    reply."""
    answer: str | None  # answer of the record, unparsed; None where it has none
    record: dict[str, Any]
    finish: Literal["stop", "length", "abort"]
    """Reason why the response ended: "stop" (by the policy), "length" (at the limit) or "abort"."""
    num_tokens: int | None = None  # tokens of the response; None where they were not counted
    replies: Mapping[str, str] = field(default_factory=dict)
    """Last trained reply of each agent, by its name of `rollout.agent_names`; empty where agents have no names."""


@dataclass(frozen=True)
class Reward:
    """The reward of one sample."""

    value: float
    parts: dict[str, float] = field(default_factory=dict)  # further finite numbers by name, for the metrics
    answer: str | None = None
    """Final answer that was read from the response, for majority votes: equal answers are equal texts. None where the
    response has none or the reward does not look for one."""
    agents: Mapping[str, Reward] = field(default_factory=dict)
    """Rewards of single agents by name, where each has its own; see `by_agent`."""

    @classmethod
    def by_agent(cls, rewards: Mapping[str, Reward]) -> Reward:
        """Returns the reward of an episode in which each agent has its own; its value is their mean."""
        return cls(sum(reward.value for reward in rewards.values()) / len(rewards), agents=dict(rewards))

    def of(self, agent: str) -> Reward:
        """Returns the reward of an agent: its own, or that of the episode."""
        return self.agents.get(agent, self)


def wrong_agents(reward: Reward, acting: Collection[str], known: Collection[str]) -> str | None:
    """Returns what is wrong with the names of a reward's agents, and the remedy; None where nothing is.

    `acting` are the agents with trained turns, of which each needs a reward; `known` are all of the job.
    """
    if not reward.agents:
        return None
    for name in reward.agents:
        if name not in known:
            names = f"has {', '.join(known)}" if known else "is empty"
            return f"it names the agent {name!r:.60}, but rollout.agent_names {names}. Correct one of them"
    if missing := sorted(set(acting) - reward.agents.keys()):
        names = ", ".join(reward.agents)
        return f"it has a number for {names}, but none for {missing[0]}, which has trained turns. Return one for each"
    return None
