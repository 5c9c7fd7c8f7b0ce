"""SGLang engine that this job starts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from verl_mg.rollout.engine_process import EngineProgram
from verl_mg.rollout.process_engine import EngineSettings, ProcessEngine
from verl_mg.rollout.request_tracker import EngineLimits, routed_shape
from verl_mg.rollout.sglang.arguments import engine_arguments, environment, port_arguments

HOST = "verl_mg.rollout.sglang.host"
"""Module that the engine's process runs."""


class SGLangEngine(ProcessEngine):
    """An `sglang.Engine` in a separate process, started by this rank."""

    NAME = "SGLang"

    def __init__(self, model: Path, settings: EngineSettings, log: Path, request_timeout: float = 3600.0) -> None:
        """Starts the process.

        Args:
            model: Hugging Face directory.
            settings: settings of the engine.
            log: file to which the engine's output is appended.
            request_timeout: seconds after which a request is aborted.

        Raises:
            UserError: the engine cannot start; the message contains the end of its log.
        """
        self._arguments = engine_arguments(model, settings)
        limits = EngineLimits(
            max_running=settings.max_running,
            max_positions=settings.max_positions,
            seeded=bool(self._arguments.get("enable_deterministic_inference")),
            routed=routed_shape(model) if settings.routed_experts else None,
        )
        super().__init__(settings, limits, log, request_timeout)

    def _program(self, ports: Sequence[int]) -> EngineProgram:
        arguments = port_arguments(ports) | self._arguments
        python = str(self.settings.python or sys.executable)
        return EngineProgram(self.NAME, python, HOST, arguments, environment(self.settings))
