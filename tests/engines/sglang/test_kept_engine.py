"""A real SGLang engine that outlives its rank: found by the next one, refused to others, ended with the launcher."""

import dataclasses
import socket
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from tests.helpers.engines import bring_weights, options_of, process_of, requests
from tests.helpers.traces import needs_sglang
from verl_mg.distributed.launcher import Launcher
from verl_mg.engines.engine import Sampling
from verl_mg.engines.engine_options import EngineOptions
from verl_mg.engines.kinds import SGLANG
from verl_mg.engines.process_engine import ProcessEngine
from verl_mg.models.tiny_model import make_tiny_model

pytestmark = needs_sglang
SETTINGS = options_of("sglang", max_running=2, routed_experts=False)
SAMPLING = Sampling(max_new_tokens=24)


@pytest.fixture
def kept(monkeypatch) -> Iterator[tuple[Launcher, socket.socket]]:
    """A launcher that keeps engines, and the socket whose end is its own."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    with tempfile.TemporaryDirectory() as folder, closing(socket.socket(socket.AF_UNIX)) as listener:
        launcher = Launcher(Path(folder))
        launcher.make_key()
        listener.bind(str(launcher.socket))
        listener.listen()
        yield launcher, listener


def leave(launcher: Launcher, engine: ProcessEngine) -> None:
    """Ends the rank's side, as the loss of the rank does."""
    launcher.regroup_mark.touch()
    engine.close()
    launcher.clear()


def test_engine_left_by_its_rank_answers_the_next_one_and_ends_with_the_launcher(kept, tmp_path):
    launcher, listener = kept
    model = make_tiny_model(
        tmp_path / "model", "qwen3", characters="abcdefgh", hidden=32, ffn=64, max_positions=256, init_std=0.2, seed=3
    )

    def engine(settings: EngineOptions = SETTINGS) -> ProcessEngine:
        return ProcessEngine(SGLANG, model, settings, tmp_path / "0.log", launcher=launcher)

    first = engine()
    bring_weights(first, model, version=4)
    wanted, done = requests(8), {}
    first.submit(wanted, SAMPLING)
    while len(done) < 3:
        done |= {sample.id: sample for sample in first.collect(1.0)}
    pid, processes = first.pid, [process_of(first), *process_of(first).children(recursive=True)]
    leave(launcher, first)

    stranger = dataclasses.replace(first._attachment, key="another")
    assert stranger.find(10) is None

    second = engine()
    assert (second.pid, second.version, second.health()) == (pid, 4, True)
    assert second.chosen == first.chosen and "key-value cache" in second.chosen
    samples = {sample.id: sample for sample in second.generate(wanted, SAMPLING)}
    assert all(samples[i] == sample for i, sample in done.items()) and len(samples) == 8
    # SGLang has no seeds of requests on a CPU: whatever is generated again is another sample.
    assert [samples[request.id] for request in wanted] != second.generate(wanted, SAMPLING)
    assert all(set(sample.policy_versions) == {4} for sample in samples.values())
    bring_weights(second, model, version=5)
    assert second.generate(wanted[:1], SAMPLING)[0].policy_versions[0] == 5
    leave(launcher, second)

    third = engine(dataclasses.replace(SETTINGS, max_running=3))
    assert third.pid != pid and third.version == -1 and not psutil.wait_procs(processes, 600)[1]
    processes = [process_of(third), *process_of(third).children(recursive=True)]
    assert len(processes) > 2 and all(process.is_running() for process in processes)
    listener.close()
    assert not psutil.wait_procs(processes, 600)[1]
