"""Server on the loopback interface that speaks as much of the Hugging Face hub's protocol as its client needs."""

import hashlib
import json
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

from tests.helpers.json_server import listening

COMMIT = "0123456789abcdef0123456789abcdef01234567"
"""The commit that every revision has."""


class HubServer(NamedTuple):
    url: str
    """Its address, for HF_ENDPOINT."""
    downloads: Counter[str]
    """How often each file was sent."""
    held: threading.Semaphore
    """Counts the answers that have stopped in the middle of a held file."""
    release: threading.Event
    """Once set, held files are sent whole."""

    def variables(self, home: Path) -> dict[str, str]:
        """Environment of a client whose cache is in a folder."""
        return {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}


def forget_client() -> None:
    """Makes the next import of the client read its variables: a warm start has the client of its server."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "huggingface_hub"]:
        del sys.modules[name]


@contextmanager
def serving(
    models: Mapping[str, Mapping[str, bytes]],
    datasets: Mapping[str, Mapping[str, bytes]],
    held: str | None = None,
    gated: str | None = None,
) -> Iterator[HubServer]:
    """Serves repositories as {name: {path: content}}: of file `held` half until `release` is set, `gated` to nobody."""
    repositories = {f"models/{name}": files for name, files in models.items()}
    repositories |= {f"datasets/{name}": files for name, files in datasets.items()}
    downloads: Counter[str] = Counter()
    held_answers, release = threading.Semaphore(0), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            parts = unquote(self.path.partition("?")[0]).strip("/").split("/")
            if parts[0] == "api":
                self._answer_api("/".join(parts[1:4]), parts[4:])
            else:
                kind = () if parts[0] == "datasets" else ("models",)
                repository, (_, _, *file) = "/".join((*kind, *parts[: 3 - len(kind)])), parts[3 - len(kind) :]
                if repository == f"models/{gated}":
                    self._send(b'{"error": "restricted"}', 403, {"X-Error-Code": "GatedRepo"})
                else:
                    self._answer_file(repositories[repository]["/".join(file)], "/".join(file))

        def do_HEAD(self) -> None:
            self.do_GET()

        def _answer_api(self, repository: str, rest: list[str]) -> None:
            files = repositories.get(repository)
            if files is None:
                self._send(b'{"error": "not found"}', 404, {"X-Error-Code": "RepoNotFound"})
            elif rest[:1] == ["tree"]:
                sizes = [
                    {"type": "file", "path": path, "size": len(data), "oid": _etag(data)}
                    for path, data in files.items()
                ]
                self._send_json(sizes)
            elif rest[:1] == ["revision"] and rest[1] not in ("main", "v1", COMMIT):
                self._send(b'{"error": "not found"}', 404, {"X-Error-Code": "RevisionNotFound"})
            else:
                name = repository.partition("/")[2]
                self._send_json({"id": name, "sha": COMMIT, "siblings": [{"rfilename": path} for path in files]})

        def _answer_file(self, data: bytes, path: str) -> None:
            if self.command == "GET":
                downloads[path] += 1
            stop = path == held and self.command == "GET"
            self._send(data, 200, {"ETag": f'"{_etag(data)}"', "X-Repo-Commit": COMMIT}, stop)

        def _send_json(self, value: Any) -> None:
            self._send(json.dumps(value).encode(), 200, {"Content-Type": "application/json"})

        def _send(self, data: bytes, status: int, headers: Mapping[str, str], stop: bool = False) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(data)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            half = len(data) // 2 if stop else 0
            if half:
                self.wfile.write(data[:half])
                self.wfile.flush()
                held_answers.release()
                release.wait()
            if self.command == "GET":
                with suppress(ConnectionError):  # the client was killed
                    self.wfile.write(data[half:])

        def log_message(self, *_: Any) -> None:
            pass

    with listening(Handler) as url:
        try:
            yield HubServer(url, downloads, held_answers, release)
        finally:
            release.set()


def _etag(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()
