from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from verl_mg.engines.engine import EngineDiedError
from verl_mg.engines.ipc_payload import Staging
from verl_mg.engines.patch_payload import PatchStaging
from verl_mg.engines.process_engine import ProcessEngine

Result = TypeVar("Result")
log = logging.getLogger(__name__)


class EngineUpdate:
    """Update of the weights of the engine in another process that this rank leads, if any."""

    # The engine's process may end at any time. Its leader still takes part in the transfer, because other ranks wait
    # for its messages; the engine is restarted before it generates samples.

    def __init__(self, engine: ProcessEngine | None, version: int) -> None:
        self._engine, self._version = engine, version
        self._loading: int | None = None
        self._staging: Staging | PatchStaging | None = None
        self.died = False

    def load(self, staging: Staging | PatchStaging, payloads: Sequence[str], is_last: bool) -> None:
        """Starts copying a chunk into the parameters, from the payloads of all ranks of the engine.

        `staging` is the memory of this rank's payload. It replaces the previous chunk's memory, which must be copied.
        """
        self._staging = staging
        self._loading = self._call(lambda engine: engine.load(payloads, self._version if is_last else None))

    def finish_load(self) -> None:
        """Waits until the engine has copied the chunk of the last `load`; it has the new version after the last one."""
        loading, self._loading = self._loading, None
        if loading is not None:
            self._call(lambda engine: engine.loaded(loading))

    def _call(self, function: Callable[[ProcessEngine], Result]) -> Result | None:
        if self._engine is not None:
            try:
                return function(self._engine)
            except EngineDiedError as error:
                log.warning("rollout: an engine ended before it had the new weights; it will be restarted: %s", error)
                self._engine, self.died = None, True
        return None
