"""One rank of a trace of SGLang: `python -m verl_mg.rollout.sglang.tracing.trace_rank FOLDER RANK`, started by
`tracer`.

FOLDER/jobs.json lists the jobs. For each job with this rank, SGLang's groups and model class are set up, its
`load_weights` runs, and all is torn down again; the shards go to FOLDER/JOB-RANK.json. The first job that fails ends
the process, with the reason in FOLDER/JOB-RANK.error.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import Tensor

from verl_mg.errors import UserError
from verl_mg.layout import EngineLayout
from verl_mg.rollout.sglang.tracing.position_codes import UNWRITTEN, PositionCodes, decode, is_written
from verl_mg.sharding.boxes import Shard
from verl_mg.sharding.traced_table import write_rank_shards


class TraceJob(TypedDict):
    """One model in one layout, as an entry of FOLDER/jobs.json."""

    model: str
    """Model directory."""
    tp: int
    """Tensor-parallel size."""
    pp: int
    """Pipeline-parallel size."""
    ep: int
    """Expert-parallel size."""
    adp: int
    """Data-parallel size of attention."""
    shapes: dict[str, list[int]]
    """Shapes of the checkpoint's tensors."""


def jobs_file(folder: Path) -> Path:
    """Returns the path of the list of jobs."""
    return folder / "jobs.json"


def result_file(folder: Path, job: int, rank: int) -> Path:
    """Returns the path of a rank's shards.

    Args:
        folder: folder of the trace.
        job: number of the job.
        rank: rank of the engine.
    """
    return folder / f"{job}-{rank}.json"


def error_file(folder: Path, job: int, rank: int) -> Path:
    """Returns the path of the reason why a job failed on a rank.

    Args:
        folder: folder of the trace.
        job: number of the job.
        rank: rank of the engine.
    """
    return folder / f"{job}-{rank}.error"


def main(folder: Path, rank: int) -> int:
    """Runs this rank's part of all jobs.

    Args:
        folder: folder of the trace.
        rank: rank of the engines.

    Returns:
        The exit status of the process.
    """
    jobs: list[TraceJob] = json.loads(jobs_file(folder).read_text(encoding="utf-8"))
    for number, job in enumerate(jobs):
        layout = EngineLayout(job["tp"], job["pp"], job["ep"], job["adp"])
        if rank >= layout.ranks:
            continue
        codes = PositionCodes({name: tuple(shape) for name, shape in job["shapes"].items()})
        try:
            with _sglang_model(job["model"], layout, rank, folder / f"{number}.store") as model:
                write_rank_shards(result_file(folder, number, rank), _traced(model, codes))
        except Exception as error:
            traceback.print_exc()
            unfinished = error_file(folder, number, rank).with_suffix(".unfinished")
            unfinished.write_text(_reason(error), encoding="utf-8")
            unfinished.rename(error_file(folder, number, rank))
            return 1
    return 0


def _reason(error: Exception) -> str:
    if isinstance(error, UserError):
        return str(error)
    place = traceback.extract_tb(error.__traceback__)[-1]
    message = " ".join(str(error).split()) or place.line
    return f"{type(error).__name__} in {place.name}: {message}"


@contextmanager
def _sglang_model(model_dir: str, layout: EngineLayout, rank: int, store: Path) -> Iterator[Any]:
    """Builds SGLang's model of one rank of an engine as a server does, in float32 and not loaded."""
    from sglang.srt import runtime_context
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.model_loader.loader import _initialize_model
    from sglang.srt.model_loader.utils import set_default_torch_dtype
    from sglang.srt.server_args import ServerArgs

    arguments = ServerArgs(
        model_path=model_dir,
        device="cpu",
        dtype="float32",
        tp_size=layout.tp,
        pp_size=layout.pp,
        ep_size=layout.ep,
        attn_dp_size=layout.adp,
        disable_shared_experts_fusion=True,
        attention_backend="torch_native",
        sampling_backend="pytorch",
        disable_custom_all_reduce=True,
        disable_cuda_graph=True,
        disable_overlap_schedule=True,
        skip_tokenizer_init=True,
        mem_fraction_static=0.1,
    )
    ranks = runtime_context.SpawnRanks(world_rank=rank, gpu_id=rank)
    runtime_context.publish(arguments, role="scheduler", ranks=ranks)
    parallel_state.init_distributed_environment(
        layout.ranks, rank, f"file://{store.absolute()}", local_rank=rank, backend="gloo"
    )
    parallel_state.initialize_model_parallel()
    initialize_dp_attention(arguments)
    initialize_moe_config()
    with set_default_torch_dtype(torch.float32):
        yield _initialize_model(ModelConfig.from_server_args(arguments), LoadConfig())
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()
    runtime_context.reset_context()


@torch.no_grad()
def _traced(model: Any, codes: PositionCodes) -> dict[str, Shard]:
    """Returns the shard of each parameter, and of each saved buffer that the model's loader fills."""
    parameters = dict(model.named_parameters())
    state = model.state_dict(keep_vars=True)
    buffers = {name: b for name, b in model.named_buffers() if name in state and b.is_floating_point()}
    tensors: dict[str, Tensor] = parameters | buffers
    passes: dict[str, list[Tensor]] = {name: [] for name in tensors}
    for number in range(codes.passes):
        for tensor in tensors.values():
            tensor.fill_(UNWRITTEN)
        model.load_weights((name, codes.tensor(name, number)) for name in codes.names)
        for name, tensor in tensors.items():
            passes[name].append(tensor.clone())
    unwritten = [name for name in parameters if not is_written(passes[name])]
    if unwritten:
        raise UserError(
            f"its loader does not fill {len(unwritten)} parameters: {', '.join(unwritten[:4])}. "
            "Add the missing tensors to the model directory."
        )
    return {name: decode(name, codes, seen) for name, seen in passes.items() if name in parameters or is_written(seen)}


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
