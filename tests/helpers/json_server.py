"""Real HTTP servers on the loopback interface."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple


class JsonResponse(NamedTuple):
    """Response of the test server; a body is sent as JSON, unless it is bytes."""

    body: Any
    status: int = 200
    headers: tuple[tuple[str, str], ...] = ()


class JsonRequest(NamedTuple):
    """Request that the test server has received."""

    path: str
    body: Any
    headers: dict[str, str]


@contextmanager
def serving(respond: Callable[[JsonRequest], JsonResponse]) -> Iterator[str]:
    """Runs a server that handles POST requests concurrently, and yields its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            text = self.rfile.read(int(self.headers["Content-Length"]))
            headers = {name.lower(): value for name, value in self.headers.items()}
            body, status, more = respond(JsonRequest(self.path, json.loads(text), headers))
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            try:
                self.send_response(status)
                for name, value in (("Content-Length", str(len(content))), *more):
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)
            except BrokenPipeError:  # the client has timed out
                pass

        def log_message(self, *_: Any) -> None:
            pass

    with listening(Handler) as url:
        yield url


@contextmanager
def listening(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Runs a server in threads, and yields its URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
