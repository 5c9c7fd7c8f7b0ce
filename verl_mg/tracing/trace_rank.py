"""One rank of a trace: `PYTHON -m verl_mg.tracing.trace_rank ENGINE FOLDER RANK`, started by `tracer`.

PYTHON is that of the engine's processes. FOLDER/jobs.json lists the jobs. For each job with this rank, the engine's
groups and model class are set up, its `load_weights` runs, and all is torn down again; the shards go to
FOLDER/JOB-RANK.json. The first job that fails ends the process, with the reason in FOLDER/JOB-RANK.error. Rank 0 writes
the engine's version to FOLDER/version.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import Tensor

from verl_mg.errors import UserError, one_line
from verl_mg.jsonl import replacing
from verl_mg.layout import EngineLayout
from verl_mg.sharding.boxes import Shard
from verl_mg.sharding.traced_table import EngineName, write_rank_shards
from verl_mg.tracing.position_codes import UNWRITTEN, PositionCodes, decode, is_written

# Files of a trace: the list of jobs, the version of the engine; a rank's shards of a job, the reason why it failed.
JOBS, VERSION = "jobs.json", "version"
result_name, error_name = "{}-{}.json".format, "{}-{}.error".format


class TraceJob(TypedDict):
    """One model in one layout, as an entry of FOLDER/jobs.json."""

    model: str  # model directory
    layout: str
    shapes: dict[str, tuple[int, ...]]  # of the checkpoint's tensors; experts that its files stack are separate here
    stacks: dict[str, list[str]]  # {stack: its experts' tensors in order}, transposed in the files


def main(engine: EngineName, folder: Path, rank: int) -> int:
    """Runs this rank's part of all jobs, and returns the exit status."""
    jobs: list[TraceJob] = json.loads((folder / JOBS).read_text(encoding="utf-8"))
    internals = importlib.import_module(f"verl_mg.engines.{engine}.internals")
    if rank == 0:
        (folder / VERSION).write_text(importlib.import_module(engine).__version__, encoding="utf-8")
    for number, job in enumerate(jobs):
        layout = EngineLayout.parse(job["layout"])
        if rank >= layout.ranks:  # there are as many processes as the largest job needs
            continue
        codes = PositionCodes({name: tuple(shape) for name, shape in job["shapes"].items()})
        try:
            with internals.unloaded_model(job["model"], layout, rank, folder / f"{number}.store") as model:
                shards = traced_shards(model, codes, job["stacks"], internals.DERIVED)
                write_rank_shards(folder / result_name(number, rank), shards)
        except Exception as error:
            traceback.print_exc()
            with replacing(folder / error_name(number, rank)) as file:  # the tracer polls for it
                file.write_text(_reason(error), encoding="utf-8")
            return 1
    return 0


def _reason(error: Exception) -> str:
    if isinstance(error, UserError):
        return str(error)
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{one_line(error)} (in {place.name})"


def checkpoint(codes: PositionCodes, number: int, stacks: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of the files in pass `number`."""
    members = {name for names in stacks.values() for name in names}
    for name in codes.names:
        if name not in members:
            yield name, codes.tensor(name, number)
    for name, experts in stacks.items():
        tensors = [codes.tensor(expert, number) for expert in experts]
        yield name, torch.stack([tensor.permute(*reversed(range(tensor.dim()))) for tensor in tensors])


@torch.no_grad()
def traced_shards(
    model: Any, codes: PositionCodes, stacks: Mapping[str, Sequence[str]], derived: tuple[str, ...]
) -> dict[str, Shard]:
    """Returns the shard of each parameter, and of each buffer that the model's loader fills.

    Buffers with a name that ends with one of `derived` are computed from weights, in each update too.
    """
    parameters = dict(model.named_parameters())
    # Whether a buffer is saved says nothing: a loader finds buffers by their names. Those that it leaves as they are,
    # such as tables of angles, are no weights; nor is another view of a parameter's memory, such as of a convolution.
    memory = {tensor.untyped_storage().data_ptr() for tensor in parameters.values()}
    before = {
        name: buffer.clone()
        for name, buffer in model.named_buffers()
        if not name.endswith(derived) and buffer.untyped_storage().data_ptr() not in memory
    }
    tensors = dict(parameters)
    passes: dict[str, list[Tensor]] = defaultdict(list)
    for number in range(codes.passes):
        for tensor in tensors.values():
            tensor.fill_(UNWRITTEN)  # also what the last pass has written
        model.load_weights(checkpoint(codes, number, stacks))
        # A scale may have had the value of its code: such a buffer is found in a later pass.
        for name, buffer in _filled_buffers(model, before).items():
            if name not in tensors:
                tensors[name], passes[name] = buffer, [before[name]] * number
        for name, tensor in tensors.items():
            passes[name].append(tensor.clone())
    unwritten = [name for name in parameters if not is_written(passes[name])]
    if unwritten:
        raise UserError(
            f"its loader does not fill {len(unwritten)} parameters: {', '.join(unwritten[:4])}. "
            "Add the missing tensors to the model directory."
        )
    return {name: decode(name, codes, seen) for name, seen in passes.items()}


def _filled_buffers(model: Any, before: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the buffers whose values have changed; UserError for one whose dtype has no position codes."""
    buffers = dict(model.named_buffers())
    # Bits: a loader that leaves NaN as it is fills nothing.
    filled = {name: buffers[name] for name, values in before.items() if not _same_bits(buffers[name], values)}
    for name, buffer in filled.items():
        if buffer.dtype in (torch.bool, torch.int8, torch.uint8):
            raise UserError(
                f"its loader fills the buffer {name} of {str(buffer.dtype).removeprefix('torch.')}, which is "
                "too narrow for a trace. Use rollout.engine=hf."
            )
    return filled


def _same_bits(values: Tensor, others: Tensor) -> bool:
    return torch.equal(*(each.detach().cpu().contiguous().flatten().view(torch.uint8) for each in (values, others)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])))  # type: ignore[arg-type]
