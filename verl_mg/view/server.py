"""The server of the page: files that come with the package, and JSON read from the folders of one run or two.

A request names a run by its place on the command line and an iteration by its number, never a path.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, parse_qsl, urlsplit

import pyarrow as pa

from verl_mg.errors import UserError
from verl_mg.view.run import Run
from verl_mg.view.samples import BRIEF, Query

KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    # Samples are what a model wrote: nothing in them may run, load or leave.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
JSON = "application/json"
MOST_ROWS = 1000
"""Of a page of samples."""

Parameters = Mapping[str, str]


class _RequestError(Exception):
    """A request that cannot be answered: HTTP status, and what is wrong with it."""


def view(folders: list[Path], host: str, port: int) -> None:
    """Serve the page until Ctrl-C, at a free port where `port` is 0; UserError where a folder or the port is bad."""
    with Viewer([Run(folder) for folder in folders], host, port) as viewer:
        if not _is_loopback(host):
            print(f"warning: {host} can be reached from outside: whoever does so reads the samples", file=sys.stderr)
        print(f"view {viewer.url}  (Ctrl-C ends it)", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            viewer.serve_forever()


class Viewer(ThreadingHTTPServer):
    """Listening when built; `serve_forever` answers."""

    daemon_threads = True

    def __init__(self, runs: list[Run], host: str = "127.0.0.1", port: int = 0) -> None:
        self.runs = runs
        if len({run.name for run in runs}) < len(runs):
            for run in runs:
                run.name = f"{run.folder.resolve().parent.name}/{run.name}"
        self.page = {
            file.name: file.read_bytes()
            for file in resources.files("verl_mg.view").joinpath("page").iterdir()
            if Path(file.name).suffix in KINDS
        }
        self.open_to_all = not _is_loopback(host)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UserError(f"--host {host} --port {port}: {reason}; leave --port out for a free one") from None

    @property
    def url(self) -> str:
        """Where the page is."""
        host, port = self.server_address[:2]
        return f"http://[{host!s}]:{port}/" if ":" in str(host) else f"http://{host!s}:{port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away in the middle of an answer is no error."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _Handler(BaseHTTPRequestHandler):
    server: Viewer
    protocol_version = "HTTP/1.1"
    timeout = 60

    def do_GET(self) -> None:
        try:
            status, kind, body = 200, *self._asked()
        except _RequestError as refused:
            status, reason = refused.args
            kind, body = JSON, json.dumps({"error": reason}).encode()
        except (OSError, pa.ArrowException) as error:
            # What a run that goes on has just replaced; the page asks again.
            status, kind, body = 503, JSON, json.dumps({"error": str(error)}).encode()
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **HEADERS}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _asked(self) -> tuple[str, bytes]:
        """The kind and the bytes of what was asked for."""
        self._check_host()
        asked = _split(self.path)
        if asked.path.startswith("/api/"):
            told = _answer(self.server.runs, asked.path.removeprefix("/api/"), dict(parse_qsl(asked.query)))
            return JSON, json.dumps(told, allow_nan=False).encode()
        name = asked.path.removeprefix("/") or "index.html"
        if name not in self.server.page:
            raise _RequestError(404, f"no {name}")
        return KINDS[Path(name).suffix], self.server.page[name]

    def _check_host(self) -> None:
        """A foreign page must not read samples through a name of its own that leads to this machine."""
        name = _split(f"//{self.headers.get('Host', '')}").hostname or ""
        if not self.server.open_to_all and not _is_loopback(name):
            raise _RequestError(403, f"{name}: not a name of this machine; use {self.server.url}")

    def log_message(self, format: str, *args: Any) -> None:
        """The terminal stays quiet."""


def _split(address: str) -> SplitResult:
    try:
        return urlsplit(address)
    except ValueError:
        raise _RequestError(400, f"{address}: not an address") from None


def _answer(runs: list[Run], name: str, parameters: Parameters) -> Any:
    if name == "runs":
        return [run.about() for run in runs]
    if name not in _ANSWERS:
        raise _RequestError(404, f"no {name}; there are runs, {', '.join(_ANSWERS)}")
    number = _number(parameters, "run", int, 0)
    if not 0 <= number < len(runs):
        raise _RequestError(404, f"run={number}: there are {len(runs)}, from 0")
    return _ANSWERS[name](runs[number], parameters)


def _number(parameters: Parameters, name: str, kind: type, default: Any = None) -> Any:
    try:
        value = kind(parameters[name]) if name in parameters else default
    except ValueError:
        raise _RequestError(400, f"{name}={parameters[name]}: not a number") from None
    if isinstance(value, int) and abs(value) >= 2**63:
        raise _RequestError(400, f"{name}={value}: too large")
    return value


def _needed(parameters: Parameters, name: str) -> int:
    if name not in parameters:
        raise _RequestError(400, f"{name} is missing")
    number: int = _number(parameters, name, int)
    return number


def _metrics(run: Run, parameters: Parameters) -> Any:
    return run.metrics(parameters.get("file", ""), max(0, _number(parameters, "offset", int, 0)))


def _timeline(run: Run, parameters: Parameters) -> Any:
    return run.timeline(_needed(parameters, "iteration"))


def _facets(run: Run, parameters: Parameters) -> Any:
    return run.samples.facets(_number(parameters, "first", int), _number(parameters, "last", int))


def _samples(run: Run, parameters: Parameters) -> Any:
    kinds = {"int": int, "float": float, "str": str}
    asked: dict[str, Any] = {}
    for field in fields(Query):
        kind = kinds.get(str(field.type).split(" ")[0])
        if kind and field.name in parameters:
            asked[field.name] = _number(parameters, field.name, kind)
    asked["descending"] = parameters.get("descending") == "true"
    query = Query(**asked)
    if query.sort not in BRIEF:
        raise _RequestError(400, f"sort={query.sort}: not one of {', '.join(BRIEF)}")
    if query.offset < 0 or not 0 <= query.limit <= MOST_ROWS:
        bounds = f"offset={query.offset} limit={query.limit}"
        raise _RequestError(400, f"{bounds}: write 0 or more, and at most {MOST_ROWS} rows")
    return run.samples.find(query)


def _prompts(run: Run, parameters: Parameters) -> Any:
    return run.samples.prompts(_needed(parameters, "iteration"))


def _sample(run: Run, parameters: Parameters) -> Any:
    iteration, call, number = (_needed(parameters, name) for name in ("iteration", "call", "sample_id"))
    found = run.samples.one(iteration, call, number)
    if found is None:
        raise _RequestError(404, f"iteration {iteration} has no sample {number} of call {call}")
    return found


_ANSWERS: dict[str, Callable[[Run, Parameters], Any]] = {
    "metrics": _metrics,
    "timeline": _timeline,
    "facets": _facets,
    "samples": _samples,
    "prompts": _prompts,
    "sample": _sample,
}
