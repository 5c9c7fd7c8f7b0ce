"""Measures what the endpoint of agents costs: tokens per second by it, and of the same requests handed to the engine.

    python -m tools.bench.bench_agents [--engine sglang] [--sessions 64] [--turns 3] [--tokens 64] [--hidden 384]
        [--rounds 5]

Agents, functions in this process, hold a conversation of some turns each by `/v1/chat/completions`; every reply has the
same number of tokens. The other way hands the engine exactly the contexts that the endpoint has made, each turn's as
soon as the turn before is complete. Both take turns on the same engine, whose prefix cache is emptied before each
run by loading its weights again. Server, agents and engine share the machine's cores, so the cost of clients is counted
too. Prints the medians over the rounds, after a warm-up round, and their ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from transformers import AutoTokenizer

from tools.bench.harness import medians, options_of, seconds_in_turn
from tools.bench.local_servers import running_servers
from verl_mg.agents.agent import Session
from verl_mg.agents.engine import AgentEngine
from verl_mg.agents.renderer import ConversationRenderer
from verl_mg.agents.tool_calls import ReplyParser
from verl_mg.config.roles import RolloutConfig
from verl_mg.data.prompts import Prompt
from verl_mg.engines.engine import Request, RolloutEngine, Sampling
from verl_mg.engines.engine_options import EngineOptions
from verl_mg.engines.hf.engine import HFEngine
from verl_mg.layout import EngineLayout
from verl_mg.models.hf_config import read_config
from verl_mg.models.tiny_model import make_tiny_model
from verl_mg.rewards.reward import Sample as Task
from verl_mg.servers.info import ServerRequirements
from verl_mg.servers.pool import ServerPool
from verl_mg.servers.remote_engine import RemoteEngine

QUESTION = "Explain step by step what you would do next, and why. " * 4
Turns = dict[tuple[int, int], tuple[int, ...]]
"""Context of each (session, turn)."""


def main() -> None:
    """Prints the tokens per second of both ways and their ratio."""
    parser = options_of(__doc__, sessions=64, turns=3, tokens=64, hidden=384, rounds=5)
    parser.add_argument("--engine", default="sglang", choices=("hf", "sglang"))
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, _engine(Path(name), chosen) as (model, engine, empty_cache):
        by_agents = _agents_around(engine, model, chosen)
        contexts: Turns = {}
        ways: dict[str, Callable[[], None]] = {
            "endpoint": lambda: _by_endpoint(by_agents, chosen, contexts),
            "direct": lambda: _directly(engine, chosen, contexts),
        }
        seconds = seconds_in_turn(ways, chosen.rounds, before=empty_cache)
    tokens = chosen.sessions * chosen.turns * chosen.tokens
    for way, values in seconds.items():
        rate = tokens / medians(seconds)[way]
        print(f"{way:9} {rate:8.0f} tokens/s  ({tokens / max(values):.0f} to {tokens / min(values):.0f})")
    print(f"endpoint / direct {medians(seconds)['direct'] / medians(seconds)['endpoint']:.2f}")


@contextmanager
def _engine(folder: Path, chosen: argparse.Namespace) -> Iterator[tuple[Path, RolloutEngine, Callable[[], None]]]:
    """Starts an engine; yields its model, itself, and a function that empties its prefix cache."""
    longest = chosen.turns * (chosen.tokens + len(QUESTION) + 32) + 64
    model = make_tiny_model(
        folder / "model", "qwen3", hidden=chosen.hidden, layers=4, ffn=3 * chosen.hidden, max_positions=longest
    )
    if chosen.engine == "hf":
        yield model, HFEngine(model, "cpu", torch.float32, chosen.sessions), lambda: None
        return
    settings = EngineOptions(
        layout=EngineLayout(), dtype=torch.float32, max_running=chosen.sessions, max_positions=longest,
        extra={"skip_tokenizer_init": False},
    )  # fmt: skip
    requirements = ServerRequirements(read_config(model), longest - 8)

    def connect(url: str, borrowed: bool, on_arrival: Callable[[], None]) -> RemoteEngine:
        return RemoteEngine(url, requirements, settings, borrowed=borrowed, on_arrival=on_arrival)

    with running_servers(model, settings, 1, folder) as urls:
        pool = ServerPool(connect)
        pool.assign(dict(enumerate(urls)))
        for server in pool.due(time.monotonic()):
            pool.reach(server)

        def empty_cache() -> None:
            for client in pool.receivers().values():
                client.load_folder(model, version=0)
            pool.confirm(pool.receivers(), 0)

        yield model, pool, empty_cache
        pool.close()


def _agents_around(engine: RolloutEngine, model: Path, chosen: argparse.Namespace) -> AgentEngine:
    tokenizer = AutoTokenizer.from_pretrained(model)
    renderer = ConversationRenderer(tokenizer, [])

    async def converse(session: Session, sample: Task) -> float:
        messages = list(session.messages)
        for _ in range(chosen.turns):
            reply = await _chat(session, messages, chosen.tokens)
            messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": QUESTION}]
        return 1.0

    config, parser = RolloutConfig(agent_timeout_s=600.0), ReplyParser(tokenizer, "qwen25")
    return AgentEngine(engine, converse, config, renderer, parser, read_config(model).max_positions)


async def _chat(session: Session, messages: list[dict[str, Any]], tokens: int) -> str:
    """Returns the text of a reply, by a separate connection."""
    address = urlsplit(session.base_url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    body = json.dumps({"model": session.model, "messages": messages, "max_tokens": tokens}).encode()
    writer.write(
        f"POST {address.path}/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {session.api_key}"
        f"\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
    reply = await reader.read()
    writer.close()
    return str(json.loads(reply.partition(b"\r\n\r\n")[2])["choices"][0]["message"]["content"])


def _by_endpoint(agents: AgentEngine, chosen: argparse.Namespace, contexts: Turns) -> None:
    first = [{"role": "user", "content": QUESTION}]
    requests = [
        Request(i, (3,), i, None, Prompt(0, (3,), "", None, {}, messages=first)) for i in range(chosen.sessions)
    ]
    sampling = Sampling(max_new_tokens=chosen.turns * chosen.tokens)
    for sample in agents.generate(requests, sampling):
        assert sample.trajectory is not None and not sample.trajectory.error, sample.trajectory
        (segment,) = sample.trajectory.segments
        lengths = [turn.prompt_tokens for turn in sample.trajectory.turns]
        contexts |= {(sample.id, turn): segment.tokens[:length] for turn, length in enumerate(lengths)}


def _directly(engine: RolloutEngine, chosen: argparse.Namespace, contexts: Turns) -> None:
    sampling = Sampling(max_new_tokens=chosen.tokens)

    def request(session: int, turn: int) -> Request:
        return Request(session * chosen.turns + turn, contexts[session, turn], session)

    engine.submit([request(session, 0) for session in range(chosen.sessions)], sampling)
    left = chosen.sessions * chosen.turns
    while left:
        complete = engine.collect(1.0)
        left -= len(complete)
        following = [divmod(sample.id, chosen.turns) for sample in complete]
        engine.submit([request(s, turn + 1) for s, turn in following if turn + 1 < chosen.turns], sampling)


if __name__ == "__main__":
    main()
