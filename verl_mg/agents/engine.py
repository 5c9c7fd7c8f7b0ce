"""Engine whose samples are made by agents.

    thread "agents"                    thread "agent-server"               rank's thread, in `collect`
    (functions of the user)            (messages to tokens and back)       (submits to the inner engine)

    _start: agent -------- HTTP -----> _generate: _Turn ---- _events ----> _handle: engine.submit
                                       await turn.reply <--- its loop ---- _resolve: engine.collect
    _return: Sample ---------------------------------------- _events ----> _handle: _returned --> _finish: _done

A sample is complete when its agent has returned and none of its requests is in the inner engine. `abort` may come from
any thread; it cancels the agents' tasks, whose samples then come back as aborted.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import queue
import threading
import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field

from verl_mg.agents.agent import Agent
from verl_mg.agents.history import Context
from verl_mg.agents.renderer import ConversationRenderer
from verl_mg.agents.runner import AgentRunner
from verl_mg.agents.server import AgentServer
from verl_mg.agents.sessions import OpenSession, Sessions
from verl_mg.agents.tool_calls import ReplyParser
from verl_mg.config.roles import RolloutConfig
from verl_mg.data.images import ImageLimits
from verl_mg.engines.engine import EngineWrapper, Request, RolloutEngine, Sample, Sampling
from verl_mg.errors import UserError

POLL_SECONDS = 0.01  # longest time that a request of an agent waits until the engine has it
GATHER_SECONDS = 0.002  # an idle engine receives requests together that arrive within this time of each other
LONGEST_GATHER_SECONDS = 0.05  # longest time that an idle engine waits for more requests


@dataclass(frozen=True)
class _Turn:
    """A request of an agent for the inner engine, and the future for its reply, for which the server's loop waits."""

    sample_id: int
    request: Request
    sampling: Sampling
    reply: Future[Sample] = field(default_factory=Future)


class AgentEngine(EngineWrapper):
    """Wrapper around an engine: each request starts an agent, whose conversation is the sample.

    An aborted sample begins again: the effects of an agent outside the job cannot be continued. A context with its
    reply has at most `max_positions` tokens; without `image_limits` the policy reads text only.
    """

    continues_aborted = False

    def __init__(
        self,
        engine: RolloutEngine,
        agent: Agent,
        config: RolloutConfig,
        renderer: ConversationRenderer,
        parser: ReplyParser,
        max_positions: int,
        image_limits: ImageLimits | None = None,
    ) -> None:
        super().__init__(engine)
        self._concurrency = config.agent_concurrency
        self._events: queue.SimpleQueue[_Turn | Sample] = queue.SimpleQueue()
        self._turns: dict[int, _Turn] = {}
        self._numbers = itertools.count()
        self._agents: set[int] = set()
        self._cancelled: set[int] = set()  # samples whose agents are to be aborted
        self._tasks: dict[int, asyncio.Task[Sample]] = {}  # used only in the agents' thread
        # Samples whose agents have returned; some have requests still in the inner engine.
        self._returned: dict[int, Sample] = {}
        self._done: list[Sample] = []
        # `abort` may come from another thread, between any two steps of `collect`.
        self._lock = threading.RLock()
        self._error: BaseException | None = None
        sessions = Sessions(
            renderer, parser, self._generate, max_positions, config.agent_trained, image_limits, config.agent_names
        )
        server = AgentServer(sessions, config.agent_host, self._fail)
        self._runner = AgentRunner(agent, config, sessions, server.url)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._run_agents, name="agents", daemon=True).start()

    def num_free_slots(self) -> int:
        """Returns how many more agents may run."""
        if self._concurrency is None:
            # Each agent counts as one slot, also while it has no request in the engine.
            return self._engine.num_free_slots() + len(self._turns) - len(self._agents)
        return self._concurrency - len(self._agents)

    def num_queue_slots(self) -> int:
        """Returns 0: an agent starts with its request."""
        return 0

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> None:
        """Starts an agent for each request; the tokens of a partial sample are not used."""
        with self._lock:
            self._agents |= {request.id for request in requests}
        for request in requests:
            self._loop.call_soon_threadsafe(self._start, request, sampling)

    def collect(self, timeout: float) -> list[Sample]:
        """Returns samples whose agents have returned; moves requests to the engine and replies to the agents.

        The loop consumes `_events` and the engine's replies, waits in the engine while it generates and in `_events`
        otherwise, and ends with a complete sample, without agents, or at the time limit.
        """
        deadline = time.monotonic() + timeout
        while True:
            error = self._error  # another thread sets it
            if isinstance(error, UserError):
                raise error
            if error is not None:
                raise RuntimeError(f"the endpoint of agents failed: {error!r}") from error
            left = max(deadline - time.monotonic(), 0.0)
            # While the engine generates it is polled, so that new requests join its batch within POLL_SECONDS.
            self._receive(0.0 if self._turns else left)
            if self._turns:
                for sample in self._engine.collect(min(left, POLL_SECONDS)):
                    self._resolve(sample)
            with self._lock:
                if self._done or not self._agents or time.monotonic() >= deadline:
                    done, self._done = self._done, []
                    return done

    def abort(self) -> None:
        """Cancels all agents and aborts their requests."""
        with self._lock:
            self.abort_samples(set(self._agents))
            self._engine.abort()

    def abort_samples(self, ids: Collection[int]) -> None:
        """Cancels the agents of some samples."""
        with self._lock:
            running = self._agents & set(ids)
            self._cancelled |= running
        self._loop.call_soon_threadsafe(self._cancel, running)

    def _run_agents(self) -> None:
        # Runs the tasks of `_start` until the process ends; a daemon thread, since the code of a user may not return.
        try:
            self._loop.run_forever()
        except BaseException as error:  # such as SystemExit in a task that an agent has started
            self._fail(error)

    def _start(self, request: Request, sampling: Sampling) -> None:
        task = self._tasks[request.id] = self._loop.create_task(self._runner.run(request, sampling))
        task.add_done_callback(lambda task: self._return(request.id, task))

    def _cancel(self, ids: Collection[int]) -> None:
        for i in ids:
            if i in self._tasks:
                self._tasks[i].cancel()

    def _return(self, sample_id: int, task: asyncio.Task[Sample]) -> None:
        del self._tasks[sample_id]
        if task.cancelled():
            self._events.put(Sample(sample_id, (), (), (), "abort"))
        elif (error := task.exception()) is not None:  # our own: an agent's error is part of its sample
            self._fail(error)
        else:
            self._events.put(task.result())

    async def _generate(self, session: OpenSession, context: Context, sampling: Sampling) -> Sample:
        """Returns the reply of the engine; called in the server's thread."""
        # Of each agent: when several act at the same time, their requests arrive in any order.
        number = f"{context.agent} {next(session.seeds[context.agent])}".strip()
        seed = hashlib.blake2b(f"{session.request.seed}:{number}".encode(), digest_size=8).digest()
        request = Request(next(self._numbers), context.tokens, int.from_bytes(seed) >> 1, images=context.images)
        turn = _Turn(session.request.id, request, sampling)
        self._events.put(turn)
        return await asyncio.shield(asyncio.wrap_future(turn.reply))  # which is set also where the server has ended

    def _receive(self, timeout: float) -> None:
        """Handles what has arrived; an idle engine waits for the first event, and for others that arrive with it."""
        events: list[_Turn | Sample] = []
        with suppress(queue.Empty):
            events.append(self._events.get(timeout=timeout) if timeout else self._events.get_nowait())
            latest = time.monotonic() + LONGEST_GATHER_SECONDS
            while not timeout or time.monotonic() < latest:
                events.append(self._events.get(timeout=GATHER_SECONDS) if timeout else self._events.get_nowait())
        if events:
            with self._lock:
                self._handle(events)

    def _handle(self, events: Sequence[_Turn | Sample]) -> None:
        submitted: dict[Sampling, list[Request]] = {}
        for event in events:
            if isinstance(event, Sample):
                self._returned[event.id] = event
            elif event.sample_id in self._agents - self._cancelled:
                self._turns[event.request.id] = event
                submitted.setdefault(event.sampling, []).append(event.request)
            else:  # it was on its way when its sample was aborted
                event.reply.set_result(Sample(event.request.id, (), (), (), "abort"))
        for sampling, requests in submitted.items():
            self._engine.submit(requests, sampling)
        if self._returned:
            # An agent may return without waiting for all of its requests; their replies are no part of the sample.
            left = [number for number, turn in self._turns.items() if turn.sample_id in self._returned]
            if left:
                self._engine.abort_samples(left)
            self._finish()

    def _resolve(self, sample: Sample) -> None:
        with self._lock:
            if (turn := self._turns.pop(sample.id, None)) is not None:
                turn.reply.set_result(sample)
            self._finish()

    def _finish(self) -> None:
        """Completes the samples that have returned and have no requests in the engine any more."""
        busy = {turn.sample_id for turn in self._turns.values()}
        for i in self._returned.keys() - busy:
            self._agents.discard(i)
            self._cancelled.discard(i)
            self._done.append(self._returned.pop(i))

    def _fail(self, error: BaseException) -> None:
        # In the server's or the agents' thread; the next `collect` raises it in the rank's.
        self._error = error
