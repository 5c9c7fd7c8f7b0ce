"""Command lines as agents, in a real sandbox, with a scripted policy behind a real socket."""

import asyncio
import datetime
import json
import os
import socket
import subprocess
import tempfile
import threading
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from tests.agents.scripted_session import ScriptedSample, ScriptedSession, policy
from tests.helpers.isolation import isolate_by
from tests.helpers.json_server import listening
from tests.helpers.loop_clock import pass_time
from tests.helpers.named_processes import named, processes_named
from verl_mg.agents.agent import AgentError
from verl_mg.agents.command import read_reward, run_command
from verl_mg.errors import UserError
from verl_mg.sandbox import supervisor

NOWHERE = "http://127.0.0.1:9999/v1"
TIMEOUT = 600  # seconds for commands that are to end by themselves, on a machine that is busy
ASK = """
import json, os, urllib.request
def ask(text):
    body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": text}]}
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as reply:
        return json.load(reply)["choices"][0]["message"]["content"]
sample = json.load(open(os.environ["VERL_MG_SAMPLE"]))
def reward(value): json.dump(value, open(os.environ["VERL_MG_REWARD"], "w"))
"""


@pytest.fixture(
    params=["best", *(pytest.param(kind, marks=pytest.mark.nightly) for kind in ("bubblewrap", "namespaces", "none"))]
)
def kind(request, monkeypatch) -> str:
    """The best isolation of this machine, and nightly each."""
    if request.param == "best":
        return supervisor.isolation()
    isolate_by(request.param, monkeypatch)
    return str(request.param)


@pytest.fixture
def jail():
    if not supervisor.isolated():
        pytest.skip("no namespaces on this machine")


def python(program: str) -> list[str]:
    """A program that can use `ask`, `sample` and `reward`."""
    return ["python3", "-c", ASK + program]


def run(command: str | list[str], url: str, sample: ScriptedSample | None = None, **options: Any) -> tuple[Any, str]:
    """Runs a command as an agent; returns its reward and the log."""
    session = ScriptedSession(url, options)
    result = asyncio.run(run_command(command, session, sample or ScriptedSample(), timeout=TIMEOUT))
    return result, "".join(session.written)


def test_run_command_agent_asks_policy_and_returns_its_reward(kind):
    program = """
answers = [ask(message["content"]) for message in sample["messages"]]
print("asked", answers, os.getcwd() == os.environ["HOME"].replace("/user", "/work"))
open("file", "w").write("x")
reward({"reward": len(answers[0]), "calls": 1})
"""
    with policy(lambda body: f"{body['model']} says {body['messages'][0]['content']}") as url:
        assert run(python(program), url) == ({"reward": 16, "calls": 1}, "asked ['policy says 1+1='] True\n")


@pytest.mark.usefixtures("jail")
def test_run_command_sandbox_reaches_nothing_but_the_endpoint(tmp_path, monkeypatch):
    (tmp_path / "precious").write_text("x")
    program = f"""
import socket
for port in (PORT, int(os.environ["OPENAI_BASE_URL"].split(":")[2].split("/")[0])):
    try: socket.create_connection(("127.0.0.1", port), timeout=30); print("connected")
    except OSError: print("no way")
print(os.path.exists({str(tmp_path)!r}), os.getuid() != 0, sorted(os.listdir("/agent")), os.path.exists("/etc/shadow"))
print(sorted(name for name in os.environ if "API_KEY" in name), os.environ.get("SECRET"))
"""
    monkeypatch.setenv("SECRET", "s3cret")
    with policy(lambda body: "") as url, socket.create_server(("127.0.0.1", 0)) as other:
        result, log = run(python(program.replace("PORT", str(other.getsockname()[1]))), url)
    assert result is None
    assert log.splitlines() == [
        "no way",
        "connected",
        "False True ['sample.json', 'user', 'work'] False",
        "['ANTHROPIC_API_KEY', 'OPENAI_API_KEY'] None",
    ]


@pytest.mark.usefixtures("jail")
def test_run_command_streamed_reply_arrives_in_pieces_through_the_relay():
    received = threading.Event()

    class Streaming(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self.path.endswith("/received"):
                received.set()
                self.send_response(204)
                self.end_headers()
                return
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"5\r\nfirst\r\n")
            assert received.wait(TIMEOUT)  # which the client only sends once it has the first piece
            self.wfile.write(b"%x\r\n%s\r\n0\r\n\r\n" % (1 << 21, bytes(1 << 21)))

        def log_message(self, *_: Any) -> None:
            pass

    program = """
url = os.environ["OPENAI_BASE_URL"]
with urllib.request.urlopen(url + "/stream") as reply:
    first = reply.read1(5)
    urllib.request.urlopen(url + "/received").close()
    reward(len(first + reply.read()))
"""
    with listening(Streaming) as url:
        assert run(python(program), f"{url}/v1")[0] == 5 + (1 << 21)


def test_run_command_failed_command_raises_with_its_last_line(kind):
    with pytest.raises(AgentError, match=r"^the agent's command ended with exit code 3: no luck$"):
        run(python("import sys; reward(1); print('no luck'); sys.exit(3)"), NOWHERE)
    with pytest.raises(AgentError, match=r"exit code 127: nothing-here: No such file"):
        run(["nothing-here"], NOWHERE)


class Impatient(ScriptedSession):
    """A session whose time is over as soon as something is written."""

    def log(self, text: str) -> None:
        super().log(text)
        pass_time(TIMEOUT)


def test_run_command_time_limit_kills_every_process(kind):
    name = uuid.uuid4().hex[:12]
    program = named(name, "if os.fork() == 0:\n os.setsid()\n print('before', flush=True)\ntime.sleep(6000)")
    session = Impatient(NOWHERE)
    with pytest.raises(TimeoutError):
        asyncio.run(run_command(["python3", "-c", program], session, ScriptedSample(), timeout=TIMEOUT))
    assert (session.written, processes_named(name)) == (["before\n"], [])


@pytest.mark.usefixtures("jail")
def test_run_command_many_at_once_and_a_cancelled_one_leave_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    name = uuid.uuid4().hex[:12]

    async def all_of_them(url: str) -> list[Any]:
        session, sample = ScriptedSession(url), ScriptedSample()
        sleeping = ["python3", "-c", named(name, "time.sleep(600)")]
        lost = asyncio.create_task(run_command(sleeping, session, sample, timeout=600))
        command = python("reward(int(ask('?')))")
        rewards = await asyncio.gather(*(run_command(command, session, sample, timeout=TIMEOUT) for _ in range(6)))
        while not processes_named(name):
            await asyncio.sleep(0.05)
        lost.cancel()
        with pytest.raises(asyncio.CancelledError):
            await lost
        return rewards

    with policy(lambda body: "4") as url:
        assert asyncio.run(all_of_them(url)) == [4.0] * 6
    assert (processes_named(name), list(tmp_path.iterdir())) == ([], [])


@pytest.mark.usefixtures("jail")
def test_run_command_folders_of_any_depth_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    program = "for _ in range(3000): os.mkdir('d', 0o300); os.chdir('d')\nreward(1)"
    try:
        assert run(python(program), NOWHERE)[0] == 1.0
        assert list(tmp_path.iterdir()) == []
    finally:
        subprocess.run(["rm", "-rf", *tmp_path.iterdir()], check=True)  # pytest cannot remove it either


def test_run_command_inherits_no_descriptor(kind):
    program = """
def is_open(number):
    try: return bool(os.fstat(number))
    except OSError: return False
print([number for number in range(1000) if is_open(number)])
"""
    assert run(python(program), NOWHERE)[1] == "[0, 1, 2]\n"


def test_run_command_log_has_the_lines_of_the_output():
    pieces = (b"one ", b"li", b"ne \xc3", b"\xa4\nand ", b"another")
    program = f"import os, time\nfor piece in {pieces}: os.write(1, piece); time.sleep(0.05)"
    session = ScriptedSession(NOWHERE)
    asyncio.run(run_command(["python3", "-c", program], session, ScriptedSample(), timeout=TIMEOUT))
    assert session.written == ["one line \u00e4\n", "and another"]


def test_run_command_record_that_is_not_json_is_in_the_sample():
    record = {"day": datetime.date(2026, 1, 2), "text": "\ud800"}
    _, log = run('cat "$VERL_MG_SAMPLE"', NOWHERE, ScriptedSample(record=record))
    assert json.loads(log)["record"] == {"day": "2026-01-02", "text": "\ud800"}


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that every user can read, which pytest's folders are not."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def test_run_command_folders_and_paths_are_there(kind, public):
    task, common, harness = public / "task", public / "common", public / "harness"
    for folder, name in ((task, "b"), (common, "a"), (common, "b"), (harness, "c")):
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(folder.name)
    sample = ScriptedSample(record={"folder": str(task), "answer": "2", "info": {"truth": 2}, "level": 1})
    command = ["sh", "-c", f'echo $(cat a b {harness}/c) $MORE; cat "$VERL_MG_SAMPLE"; echo 0.5 >"$VERL_MG_REWARD"']
    options = {"folder": str(common), "paths": [str(harness)], "environment": {"MORE": 1}}
    reward, log = run(command, NOWHERE, sample, **options)
    words, _, content = log.partition("\n")
    assert (reward, words) == (0.5, "commontaskharness 1")
    assert json.loads(content) == {
        "prompt": "1+1=",
        "messages": [{"role": "user", "content": "1+1="}],
        "record": {"folder": str(task), "level": 1},  # nothing that contains the answer
    }
    _, log = run("cat $VERL_MG_SAMPLE", NOWHERE, sample, show_answer=True)
    assert json.loads(log)["answer"] == "2" == json.loads(log)["record"]["answer"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": []}, "rollout.agent_options.path: unknown. Use folder, paths"),
        ({"folder": "/none"}, "/none: it does"),
        ({"paths": "/opt/harness"}, "rollout.agent_options.paths: 'str' instances are not allowed"),
        ({"environment": {"A": None}}, "rollout.agent_options.environment.A"),
        ({"processes": "many"}, "rollout.agent_options.processes: Input should be a valid integer"),
    ],
)
def test_run_command_wrong_options_raise(options, message):
    with pytest.raises(UserError, match=message):
        run("", NOWHERE, **options)


@pytest.mark.parametrize(
    ("write", "expected"),
    [
        (lambda file: None, None),
        (lambda file: file.write_text("0.25\n"), 0.25),
        (lambda file: file.write_text('{"reward": 1, "steps": 3}'), {"reward": 1, "steps": 3}),
        (lambda file: file.write_text("good"), "neither a number nor an object with a reward: b'good'"),
        (lambda file: file.write_text("true"), "neither a number"),
        (lambda file: file.write_text('{"score": 1}'), "neither a number"),
        (lambda file: file.write_text("[" * 100_000), "neither a number"),
        (lambda file: file.symlink_to("/etc/passwd"), "cannot be read"),
        (lambda file: os.mkfifo(file), "is not a file"),
        (lambda file: file.mkdir(), "is not a file"),
    ],
)
def test_read_reward_of_untrusted_file_is_a_reward_or_an_error(tmp_path, write, expected):
    file = tmp_path / "reward.json"
    write(file)
    if isinstance(expected, str):
        with pytest.raises(AgentError, match=expected):
            read_reward(file)
    else:
        assert read_reward(file) == expected
