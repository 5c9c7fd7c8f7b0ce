"""SGLang engine that this job starts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.distributed import Store

from verl_mg.distributed.launcher import Launcher
from verl_mg.engines.engine_nodes import FollowingNode, LeadingNode
from verl_mg.engines.engine_process import EngineProgram
from verl_mg.engines.ports import PortBlock
from verl_mg.engines.process_engine import EngineSettings, ProcessEngine
from verl_mg.engines.request_tracker import EngineLimits, routed_shape
from verl_mg.engines.sglang.arguments import engine_arguments, environment, port_arguments

HOST = "verl_mg.engines.sglang.host"  # module that the engine's process runs


class SGLangEngine(ProcessEngine):
    """An `sglang.Engine` in a separate process, started by this rank."""

    NAME = "SGLang"

    def __init__(
        self,
        model: Path,
        settings: EngineSettings,
        log: Path,
        request_timeout: float = 3600.0,
        nodes: LeadingNode | None = None,
        launcher: Launcher | None = None,
    ) -> None:
        self._arguments = engine_arguments(model, settings)
        limits = EngineLimits(
            max_running=settings.max_running,
            max_positions=settings.max_positions,
            seeded=bool(self._arguments.get("enable_deterministic_inference")),
            reads_text=settings.reads_text,
            routed=routed_shape(model) if settings.routed_experts else None,
        )
        super().__init__(settings, limits, log, request_timeout, nodes, launcher)

    @property
    def num_adapter_readers(self) -> int:
        """Returns 1: SGLang's main process passes adapters on."""
        return 1

    def _program(self, ports: Sequence[int], address: str) -> EngineProgram:
        return sglang_program(self._arguments, self.settings, ports, address)


def sglang_program(
    arguments: dict[str, Any], settings: EngineSettings, ports: Sequence[int], address: str
) -> EngineProgram:
    """Returns the program of an engine, or of its part on one node, whose parts meet at `address`, HOST:PORT."""
    python = str(settings.python or sys.executable)
    arguments = port_arguments(ports, address) | arguments  # the user's take precedence
    return EngineProgram(SGLangEngine.NAME, python, HOST, arguments, environment(settings))


def sglang_follower(model: Path, settings: EngineSettings, log: Path, store: Store, number: int) -> FollowingNode:
    """Starts this node's part of an engine that another node's rank leads."""
    arguments, ports = engine_arguments(model, settings), PortBlock()
    return FollowingNode(store, number, lambda address: sglang_program(arguments, settings, ports.ports, address), log)
