"""HTTP server of the page: files of the package, and JSON read from the folders of runs.

    main thread             view --> serve_forever: accepts connections, until Ctrl-C or SIGTERM
    thread per connection   do_GET --> _check_host --> file of the page, or
                            /api/NAME --> Run --> Metrics (lock), Samples (lock), SampleIndex (lock)
    process per run         index_builder, started by `view` where the run has many iterations, ended by `server_close`

A request names a run by its position on the command line and an iteration by its number, never by a path.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import signal
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
from verl_mg.view.metrics import BANDS, View, band, every, points
from verl_mg.view.rows import IDENTITY
from verl_mg.view.run import Run, groups_of
from verl_mg.view.search import AGENT_OUTCOMES, SORTABLE, Query

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
MAX_PIXELS = 8000
PHASES, ITERATION = "time/phase/", "time/iteration"  # metrics with the seconds of each phase, and of all

Parameters = Mapping[str, str]


class _RequestError(Exception):
    """An invalid request; its arguments are the HTTP status and a message."""


def view(folders: list[Path], host: str, port: int) -> None:
    """Serves the page of some runs until Ctrl-C or SIGTERM; port 0 is a free one."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # by an exception, so that the index builders are ended
    with Viewer([Run(folder) for folder in folders], host, port) as viewer:
        for run in viewer.runs:
            run.metrics.update()
            run.samples.index.start()
        if viewer.open_to_all:
            warning = f"warning: {host} is reachable from other machines: their users can read the samples"
            print(warning, file=sys.stderr)
        print(f"view {viewer.url}  (Ctrl-C ends it)", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            viewer.serve_forever()


class Viewer(ThreadingHTTPServer):
    """The HTTP server; it listens when it is constructed, and `serve_forever` handles requests."""

    daemon_threads = True  # a browser keeps connections open, which must not delay the end

    def __init__(self, runs: list[Run], host: str = "127.0.0.1", port: int = 0) -> None:
        self.runs = runs
        if len({run.name for run in runs}) < len(runs):  # such as a/output and b/output
            for run in runs:
                run.name = f"{run.folder.resolve().parent.name}/{run.name}"
        # Read once: a path in a request can name nothing but one of these files.
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

    def server_close(self) -> None:
        """Closes the port, and ends the processes that build the indexes of samples."""
        super().server_close()
        for run in self.runs:
            run.samples.index.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores a browser that disconnects during a response."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _Handler(BaseHTTPRequestHandler):
    server: Viewer
    # A connection serves several requests, and an idle one gives its thread back after the time limit in seconds.
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
            return JSON, json.dumps(content, allow_nan=False).encode()  # a browser cannot parse NaN
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
    if name == "groups":
        return groups_of([run.configuration for run in runs])
    if name == "curves":
        return _curves(runs, parameters)
    if name not in _ENDPOINTS:
        raise _RequestError(404, f"no {name}; there are runs, groups, curves, {', '.join(_ENDPOINTS)}")
    number = _number(parameters, "run", int, 0)
    if not 0 <= number < len(runs):
        raise _RequestError(404, f"run={number}: there are {len(runs)}, from 0")
    return _ENDPOINTS[name](runs[number], parameters)


def _number(parameters: Parameters, name: str, kind: type, default: Any = None) -> Any:
    try:
        value = kind(parameters[name]) if name in parameters else default
    except ValueError:
        raise _RequestError(400, f"{name}={parameters[name]}: not a number") from None
    if isinstance(value, int) and abs(value) >= 2**63:  # columns are int64
        raise _RequestError(400, f"{name}={value}: too large")
    return value


def _needed(parameters: Parameters, name: str) -> int:
    if name not in parameters:
        raise _RequestError(400, f"{name} is missing")
    number: int = _number(parameters, name, int)
    return number


def _listed(parameters: Parameters, name: str, kind: type) -> list[Any]:
    """Returns a list of numbers or texts, which is written as JSON."""
    try:
        values = json.loads(parameters.get(name, ""))
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, list) or not all(type(value) is kind for value in values):
        raise _RequestError(400, f"{name}={parameters.get(name)}: not a list in JSON")
    return values


def _curves(runs: list[Run], parameters: Parameters) -> Any:
    """Returns the curves of metrics by name: of one run, or the mean of several with a band."""
    numbers, names = _listed(parameters, "runs", int), _listed(parameters, "names", str)
    if not numbers or not all(0 <= number < len(runs) for number in numbers):
        raise _RequestError(404, f"runs={numbers}: there are {len(runs)}, from 0")
    first, last = (_number(parameters, name, int) for name in ("first", "last"))
    smoothing = _number(parameters, "smoothing", float, 0.0)
    pixels, kind = _number(parameters, "pixels", int, 400), parameters.get("band", BANDS[0])
    if not 0 <= smoothing < 1 or not 1 <= pixels <= MAX_PIXELS or kind not in BANDS:
        bounds = f"smoothing={smoothing} pixels={pixels} band={kind}"
        raise _RequestError(400, f"{bounds}: write 0 to below 1, 1 to {MAX_PIXELS}, and one of {', '.join(BANDS)}")
    for number in numbers:
        runs[number].metrics.update()
    shown = View(first, last, pixels, smoothing)
    curves = {name: [runs[number].metrics.curve(name) for number in numbers] for name in names}
    if len(numbers) == 1:
        return {name: points(of_runs[0], shown) for name, of_runs in curves.items()}
    return {name: band(of_runs, shown, kind) for name, of_runs in curves.items()}


def _strip(run: Run, parameters: Parameters) -> Any:
    """Returns the seconds of phases at some iterations by name of the metric."""
    first, stride = _needed(parameters, "first"), _needed(parameters, "stride")
    if stride < 1:
        raise _RequestError(400, f"stride={stride}: write 1 or more")
    names = [name for name in run.metrics.latest()["names"] if name.startswith(PHASES) or name == ITERATION]
    return {name: every(run.metrics.curve(name), first, stride) for name in names}


def _samples(run: Run, parameters: Parameters) -> Any:
    # The fields of `Query` are the parameters; their annotations are texts, such as "int | None".
    kinds = {"int": int, "float": float, "str": str}
    arguments: dict[str, Any] = {}
    for field in fields(Query):
        kind = kinds.get(str(field.type).split(" ")[0])
        if kind and field.name in parameters:
            arguments[field.name] = _number(parameters, field.name, kind)
    arguments |= {name: parameters.get(name) == "true" for name in ("descending", "trajectories", "words")}
    query = Query(**arguments)
    if query.sort not in SORTABLE:
        raise _RequestError(400, f"sort={query.sort}: not one of {', '.join(SORTABLE)}")
    if query.agent not in (None, *AGENT_OUTCOMES):
        raise _RequestError(400, f"agent={query.agent}: not one of {', '.join(AGENT_OUTCOMES)}")
    if query.offset < 0 or not 0 <= query.limit <= MAX_PAGE_ROWS:
        bounds = f"offset={query.offset} limit={query.limit}"
        raise _RequestError(400, f"{bounds}: write 0 or more, and at most {MAX_PAGE_ROWS} rows")
    return run.samples.find(query)


def _of_sample(get: Callable[[int, int, int], Any], parameters: Parameters, what: str) -> Any:
    iteration, call, number = (_needed(parameters, name) for name in IDENTITY)
    content = get(iteration, call, number)
    if content is None:
        raise _RequestError(404, f"iteration {iteration} has no {what} {number} of call {call}")
    return content


_ENDPOINTS: dict[str, Callable[[Run, Parameters], Any]] = {
    "strip": _strip,
    "timeline": lambda run, parameters: run.timeline(_needed(parameters, "iteration")),
    "facets": lambda run, parameters: run.samples.facets(*(_number(parameters, end, int) for end in ("first", "last"))),
    "samples": _samples,
    "prompts": lambda run, parameters: run.samples.prompts(_needed(parameters, "iteration")),
    "sample": lambda run, parameters: _of_sample(run.samples.get, parameters, "sample"),
    "conversation": lambda run, parameters: _of_sample(run.samples.conversation, parameters, "conversation of sample"),
}
