"""A real S3 server on the loopback interface (moto's), in a process that may be killed and started again.

python -m tests.helpers.s3_server FOLDER PORT: objects and parts are in FOLDER/state after each request that changes
them, so a server that is started again has what the one before had answered.
"""

import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from tests.helpers.waiting import wait_until

BUCKET = "runs"
HOLD = "hold"
"""File in the folder of the server: a request whose address contains its text is not answered while it exists."""
HELD = "held"
"""File that the server makes when it holds a request."""


class S3Server:
    """The server's process; `variables` are what its clients need in their environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def variables(self) -> Mapping[str, str]:
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._port}",
            "AWS_ACCESS_KEY_ID": "the-key-id",
            "AWS_SECRET_ACCESS_KEY": "the-secret-key",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def start(self) -> None:
        command = [sys.executable, "-m", __name__, str(self.folder), str(self._port)]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self._port)) == 0:
                    return
            if self._process.poll() is not None:
                raise RuntimeError(f"the S3 server has ended with {self._process.returncode}")
            time.sleep(0.02)
        raise TimeoutError("the S3 server does not listen")

    def kill(self) -> None:
        """Kills the server, which completes no request."""
        assert self._process
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def hold(self, part: str) -> None:
        """Holds every PUT, POST or DELETE whose path and query contain a text, from now on."""
        (self.folder / HELD).unlink(missing_ok=True)
        (self.folder / HOLD).write_text(part)

    def release(self) -> None:
        (self.folder / HOLD).unlink(missing_ok=True)

    def is_holding(self) -> bool:
        return (self.folder / HELD).exists()

    @contextmanager
    def lost_at(self, part: str, seconds: float = 0.7) -> Iterator[None]:
        """Kills the server in the middle of the first request with a text, and starts it again some time later."""
        self.hold(part)

        def restart() -> None:
            wait_until(self.is_holding)
            self.kill()
            self.release()
            time.sleep(seconds)
            self.start()

        thread = threading.Thread(target=restart)
        thread.start()
        yield
        thread.join()


@contextmanager
def s3_server(folder: Path) -> Iterator[S3Server]:
    folder.mkdir(parents=True, exist_ok=True)
    server = S3Server(folder)
    server.start()
    try:
        yield server
    finally:
        server.kill()


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except FileNotFoundError:
        return ""


def _serve(folder: Path, port: int) -> None:
    from moto.backends import get_backend
    from moto.core import DEFAULT_ACCOUNT_ID
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    state, lock = folder / "state", threading.Lock()
    backends: Any = get_backend("s3")[DEFAULT_ACCOUNT_ID]
    if state.exists():
        backends["aws"].buckets = pickle.loads(state.read_bytes())
    else:
        backends["aws"].create_bucket(BUCKET, "us-east-1")
    application = DomainDispatcherApplication(create_backend_app)

    def persistent(environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        if environ["REQUEST_METHOD"] not in ("PUT", "POST", "DELETE"):
            return application(environ, start_response)
        while (text := _text(folder / HOLD)) and text in f"{environ['PATH_INFO']}?{environ['QUERY_STRING']}":
            (folder / HELD).touch()
            time.sleep(0.01)
        with lock:  # answered only when it is on disk
            upload = parse_qs(environ["QUERY_STRING"]).get("uploadId", [""])[0]
            if upload and upload not in backends["aws"].buckets[BUCKET].multiparts:
                # As S3 does; moto fails.
                start_response("404 Not Found", [("Content-Type", "application/xml")])
                return [b"<Error><Code>NoSuchUpload</Code><Message>no such upload</Message></Error>"]
            answer = application(environ, start_response)
            partial = state.with_suffix(".partial")
            partial.write_bytes(pickle.dumps(backends["aws"].buckets))
            os.replace(partial, state)
        return answer

    make_server("127.0.0.1", port, persistent, threaded=True).serve_forever()


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), int(sys.argv[2]))
