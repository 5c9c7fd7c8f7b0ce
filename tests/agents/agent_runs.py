"""Agents around a given engine, without a job."""

from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import httpx
from transformers import AutoTokenizer

from verl_mg.agents.agent import Session
from verl_mg.agents.engine import AgentEngine
from verl_mg.agents.renderer import ConversationRenderer
from verl_mg.agents.tool_calls import ReplyParser
from verl_mg.config.roles import RolloutConfig
from verl_mg.data.prompts import Prompt
from verl_mg.engines.engine import EngineWrapper, Request, RolloutEngine, Sample, Sampling
from verl_mg.engines.trajectory import NOT_GENERATED


class LoggedEngine(EngineWrapper):
    """An engine that notes what it was given and what it has generated."""

    def __init__(self, engine: RolloutEngine) -> None:
        super().__init__(engine)
        self.log: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        self.most_at_once = 0
        self._requests: dict[int, Request] = {}

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> None:
        self._requests |= {request.id: request for request in requests}
        self.most_at_once = max(self.most_at_once, len(self._requests))
        self._engine.submit(requests, sampling)

    def collect(self, timeout: float) -> list[Sample]:
        samples = self._engine.collect(timeout)
        for sample in samples:
            self.log.append((self._requests.pop(sample.id).context, sample.tokens))
        return samples


RunAgents = Callable[..., tuple[list[Sample], LoggedEngine]]


async def ask(session: Session, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    """Sends a conversation as any HTTP client does, and returns the reply's message."""
    async with httpx.AsyncClient(timeout=600.0) as client:
        response = await client.post(
            f"{session.base_url}/chat/completions",
            headers={"authorization": f"Bearer {session.api_key}"},
            json={"model": "policy", "messages": messages, **fields},
        )
    if response.status_code != 200:
        raise RuntimeError(f"{response.status_code}: {response.json()['error']['message']}")
    message: dict[str, Any] = response.json()["choices"][0]["message"]
    return {key: value for key, value in message.items() if value is not None}


def requests_of(count: int) -> list[Request]:
    """Requests whose prompt is a question of the user."""
    return [
        Request(i, (7,), i, None, Prompt(i, (7,), "", f"answer {i}", {"n": i}, messages=[question(i)]))
        for i in range(count)
    ]


def question(number: int) -> dict[str, Any]:
    return {"role": "user", "content": f"question {number % 10}"}


def runner_of(model: Path, positions: int) -> RunAgents:
    """A function that runs an agent on requests, and returns the samples and the log of the engine."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    stops = tokenizer.convert_tokens_to_ids(["<|im_end|>"])
    renderer = ConversationRenderer(tokenizer, stops)
    parser = ReplyParser(tokenizer, "qwen25", None)

    def run(
        inner: RolloutEngine,
        agent: Any,
        count: int = 4,
        *,
        tokens: int = 200,
        timeout: float = 600.0,
        retries: int = 0,
        trained: Sequence[str] = (),
        names: Sequence[str] = (),
        concurrency: int | None = None,
        host: str = "127.0.0.1",
        drive: Callable[[AgentEngine], list[Sample]] | None = None,
        **options: Any,
    ) -> tuple[list[Sample], LoggedEngine]:
        logged = LoggedEngine(inner)

        given: dict[str, Any] = {"agent_timeout_s": timeout, "agent_retries": retries, "agent_options": options}
        given |= {"agent_concurrency": concurrency, "agent_trained": list(trained), "agent_host": host}
        given["agent_names"] = list(names)
        config = RolloutConfig(agent_failure_reward=-1.0, **given)
        engine = AgentEngine(logged, agent, config, renderer, parser, positions)
        sampling = Sampling(max_new_tokens=tokens, stop_token_ids=tuple(stops))
        if drive is None:
            waiting, samples = requests_of(count), list[Sample]()
            while len(samples) < count:
                slots = max(0, engine.num_free_slots())
                engine.submit(waiting[:slots], sampling)
                waiting = waiting[slots:]
                samples += engine.collect(1.0)
            return sorted(samples, key=lambda sample: sample.id), logged
        engine.submit(requests_of(count), sampling)
        return drive(engine), logged

    return run


def trained_runs(samples: list[Sample]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(tokens in front, tokens) of each range that is trained."""
    runs = []
    for sample in samples:
        assert sample.trajectory is not None
        for segment in sample.trajectory.segments:
            start = 0
            for is_trained, versions in groupby(segment.policy_versions, lambda version: version != NOT_GENERATED):
                end = start + len(list(versions))
                if is_trained:
                    runs.append((segment.tokens[:start], segment.tokens[start:end]))
                start = end
    return runs
