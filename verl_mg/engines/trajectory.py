"""The sample of an agent: sequences of tokens as the engine was given and has continued them, and the conversation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from verl_mg.engines.fed_tokens import SelectedKeys
from verl_mg.engines.sampled_support import SampledSupport
from verl_mg.images import RowImages
from verl_mg.rewards.reward import Reward

if TYPE_CHECKING:
    from torch import Tensor

NOT_GENERATED = -1  # policy version of tokens that no policy generated, such as observations of tools


# Largest number of segments of a trajectory: rows of a batch have ids `sample * MAX_SEGMENTS + segment`.
MAX_SEGMENTS = 1024
# Above the numbers of all samples. Rows of agents with names, numbered from 0, have trajectory and group ids
# `agent * MAX_SAMPLES + sample`: for the first agent the same as without names.
MAX_SAMPLES = 2**40
Ids = TypeVar("Ids", int, "Tensor")


def without_agent(ids: Ids) -> Ids:
    """Returns trajectory ids as ids of episodes, which all agents share, or group ids as ids of the prompts' groups."""
    return ids % MAX_SAMPLES


@dataclass(frozen=True)
class Segment:
    """A context, with replies and observations that continue it without rewriting anything.

    Context (1, 2), reply (3, 4), observation (5,) and reply (6,), under version 7 of the weights:

        Segment(tokens=(1, 2, 3, 4, 5, 6), logprobs=(0, 0, -0.1, -0.2, 0, -0.3),
                policy_versions=(-1, -1, 7, 7, -1, 7), truncated=False)

    An agent that then leaves (3, 4, 5) out of its messages begins another segment, (1, 2, 8, ...), with prefix_of=0 and
    prefix_length=2.
    """

    tokens: tuple[int, ...]  # all token ids, from the first one of the context on
    logprobs: tuple[float, ...]
    """Log-probability of each token in nats, as in `Sample`; 0 where the segment does not train the token."""
    policy_versions: tuple[int, ...]
    """Version of the weights that generated each token; NOT_GENERATED for the context, for observations, and for tokens
    that an earlier segment trains."""
    truncated: bool  # whether the last reply ended at a limit of its length
    prefix_of: int | None = None
    """Number of the earlier segment whose first `prefix_length` tokens this one repeats; None where there is none."""
    prefix_length: int = 0  # number of leading tokens that are the same in the segment `prefix_of`
    routed_experts: Tensor | None = field(default=None, compare=False)
    """Experts of the tokens, as in `Sample`: int16, (tokens fed to the model, layers, top_k)."""
    support: SampledSupport | None = field(default=None, compare=False)
    """Candidates of each of the tokens, as in `Sample`; 0 of them where `policy_versions` is NOT_GENERATED."""
    top: Tensor | None = field(default=None, compare=False)
    """Likeliest tokens in the place of each of the tokens, as in `Sample`: (tokens, 2, k) float32."""
    images: RowImages = ()  # images whose placeholders the tokens have, in their order
    agent: str = ""
    """Name of the agent whose replies these are, one of `rollout.agent_names`; "" where agents have no names."""
    selected_keys: SelectedKeys | None = field(default=None, compare=False)
    """Keys that the tokens of `routed_experts` attended to, as in `Sample`."""


@dataclass(frozen=True)
class ConversationTurn:
    """One request of an agent and its reply, for people."""

    segment: int  # number of the segment that contains the reply
    model: str  # name of the model in the request
    trained: bool
    started: float  # seconds from the start of the sample to the request
    seconds: float  # seconds until the reply was complete
    messages: tuple[dict[str, Any], ...]  # messages that were new in the request
    reply: dict[str, Any]  # message of the assistant, with its reasoning
    prompt_tokens: int  # tokens in front of the reply
    tokens: int  # tokens of the reply
    finish: str  # reason why the reply ended


@dataclass(frozen=True)
class Trajectory:
    """Everything that an agent has done for one sample. Each generated token of a trained model has its policy version
    in exactly one segment."""

    segments: tuple[Segment, ...]  # the sequences, by agent, of each in the order in which they began
    turns: tuple[ConversationTurn, ...]  # in the order in which the requests began
    reward: Reward | None  # reward that the agent returned; None: the reward function of the job scores the sample
    log: str = ""  # end of the agent's output
    error: str = ""  # reason why the agent failed, one line; "" where it has not
