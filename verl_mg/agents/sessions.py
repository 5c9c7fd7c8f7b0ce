"""The open sessions of one engine: they authorize requests, obtain replies, and record every token.

    open --------> requests: authorize, complete, count_tokens --------> close --> trajectory
    agents' thread                 server's thread                       agents' thread

    complete:  ConversationHistory.context --> generate (waits for the engine) --> lock: still open? record --> Reply

Several requests of a session may wait for the engine at the same time. A reply that arrives after `close` is dropped.
"""

from __future__ import annotations

import hmac
import itertools
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from verl_mg.agents.call import Call, Reply, ReplyToken, RequestError, for_people
from verl_mg.agents.history import Context, ConversationHistory
from verl_mg.agents.protocols.memory import SessionMemory
from verl_mg.agents.renderer import ConversationRenderer
from verl_mg.agents.tool_calls import ReplyParser
from verl_mg.data.images import ImageLimits
from verl_mg.engines.engine import Request, Sample, Sampling
from verl_mg.engines.stop_strings import cut_at_stop
from verl_mg.engines.trajectory import ConversationTurn, Trajectory
from verl_mg.rewards.reward import Reward

LOG_CHARACTERS = 1 << 16  # end of an agent's log that is kept

# Generates a reply: the session, what is in front of the reply, and how it is drawn.
Generate = Callable[["OpenSession", Context, Sampling], Awaitable[Sample]]


@dataclass
class OpenSession:
    """A session whose agent is running."""

    id: str  # id in the URL
    key: str
    request: Request
    sampling: Sampling  # sampling parameters; `max_new_tokens` limits all replies together
    history: ConversationHistory
    memory: SessionMemory  # state of the requests; used in the server's thread
    started: float = field(default_factory=time.monotonic)  # time of the first request of the agent's attempt
    turns: list[ConversationTurn] = field(default_factory=list)
    num_generated: int = 0  # tokens of all replies
    log: str = ""  # end of the agent's log
    seeds: dict[str, itertools.count[int]] = field(default_factory=lambda: defaultdict(itertools.count))
    """Numbers of the replies of each agent, for their seeds."""

    def write_log(self, text: str) -> None:
        """Adds text to the log, of which the end is kept."""
        self.log = (self.log + text + ("" if text.endswith("\n") else "\n"))[-LOG_CHARACTERS:]

    def trajectory(self, reward: Reward | None, error: str) -> Trajectory:
        """Returns everything that was recorded; `error` says why the agent failed."""
        places = {number: place for place, number in enumerate(self.history.order())}
        turns = sorted(self.turns, key=lambda turn: turn.started)  # replies were complete in any order
        placed = tuple(replace(turn, segment=places[turn.segment]) for turn in turns)
        return Trajectory(self.history.segments(), placed, reward, self.log, error)


class Sessions:
    """Open sessions by their ids; answers the requests that the server has read.

    Nothing is recorded in a session once `close` has returned. A context with its reply has at most `max_positions`
    tokens. Replies to the models `trained` are trained; all if it is empty. With `agents` each request names one of
    them as its model. Without `image_limits` the policy reads text only. Coroutines run in the server's event loop.
    """

    def __init__(
        self,
        renderer: ConversationRenderer,
        parser: ReplyParser,
        generate: Generate,
        max_positions: int,
        trained: Collection[str],
        image_limits: ImageLimits | None = None,
        agents: Sequence[str] = (),
    ) -> None:
        self.agents = tuple(agents)
        self._renderer, self._parser, self._generate = renderer, parser, generate
        self._image_limits = image_limits
        self._max_positions, self._trained = max_positions, frozenset(trained)
        self._open: dict[str, OpenSession] = {}
        self._lock = threading.Lock()  # held while a reply is recorded, and while a session is closed
        self._numbers = itertools.count()

    def open(self, request: Request, sampling: Sampling) -> OpenSession:
        """Opens a session for a sample; from any thread."""
        # Another id for each attempt: requests of programs that an earlier attempt has started are refused.
        name = f"{request.id}-{next(self._numbers)}"
        history, memory = ConversationHistory(self._renderer, self.agents), SessionMemory(self._image_limits)
        session = OpenSession(name, secrets.token_urlsafe(24), request, sampling, history, memory)
        self._open[name] = session
        return session

    def close(self, session: OpenSession) -> None:
        """Closes a session, whose requests are refused from now on; from any thread."""
        with self._lock:
            self._open.pop(session.id, None)

    def authorize(self, name: str, key: str) -> OpenSession:
        """Returns a session; RequestError with status 404 where there is none, 401 where the key is not its own."""
        session = self._session(name)
        if not hmac.compare_digest(session.key.encode(), key.encode("utf-8", "surrogatepass")):
            text = "api_key: it is not the key of this session. Use the key that the agent was given."
            raise RequestError(401, text, code="invalid_api_key")
        return session

    async def complete(self, session: OpenSession, call: Call) -> Reply:
        """Returns the reply to a call, and records its tokens; RequestError where the session has been closed."""
        started = time.monotonic()
        call = self._of_agent(call)
        context = self._context(session, call)
        left = self._tokens_left(session, context)
        limit = left if call.max_tokens is None else min(left, call.max_tokens)
        sampling = replace(session.sampling, max_new_tokens=limit, stop=(*session.sampling.stop, *call.stop))
        sample = await self._generate(session, context, sampling)
        if sample.finish == "abort":
            raise _aborted()
        if not sample.tokens:  # its time in the engine is up
            raise RequestError(503, "engine: it has generated no token within its time limit. Try again.")
        # Samples that a limit of the job has cut may be left out of training; a limit of the agent is its own choice.
        cut_by_agent = sample.finish == "length" and limit < left
        sample, stopped = self._cut(sample, sampling)
        truncated = sample.finish != "stop" and not cut_by_agent
        with self._lock:
            if session.id not in self._open:  # its agent has returned in the meantime
                raise _aborted()
            return self._record(session, call, context, sample, stopped, truncated, started)

    def count_tokens(self, session: OpenSession, call: Call) -> int:
        """Returns the number of tokens in front of the reply to a call."""
        return len(self._context(session, self._of_agent(call)).tokens)

    def _session(self, name: str) -> OpenSession:
        session = self._open.get(name)  # in one step: `close` comes from another thread
        if session is None:
            raise RequestError(404, f"session {name[:80]!r}: it is not open. Its agent has returned, or it never was.")
        return session

    def _of_agent(self, call: Call) -> Call:
        if self.agents and call.model not in self.agents:
            names = ", ".join(self.agents)
            text = f"model: {call.model[:80]!r} is not in rollout.agent_names ({names}). Write the name of an agent."
            raise RequestError(404, text, "model", "model_not_found")
        return replace(call, agent=call.model) if self.agents else call

    def _context(self, session: OpenSession, call: Call) -> Context:
        self._session(session.id)  # it may have been closed since its request was authorized
        try:
            self._parser.check_tools(call.tools)
        except ValueError as error:
            reason = " ".join(str(error).split())[:200]
            raise RequestError(400, f"tools: they cannot be read ({reason}). Correct them.", "tools") from error
        return session.history.context(call)

    def _record(
        self,
        session: OpenSession,
        call: Call,
        context: Context,
        sample: Sample,
        stopped: str | None,
        truncated: bool,
        started: float,
    ) -> Reply:
        text = self._text(sample, stopped)
        parsed = self._parser.parse(text, call.tools, context.rendered)
        finish = "tool_calls" if parsed.tool_calls else "stop" if sample.finish == "stop" else "length"
        reply = Reply(
            text=parsed.text,
            reasoning=parsed.reasoning,
            tool_calls=parsed.tool_calls,
            finish=finish,  # type: ignore[arg-type]
            tokens=tuple(map(ReplyToken, sample.tokens, map(self._renderer.piece, sample.tokens), sample.logprobs)),
            prompt_tokens=len(context.tokens),
            cached_tokens=context.kept,
            stopped=stopped,
        )
        # Replies to other models, such as an opponent in a game, are context without log-probabilities.
        trained = not self._trained or call.model in self._trained
        number = session.history.add(call, context, sample, reply.message, trained=trained, truncated=truncated)
        session.num_generated += len(sample.tokens)
        session.turns.append(
            ConversationTurn(
                segment=number,
                model=call.model,
                trained=trained,
                started=started - session.started,
                seconds=time.monotonic() - started,
                messages=tuple(map(for_people, context.new_messages)),
                reply=reply.message,
                prompt_tokens=len(context.tokens),
                tokens=len(sample.tokens),
                finish=reply.finish,
            )
        )
        return reply

    def _tokens_left(self, session: OpenSession, context: Context) -> int:
        """Returns how many tokens the job permits for the reply, at least 1."""
        length, allowed = len(context.tokens), session.sampling.max_new_tokens
        left = min(allowed - session.num_generated, self._max_positions - length)
        if left < 1:
            raise RequestError(
                400,
                f"messages: no token is left for a reply; {length} of {self._max_positions} positions and "
                f"{session.num_generated} of rollout.max_new_tokens={allowed} are used. Shorten the conversation, or "
                "end it.",
                "messages",
                "context_length_exceeded",  # OpenAI's name of this error, which clients know
            )
        return left

    def _cut(self, sample: Sample, sampling: Sampling) -> tuple[Sample, str | None]:
        """Returns the sample up to the token that completes a stop string, and that string; None where none occurs."""
        # These are the tokens that an engine generates which knows the text, so no engine needs to.
        cut = cut_at_stop(sample, sampling, self._renderer.decode)
        if cut is None:
            return sample, None
        text = self._renderer.decode(cut.tokens)
        return cut, min((stop for stop in sampling.stop if stop in text), key=text.index)

    def _text(self, sample: Sample, stopped: str | None) -> str:
        """Returns the text of a reply, without the token or text that ended it."""
        if stopped is not None:
            return self._renderer.decode(sample.tokens).partition(stopped)[0]
        ended = sample.finish == "stop" and sample.tokens[-1] in self._renderer.stops
        return self._renderer.decode(sample.tokens[:-1] if ended else sample.tokens)


def _aborted() -> RequestError:
    return RequestError(503, "the sample was aborted. Stop: its session is closed.")
