"""Writes the records of an iteration in a thread, while the next one generates.

    rank's thread       write(records of 3) ─▶ iteration 4 ... ─▶ flush: waits for them ─▶ write(records of 4)
                            │                                    ▲
    thread "records"        └─▶ writes them, in their order ─────┘

All is written before the records of the next iteration are given, before a checkpoint is complete, and at the end, also
at that by an exception. So a process that is killed loses at most the records of its last complete iteration, and
a resumed run has no gap in its records: it repeats the iterations after its checkpoint.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Queue
from types import TracebackType


class RecordWriter:
    """Context manager of the thread. An exception of a write is raised by the next `flush`."""

    def __init__(self) -> None:
        self._queue: Queue[Callable[[], None] | None] = Queue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="records")

    def __enter__(self) -> RecordWriter:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        _: TracebackType | None,
    ) -> None:
        self._queue.put(None)
        self._thread.join()
        if error is None:
            self.flush()

    def write(self, job: Callable[[], None]) -> None:
        """Writes after all that was given before; what `job` reads must not change any more."""
        self._queue.put(job)

    def wait(self) -> None:
        """Waits until all is written; from any thread."""
        self._queue.join()

    def flush(self) -> None:
        """Waits until all is written, and raises what a write has raised."""
        self.wait()
        if self._error:
            error, self._error = self._error, None
            raise error

    def _run(self) -> None:
        """Consumes the queue, woken by each entry; ended by None."""
        while (job := self._queue.get()) is not None:
            try:
                job()
            except BaseException as error:  # raised again in the rank's thread
                self._error = self._error or error
            self._queue.task_done()
        self._queue.task_done()
