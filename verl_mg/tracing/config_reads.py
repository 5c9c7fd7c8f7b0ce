"""Fields of a configuration that `transformers` reads and an engine's model does not, with what each of them changes.

    this process                                          `PYTHON -m verl_mg.tracing.config_reads ENGINE FOLDER`
    builds the module of transformers without memory      builds the engine's model class on the CPU
    and passes a row through it                           writes FOLDER/reads.json: names of the fields that it has read
    computes a narrow copy with and without each field
    that only transformers has read

A field counts as read where the value is taken by its name, also out of a dict within the configuration, of which an
engine may first make a copy, and compare each key with those that it knows.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from verl_mg.engines.engine_options import inherited_environment
from verl_mg.engines.kinds import PROCESSES
from verl_mg.errors import UserError
from verl_mg.layout import EngineLayout
from verl_mg.models.shrunk_config import LONGEST_ROW, narrow_module, random_rows, row_logprobs, shrink
from verl_mg.models.transformers_module import meta_module, read_module_config
from verl_mg.sharding.traced_table import EngineName
from verl_mg.tracing.tracer import TracedEngine

if TYPE_CHECKING:
    from transformers import PretrainedConfig

READS = "reads.json"
SMALLEST_EFFECT = 1e-4  # nats; an epsilon of a norm or the order of a sum changes less
SECONDS = 300.0  # for an engine to import and build its model


def unread_fields(model_dir: Path, engine: TracedEngine, longest_row: int) -> dict[str, float]:
    """Returns the fields that only `transformers` reads, nested ones too, and by how many nats each changes log-probs.

    The largest comes first. {} where the engine's model or a narrow copy cannot be built here.
    """
    with (
        tempfile.TemporaryDirectory(prefix="reads-") as folder,
        suppress(UserError, OSError, subprocess.SubprocessError),
    ):
        theirs = _reads_of_engine(model_dir, engine, Path(folder))
        ours = _reads_of_transformers(model_dir)
        return effects(read_module_config(model_dir), ours - theirs, longest_row)
    return {}


def effects(config: PretrainedConfig, names: Iterable[str], longest_row: int) -> dict[str, float]:
    """Returns those fields without which a narrow copy has other log-probs, the mean difference in nats of each.

    Rows of the copy cross the bounds that `longest_row` tokens cross.
    """
    narrow = shrink(config, longest_row).config
    module, rows = narrow_module(narrow), random_rows(narrow, [LONGEST_ROW])
    (expected,) = row_logprobs(module, rows)

    def effect(name: str) -> float:
        largest = 0.0
        # What a program computes that does not read a field: as by default, or as without what the field turns on.
        for null in (False, True):
            # A family may not have the one or the other, or other weights then: of any kind, it is a library's code.
            with suppress(Exception):
                other = narrow_module(type(narrow).from_dict(_without(narrow.to_dict(), name, null)))
                other.load_state_dict(module.state_dict())
                difference = float((row_logprobs(other, rows)[0] - expected).abs().mean())
                largest = max(largest, difference if difference >= SMALLEST_EFFECT else 0.0)
        return largest

    changed = {name: effect(name) for name in sorted(names)}
    return {name: changed[name] for name in sorted(changed, key=lambda name: -changed[name]) if changed[name]}


def _without(fields: dict[str, Any], name: str, null: bool) -> dict[str, Any]:
    """Returns fields without a name, at any depth, or with null or false in its place."""
    result = {}
    for key, value in fields.items():
        if key != name:
            result[key] = _without(value, name, null) if isinstance(value, dict) else value
        elif null:
            result[key] = False if isinstance(value, bool) else None
    return result


def _reads_of_transformers(model_dir: Path) -> set[str]:
    config = read_module_config(model_dir)
    reads: set[str] = set()
    with recorded_reads(reads):
        module = meta_module(config, model_dir)
        # What only the forward pass reads, such as windows of masks. Some layers compute with values, which a module
        # without memory has not: what was read before counts.
        with suppress(Exception), torch.no_grad():
            module(input_ids=torch.zeros(1, 8, dtype=torch.int64, device="meta"), use_cache=False)
    return reads


def _reads_of_engine(model_dir: Path, engine: TracedEngine, folder: Path) -> set[str]:
    kind = PROCESSES[engine.name]
    variables = inherited_environment(engine.python) | dict(kind.on_cpu)
    variables |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    command = [kind.python(engine.python), "-m", __name__, engine.name, str(model_dir.absolute()), str(folder)]
    subprocess.run(command, env=variables, capture_output=True, timeout=SECONDS, check=True)
    return set(json.loads((folder / READS).read_text(encoding="utf-8")))


class _Key(str):
    """Key of a dict in a configuration, which counts as read where it is compared with an equal string."""

    __slots__ = ("reads",)
    reads: set[str]

    def __eq__(self, other: object) -> bool:
        is_equal = str.__eq__(self, other) is True
        if is_equal:
            self.reads.add(str(self))
        return is_equal

    __hash__ = str.__hash__

    def __deepcopy__(self, memo: dict[int, Any]) -> _Key:
        return self  # a copy would record into a copy of `reads`


class _Fields(dict[str, Any]):
    """Dict of a configuration that records which keys are read; its own keys, in a loop, do not count."""

    def __init__(self, fields: dict[str, Any], reads: set[str]) -> None:
        super().__init__()
        for name, value in fields.items():
            key = _Key(name)
            key.reads = reads
            super().__setitem__(key, _Fields(value, reads) if type(value) is dict else value)


@contextmanager
def recorded_reads(reads: set[str]) -> Iterator[None]:
    """Adds every field that is read of any configuration of `transformers` to `reads`."""
    from transformers import PretrainedConfig

    original = PretrainedConfig.__getattribute__
    wrapped: dict[int, tuple[dict[str, Any], _Fields]] = {}

    def read(config: Any, name: str) -> Any:
        value = original(config, name)
        field = type(config).attribute_map.get(name, name)
        if field in original(config, "__dict__"):
            reads.add(field)
            if type(value) is dict:  # kept, so that the same dict has the same keys each time
                _, value = wrapped.setdefault(id(value), (value, _Fields(value, reads)))
        return value

    PretrainedConfig.__getattribute__ = read  # type: ignore[method-assign]
    try:
        yield
    finally:
        PretrainedConfig.__getattribute__ = original  # type: ignore[method-assign]


def main(engine: EngineName, model_dir: str, folder: Path) -> int:
    """Records the reads of an engine's model in the engine's Python, and returns the exit status."""
    unloaded_model = importlib.import_module(f"verl_mg.engines.{engine}.internals").unloaded_model
    reads: set[str] = set()
    with unloaded_model(model_dir, EngineLayout(), 0, folder / "store", recorded_reads(reads)):
        (folder / READS).write_text(json.dumps(sorted(reads)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))  # type: ignore[arg-type]
