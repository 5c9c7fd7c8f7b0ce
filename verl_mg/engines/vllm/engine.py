"""Engine of vLLM that this job starts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.distributed import Store

from verl_mg.distributed.launcher import Launcher
from verl_mg.engines.engine import Request, Sampling
from verl_mg.engines.engine_nodes import FollowingNode, LeadingNode
from verl_mg.engines.engine_process import EngineProgram
from verl_mg.engines.process_engine import EngineSettings, ProcessEngine
from verl_mg.engines.request_tracker import EngineLimits, routed_shape
from verl_mg.engines.vllm.arguments import engine_arguments, environment, node_arguments
from verl_mg.errors import UserError
from verl_mg.models.transformers_module import read_any_config

HOST = "verl_mg.engines.vllm.host"  # module that the engine's process runs


class VLLMEngine(ProcessEngine):
    """An `AsyncLLM` of vLLM in a separate process, started by this rank."""

    NAME = "vLLM"

    def __init__(
        self,
        model: Path,
        settings: EngineSettings,
        log: Path,
        request_timeout: float = 3600.0,
        nodes: LeadingNode | None = None,
        launcher: Launcher | None = None,
    ) -> None:
        self._model, self._arguments = model, engine_arguments(model, settings)
        self._vocab = read_any_config(model).vocab
        limits = EngineLimits(
            max_running=settings.max_running,
            max_positions=settings.max_positions,
            seeded=True,  # every request has a generator
            reads_text=settings.reads_text,
            routed=routed_shape(model) if settings.routed_experts else None,
        )
        super().__init__(settings, limits, log, request_timeout, nodes, launcher)

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> None:
        """Sends requests to the engine; UserError also for a token beyond the vocabulary, which would end vLLM."""
        for request in requests:
            if max(request.prompt, default=0) >= self._vocab:
                raise UserError(
                    f"request {request.id}: its token {max(request.prompt)} is not in the vocabulary of {self._vocab}. "
                    "Use the tokenizer of the model."
                )
        super().submit(requests, sampling)

    @property
    def num_adapter_readers(self) -> int:
        """Returns the number of workers, each of which opens the memory."""
        return self.settings.layout.ranks

    def _program(self, ports: Sequence[int], address: str) -> EngineProgram:
        return vllm_program(self._model, self._arguments, self.settings, address)


def vllm_program(model: Path, arguments: dict[str, Any], settings: EngineSettings, address: str) -> EngineProgram:
    """Returns the program of an engine, or of its part on one node, whose parts meet at `address`, HOST:PORT."""
    python = str(settings.python or sys.executable)
    arguments = node_arguments(settings, address) | arguments
    return EngineProgram(VLLMEngine.NAME, python, HOST, arguments, environment(model, settings))


def vllm_follower(model: Path, settings: EngineSettings, log: Path, store: Store, number: int) -> FollowingNode:
    """Starts this node's part of an engine that another node's rank leads."""
    arguments = engine_arguments(model, settings)
    return FollowingNode(store, number, lambda address: vllm_program(model, arguments, settings, address), log)
