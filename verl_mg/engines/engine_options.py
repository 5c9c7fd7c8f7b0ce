"""Options of an engine, one record from the job to the process of the engine, and the program that this process runs.

    configuration ──▶ EngineOptions ──▶ ProcessEngine ──▶ arguments of SGLang or vLLM ──▶ EngineProgram
                                    └─▶ RemoteEngine (a server)          as JSON ──▶ EngineHost.options

A new option is a key of the configuration, a field and a line of `of_job` here, and the code that uses it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_mg import device
from verl_mg.checkpoint.peft import adapter_targets
from verl_mg.config import Config
from verl_mg.config.checks import Refusal
from verl_mg.engines import import_path
from verl_mg.layout import EngineLayout
from verl_mg.lazy_import import lazy_import
from verl_mg.models.hf_config import HFConfig
from verl_mg.reshard.encoding import Wire
from verl_mg.sharding.model_table import ModelTable

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_import("torch")

# Linear layers that engines fuse: SGLang loads adapters of a part of them only together with the others.
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
# Memory of a device on which only an engine computes that stays for the rank: CUDA's context, chunks in transfer, the
# buffers of NCCL.
RANK_BYTES = 6 * 2**30
# Environment of engines in float32 on GPUs: Triton would round the inputs of products to TF32.
EXACT_TRITON = {"TRITON_F32_DEFAULT": "tf32x3"}
# Environment variables of a rank that would mislead an engine.
OF_THE_LAUNCHER = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK"),
    *("MASTER_ADDR", "MASTER_PORT"),
}
# Caches of compiled kernels: torch names them in the environment of a process that compiles, as folders in the
# temporary directory, which is lost with a container. Engines have their own defaults.
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
# Environment variables of a rank that are only for training. SGLang's release of memory refuses `expandable_segments`
# of the allocator, and engines compute on more hardware queues than Megatron.
OF_TRAINING = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUDA_DEVICE_MAX_CONNECTIONS"}

# Folder on the path of engines' processes from which they import this package, and nothing else of its environment.
IMPORT_PATH = str(Path(import_path.__file__).parent)


@dataclass(frozen=True)
class AdapterSettings:
    """LoRA adapters that an engine receives, and computes with in addition to the weights."""

    rank: int  # rank of A and B
    targets: tuple[str, ...]  # names of the linear layers that have them

    @classmethod
    def of_job(cls, config: Config, table: ModelTable) -> AdapterSettings | None:
        """Returns the adapters for which a job's engines are started; None where adapters are merged."""
        lora = config.actor.lora
        if not config.rollout.adapters or lora is None:
            return None
        targets = adapter_targets(table, lora)
        # ["o_proj", "q_proj"] becomes ("o_proj", "q_proj", "k_proj", "v_proj").
        fused = [name for group in FUSED if set(group) & set(targets) for name in group]
        return cls(lora.rank, tuple(dict.fromkeys([*targets, *fused])))


@dataclass(frozen=True)
class EngineNodes:
    """The nodes of one engine, as its processes know them."""

    count: int = 1
    rank: int = 0  # number of this node among them; the leader is on node 0
    address: str = ""  # address of this node, where there are several


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options with which an engine is started and runs."""

    layout: EngineLayout
    dtype: torch.dtype
    wire: Wire = "cast"  # form in which the engine has its weights; cast: in `dtype`, whatever config.json says
    max_running: int | None  # largest number of requests at the same time; None: the engine's own default
    max_positions: int  # largest number of tokens of a prompt with its response
    request_timeout: float = 3600.0  # seconds after which a request is aborted, without the others
    keep_cache: bool = False  # whether requests in flight keep keys and values of the old weights in an update
    memory_fraction: float = 0.6  # share of a GPU's memory, free at the start, for weights and key-value cache
    first_gpu: int = 0
    nodes: EngineNodes = EngineNodes()  # nodes over which the engine is spread
    gpu_step: int = 1  # distance between the indices of two GPUs of the engine
    sleeps: bool = True  # whether the engine can release its memory, which costs some speed; on GPUs
    seed: int = 0
    routed_experts: bool = False  # whether samples contain the experts of each token
    selected_keys: bool = False  # whether samples contain the keys that each token attended to
    deterministic: bool = False  # whether a sample depends only on its seed, and not on concurrent requests; on GPUs
    reads_text: bool = False  # whether the engine has the tokenizer, to end responses at stop strings
    adapters: AdapterSettings | None = None  # adapters that the engine receives; None: it has only weights
    python: Path | None = None  # interpreter of the engine's process; None: this process's
    extra: Mapping[str, Any] = field(default_factory=dict)  # further arguments by the engine's names, which win

    @classmethod
    def of_job(cls, config: Config, dtype: torch.dtype, table: ModelTable) -> EngineOptions:
        """Returns the options of the engines of a job, the same for all of them, and for servers."""
        rollout, device_bytes = config.rollout, device.total_memory()
        # On a separate rank an engine leaves RANK_BYTES of the device.
        most = 1 - RANK_BYTES / device_bytes if device_bytes and rollout.num_ranks else 1.0
        return cls(
            layout=EngineLayout.parse(rollout.layout),
            dtype=dtype,
            wire=rollout.wire,
            max_running=rollout.fixed_requests,
            max_positions=table.config.max_positions,
            request_timeout=rollout.request_timeout_s,
            keep_cache=rollout.keep_kv_cache,
            memory_fraction=min(rollout.memory_fraction, max(0.0, most)),
            sleeps=rollout.sleep and not rollout.num_ranks,
            seed=config.job.seed,
            routed_experts=rollout.replay_routing,
            selected_keys=rollout.replay_selections,
            deterministic=config.job.deterministic,
            reads_text=config.ends_at_strings,
            adapters=AdapterSettings.of_job(config, table),
            python=rollout.python,
            extra=rollout.engine_arguments,
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the options as JSON has them."""
        plain = {"layout": str(self.layout), "dtype": self.dtype_name, "python": self.python and str(self.python)}
        return asdict(self) | plain

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> EngineOptions:
        """Returns the options from what `to_json` has returned."""
        adapters, python = fields["adapters"], fields["python"]
        typed = {
            "layout": EngineLayout.parse(fields["layout"]),
            "dtype": getattr(torch, fields["dtype"]),
            "nodes": EngineNodes(**fields["nodes"]),
            "adapters": adapters and AdapterSettings(adapters["rank"], tuple(adapters["targets"])),
            "python": python and Path(python),
        }
        return cls(**{**fields, **typed})

    @property
    def requests_on_cpu(self) -> int:
        """Number of the longest requests for which an engine on the CPU has a cache, where memory permits it."""
        return self.max_running or 256

    @property
    def dtype_name(self) -> str:
        """Name of the dtype, such as bfloat16."""
        return str(self.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class EngineCase:
    """A model and the options with which an engine is to compute it, for checks of the configuration."""

    table: ModelTable
    layout: EngineLayout
    dtype: str = "float32"
    extra: Mapping[str, Any] = field(default_factory=dict)  # further arguments by the engine's names
    wire: Wire = "cast"
    blackwell: bool = False  # whether the GPUs are of this generation or a newer one

    def extra_beyond(self, names: Sequence[str], values: Sequence[str]) -> str:
        """Returns the first of the further arguments with these names that has another value, as NAME=VALUE."""
        others = (f"{name}={self.extra[name]}" for name in names if self.extra.get(name) not in (None, *values))
        return next(others, "")


def in_float32(
    engine: str,
    arguments: Sequence[str],
    kernels: Sequence[str],
    parts: Callable[[HFConfig], Mapping[str, object]],
) -> Sequence[Refusal[EngineCase]]:
    """Returns what an engine in float32 on GPUs refuses: values of `arguments` but `kernels`, models with `parts`."""
    return (
        Refusal(
            lambda c: c.dtype == "float32" and c.extra_beyond(arguments, kernels),
            f"rollout.{engine}.{{value}}: it has no kernels for float32, the dtype of the actor. Leave it out, or set "
            "actor.dtype=bfloat16.",
        ),
        Refusal(
            lambda c: c.dtype == "float32" and next((part for part, has in parts(c.table.config).items() if has), ""),
            f"rollout.engine={engine}: on GPUs its engines in float32, the dtype of the actor, do not serve a model "
            "with {value}. Set actor.dtype=bfloat16, or rollout.engine=hf.",
        ),
    )


@dataclass(frozen=True)
class EngineProgram:
    """Program that the process of an engine runs."""

    engine: str  # name of the engine, in messages
    python: str
    module: str  # module of the engine's host
    arguments: Mapping[str, Any]  # arguments of the engine by its own names, as JSON
    environment: Mapping[str, str]
    options: Mapping[str, Any]  # `EngineOptions` as JSON

    @property
    def digest(self) -> str:
        """SHA-256 of the program, the same for two starts of it; variables of the environment do not count."""
        parts = [self.engine, self.python, self.module, dict(self.arguments), dict(self.options)]
        text = json.dumps(parts, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def inherited_environment(python: Path | None) -> dict[str, str]:
    """Returns the environment of an engine's process in this interpreter, or in another `python` with its own packages.

    It is this process's without what is only for the rank. Modules come from IMPORT_PATH, from the interpreter's
    packages, and in this interpreter from PYTHONPATH: another one might load a library there that is built for another
    torch. They do not come from the working directory.
    """
    left_out = OF_THE_LAUNCHER | OF_TRAINING | {name for name in CACHES if _is_of_torch(os.environ.get(name))}
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in left_out and not name.startswith(("TORCHELASTIC", "OMPI_", "PMIX_"))
    }
    path = [IMPORT_PATH]
    if python is None:
        path += filter(None, [inherited.get("PYTHONPATH")])
    else:
        inherited.pop("PYTHONHOME", None)
    return inherited | {"PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1"}


def _is_of_torch(folder: str | None) -> bool:
    """Returns whether a folder of a cache is the one that torch takes by itself, and not one that the user has set."""
    if folder is None:
        return False
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # seconds, where nothing was compiled

    return Path(folder).is_relative_to(Path(default_cache_dir()).absolute())
