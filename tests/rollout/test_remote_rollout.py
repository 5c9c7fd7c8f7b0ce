"""GRPO on a real SGLang server that the job did not start: weights by group and by folder, a server lost and back."""

import math
import re
import selectors
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.helpers.engines import all_of, cut_short, late_and_other, requests
from tests.helpers.sglang_servers import SETTINGS, RunningServer, free_port, ready
from tests.helpers.traces import needs_sglang
from tests.rollout.engine_jobs import checked_steps, complaint, engine_job, inputs, train
from verl_mg.engines.engine import EngineDiedError, Request, Sampling
from verl_mg.engines.stop_strings import StopStringEngine, decoder
from verl_mg.errors import UserError
from verl_mg.models.hf_config import read_config
from verl_mg.models.tiny_model import make_tiny_model
from verl_mg.models.transformers_module import read_tokenizer
from verl_mg.servers.info import ServerRequirements
from verl_mg.servers.remote_engine import RemoteEngine
from verl_mg.weight_sync import broadcast

pytestmark = needs_sglang
LONG = Sampling(max_new_tokens=58)


@dataclass(frozen=True)
class Server:
    folder: Path
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


class FailingGroup:
    """A process group whose communicator cannot be made."""

    def broadcast(self, tensor: torch.Tensor, root: int) -> dist.Work:
        raise dist.DistBackendError("NCCL error: Mismatched NCCL version detected : 22809 vs 23003")


def test_process_group_that_nccl_cannot_connect_raises_with_its_version(monkeypatch):
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    with pytest.raises(UserError, match=r"NCCL 2\.28\.9 cannot connect .*22809 vs 23003.*weight_transfer=disk"):
        broadcast.start_broadcast(FailingGroup(), torch.zeros(1))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    folder = inputs(tmp_path_factory.mktemp("server"), "qwen3")
    with ready(RunningServer(folder / "model", folder / "server.log")) as (running,):
        yield Server(folder, running.port)


class Door:
    """Lets bytes through between its port and the server's, until it is shut.

    With `holds` nothing passes from the first generated sample on, and `held` is set.
    """

    def __init__(self, port: int, behind: int) -> None:
        self._port, self._behind = port, behind
        self.holds, self.held = False, threading.Event()
        self.open()

    def open(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._listener = socket.create_server(("127.0.0.1", self._port), backlog=100)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._pass_on, daemon=True)
        self._shut = False
        self._thread.start()

    def shut(self) -> None:
        self._shut = True
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()
        self._selector.close()

    def _pass_on(self) -> None:
        while not self._shut:
            if self.held.is_set():
                time.sleep(0.01)
                continue
            for key, _ in self._selector.select(0.05):
                if key.fileobj is self._listener:
                    ours, theirs = self._listener.accept()[0], socket.create_connection(("127.0.0.1", self._behind))
                    self._selector.register(ours, selectors.EVENT_READ, theirs)
                    self._selector.register(theirs, selectors.EVENT_READ, ours)
                elif data := key.fileobj.recv(2**16):
                    if self.holds and b"meta_info" in data:
                        self.held.set()
                        break
                    key.data.sendall(data)
                else:
                    for end in (key.fileobj, key.data):
                        self._selector.unregister(end)
                        end.close()
                    break  # the other end may be among the events


# -- a job


def train_on(server: Server, updates: int, overrides: list[str]) -> list[dict[str, object]]:
    return train(server.folder, f"rollout.urls=[{server.url}]", *overrides, updates=updates)


def check_updates(server: Server, results: list[list[dict[str, object]]]) -> None:
    for update, reported in enumerate(checked_steps(server.folder, results)):
        assert {v for rank in reported for v in rank["versions"]} == {update}
        assert sorted(i for rank in reported for i in rank["ids"]) == list(range(update * 24, (update + 1) * 24))


def test_process_group_sync_serves_the_exported_checkpoint(server, ranks):
    results = ranks.run(2, train_on, server, 2, ["actor.layout=tp2", "rollout.weight_transfer=process_group"])
    check_updates(server, results)
    for received, bound in (reported["sync"] for rank in results for reported in rank):
        assert received > 1.6 * bound > 0  # both ranks of the server receive the whole model, which it needs once


def test_shared_folder_sync_serves_the_exported_checkpoint(server, ranks, tmp_path):
    folder = tmp_path / "shared"
    overrides = ["actor.layout=pp2", "rollout.weight_transfer=disk", f"rollout.shared_folder={folder}"]
    check_updates(server, ranks.run(2, train_on, server, 1, overrides))
    assert [version.name for version in folder.iterdir()] == ["weights-1"]


def in_portions(server: Server) -> list[dict[str, object]]:
    with mock.patch.object(broadcast, "BUFFER_BYTES", 2**14):
        return train_on(server, 1, ["actor.layout=tp2"])


@pytest.mark.nightly
def test_process_group_sync_in_many_chunks_serves_the_same_weights(server, ranks):
    check_updates(server, ranks.run(2, in_portions, server))


def lose_the_server(server: Server, port: int) -> dict[str, object]:
    """The way to the server is shut in the middle of a rollout, and open again after the loss was noticed."""
    leads = dist.get_rank() == 0
    door = Door(port, server.port) if leads else None
    job, _ = engine_job(
        server.folder, "actor.layout=tp2", f"rollout.urls=[http://127.0.0.1:{port}]", "rollout.max_new_tokens=30"
    )
    in_flight = []

    def lose() -> None:
        pool = job.rollout._engines.engine
        assert door.held.wait(600)
        in_flight.append(len(pool._servers[0].client.in_flight()))
        door.shut()
        while not pool._num_lost:
            time.sleep(0.01)
        time.sleep(1.0)  # it does not come back at the first attempt
        door.holds = False
        door.held.clear()
        door.open()

    thread = threading.Thread(target=lose)
    if leads:
        door.holds = True
        thread.start()
    batch = job.rollout.generate(list(job.prompts)[:10], num_samples=4)
    if leads:
        thread.join()
        door.shut()
    ended = (batch["truncated"] | (batch["tokens"][batch.lengths.cumsum(0) - 1] == 1)).all()
    found = {
        "ids": batch["sample_id"].tolist(),
        "ended": bool(ended),
        "versions": batch["policy_versions"][batch["loss_mask"]].unique().tolist(),
        "lost": job.rollout._engines.engine.take_num_lost() if leads else 0,
        "in_flight": in_flight,
    }
    job.close()
    return found


def test_lost_server_requests_are_submitted_again(server, ranks):
    output = ranks.run(2, lose_the_server, server, free_port())
    assert sorted(i for rank in output for i in rank["ids"]) == list(range(40))
    assert output[0]["lost"] == 1 and output[0]["in_flight"][0] >= 8
    assert all(rank["ended"] and rank["versions"] == [0] for rank in output)


# -- one engine


@pytest.fixture
def engine(server) -> Iterator[RemoteEngine]:
    requirements = ServerRequirements(read_config(server.folder / "model"), 64)
    engine = RemoteEngine(server.url, requirements, replace(SETTINGS, max_running=16))
    engine.load_folder(server.folder / "model", 7)
    yield engine
    engine.close()


def test_remote_engine_resumes_a_partial_sample(engine):
    greedy = Sampling(max_new_tokens=58, temperature=0.0)
    whole = engine.generate(requests(6), greedy)
    cut = cut_short(engine, requests(6), greedy)
    assert all(len(sample.tokens) < 58 for sample in cut)
    again = [Request(r.id, r.prompt, r.seed, partial=s) for r, s in zip(requests(6), cut, strict=True)]
    joined = engine.generate(again, greedy)
    assert [sample.tokens for sample in joined] == [sample.tokens for sample in whole]
    assert {sample.policy_versions for sample in joined} == {(7,) * 58}


def test_remote_engine_has_candidates_and_likeliest_tokens(engine):
    sampling = Sampling(max_new_tokens=20, temperature=1.5, top_p=0.7, returns_support=True, top_logprobs=40)
    for sample in engine.generate(requests(3), sampling):
        ids = sample.support.ids.split(sample.support.sizes.tolist())
        for token, logprob, candidates, (values, likeliest) in zip(
            sample.tokens, sample.logprobs, ids, sample.top, strict=True
        ):
            known = values > -torch.inf  # of the vocabulary of 32
            assert sorted(likeliest[known].tolist()) == sorted(candidates.tolist()) and len(values) == 40
            assert values[known].exp().sum() == pytest.approx(1.0, abs=1e-5)
            assert values[likeliest.tolist().index(token)] == pytest.approx(logprob, abs=1e-6)


def test_remote_engine_and_its_server_end_at_a_stop_string(engine, server):
    decode = decoder(read_tokenizer(server.folder / "model"))
    (whole,) = engine.generate(requests(1), Sampling(max_new_tokens=40, temperature=0.0))
    stop = decode(whole.tokens[8:11])
    count = next(n for n in range(1, 41) if stop in decode(whole.tokens[:n]))
    stopping = Sampling(max_new_tokens=40, temperature=0.0, stop=(stop,))
    for each in (engine, StopStringEngine(engine, decode)):
        (sample,) = each.generate(requests(1), stopping)
        assert (sample.tokens, sample.finish) == (whole.tokens[:count], "stop")


def test_remote_engine_abort_before_its_requests_aborts_them(engine):
    engine.submit(requests(16), LONG)
    engine.abort()
    assert {sample.finish for sample in all_of(engine, 16)} == {"abort"}


def test_remote_engine_timeout_aborts_one_request(engine, monkeypatch):
    late, other = late_and_other(engine, monkeypatch, LONG, 0.02)
    assert len(late.tokens) < 58
    assert other.finish == "length" and len(other.tokens) == 58


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("finish_reason", None, "the engine rejects request 10 .*its response is not one of SGLang's: TypeError"),
        ("output_token_logprobs", [[math.nan, 1, None]] * 3, "sample 10 has the log-prob nan for its token 0"),
    ],
)
def test_remote_engine_wrong_response_raises_with_its_address(engine, monkeypatch, field, value, message):
    exchange = engine._exchange

    async def answer_wrongly(body):
        response = await exchange(body)
        return response | {"meta_info": response["meta_info"] | {field: value}}

    monkeypatch.setattr(engine, "_exchange", answer_wrongly)
    with pytest.raises(UserError, match=f"^{engine.url}: {message}"):
        engine.generate(requests(1), Sampling(max_new_tokens=3))


def test_remote_engine_server_that_stays_away_raises(server):
    door = Door(port := free_port(), server.port)
    requirements = ServerRequirements(read_config(server.folder / "model"), 64)
    engine = RemoteEngine(f"http://127.0.0.1:{port}", requirements, SETTINGS)
    engine.load_folder(server.folder / "model", 7)
    door.holds = True
    engine.submit(requests(6), LONG)
    assert door.held.wait(600)
    door.shut()
    with pytest.raises(EngineDiedError, match=rf"the server http://127\.0\.0\.1:{port} is lost: "):
        all_of(engine, 6)
    assert not engine.health()
    with pytest.raises(EngineDiedError, match=rf"the server http://127\.0\.0\.1:{port} is lost: "):
        engine.reconnect()
    assert sorted(request.id for request, _ in engine.take_unfinished()) == [10, 11, 12, 13, 14, 15]
    engine.close()


def test_remote_engine_weights_that_the_server_rejects_raise(engine, tmp_path):
    with pytest.raises(UserError, match=r"does not accept the weights \(/update_weights_from_disk: "):
        engine.load_folder(tmp_path / "nothing", 8)


# -- mistakes


@pytest.fixture(scope="module")
def others(tmp_path_factory) -> dict[str, Path]:
    """Models that the server does not serve."""
    sizes = {"hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 128}
    vocabulary, positions = tmp_path_factory.mktemp("vocabulary"), tmp_path_factory.mktemp("positions")
    make_tiny_model(vocabulary, "qwen3", characters="0123456789+-*=() abcdefghi", max_positions=64, **sizes)
    make_tiny_model(positions, "qwen3", characters="0123456789+-*=() abcdefg", max_positions=128, **sizes)
    llama = make_tiny_model(tmp_path_factory.mktemp("llama"), "llama", characters="0123456789+-*=() ab", **sizes)
    return {"vocabulary": vocabulary, "positions": positions, "llama": llama}


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("vocabulary", "with a vocabulary of 30 instead of 32. Start the server with --model-path of the same"),
        (
            "positions",
            "the context length is 64, but a prompt with its response can have 128 tokens. "
            "Start the server with --context-length 128",
        ),
        ("llama", "a qwen3 instead of a llama. Start the server with --model-path"),
    ],
)
def test_server_of_another_model_raises(server, ranks, others, model, words):
    (output,) = ranks.run(1, complaint, server.folder, f"model.path={others[model]}", f"rollout.urls=[{server.url}]")
    assert output.startswith(f"{server.url}: ") and words in output and "\n" not in output


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["rollout.urls=[http://127.0.0.1:1]"],
            r"^http://127\.0\.0\.1:1: no server responds .*correct rollout\.urls\.$",
        ),
        (["rollout.urls=[URL/path]"], r"^URL/path: not an SGLang server \(.*\)\. Correct rollout\.urls\.$"),
        (
            ["rollout.urls_file=/dev/null"],
            r"^rollout\.urls_file=/dev/null: names no server\. Write one address a line\.$",
        ),
        (
            ["rollout.urls_file=/nowhere"],
            r"^rollout\.urls_file=/nowhere: cannot be read \(.*\)\. Write one address a line\.$",
        ),
        (
            ["rollout.urls=[URL]", "rollout.api_key_env=NOT_SET_ANYWHERE"],
            r"^rollout\.api_key_env=NOT_SET_ANYWHERE: this environment variable is not set",
        ),
        (
            ["rollout.urls=[URL]", "rollout.admin_key_env=NOT_SET_ANYWHERE"],
            r"^rollout\.admin_key_env=NOT_SET_ANYWHERE: this environment variable is not set",
        ),
        (
            ["rollout.urls=[URL]", "rollout.weight_transfer=shards"],
            r"^URL: its ranks cannot receive their shards: it was started without --custom-weight-loader "
            r"verl_mg\.engines\.sglang\.shard_receiver\.receive_shards",
        ),
        (["rollout.urls=[URL, URL]"], r"^rollout\.urls: the server URL is named twice"),
        (
            ["rollout.urls=[URL]", "rollout.weight_transfer=disk", "rollout.shared_folder=/dev/null/x"],
            r"^rollout\.shared_folder=/dev/null/x: cannot be made \(Not a directory\)\. Name a folder",
        ),
        (
            ["rollout.urls=[URL]", "rollout.replay_routing=true"],
            r"^rollout\.replay_routing: .*has no experts\. Set it to false\.",
        ),
    ],
)
def test_server_configuration_mistake_raises_before_building(server, ranks, overrides, words):
    (output,) = ranks.run(1, complaint, server.folder, *(text.replace("URL", server.url) for text in overrides))
    assert re.search(words.replace("URL", re.escape(server.url)), output), output
