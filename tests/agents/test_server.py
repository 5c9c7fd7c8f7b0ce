"""The endpoint's server with the official clients, and its limits."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from urllib.parse import urlsplit

import httpx
import pytest

from tests.agents.malformed_requests import check_malformed
from tests.agents.scripted_backend import KEY, ScriptedBackend, base_url, reply_of, serving
from verl_mg.agents import server as agent_server
from verl_mg.agents.call import Call, Reply, RequestError
from verl_mg.agents.server import AgentServer
from verl_mg.agents.tool_calls import ToolCall

CHAT = {"model": "policy", "messages": [{"role": "user", "content": "Hello"}]}
HEADERS = {"authorization": f"Bearer {KEY}"}


def wait_for(entries: Sequence[object]) -> None:
    """Waits until a list has an entry."""
    deadline = time.monotonic() + 600
    while not entries:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(scope="module")
def server() -> Iterator[AgentServer]:
    with serving(ScriptedBackend()) as running:
        yield running


def test_server_given_official_clients_satisfies_their_checks(server):
    pytest.importorskip("openai")
    pytest.importorskip("anthropic")
    from tests.agents import client_checks

    for name in client_checks.CHECKS:
        result = getattr(client_checks, name)(base_url(server), KEY)
        if result is not None:
            asyncio.run(result)


def test_server_given_wrong_key_replies_before_the_body_is_read(server):
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname or "", address.port or 0), timeout=600) as connection:
        path = urlsplit(base_url(server)).path
        connection.sendall(f"POST {path}/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n".encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize("steps", [1, 2])
def test_server_given_session_that_ends_during_the_request_replies_404(steps):
    backend, reported = ScriptedBackend(), list[BaseException]()
    backend.ends_after = steps  # once it is authorized, once the body has been read
    with serving(backend, on_error=reported.append) as server:
        reply = httpx.post(f"{base_url(server)}/chat/completions", json=CHAT, headers=HEADERS)
    assert reply.status_code == 404 and not backend.calls and not reported


def test_server_given_body_above_the_limit_replies_413(server, monkeypatch):
    monkeypatch.setattr(agent_server, "MAX_BODY", 1000)
    url = f"{base_url(server)}/chat/completions"
    large = json.dumps(CHAT | {"user": "x" * 1000}).encode()
    assert httpx.post(url, content=large, headers=HEADERS).status_code == 413
    assert httpx.post(url, content=iter([large[:600], large[600:]]), headers=HEADERS).status_code == 413
    assert httpx.post(url, json=CHAT, headers=HEADERS).status_code == 200


def test_server_given_disconnected_client_completes_the_call():
    backend, body = ScriptedBackend(delay=0.2), json.dumps(CHAT)
    with serving(backend) as server:
        url = urlsplit(f"{base_url(server)}/chat/completions")
        head = f"POST {url.path} HTTP/1.1\r\nHost: x\r\nx-api-key: {KEY}\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection((url.hostname or "", url.port or 0)) as connection:
            connection.sendall((head + body).encode())
            wait_for(backend.calls)
        wait_for(backend.replies)


def test_server_given_slow_reply_keeps_the_stream_alive(monkeypatch):
    monkeypatch.setattr(agent_server, "KEEP_ALIVE_S", 0.001)
    with serving(ScriptedBackend(delay=0.3)) as server:
        url = f"{base_url(server)}/chat/completions"
        text = httpx.post(url, json=CHAT | {"stream": True}, headers=HEADERS).text
    assert text.startswith(": keep-alive\n\n") and text.endswith("data: [DONE]\n\n")


def test_server_given_error_after_the_stream_has_begun_writes_an_event(monkeypatch):
    def refuse(call: Call) -> Reply:
        raise RequestError(400, "messages: too long. Send fewer.", code="context_length_exceeded")

    monkeypatch.setattr(agent_server, "KEEP_ALIVE_S", 0.001)
    with serving(ScriptedBackend(refuse, delay=0.3)) as server:
        url = f"{base_url(server)}/chat/completions"
        reply = httpx.post(url, json=CHAT | {"stream": True}, headers=HEADERS)
    assert json.loads(reply.text.split("data: ")[-1])["error"]["code"] == "context_length_exceeded"


def test_server_given_unexpected_exception_replies_500_and_reports_it(capfd):
    def fail(call: Call) -> Reply:
        raise ZeroDivisionError("secret")

    reported: list[BaseException] = []
    with serving(ScriptedBackend(fail), on_error=reported.append) as server:
        reply = httpx.post(f"{base_url(server)}/chat/completions", json=CHAT, headers=HEADERS)
    assert reply.status_code == 500 and "secret" not in reply.text and reply.json()["error"]["type"] == "server_error"
    assert [type(error) for error in reported] == [ZeroDivisionError]
    assert capfd.readouterr().err == ""


def test_server_given_close_ends_running_calls_with_503():
    backend = ScriptedBackend(delay=6000)
    server = AgentServer(backend, "127.0.0.1", pytest.fail)
    replies: list[httpx.Response] = []
    url = f"{base_url(server)}/chat/completions"
    thread = threading.Thread(target=lambda: replies.append(httpx.post(url, json=CHAT, headers=HEADERS, timeout=600)))
    thread.start()
    wait_for(backend.calls)
    server.close()
    server.close()
    thread.join()
    assert replies[0].status_code == 503


def test_server_given_unknown_path_or_method_replies_404_or_405(server):
    assert httpx.post(f"{server.url}/v1/chat/completions", json=CHAT).status_code == 404
    reply = httpx.get(f"{base_url(server)}/chat/completions", headers=HEADERS)
    assert reply.status_code == 405 and set(reply.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("stream", [False, True])
def test_server_given_half_of_a_surrogate_pair_replaces_it(stream):
    reply = reply_of("a\ud800", calls=(ToolCall("c1", "f\udfff", "{}"),))
    with serving(ScriptedBackend(lambda call: replace(reply, tokens=()))) as server:
        text = httpx.post(f"{base_url(server)}/chat/completions", json=CHAT | {"stream": stream}, headers=HEADERS).text
    assert '"a?"' in text and '"f?"' in text


def test_reply_given_reasoning_counts_its_tokens():
    with serving(ScriptedBackend(lambda call: reply_of("Yes.", "abc"))) as server:
        usage = httpx.post(f"{base_url(server)}/chat/completions", json=CHAT, headers=HEADERS).json()["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == len("<think>abc")


def test_server_given_malformed_requests_refuses_each_in_one_line(capfd):
    reported: list[BaseException] = []
    with serving(ScriptedBackend(), on_error=reported.append) as server:
        check_malformed(base_url(server), KEY, count=500)
    assert reported == []
    assert capfd.readouterr() == ("", "")


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(1, 11))
def test_server_given_many_malformed_requests_refuses_each(seed):
    reported: list[BaseException] = []
    with serving(ScriptedBackend(), on_error=reported.append) as server:
        check_malformed(base_url(server), KEY, count=3000, seed=seed)
    assert reported == []
