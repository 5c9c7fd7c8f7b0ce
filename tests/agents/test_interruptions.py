"""Agents whose engine is interrupted: by a checkpoint of an asynchronous rollout, or by the end of its process."""

import asyncio
import threading
from typing import Any

import pytest
from torch.distributed import TCPStore

from tests.agents.agent_runs import ask, requests_of, trained_runs
from tests.helpers.engines import SGLANG, VLLM_NIGHTLY, bring_weights, process_of
from tests.helpers.waiting import wait_until
from verl_mg.agents.agent import Session
from verl_mg.agents.engine import AgentEngine
from verl_mg.data import Prompt
from verl_mg.engines.engine import EngineDiedError, Sample, Sampling
from verl_mg.rollout.engine_worker import EngineEvents, EngineWorker
from verl_mg.rollout.groups import Group
from verl_mg.rollout.work_queue import WorkQueue


def test_checkpoint_with_agents_in_flight_does_not_interrupt_them(hf_engine, run_agents):
    asked: list[int] = []
    released = threading.Event()

    async def agent(session: Session, sample: Any) -> None:
        reply = await ask(session, session.messages, max_tokens=4)
        asked.append(sample.record["n"])
        while sample.record["n"] and not released.is_set():
            await asyncio.sleep(0.01)
        await ask(session, [*session.messages, reply, {"role": "user", "content": "on"}], max_tokens=4)

    def drive(engine: AgentEngine) -> list[Sample]:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        requests = {request.id: request for request in requests_of(3)}
        completed: list[Sample] = []
        aborted: list[Sample] = []
        worker = EngineWorker(engine, 1, EngineEvents(store), requests.__getitem__, completed.append, aborted.append)
        queue = WorkQueue(store, "queue", Sampling(max_new_tokens=20), is_open=True)
        worker.add(queue)
        worker.append(queue, [Group(Prompt(0, (1,), "", None, {}), range(3))], [])
        worker.start()
        wait_until(lambda: len(asked) == 3 and len(completed) == 1)
        with worker.stopped():
            worker.interrupt()
        assert [sample.id for sample in completed] == [0] and not aborted
        released.set()
        wait_until(lambda: len(completed) == 3)
        worker.close()
        return completed

    samples, engine = run_agents(hf_engine, agent, 0, concurrency=3, drive=drive)
    assert sorted(asked) == [0, 1, 2], "each agent has begun once"
    assert sorted(trained_runs(samples)) == sorted(engine.log) and len(engine.log) == 6


@pytest.mark.parametrize("any_engine", [SGLANG, VLLM_NIGHTLY], indirect=True)
def test_agents_continue_where_the_process_of_their_engine_has_died(any_engine, run_agents, chat_model):
    deaths: list[EngineDiedError] = []
    killed: list[int] = []

    async def agent(session: Session, sample: Any) -> None:
        messages = list(session.messages)
        for _ in range(3):
            messages += [await ask(session, messages, max_tokens=40), {"role": "user", "content": "on"}]

    def drive(engine: AgentEngine) -> list[Sample]:
        samples: list[Sample] = []
        num_turns = 0
        while len(samples) < 4:
            try:
                samples += engine.collect(0.05)
                num_turns += 1
                if num_turns >= 3 and any_engine._running and not killed:
                    killed.append(process_of(any_engine).pid)
                    process_of(any_engine).kill()
            except EngineDiedError as error:
                deaths.append(error)
                any_engine.restart()
                bring_weights(any_engine, chat_model, version=3)
                any_engine.resume()
        return samples

    samples, engine = run_agents(any_engine, agent, 4, tokens=400, drive=drive)
    assert len(deaths) == 1
    assert [s.trajectory.error for s in samples if s.trajectory] == [""] * 4
    assert sorted(trained_runs(samples)) == sorted(engine.log) and len(engine.log) == 12
