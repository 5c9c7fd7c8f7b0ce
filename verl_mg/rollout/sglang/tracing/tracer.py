"""Which box of which checkpoint tensor every element of every parameter is, read off the loaders themselves.

    trace_sglang(model_dir, layout)[rank] -> {parameter: Shard}       SGLang's model classes and their `load_weights`
    trace_transformers(model_dir)       -> {parameter: Shard}       `from_pretrained`

The loaders are fed codes of positions instead of weights (see `verl_mg.rollout.sglang.tracing.position_codes`), so
that a directory with
only a config.json can be traced. SGLang runs on the CPU, in real processes that talk over gloo; what is traced is
what `load_weights` leaves, before any processing of loaded weights, and without the padding of heads and of
intermediate sizes that an SGLang server adds on the CPU alone: the layout of a server on GPUs that has
`--disable-shared-experts-fusion`.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

import verl_mg
from verl_mg.errors import UserError
from verl_mg.layout import EngineLayout
from verl_mg.rollout.sglang.tracing.position_codes import PositionCodes, decode
from verl_mg.rollout.sglang.tracing.trace_rank import TraceJob, error_file, jobs_file, result_file
from verl_mg.sharding.boxes import Shard
from verl_mg.sharding.traced_table import TracedTable, read_rank_shards, write_traced_table

Shapes = dict[str, tuple[int, ...]]

LOG_LINES = 8  # of a rank that died, in the error


def trace_sglang(model_dir: str | Path, layout: EngineLayout) -> list[dict[str, Shard]]:
    """The shards of each rank of an SGLang engine, under SGLang's own names; see `trace_sglang_many`."""
    (ranks,) = trace_sglang_many([(model_dir, layout)])
    return ranks


def trace_sglang_many(jobs: Sequence[tuple[str | Path, EngineLayout]]) -> list[list[dict[str, Shard]]]:
    """Trace several models and layouts with one set of processes; importing SGLang takes them most of the time.

    Returns:
        For each job, for each rank of its engine (`pp_rank * tp + tp_rank`): parameter -> shard, of everything in
        `named_parameters()`, tied ones once, and of the saved buffers that the checkpoint feeds.

    Raises:
        UserError: SGLang is not installed, it cannot build or load a model, it leaves a parameter without a tensor,
            or it changes values while loading. The first job that fails ends all.
    """
    _require_sglang()
    described = [_job(Path(model_dir), layout) for model_dir, layout in jobs]
    with tempfile.TemporaryDirectory(prefix="trace-") as name:
        folder = Path(name)
        jobs_file(folder).write_text(json.dumps(described), encoding="utf-8")
        _run_ranks(folder, described, max((layout.ranks for _, layout in jobs), default=0))
        return [
            [read_rank_shards(result_file(folder, number, rank)) for rank in range(layout.ranks)]
            for number, (_, layout) in enumerate(jobs)
        ]


def trace_transformers(model_dir: str | Path) -> dict[str, Shard]:
    """What each parameter, and each saved buffer that the checkpoint feeds, holds in the module of transformers.

    The module is loaded by `from_pretrained` from temporary checkpoints of the size of the model in float32.

    Raises:
        UserError: transformers cannot build or load the model, leaves a parameter without a tensor, or changes
            values while loading.
    """
    model_dir = Path(model_dir)
    codes = PositionCodes(checkpoint_shapes(model_dir))
    passes: dict[str, list[Tensor]] = {}
    for number in range(codes.passes):
        for name, tensor in _loaded_by_transformers(model_dir, {n: codes.tensor(n, number) for n in codes.names}):
            passes.setdefault(name, []).append(tensor)
    return {name: decode(name, codes, seen) for name, seen in passes.items()}


def write_trace(model_dir: str | Path, output: str | Path, layout: EngineLayout) -> None:
    """Trace SGLang and write the dialect down as JSON; UserErrors as in `trace_sglang_many`."""
    architecture = _architecture(Path(model_dir))
    ranks = tuple(trace_sglang(model_dir, layout))
    write_traced_table(output, TracedTable(architecture, importlib.metadata.version("sglang"), layout, ranks))


def checkpoint_shapes(model_dir: str | Path) -> Shapes:
    """Names and shapes of the checkpoint's tensors, sorted by name.

    They come from the safetensors files; without any, from what transformers would save for config.json.
    """
    model_dir = Path(model_dir)
    shapes: Shapes = {}
    for path in sorted(model_dir.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path}: not a readable safetensors file ({error})") from None
    return dict(sorted((shapes or _shapes_by_transformers(model_dir)).items()))


def _shapes_by_transformers(model_dir: Path) -> Shapes:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    with _refusals_of("transformers", model_dir), torch.device("meta"):
        config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        # What `save_pretrained` does between the state dict and the files.
        kept = remove_tied_weights_from_state_dict(model.state_dict(), model)
        return {name: tuple(tensor.shape) for name, tensor in revert_weight_conversion(model, kept).items()}


def _loaded_by_transformers(model_dir: Path, checkpoint: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The parameters and the fed buffers of the module that `from_pretrained` makes of a checkpoint."""
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory(prefix="trace-") as name, _refusals_of("transformers", model_dir):
        shutil.copy(model_dir / "config.json", name)
        save_file(checkpoint, Path(name) / "model.safetensors", {"format": "pt"})
        model, info = AutoModelForCausalLM.from_pretrained(
            name, dtype=torch.float32, local_files_only=True, output_loading_info=True
        )
    missing: set[str] = set(info["missing_keys"])
    parameters = dict(model.named_parameters())
    unfed = sorted(missing & parameters.keys())
    if unfed:
        raise UserError(f"{model_dir}: transformers finds no tensor of the checkpoint for {', '.join(unfed[:4])}")
    yield from parameters.items()
    saved = model.state_dict().keys() - missing
    yield from ((name, b) for name, b in model.named_buffers() if name in saved)


def _require_sglang() -> None:
    if importlib.util.find_spec("sglang") is None:
        raise UserError("SGLang is not installed; run bash tools/install_sglang_cpu.sh")


def _config(model_dir: Path) -> dict[str, Any]:
    path = model_dir / "config.json"
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path}: not a readable configuration ({error})") from None


def _architecture(model_dir: Path) -> str:
    match _config(model_dir).get("architectures"):
        case [str(name), *_]:
            return name
    raise UserError(f"{model_dir / 'config.json'}: architectures is missing; it names the model's class")


def _job(model_dir: Path, layout: EngineLayout) -> TraceJob:
    _architecture(model_dir)
    return {
        "model": str(model_dir.absolute()),
        "tp": layout.tp,
        "pp": layout.pp,
        "ep": layout.ep,
        "adp": layout.adp,
        "shapes": {name: list(shape) for name, shape in checkpoint_shapes(model_dir).items()},
    }


@contextmanager
def _refusals_of(who: str, model_dir: Path) -> Iterator[None]:
    """Whatever a library says to a model that it cannot take, as a UserError."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{model_dir}: {who} cannot load it: {type(error).__name__}: {reason}") from error


def _run_ranks(folder: Path, jobs: Sequence[TraceJob], count: int) -> None:
    """Start the ranks and wait for them; the first that fails ends all with a UserError."""
    root = Path(verl_mg.__file__).parents[1]
    environment = os.environ | {
        "SGLANG_USE_CPU_ENGINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(count):
            with open(_log(folder, rank), "wb") as log:
                command = [sys.executable, "-m", "verl_mg.rollout.sglang.tracing.trace_rank", str(folder), str(rank)]
                ranks.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
        while any(process.poll() is None for process in ranks):
            _raise_failure(folder, jobs, ranks)
            time.sleep(0.05)
        _raise_failure(folder, jobs, ranks)
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def _raise_failure(folder: Path, jobs: Sequence[TraceJob], ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    failed = [rank for rank, process in enumerate(ranks) if process.poll()]
    if not failed:
        return
    reasons = [
        (path.stat().st_mtime_ns, number, path)
        for number in range(len(jobs))
        for rank in range(len(ranks))
        if (path := error_file(folder, number, rank)).exists()
    ]
    if reasons:
        _, number, path = min(reasons)  # the others may have failed because this one left
        job = jobs[number]
        layout = EngineLayout(job["tp"], job["pp"], job["ep"], job["adp"])
        raise UserError(f"{job['model']}: SGLang at {layout}: {path.read_text(encoding='utf-8')}")
    log = _log(folder, failed[0]).read_text(encoding="utf-8", errors="replace").splitlines()
    raise UserError(
        f"tracing SGLang: rank {failed[0]} ended with {ranks[failed[0]].returncode}; its last lines: "
        + " | ".join(line.strip() for line in log[-LOG_LINES:])
    )


def _log(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.log"
