"""HTTP server of the page: files of the package, and JSON read from the folders of runs.

A request names a run by its position on the command line and an iteration by its number, never by a path.
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
from verl_mg.view.samples import AGENT_OUTCOMES, IDENTITY, SORTABLE, Query

KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    # Samples are text of a model: nothing in them may run, load resources or send data.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
JSON = "application/json"
MAX_PAGE_ROWS = 1000
"""Largest number of samples in a page."""

Parameters = Mapping[str, str]


class _RequestError(Exception):
    """An invalid request; its arguments are the HTTP status and a message."""


def view(folders: list[Path], host: str, port: int) -> None:
    """Serves the page until Ctrl-C.

    Args:
        folders: output folders of runs.
        host: address to listen on.
        port: port; 0 for a free one.

    Raises:
        UserError: a folder is not a run, or the port is not available.
    """
    with Viewer([Run(folder) for folder in folders], host, port) as viewer:
        if not _is_loopback(host):
            print(
                f"warning: {host} is reachable from other machines: their users can read the samples", file=sys.stderr
            )
        print(f"view {viewer.url}  (Ctrl-C ends it)", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            viewer.serve_forever()


class Viewer(ThreadingHTTPServer):
    """The HTTP server; it listens when it is constructed, and `serve_forever` handles requests."""

    daemon_threads = True

    def __init__(self, runs: list[Run], host: str = "127.0.0.1", port: int = 0) -> None:
        """Opens the port.

        Args:
            runs: the runs.
            host: address to listen on.
            port: port; 0 for a free one.
        """
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
            reason = str(getattr(error, "strerror", None) or error).rstrip(".")
            raise UserError(f"--host {host} --port {port}: {reason}. Omit --port to use a free one.") from None

    @property
    def url(self) -> str:
        """Returns the address of the page."""
        host, port = self.server_address[:2]
        return f"http://[{host!s}]:{port}/" if ":" in str(host) else f"http://{host!s}:{port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores a browser that disconnects during a response.

        Args:
            request: the connection.
            client_address: address of the browser.
        """
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
            status, kind, body = 200, *self._respond()
        except _RequestError as refused:
            status, reason = refused.args
            kind, body = JSON, json.dumps({"error": reason}).encode()
        except (OSError, pa.ArrowException) as error:
            # A running job has just replaced the file; the page repeats the request.
            status, kind, body = 503, JSON, json.dumps({"error": str(error)}).encode()
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **HEADERS}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _respond(self) -> tuple[str, bytes]:
        """Returns the content type and the content of the requested path."""
        self._check_host()
        url = _split(self.path)
        if url.path.startswith("/api/"):
            content = _api(self.server.runs, url.path.removeprefix("/api/"), dict(parse_qsl(url.query)))
            return JSON, json.dumps(content, allow_nan=False).encode()
        name = url.path.removeprefix("/") or "index.html"
        if name not in self.server.page:
            raise _RequestError(404, f"no {name}")
        return KINDS[Path(name).suffix], self.server.page[name]

    def _check_host(self) -> None:
        """Rejects foreign host names, with which another page could read samples by DNS rebinding."""
        name = _split(f"//{self.headers.get('Host', '')}").hostname or ""
        if not self.server.open_to_all and not _is_loopback(name):
            raise _RequestError(403, f"{name}: not a name of this machine; use {self.server.url}")

    def log_message(self, format: str, *args: Any) -> None:
        """Prints nothing for a request."""


def _split(address: str) -> SplitResult:
    try:
        return urlsplit(address)
    except ValueError:
        raise _RequestError(400, f"{address}: not an address") from None


def _api(runs: list[Run], name: str, parameters: Parameters) -> Any:
    if name == "runs":
        return [run.about() for run in runs]
    if name not in _ENDPOINTS:
        raise _RequestError(404, f"no {name}; there are runs, {', '.join(_ENDPOINTS)}")
    number = _number(parameters, "run", int, 0)
    if not 0 <= number < len(runs):
        raise _RequestError(404, f"run={number}: there are {len(runs)}, from 0")
    return _ENDPOINTS[name](runs[number], parameters)


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
    arguments: dict[str, Any] = {}
    for field in fields(Query):
        kind = kinds.get(str(field.type).split(" ")[0])
        if kind and field.name in parameters:
            arguments[field.name] = _number(parameters, field.name, kind)
    arguments |= {name: parameters.get(name) == "true" for name in ("descending", "trajectories")}
    query = Query(**arguments)
    if query.sort not in SORTABLE:
        raise _RequestError(400, f"sort={query.sort}: not one of {', '.join(SORTABLE)}")
    if query.agent not in (None, *AGENT_OUTCOMES):
        raise _RequestError(400, f"agent={query.agent}: not one of {', '.join(AGENT_OUTCOMES)}")
    if query.offset < 0 or not 0 <= query.limit <= MAX_PAGE_ROWS:
        bounds = f"offset={query.offset} limit={query.limit}"
        raise _RequestError(400, f"{bounds}: write 0 or more, and at most {MAX_PAGE_ROWS} rows")
    return run.samples.find(query)


def _prompts(run: Run, parameters: Parameters) -> Any:
    return run.samples.prompts(_needed(parameters, "iteration"))


def _sample(run: Run, parameters: Parameters) -> Any:
    iteration, call, number = (_needed(parameters, name) for name in IDENTITY)
    sample = run.samples.get(iteration, call, number)
    if sample is None:
        raise _RequestError(404, f"iteration {iteration} has no sample {number} of call {call}")
    return sample


def _conversation(run: Run, parameters: Parameters) -> Any:
    iteration, call, number = (_needed(parameters, name) for name in IDENTITY)
    conversation = run.samples.conversation(iteration, call, number)
    if conversation is None:
        raise _RequestError(404, f"iteration {iteration} has no conversation of sample {number} of call {call}")
    return conversation


_ENDPOINTS: dict[str, Callable[[Run, Parameters], Any]] = {
    "metrics": _metrics,
    "timeline": _timeline,
    "facets": _facets,
    "samples": _samples,
    "prompts": _prompts,
    "sample": _sample,
    "conversation": _conversation,
}
