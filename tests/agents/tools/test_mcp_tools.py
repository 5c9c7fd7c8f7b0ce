"""Tools of real MCP servers, in processes of their own."""

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.agents.tools.ledgers import SAMPLE, call
from verl_mg.agents.tools.load import load_tools
from verl_mg.agents.tools.tool_runner import ToolRunner
from verl_mg.errors import UserError

ROOT = Path(__file__).parents[3]
MODULE = "tests.agents.tools.mcp_server"


class Servers(NamedTuple):
    """Their names in the configuration."""

    sessions: str
    stateless: str
    latest: str


@contextmanager
def started(*arguments: str) -> Iterator[list[str]]:
    """Starts the servers and yields their URLs."""
    command = [sys.executable, "-m", MODULE, *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process.stdout.readline().split()
        finally:
            process.kill()


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    with started() as urls:
        yield Servers(*(f"mcp:{url}" for url in urls))


@pytest.fixture
def runners() -> Iterator[list[ToolRunner]]:
    runners: list[ToolRunner] = []
    yield runners
    for runner in runners:
        runner.close()


def runner_of(runners: list[ToolRunner], *names: str, timeout: float = 600) -> ToolRunner:
    runners.append(ToolRunner(load_tools(names), timeout))
    return runners[-1]


def result(runner: ToolRunner, name: str, sample: int = 7, **arguments: object) -> str:
    runner.begin(sample, SAMPLE, ())
    return runner.start(sample, [call(name, json.dumps(arguments))]).result(600)[0]


def counted(runner: ToolRunner) -> dict[str, int]:
    counts: dict[str, int] = json.loads(result(runner, "count", sample=-1))
    return counts


def test_mcp_tools_have_the_schemas_of_the_server(servers):
    tools = {tool.name: tool.schema["function"] for tool in load_tools([servers.sessions])}
    assert list(tools) == ["add", "fail", "wait", "show", "count"]
    assert tools["add"]["description"] == "Add to the sum of the session."
    assert tools["add"]["parameters"]["properties"]["n"]["description"] == "the summand"
    assert tools["add"]["parameters"]["required"] == ["n"]


def test_mcp_tools_of_two_servers_with_equal_names_need_a_prefix(servers):
    with pytest.raises(UserError) as caught:
        load_tools([servers.sessions, servers.stateless])
    assert str(caught.value) == (
        f"rollout.tools={servers.stateless}: another tool is named add, of {servers.sessions}. Rename one, or write "
        f"PREFIX={servers.stateless} for tools with names that begin with PREFIX_."
    )
    tools = load_tools([servers.sessions, f"other={servers.stateless}"])
    assert [tool.name for tool in tools][4:6] == ["count", "other_add"]


def test_mcp_sessions_of_concurrent_samples_have_separate_states(servers, runners):
    runner = runner_of(runners, servers.sessions)
    before = counted(runner)
    for i in range(64):
        runner.begin(i, SAMPLE, ())
    futures = [runner.start(i, [call("add", f'{{"n": {i}}}')] * 2) for i in range(64)]
    for i, future in enumerate(futures):
        assert future.result(600) == [str(i), str(2 * i)]
    for i in range(64):
        runner.end(i)
    runner.close()
    after = counted(runner_of(runners, servers.sessions))
    assert after["closed"] - before.get("closed", 0) == 64 + 2, "and those that count and list"
    assert after["opened"] - before["opened"] == 64 + 2


def test_mcp_session_of_a_resumed_sample_repeats_its_calls(servers, runners):
    runner = runner_of(runners, f"my={servers.sessions}")
    runner.begin(7, SAMPLE, [call("my_add", '{"n": 1}'), call("my_add", '{"n": 2}')])
    assert result(runner, "my_add", n=4) == "7"


@pytest.mark.parametrize("kind", ["stateless", "latest"])
def test_mcp_server_without_sessions_has_one_connection(kind, servers, runners):
    runner = runner_of(runners, getattr(servers, kind))
    before = counted(runner)
    runner.begin(8, SAMPLE, [call("add", '{"n": 1000}')])
    results = [runner.start(8, [call("add", '{"n": 1}')] * 5).result(60) for _ in range(2)]
    assert sorted(int(total) for turn in results for total in turn) == list(range(1, 11)), "nothing is repeated"
    runner.end(8)
    after = counted(runner)
    assert after.get("opened", 0) == before.get("opened", 0)
    assert after["called"] - before["called"] == 11


def test_mcp_results_become_text_and_images(servers, runners):
    runner = runner_of(runners, servers.sessions)
    shown = result(runner, "show")
    assert shown.text == "two\nlines\na page\n(more: file:///more)" and shown.images[0].pixels().size == (2, 1)
    assert result(runner, "fail", why="no\n luck") == "error: fail: Error executing tool fail: no luck"
    assert result(runner, "add", n="many").startswith("error: add: ")
    assert result(runner, "add").startswith("error: add: ")
    assert result(runner, "other") == "error: there is no tool 'other'; the tools are: add, fail, wait, show, count"
    assert runner.start(7, [call("add", "[")]).result(60)[0].startswith("error: add: Invalid JSON")
    assert result(runner, "add", n=1) == "1"


@pytest.mark.parametrize("kind", ["sessions", pytest.param("latest", marks=pytest.mark.nightly)])
def test_mcp_call_that_takes_too_long_is_cancelled(kind, servers, runners):
    runner = runner_of(runners, getattr(servers, kind), timeout=3)
    before = counted(runner).get("cancelled", 0)
    assert result(runner, "add", n=0).isdigit()
    assert result(runner, "wait", seconds=600) == "error: wait took longer than 3 s"
    assert result(runner, "wait", seconds=0) == "waited"
    while (cancelled := counted(runner).get("cancelled", 0)) == before:
        pass
    assert cancelled == before + 1


def test_mcp_call_that_is_aborted_closes_its_session(servers, runners):
    runner = runner_of(runners, servers.sessions)
    before = counted(runner)
    assert result(runner, "add", n=1) == "1"
    waiting = runner.start(7, [call("wait", '{"seconds": 600}')])
    while counted(runner)["called"] < before["called"] + 3:
        pass
    waiting.cancel()
    runner.end(7)
    while (after := counted(runner)).get("closed", 0) == before.get("closed", 0):
        pass
    assert after["cancelled"] == before.get("cancelled", 0) + 1


@pytest.mark.nightly
def test_mcp_server_that_ends_gives_errors_until_it_is_back(runners):
    with started() as (url, *_):
        runner = runner_of(runners, f"mcp:{url}")
        assert result(runner, "add", n=1) == "1"
    assert result(runner, "add", n=2).startswith("error: add raised MCPError: ")
    assert result(runner, "add", n=4).startswith(f"error: add: mcp:{url} cannot be opened (ConnectError: ")
    with started(url):
        assert result(runner, "add", n=8) == "11", "the calls before are repeated"


@pytest.mark.nightly
def test_mcp_command_is_a_process_for_each_sample(runners):
    runner = runner_of(runners, f"mcp:{shlex.quote(sys.executable)} -m {MODULE} stdio")
    assert [result(runner, "add", sample=i, n=3) for i in (0, 1, 0)] == ["3", "3", "6"]


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("http://127.0.0.1:1/mcp", r"\(ConnectError: .* failed\). Start it, or correct the address"),
        ("no-such-command", r"\(FileNotFoundError: .*no-such-command.*\). Start it, or correct the command"),
        ("true", r"\(MCPError: .*\). Start it, or correct the command"),
    ],
)
def test_mcp_tools_without_a_server_raise(place, reason):
    with pytest.raises(UserError, match=rf"^rollout.tools=mcp:{place}: no MCP server answers {reason}\.$"):
        load_tools([f"mcp:{place}"])


def test_mcp_tools_without_the_package_raise(monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(UserError, match=r"^rollout.tools=mcp:http://here: the package mcp cannot be imported .*pip"):
        load_tools(["mcp:http://here"])
