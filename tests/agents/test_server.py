"""The endpoint's server with the official clients, and its limits."""

import asyncio
import json
import socket
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.agents.malformed_requests import check_malformed
from tests.agents.scripted_session import KEY, ScriptedBackend, answer, base_url, reply_of, serving
from tests.helpers.waiting import wait_until
from verl_mg.agents import server as agent_server
from verl_mg.agents.call import Call, Reply, RequestError
from verl_mg.agents.server import AgentServer
from verl_mg.agents.tool_calls import ToolCall

CHAT = {"model": "policy", "messages": [{"role": "user", "content": "Hello"}]}
HEADERS = {"authorization": f"Bearer {KEY}"}


def ask(server: AgentServer, **fields: Any) -> httpx.Response:
    return httpx.post(f"{base_url(server)}/chat/completions", json=CHAT | fields, headers=HEADERS)


def sent(server: AgentServer, body: str, *headers: str) -> socket.socket:
    """A connection by which a request was sent."""
    url = urlsplit(f"{base_url(server)}/chat/completions")
    connection = socket.create_connection((url.hostname or "", url.port or 0), timeout=600)
    connection.sendall("\r\n".join([f"POST {url.path} HTTP/1.1", "Host: x", *headers, "", body]).encode())
    return connection


@pytest.fixture(scope="module")
def server() -> AgentServer:
    return serving(ScriptedBackend())


def test_server_given_official_clients_satisfies_their_checks(server):
    pytest.importorskip("openai")
    pytest.importorskip("anthropic")
    from tests.agents import client_checks

    for name in client_checks.CHECKS:
        result = getattr(client_checks, name)(base_url(server), KEY)
        if result is not None:
            asyncio.run(result)


def test_server_given_wrong_key_replies_before_the_body_is_read(server):
    with sent(server, "", "Content-Length: 9") as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 401 ")


def test_server_given_body_above_the_limit_replies_413(server, monkeypatch):
    monkeypatch.setattr(agent_server, "MAX_BODY", 1000)
    assert ask(server, user="x" * 1000).status_code == 413
    large = json.dumps(CHAT | {"user": "x" * 1000}).encode()
    chunks = iter([large[:600], large[600:]])
    assert httpx.post(f"{base_url(server)}/chat/completions", content=chunks, headers=HEADERS).status_code == 413
    assert ask(server).status_code == 200


def test_server_given_disconnected_client_completes_the_call():
    backend, body = ScriptedBackend(delay=0.2), json.dumps(CHAT)
    with sent(serving(backend), body, f"x-api-key: {KEY}", f"Content-Length: {len(body)}"):
        wait_until(lambda: backend.calls)
    wait_until(lambda: backend.replies)


def refuse(call: Call) -> Reply:
    raise RequestError(400, "messages: too long. Send fewer.", code="context_length_exceeded")


@pytest.mark.parametrize(("reply", "end"), [(answer, "[DONE]"), (refuse, '"code": "context_length_exceeded"}}')])
def test_server_given_slow_reply_keeps_the_stream_alive_until_it_or_its_error(monkeypatch, reply, end):
    monkeypatch.setattr(agent_server, "KEEP_ALIVE_S", 0.001)
    text = ask(serving(ScriptedBackend(reply, delay=0.3)), stream=True).text
    assert text.startswith(": keep-alive\n\n") and text.endswith(f"{end}\n\n")


def test_server_given_unexpected_exception_replies_500_and_reports_it(capfd):
    def fail(call: Call) -> Reply:
        raise ZeroDivisionError("secret")

    reported: list[BaseException] = []
    reply = ask(serving(ScriptedBackend(fail), reported.append))
    assert reply.status_code == 500 and "secret" not in reply.text and reply.json()["error"]["type"] == "server_error"
    assert [type(error) for error in reported] == [ZeroDivisionError]
    assert capfd.readouterr().err == ""


def test_server_given_unknown_path_or_method_replies_404_or_405(server):
    assert httpx.post(f"{server.url}/v1/chat/completions", json=CHAT).status_code == 404
    reply = httpx.get(f"{base_url(server)}/chat/completions", headers=HEADERS)
    assert reply.status_code == 405 and set(reply.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("stream", [False, True])
def test_server_given_half_of_a_surrogate_pair_replaces_it(stream):
    reply = replace(reply_of("a\ud800", calls=(ToolCall("c1", "f\udfff", "{}"),)), tokens=())
    text = ask(serving(ScriptedBackend(lambda call: reply)), stream=stream).text
    assert '"a?"' in text and '"f?"' in text


def test_reply_given_reasoning_counts_its_tokens():
    usage = ask(serving(ScriptedBackend(lambda call: reply_of("Yes.", "abc")))).json()["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == len("<think>abc")


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(1, 11))
def test_server_given_malformed_requests_refuses_each_in_one_line(seed, capfd):
    reported: list[BaseException] = []
    check_malformed(base_url(serving(ScriptedBackend(), reported.append)), KEY, count=3000, seed=seed)
    assert reported == []
    assert capfd.readouterr() == ("", "")
