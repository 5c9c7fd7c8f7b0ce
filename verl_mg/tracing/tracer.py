"""Traces an engine: which box of which checkpoint tensor each element of each parameter is, as its loader fills it.

The engine's model classes load codes of positions instead of weights (see `position_codes`), so a directory with only a
config.json can be traced. The engine runs on the CPU in real processes that communicate over gloo. The trace shows the
result of `load_weights`, before any processing of loaded weights, and without the padding and packing that engines add
on the CPU only: the shards of an engine on GPUs, of SGLang with `--disable-shared-experts-fusion`.

    this process                                        trace_rank: one process for each rank, with the engine's Python
    writes FOLDER/jobs.json, starts the ranks  ------>  for each job: joins the engine's groups over gloo, builds the
    polls the processes; the first failure     <------    model class, runs load_weights for each pass of the codes,
      ends all of them, with its reason                   writes FOLDER/JOB-RANK.json or, and ends, JOB-RANK.error
    reads the shards of all ranks and jobs
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_mg.engines.engine_options import inherited_environment
from verl_mg.engines.kinds import PROCESSES
from verl_mg.errors import UserError
from verl_mg.layout import EngineLayout
from verl_mg.models.hf_config import read_config
from verl_mg.models.hf_families import FAMILIES, VISION_LANGUAGE
from verl_mg.models.hf_tensors import model_spec
from verl_mg.models.tensor_index import index_of
from verl_mg.models.tensor_tree import StackedTensor, expert_shapes
from verl_mg.models.transformers_module import checkpoint_shapes
from verl_mg.sharding.boxes import Shard
from verl_mg.sharding.traced_table import EngineName, TracedTable, read_rank_shards, write_traced_table
from verl_mg.tracing.layer_kinds import LayerKinds, layer_kinds, text_fields, write_first_layers
from verl_mg.tracing.trace_rank import JOBS, VERSION, TraceJob, error_name, result_name

LOG_LINES = 8  # of a failed rank, in the error
log_name = "rank{}.log".format


@dataclass(frozen=True)
class TracedEngine:
    """An engine and the Python in which it runs."""

    name: EngineName
    python: Path | None = None  # path of a Python that can import it; None is the Python of this process


def trace(jobs: Sequence[tuple[str | Path, EngineLayout]], engine: TracedEngine) -> list[list[dict[str, Shard]]]:
    """Traces several models and layouts with one set of processes, which import the engine once.

    Returns for each job, for each rank of its engine (`pp_rank * tp + tp_rank`), {parameter: shard} of all
    `named_parameters()`, tied ones once, and of the saved buffers that the loader fills. The directories need no
    weights. UserError where an engine is missing, cannot build or load a model, or changes values; the first job that
    fails ends all.
    """
    PROCESSES[engine.name].python(engine.python)  # an engine that is missing is the first error
    # A directory may have several layouts, and without weights its shapes take `transformers` some time.
    directories = dict.fromkeys(Path(model_dir) for model_dir, _ in jobs)
    tensors = {directory: (_shapes(directory), stacked_tensors(directory)) for directory in directories}
    described = [_job(Path(model_dir), layout, *tensors[Path(model_dir)]) for model_dir, layout in jobs]
    return _trace(described, engine)[1]


def write_trace(
    model_dir: str | Path,
    output: str | Path,
    layout: EngineLayout,
    engine: TracedEngine,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> None:
    """Traces an engine and writes the table as a JSON file; raises UserError as `trace`.

    Of layers with equal tensors one is traced, see `layer_kinds`. Without `shapes` all tensors of the directory are.
    """
    PROCESSES[engine.name].python(engine.python)
    directory = Path(model_dir)
    architecture = _architecture(directory)
    job = _job(directory, layout, shapes or _shapes(directory), stacked_tensors(directory))
    version, (ranks,) = _traced_by_kinds(job, engine) or _trace([job], engine)
    write_traced_table(output, TracedTable(architecture, engine.name, version, layout, tuple(ranks)))


def _traced_by_kinds(job: TraceJob, engine: TracedEngine) -> tuple[str, list[list[dict[str, Shard]]]] | None:
    """Returns the same as `_trace` from a trace of the first layer of each kind; None: all layers must be traced."""
    fields = _config(Path(job["model"]))
    layers = text_fields(fields).get("num_hidden_layers")
    # Pipeline stages of a model with fewer layers would have other layers than in the whole one.
    one_stage = EngineLayout.parse(job["layout"]).pp == 1
    kinds = layer_kinds(job["shapes"], layers) if isinstance(layers, int) and one_stage else None
    if kinds is None or kinds.count == layers:
        return None
    with tempfile.TemporaryDirectory(prefix="layers-") as name:
        write_first_layers(fields, kinds.count, Path(name))
        try:
            version, (ranks,) = _trace([_first_layers(job, kinds, name)], engine)
            return version, [[kinds.extended(shards) for shards in ranks]]
        except UserError:  # the configuration cannot be cut; or the whole one fails too, and has the better message
            return None


def _first_layers(job: TraceJob, kinds: LayerKinds, model: str) -> TraceJob:
    shapes = kinds.first_layers(job["shapes"])
    stacks = {stack: [name for name in names if name in shapes] for stack, names in job["stacks"].items()}
    return {**job, "model": model, "shapes": shapes, "stacks": {s: names for s, names in stacks.items() if names}}


def _trace(jobs: Sequence[TraceJob], engine: TracedEngine) -> tuple[str, list[list[dict[str, Shard]]]]:
    """Returns the version of the engine, and the traces."""
    sizes = [EngineLayout.parse(job["layout"]).ranks for job in jobs]
    with tempfile.TemporaryDirectory(prefix="trace-") as name:
        folder = Path(name)
        (folder / JOBS).write_text(json.dumps(jobs), encoding="utf-8")
        _run_ranks(folder, jobs, max(sizes, default=0), engine)
        traces = [
            [read_rank_shards(folder / result_name(number, rank)) for rank in range(size)]
            for number, size in enumerate(sizes)
        ]
        return (folder / VERSION).read_text(encoding="utf-8"), traces


def _config(model_dir: Path) -> dict[str, Any]:
    path = model_dir / "config.json"
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise UserError(f"{path}: missing. Set model.path or --model to a Hugging Face directory.") from None
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path}: not a readable configuration ({error}). Download the model again.") from None


def _architecture(model_dir: Path) -> str:
    match _config(model_dir).get("architectures"):
        case [str(name), *_]:
            return name
    raise UserError(f"{model_dir / 'config.json'}: architectures is missing. Add the name of the model's class.")


def stacked_tensors(model_dir: Path) -> dict[str, StackedTensor]:
    """Returns the places of experts' tensors that a model's files stack."""
    if _config(model_dir).get("model_type") not in {*FAMILIES, *VISION_LANGUAGE}:
        return {}
    return index_of(model_spec(read_config(model_dir))).stacked


def _shapes(model_dir: str | Path) -> dict[str, tuple[int, ...]]:
    return expert_shapes(checkpoint_shapes(model_dir), stacked_tensors(Path(model_dir)))


def _job(
    model_dir: Path, layout: EngineLayout, shapes: Mapping[str, tuple[int, ...]], stacked: Mapping[str, StackedTensor]
) -> TraceJob:
    _architecture(model_dir)
    stacks: dict[str, list[str]] = defaultdict(list)
    for name, place in stacked.items():
        if name in shapes and place.transposed:  # loaders of others take experts one by one too
            stacks[place.name].append(name)
    return {"model": str(model_dir.absolute()), "layout": str(layout), "shapes": dict(shapes), "stacks": stacks}


def _run_ranks(folder: Path, jobs: Sequence[TraceJob], count: int, engine: TracedEngine) -> None:
    """Starts the ranks and waits for them; the first failure ends all with a UserError."""
    kind = PROCESSES[engine.name]
    # Engines trace on the CPU also where there are GPUs.
    of_ranks = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    variables = inherited_environment(engine.python) | dict(kind.on_cpu) | of_ranks
    python = kind.python(engine.python)
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(count):
            with open(folder / log_name(rank), "wb") as log:
                command = [python, "-m", "verl_mg.tracing.trace_rank", kind.name, str(folder), str(rank)]
                ranks.append(subprocess.Popen(command, env=variables, stdout=log, stderr=subprocess.STDOUT))
        # Waits for the end of all ranks, polling them; ends early by the first failure.
        while any(process.poll() is None for process in ranks):
            _raise_failure(folder, jobs, ranks, kind.title)
            time.sleep(0.05)
        _raise_failure(folder, jobs, ranks, kind.title)
    finally:
        for process in ranks:  # the others may wait for a rank that has failed
            process.kill()
            process.wait()


def _raise_failure(
    folder: Path, jobs: Sequence[TraceJob], ranks: Sequence[subprocess.Popen[bytes]], title: str
) -> None:
    failed = [rank for rank, process in enumerate(ranks) if process.poll()]
    if not failed:
        return
    reasons = [
        (path.stat().st_mtime_ns, number, path)
        for number in range(len(jobs))
        for rank in range(len(ranks))
        if (path := folder / error_name(number, rank)).exists()
    ]
    if reasons:
        _, number, path = min(reasons)  # the others may have failed because this rank ended
        job = jobs[number]
        raise UserError(f"{job['model']}: {title} at {job['layout']}: {path.read_text(encoding='utf-8')}")
    log = (folder / log_name(failed[0])).read_text(encoding="utf-8", errors="replace").splitlines()
    raise UserError(
        f"verl-mg trace: rank {failed[0]} ended with exit code {ranks[failed[0]].returncode}. Its last lines: "
        + " | ".join(line.strip() for line in log[-LOG_LINES:])
    )
