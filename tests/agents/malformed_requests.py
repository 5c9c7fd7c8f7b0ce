"""Malformed requests, from a seed, and a check that an endpoint refuses each of them and keeps working."""

import copy
import json
import random
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

from tests.agents.protocols.exchanges import RECORDED

Json = dict[str, Any]
BODIES = {path: recorded["whole"] for path, recorded in RECORDED.items()}
BODIES["/messages/count_tokens"] = BODIES["/messages"]
UNUSED = {"/messages/count_tokens": ("max_tokens", "stop_sequences", "stream")}
"""Fields of a valid body that a route does not read."""
WRONG: tuple[Any, ...] = (None, True, 7, -1, 2.5, 10**30, "", "text", [], [[]], [7], {}, {"a": 1})
BAD = (b"\xff", b'\\ud800"', b"NaN", b"-Infinity", b"1e999", b"1" * 5000, b"[" * 1000, b"\x00", b"'", b"\n")
ADDRESSES = ("", "/", "/chat", "/chat/completions/", "/completions", "/embeddings", "/../..", "/%00", "/é")
RAW = (
    b"\x00\x01\x02\r\n\r\n",
    b"GET\r\n\r\n",
    b"POST {path} HTTP/9.9\r\n\r\n",
    b"POST {path} HTTP/1.1\r\n\r\n",  # without a host
    b"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    b"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 1e3\r\n\r\n",
    b"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    b"POST {path} HTTP/1.1\r\nHost: x\r\nbad header\r\n\r\n",
    b"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\xfe\r\nContent-Length: 2\r\n\r\n{}",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",  # the beginning of TLS
)


@dataclass(frozen=True)
class Malformed:
    """A request that cannot be answered."""

    path: str
    content: bytes = b"{}"
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=dict)
    raw: bytes | None = None
    may_be_valid: bool = False


def malformed_requests(count: int, seed: int = 0) -> Iterator[Malformed]:
    """Requests of which each kind is as frequent as the others."""
    source = random.Random(seed)
    kinds = (_broken_json, _bad_bytes, _wrong_type, _missing, _refused, _wrong_address, _wrong_key, _raw, _any_change)
    for number in range(count):
        yield kinds[number % len(kinds)](source)


def _valid(source: random.Random) -> tuple[str, Json]:
    return source.choice(list(BODIES.items()))


def _broken_json(source: random.Random) -> Malformed:
    path, body = _valid(source)
    content = json.dumps(body).encode()
    return Malformed(path, content[: source.randrange(len(content))])


def _bad_bytes(source: random.Random) -> Malformed:
    path, body = _valid(source)
    content = json.dumps(body).encode()
    bad = source.choice(BAD)
    place = content.index(b'"policy"') + (1 if bad[:1] in b"\xff\\\x00\n" else 0)
    end = content.index(b'"policy"') + len(b'"policy"')
    return Malformed(path, content[:place] + bad + content[end:])


def _places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        yield (*place, key)
        yield from _places(part, (*place, key))


def _changed(body: Json, place: tuple[Any, ...], value: Any) -> bytes:
    changed = copy.deepcopy(body)
    parent: Any = changed
    for key in place[:-1]:
        parent = parent[key]
    parent[place[-1]] = value
    return json.dumps(changed).encode()


def _wrong_type(source: random.Random) -> Malformed:
    """A field with a value of a type that it never has."""
    path, body = _valid(source)
    place = source.choice([key for key in body if key not in UNUSED.get(path, ())])
    wrong = {"stream": [7, "yes", [], {}], "system": [7, True, {"a": 1}, [7], [[]]], "input": [7, True, {"a": 1}, [7]]}
    values = wrong.get(place, [7.5, True, {"a": 1}, [[7]], [{"a": [1]}]])
    return Malformed(path, _changed(body, (place,), source.choice(values)))


def _missing(source: random.Random) -> Malformed:
    path, body = _valid(source)
    gone = source.choice(["model", "input" if path == "/responses" else "messages"])
    return Malformed(path, json.dumps({key: value for key, value in body.items() if key != gone}).encode())


def _refused(source: random.Random) -> Malformed:
    path, recorded = source.choice(list(RECORDED.items()))
    fields, _ = source.choice(recorded["refused"])
    return Malformed(path, json.dumps(BODIES[path] | fields).encode())


def _wrong_address(source: random.Random) -> Malformed:
    path = source.choice(ADDRESSES)
    method = source.choice(["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "NONSENSE"])
    if source.random() < 0.5:
        path, method = source.choice(list(BODIES)), source.choice(["GET", "PUT", "DELETE", "HEAD", "OPTIONS"])
    return Malformed(path, b"", method)


def _wrong_key(source: random.Random) -> Malformed:
    path, body = _valid(source)
    keys = [{}, {"authorization": "Bearer"}, {"authorization": "Basic eDp5"}, {"x-api-key": "wrong"}]
    return Malformed(path, json.dumps(body).encode(), headers={"authorization": "", **source.choice(keys)})


def _raw(source: random.Random) -> Malformed:
    noise = bytes(source.randrange(256) for _ in range(source.randrange(1, 60))).replace(b"\n", b"") + b"\r\n\r\n"
    return Malformed(source.choice(list(BODIES)), raw=source.choice([*RAW, b"?" + noise]))


def _any_change(source: random.Random) -> Malformed:
    """A value anywhere that is replaced, which some fields allow."""
    path, body = _valid(source)
    place = source.choice(list(_places(body)))
    return Malformed(path, _changed(body, place, source.choice(WRONG)), may_be_valid=True)


def check_malformed(base_url: str, key: str, count: int, seed: int = 0) -> None:
    """Each request gets a status 4xx and one line; a valid one after them is answered."""
    with httpx.Client(base_url=base_url, headers={"authorization": f"Bearer {key}"}, timeout=600) as client:
        for request in malformed_requests(count, seed):
            status, text = _sent_raw(base_url, request) if request.raw else _sent(client, request)
            assert 400 <= status < 500 or (request.may_be_valid and status == 200), (request, status, text)
            assert status == 200 or ("\n" not in text and "Traceback" not in text and len(text) < 1000), text
        for path, body in BODIES.items():
            assert client.post(path.removeprefix("/"), json=body).status_code == 200


def _sent(client: httpx.Client, request: Malformed) -> tuple[int, str]:
    url = str(client.base_url).removesuffix("/") + request.path
    reply = client.request(request.method, url, content=request.content, headers=request.headers)
    if reply.status_code == 200 or request.method == "HEAD":
        return reply.status_code, ""
    assert reply.headers.get("content-type") == "application/json", (request, reply, reply.content)
    error = reply.json()["error"]
    assert ("/messages" in request.path) == (reply.json().get("type") == "error")
    assert error["type"] and error["message"].endswith(".") and ": " in error["message"], error
    return reply.status_code, error["message"]


def _sent_raw(base_url: str, request: Malformed) -> tuple[int, str]:
    assert request.raw is not None
    url = urlsplit(base_url)
    with socket.create_connection((url.hostname or "", url.port or 0), timeout=600) as connection:
        connection.sendall(request.raw.replace(b"{path}", (url.path + request.path).encode()))
        connection.shutdown(socket.SHUT_WR)
        reply = b"".join(iter(lambda: connection.recv(4096), b""))
    head, _, text = reply.partition(b"\r\n\r\n")
    return int(head.split()[1]), text.decode()
