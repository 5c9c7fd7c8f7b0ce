"""Exact tokens of the conversations of one session.

A request contains the whole conversation as messages; the engine must be given the tokens that it has generated, not
tokens of their text. `ConversationHistory.context` finds the longest part of the conversation whose tokens are known,
and renders what is new:

    known     a reply whose messages are the first ones of the request, if the chat template leaves it as it was:
              its tokens stay, whether or not the template would write them in the same way
    rewritten a reply that the template now renders differently than before, such as one whose reasoning it drops:
              a new segment begins, which repeats the tokens in front of that reply

Example with one token per word. The policy (version 7) answers `<u> 2+3? <end> <a>`, tokens 1 2 3 4, with
`[think] 5 <end>`, tokens 5 6 3. The agent then asks `sure?` (7), and version 8 answers `yes <end>` (8 3):

    template keeps the reasoning: one segment                   kept = 7
        tokens    1  2  3  4  5  6  3  1  7  3  4  8  3
        versions -1 -1 -1 -1  7  7  7 -1 -1 -1 -1  8  8         -1 is NOT_GENERATED, with log-probability 0
    template drops it: the first segment ends after 5 6 3, the second has prefix_of 0, prefix_length 4, kept = 4
        tokens    1  2  3  4  6  3  1  7  3  4  8  3
        versions -1 -1 -1 -1 -1 -1 -1 -1 -1 -1  8  8            the context trains in the first segment only
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from verl_mg.agents.call import Call, RequestError
from verl_mg.agents.renderer import ConversationRenderer
from verl_mg.engines.engine import Sample
from verl_mg.engines.fed_tokens import continued, first_fed
from verl_mg.engines.sampled_support import join_entries, join_tops
from verl_mg.engines.trajectory import MAX_SEGMENTS, NOT_GENERATED, Segment
from verl_mg.images import RowImages


@dataclass(frozen=True)
class _Rendered:
    """Beginning of a rendered conversation, without its text: every known reply has two of them."""

    length: int
    digest: bytes

    @classmethod
    def of(cls, text: str) -> _Rendered:
        return cls(len(text), _digest(text))

    def begins(self, text: str) -> bool:
        return len(text) >= self.length and _digest(text[: self.length]) == self.digest


@dataclass(frozen=True)
class _KnownReply:
    """A reply, and where it is in its segment."""

    segment: int  # number of the segment
    prompt: _Rendered  # conversation in front of the reply
    whole: _Rendered  # conversation with the reply as it was generated
    prompt_length: int  # tokens of the segment in front of the reply
    length: int  # tokens of the segment up to the end of the reply
    last: int  # last token of the reply
    reasoning: str  # reasoning of the reply, which agents need not send back
    num_images: int  # images in front of the reply; it has none itself


@dataclass(frozen=True)
class Context:
    """Tokens in front of a reply, and where they come from."""

    tokens: tuple[int, ...]  # all tokens that the engine is given
    kept: int  # number of these that are known from earlier requests
    new_messages: tuple[dict[str, Any], ...]  # messages that no earlier request or reply of the agent has
    segment: int | None  # number of the segment whose first tokens are kept
    rendered: str
    keys: tuple[bytes, ...]  # keys of the tools, and of each beginning of the messages with them
    images: RowImages = ()  # images whose placeholders the tokens have, in their order
    agent: str = ""  # agent of the request, where agents have names


class ConversationHistory:
    """Segments of a session; used in one thread. Replies may be added in another order than that of their requests.

    Agents may continue any earlier request, so the segments are branches of a tree: `Segment.prefix_of` is the parent.
    Each agent with a name has its own segments, in which replies of others are observations as the request has written
    them. Agents may ask at the same time, so nothing depends on whose reply is first: segments are in the order of
    `agents`, the names, and an agent's first ones share the tokens with which a segment of an earlier agent begins.
    """

    def __init__(self, renderer: ConversationRenderer, agents: Sequence[str] = ()) -> None:
        self._renderer = renderer
        self._agents = {name: number for number, name in enumerate(agents)}
        self._segments: list[Segment] = []
        self._contexts: list[int] = []
        """Tokens in front of the first reply of each segment."""
        # Known replies by agent and the messages up to and with the reply.
        self._replies: dict[tuple[str, bytes], list[_KnownReply]] = defaultdict(list)
        # Known replies by the messages in front of them.
        self._prompts: dict[bytes, list[_KnownReply]] = defaultdict(list)

    def context(self, call: Call) -> Context:
        """Returns the tokens in front of the reply to a call; RequestError where the template rejects the messages."""
        keys = _prefix_keys(call)
        messages = self._with_reasoning(call, keys)
        rendered = self._renderer.render(messages, call.tools, for_reply=True)
        known, length, tail = self._known_part(messages, call, keys, rendered)
        # Only the text after the known part becomes tokens, with the images that this text shows.
        images = call.shown_images
        new = self._renderer.tokens(tail, images[known.num_images if known else 0 :])
        tokens = (*(self._segments[known.segment].tokens[:length] if known else ()), *new)
        if not tokens:
            raise RequestError(400, "messages: the chat template makes no text of them. Add a message.", "messages")
        known_here = ((call.agent, key) in self._replies or self._replies_of(key, call.agent) for key in keys)
        seen = max((i for i, is_known in enumerate(known_here) if is_known), default=0)
        number = known.segment if known else None
        return Context(tokens, length, call.messages[seen:], number, rendered, keys, images, call.agent)

    def _known_part(
        self, messages: Sequence[Mapping[str, Any]], call: Call, keys: Sequence[bytes], rendered: str
    ) -> tuple[_KnownReply | None, int, str]:
        """Returns a reply, how many tokens of its segment the conversation begins with, and the text after them."""
        # The longest part first; of several replies to the same messages, the latest.
        for i in range(len(messages), 0, -1):
            for known in reversed(self._replies.get((call.agent, keys[i]), ())):
                if (end := self._end_of(known, rendered, messages[:i], call.tools)) is not None:
                    return known, known.length, end
            # The reply was rewritten or is another one, but the conversation in front of it is the same.
            for known in reversed(self._replies_of(keys[i], call.agent)):
                if known.prompt.begins(rendered):
                    return known, known.prompt_length, rendered[known.prompt.length :]
        return None, 0, rendered

    def add(
        self,
        call: Call,
        context: Context,
        sample: Sample,
        message: Mapping[str, Any],
        *,
        trained: bool,
        truncated: bool,
    ) -> int:
        """Adds a reply to the `context` of its call; returns the number of the segment that it is in.

        `truncated`: a limit of the job has ended it. RequestError where the session has MAX_SEGMENTS segments.
        """
        number = self._segment_for(context, call.agent)
        segment, start, count = self._segments[number], len(context.tokens), len(sample.tokens)
        logprobs = sample.logprobs if trained else (0.0,) * count
        versions = sample.policy_versions if trained else (NOT_GENERATED,) * count
        num_before = len(segment.tokens)
        observed = start - num_before
        self._segments[number] = replace(
            segment,
            tokens=(*context.tokens, *sample.tokens),
            logprobs=(*segment.logprobs, *(0.0,) * observed, *logprobs),
            policy_versions=(*segment.policy_versions, *(NOT_GENERATED,) * observed, *versions),
            truncated=truncated,
            routed_experts=continued(segment.routed_experts, sample.routed_experts),
            selected_keys=continued(segment.selected_keys, sample.selected_keys),
            support=join_entries(
                [(num_before, segment.support), (observed, None), (count, sample.support if trained else None)]
            ),
            top=join_tops([(num_before, segment.top), (observed, None), (count, sample.top if trained else None)]),
            images=context.images,
        )
        known = _KnownReply(
            number,
            _Rendered.of(context.rendered),
            _Rendered.of(context.rendered + self._renderer.decode(sample.tokens)),
            start,
            start + count,
            sample.tokens[-1] if sample.tokens else NOT_GENERATED,
            str(message.get("reasoning_content", "")).strip(),
            len(context.images),
        )
        self._prompts[context.keys[-1]].append(known)
        self._replies[call.agent, _next_key(context.keys[-1], message)].append(known)
        return number

    def segments(self) -> tuple[Segment, ...]:
        """Returns all segments as they are now, in their `order`."""
        order, segments = self.order(), list[Segment]()
        places = {number: place for place, number in enumerate(order)}
        for number in order:
            segment = self._segments[number]
            source, kept = segment.prefix_of, segment.prefix_length
            if source is None:
                source, kept = _longest_shared(segment, self._contexts[number], segments)
            else:
                source = places[source]
            segments.append(replace(segment, prefix_of=source, prefix_length=kept))
        return tuple(segments)

    def order(self) -> list[int]:
        """Returns the numbers that `add` has given to segments in the order of their agents, of one as they began."""
        return sorted(range(len(self._segments)), key=lambda number: self._agents.get(self._segments[number].agent, 0))

    def _end_of(
        self, known: _KnownReply, rendered: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]
    ) -> str | None:
        """Returns the text after a known reply, the last of `messages`; None where the template has rewritten it."""
        if known.whole.begins(rendered):
            return rendered[known.whole.length :]
        if messages[-1].get("reasoning_content", "").strip() != known.reasoning or not known.prompt.begins(rendered):
            return None
        # Other spaces or another order of keys in a parsed call are the same history: a new segment here would train
        # each turn in a context that the policy never had. So the reply is the same if the request begins with it.
        until = ""
        with contextlib.suppress(RequestError):  # a template may reject a conversation that ends with a reply
            until = self._renderer.render(messages, tools, for_reply=False)
        if len(until) < known.prompt.length or not rendered.startswith(until):
            return None
        return self._renderer.after_reply(until[known.prompt.length :], known.last) + rendered[len(until) :]

    def _segment_for(self, context: Context, agent: str) -> int:
        """Returns the number of the agent's segment that a context continues, of a new one where a reply has."""
        source, kept = context.segment, context.kept
        if source is None:
            source, kept = self._sharing(context, agent)
        if source is not None and len(self._segments[source].tokens) == kept and self._segments[source].agent == agent:
            return source
        number = len(self._segments)
        if number >= MAX_SEGMENTS:
            raise RequestError(
                400,
                f"messages: the session has {MAX_SEGMENTS} segments, the most that a sample may have. Continue an "
                "earlier conversation instead of rewriting it.",
                "messages",
            )
        routed, keys = None, None
        if source is not None:
            shared = self._segments[source]
            routed, keys = first_fed(shared.routed_experts, kept), first_fed(shared.selected_keys, kept)
        unscored = (0.0,) * kept, (NOT_GENERATED,) * kept
        tokens = context.tokens[:kept]
        begun = Segment(tokens, *unscored, False, source, kept, routed, agent=agent, selected_keys=keys)
        self._segments.append(begun)
        self._contexts.append(len(context.tokens))
        return number

    def _sharing(self, context: Context, agent: str) -> tuple[int | None, int]:
        """Returns the number of the agent's segment whose first tokens a context repeats although none were known, and
        how many.

        The template has rewritten the end of the prompt itself, or another request for the same reply was first.
        """
        # Tokens that two segments share are computed once in training, so the common prefix is worth finding.
        for key in reversed(context.keys):
            if replies := self._replies_of(key, agent):
                kept = _num_shared(self._segments[replies[-1].segment].tokens, context.tokens)
                return (replies[-1].segment, kept) if kept else (None, 0)
        return None, 0

    def _replies_of(self, key: bytes, agent: str) -> list[_KnownReply]:
        """Returns the agent's known replies to messages."""
        return [known for known in self._prompts.get(key, ()) if self._segments[known.segment].agent == agent]

    def _with_reasoning(self, call: Call, keys: Sequence[bytes]) -> list[dict[str, Any]]:
        """Returns the messages with the reasoning of known replies, which most clients of OpenAI do not send back."""
        restored: list[dict[str, Any]] = []
        for message, key in zip(call.messages, keys[1:], strict=True):
            known = self._replies.get((call.agent, key))
            if known and known[-1].reasoning and "reasoning_content" not in message:
                message = {**message, "reasoning_content": known[-1].reasoning}
            restored.append(message)
        return restored


def _longest_shared(segment: Segment, length: int, before: Sequence[Segment]) -> tuple[int | None, int]:
    """Returns which of the segments before, of other agents, shares most of the first `length` tokens, and how many.

    The latest of several: those before may be of agents that are not trained.
    """
    source, most = None, 0
    for place, other in enumerate(before):
        images = min(len(other.images), len(segment.images))
        if other.agent != segment.agent and other.images[:images] == segment.images[:images]:
            kept = _num_shared(other.tokens, segment.tokens[:length])
            if kept and kept >= most:
                source, most = place, kept
    return source, most


def _num_shared(tokens: Sequence[int], others: Sequence[int]) -> int:
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(tokens, others, strict=False))))


def _prefix_keys(call: Call) -> tuple[bytes, ...]:
    keys = [_digest(json.dumps(call.tools, sort_keys=True))]
    for message in call.messages:
        keys.append(_next_key(keys[-1], message))
    return tuple(keys)


def _next_key(key: bytes, message: Mapping[str, Any]) -> bytes:
    """Returns the key of messages and one more. Reasoning and spaces around a reply do not change it."""
    content = message.get("content") or ""
    called = [call["function"] for call in message.get("tool_calls") or ()]
    calls = [(function["name"], _canonical(function["arguments"])) for function in called]
    of_reply = message["role"] == "assistant"
    fields = [message["role"], content.strip() if of_reply else content, calls]
    fields += [message.get("tool_call_id"), message.get("name")]
    return _digest(key.hex() + json.dumps(fields))


def _canonical(arguments: str) -> str:
    # One form of JSON, since agents parse arguments and write them again.
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
