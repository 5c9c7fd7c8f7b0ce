"""Parts of tests of transports: a runner that only has weights, engines and servers that only receive, an oracle.

    ranks of the job                                              ranks of servers
    `Source`: shards of whole tensors of a version                `ServerRank`: parameters of one rank of a server
    RemoteEngine -> `Session`, in place of HTTP  --- a pipe --->    handles requests as SGLang's schedulers do, with
    `EngineProcess`: parameters of an engine of the job             our loader, and compares its parameters

Values are a function of the version, so each process knows what has to arrive.
"""

import asyncio
import base64
import pickle
import sys
import threading
import time
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.helpers.random_models import assemble, fields
from tests.helpers.sglang_servers import SETTINGS
from tests.reshard.encoded_moves import (
    Quantizer,
    differing,
    encoded_parameters,
    microscaled,
    sglang_blocks,
    sglang_channels,
)
from verl_mg.distributed.outside_group import connect_store, join_outside_group
from verl_mg.distributed.world import init_process_group
from verl_mg.engines.engine import EngineDiedError
from verl_mg.engines.payloads import apply_payload, has_patches, named_views, open_payload
from verl_mg.engines.sglang import shard_receiver, weight_loader
from verl_mg.http_client import UnreachableError
from verl_mg.layout import EngineLayout, Layout, Placement
from verl_mg.models.hf_config import parse_config
from verl_mg.reshard.encode import quantized_tensors
from verl_mg.reshard.encoding import Wire, encoding_of
from verl_mg.servers import remote_engine
from verl_mg.servers.info import ServerRequirements
from verl_mg.servers.remote_engine import RemoteEngine
from verl_mg.sharding.boxes import Shard, slices
from verl_mg.sharding.weight_table import WeightTable, weight_table
from verl_mg.weight_sync.transfer_plan import SourceWeights

CONFIG = fields(
    "qwen3", hidden_size=256, intermediate_size=256, num_attention_heads=4, num_key_value_heads=4, head_dim=64,
    num_hidden_layers=2,
)  # fmt: skip
MODEL = parse_config(CONFIG)
TABLE = weight_table(MODEL)
SHAPES = {name: shard.shape for name, shard in TABLE.huggingface().items()}
JOIN = timedelta(seconds=300)
CHANGED = 0.02
"""Share of the elements that differ from version to version."""


@lru_cache(maxsize=2)
def tensors_of(version: int) -> Mapping[str, Tensor]:
    """Whole tensors of a version in bfloat16."""
    generator = torch.Generator().manual_seed(version)
    if version == 0:
        return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in SHAPES.items()}
    return {
        name: torch.where(torch.rand(tensor.shape, generator=generator) < CHANGED, tensor * 0.75, tensor)
        for name, tensor in tensors_of(version - 1).items()
    }


class Source:
    """Shards of the tensors of a version, of which a parameter has its values when it was waited for."""

    lora: Any = None
    computed_parameters = frozenset({"decoder.layers.0.mlp.linear_fc1.weight", "decoder.final_layernorm.weight"})
    table, dtype = TABLE, torch.bfloat16

    def __init__(self, layout: str) -> None:
        placement = Placement(Layout.parse(layout).fit(dist.get_world_size()), tuple(range(dist.get_world_size())))
        self._map = TABLE.shard_map_megatron(placement)
        self._arrived: dict[str, Tensor] = {}
        self._parameters: dict[str, Tensor] = {}

    def shard_map(self):
        return self._map

    def at(self, version: int) -> SourceWeights:
        """These weights; other values than before."""
        shards = self._map.shards(dist.get_rank())
        self._arrived = {name: assemble(shard, tensors_of(version)) for name, shard in shards.items()}
        self._parameters = {name: torch.full_like(values, torch.nan) for name, values in self._arrived.items()}

        def save(folder: Path, _: Path) -> None:
            if dist.get_rank() == 0:
                folder.mkdir(parents=True)
                save_file(dict(tensors_of(version)), folder / "model.safetensors")
            dist.barrier()

        return SourceWeights(self, version, save)  # type: ignore[arg-type]

    def parameters(self, complete: bool = True) -> dict[str, Tensor]:
        if complete:
            self.wait_for()
        return self._parameters

    def wait_for(self, parameters: Iterable[Tensor] | None = None) -> None:
        waited = None if parameters is None else [id(parameter) for parameter in parameters]
        for name in self._arrived.keys() - self.computed_parameters:
            if waited is None or id(self._parameters[name]) in waited:
                self._parameters[name].copy_(self._arrived[name])

    def served_parameters(self) -> Mapping[str, Tensor]:
        return self._arrived


# -- the oracle


def quantizer(wire: Wire) -> Quantizer:
    """SGLang's own for whole tensors."""
    match wire:
        case "fp8_block":
            return sglang_blocks(128)
        case "mxfp8":
            return microscaled("sglang", 32)
    return sglang_channels


def expected(
    layout: str, rank: int, tensors: Mapping[str, Tensor], wire: Wire = "cast", table: WeightTable = TABLE
) -> dict[str, Tensor]:
    """The parameters of a rank of an engine, cut from whole tensors that SGLang has quantized as a whole."""
    quantize = quantizer(wire)
    names = quantized_tensors(table) if wire != "cast" else ()
    shards, quantized = table.engine_shards(EngineLayout.parse(layout), rank), {n: quantize(tensors[n]) for n in names}
    return encoded_parameters(shards, tensors, quantized, encoding_of(wire))


# -- engines of the job


class EngineProcess:
    """An engine of the job that keeps the parameters of its ranks; its process ends after `loads_left` loads."""

    num_adapter_readers = 1

    def __init__(self, layout: str) -> None:
        self._layout, self.version, self.loads_left = layout, -1, 10**6
        self.loads: list[str] = []
        self.begun = 0
        self.adapters: dict[str, Tensor] = {}
        self.restart()

    def restart(self) -> None:
        self.parameters: list[dict[str, Tensor]] = [{} for _ in range(EngineLayout.parse(self._layout).ranks)]
        self.version, self.loads_left = -1, 10**6

    def begin_load(self) -> None:
        self.begun += 1

    def load(self, payloads: list[str], version: int | None) -> int | None:
        if not self.loads_left:
            raise EngineDiedError("its process ended")
        self.loads_left -= 1
        for held, payload in zip(self.parameters, payloads, strict=True):
            places, memory = open_payload(payload, torch.device("cpu"))
            if has_patches(places):
                apply_payload(places, memory, held.__getitem__)
            else:
                held |= {name: tensor.clone() for name, tensor in named_views(places, memory)}
        self.loads.append("changes" if has_patches(places) else "all")
        return version

    def loaded(self, version: int | None) -> None:
        self.version = self.version if version is None else version

    def read(self, payloads: list[str], is_last: bool) -> None:
        if not self.loads_left:
            raise EngineDiedError("its process ended")
        self.loads_left -= 1
        for held, payload in zip(self.parameters, payloads, strict=True):
            weight_loader.read(held, dict(named_views(*open_payload(payload, torch.device("cpu")))))

    def load_adapters(self, payloads: list[str], version: int, fields: Mapping[str, Any]) -> None:
        (payload,) = payloads
        self.adapters = {
            name: tensor.clone() for name, tensor in named_views(*open_payload(payload, torch.device("cpu")))
        }
        self.adapter_version, self.targets = version, fields["target_modules"]

    def wrong(self, version: int, wire: Wire = "cast") -> list[str]:
        """What is not as it has to be in a version."""
        found = [] if self.version == version else [f"version {self.version}"]
        for rank, held in enumerate(self.parameters):
            found += [
                f"{name} on {rank}" for name in differing(held, expected(self._layout, rank, tensors_of(version), wire))
            ]
        return found


def damage(parameters: Mapping[str, Tensor]) -> None:
    """Changes a bit in the memory of an engine."""
    parameters["model.norm.weight"].view(torch.int16)[3] ^= 1


# -- servers


class ServerRank:
    """A rank of a server: its parameters, and what SGLang's schedulers do with requests to it."""

    def __init__(self, layout: str, rank: int, wire: Wire = "cast") -> None:
        self._layout, self._rank, self._wire = layout, rank, wire
        self._shards: Mapping[str, Shard] = TABLE.engine_shards(EngineLayout.parse(layout), rank)
        self._groups: dict[str, dist.ProcessGroup] = {}
        shard_receiver._receiver.cache_clear()  # this process was a rank of another server before
        self.restart()

    def restart(self) -> None:
        """New memory, as in a server that was started again."""
        self._version = "default"
        self._parameters = {
            name: torch.full(values.shape, 7.0).to(values.dtype)
            for name, values in expected(self._layout, self._rank, tensors_of(0), self._wire).items()
        }

    def named_buffers(self) -> Iterable[tuple[str, Tensor]]:
        return ()

    def named_parameters(self) -> Iterable[tuple[str, Tensor]]:
        """Of the model that SGLang's loaders get."""
        return self._parameters.items()

    def serve(self, address: Path) -> None:
        """Handles the requests of the job, until it says that there are no more."""
        with Listener(str(address)) as listener:
            while (pipe := listener.accept()) and self._serve(pipe):
                pipe.close()

    def _serve(self, pipe: Connection) -> bool:
        self._killed = False
        while True:
            try:
                path, body = pipe.recv()
            except EOFError:
                return True
            if path == "end":
                return False
            if self._killed and path.startswith("/"):
                return True  # the pipe is closed, as if the process had ended
            pipe.send(getattr(self, f"_{path.strip('/')}", lambda body: None)(body))
            self._version = body.get("weight_version", self._version)

    def _update_weights_from_tensor(self, body: Mapping[str, Any]) -> None:
        parallel = SimpleNamespace(pp_rank=0, tp_rank=self._rank, tp_size=EngineLayout.parse(self._layout).tp)
        with pytest.MonkeyPatch.context() as patch:
            for name in ("sglang", "sglang.srt", "sglang.srt.runtime_context"):
                patch.setitem(sys.modules, name, ModuleType(name))
            patch.setattr(sys.modules["sglang.srt.runtime_context"], "get_parallel", lambda: parallel, raising=False)
            patch.setattr(shard_receiver.internals, "compute_buffers", lambda model: None)  # this model has none
            shard_receiver.receive_shards(self, pickle.loads(base64.b64decode(body["serialized_named_tensors"][0])))

    def _init_weights_update_group(self, body: Mapping[str, Any]) -> None:
        store = connect_store(body["master_address"], body["master_port"], JOIN)
        name, members = body["group_name"], range(body["world_size"])
        rank = body["rank_offset"] + self._rank
        self._groups[name] = join_outside_group(store, name, rank, members, body["backend"], JOIN)

    def _destroy_weights_update_group(self, body: Mapping[str, Any]) -> None:
        dist.destroy_process_group(self._groups.pop(body["group_name"]))

    def _update_weights_from_distributed(self, body: Mapping[str, Any]) -> None:
        dtypes = [getattr(torch, dtype) for dtype in body["dtypes"]]
        sizes = [
            torch.Size(shape).numel() * dtype.itemsize for shape, dtype in zip(body["shapes"], dtypes, strict=True)
        ]
        flat = torch.empty(sum(sizes), dtype=torch.uint8)
        self._groups[body["group_name"]].broadcast(flat, 0).wait()
        parts = zip(body["names"], flat.split(sizes), dtypes, body["shapes"], strict=True)
        self._load({name: part.view(dtype).view(shape) for name, part, dtype, shape in parts})

    def _update_weights_from_disk(self, body: Mapping[str, Any]) -> None:
        self._load(load_file(Path(body["model_path"]) / "model.safetensors"))

    def _load(self, tensors: Mapping[str, Tensor]) -> None:
        """Cuts whole tensors, as SGLang's loaders do."""
        for name, shard in self._shards.items():
            for box in shard.padding:
                self._parameters[name][slices(box)] = 0
            for piece in shard.pieces:
                if piece.tensor in tensors:
                    self._parameters[name][slices(piece.target)] = tensors[piece.tensor][slices(piece.source)]

    def _wrong(self, body: Mapping[str, Any]) -> list[str]:
        wanted = expected(self._layout, self._rank, tensors_of(body["version"]), self._wire)
        found = [] if self._version == str(body["version"]) else [f"version {self._version}"]
        return found + [f"{name} on {self._rank} of {self._layout}" for name in differing(self._parameters, wanted)]

    def _damage(self, body: Mapping[str, Any]) -> None:
        damage(self._parameters)

    def _kill(self, body: Mapping[str, Any]) -> None:
        self._killed = True

    def _restart(self, body: Mapping[str, Any]) -> None:
        self.restart()


class Session:
    """Requests to all ranks of a server, in place of `JsonSession`."""

    def __init__(self, url: str, addresses: Sequence[Path]) -> None:
        self.url = url
        self._pipes = [_connect(address) for address in addresses]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def post(self, path: str, body: dict[str, Any], timeout: float | None) -> dict[str, Any]:
        return await asyncio.to_thread(lambda: {"success": True, "answers": self.query(path, body)})

    def query(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The answers of all ranks."""
        try:
            for pipe in self._pipes:
                pipe.send((path, body))
            return [pipe.recv() for pipe in self._pipes]
        except (EOFError, OSError) as error:
            raise UnreachableError(f"{path}: {error!r}") from None

    def end(self) -> None:
        """Ends the ranks of the server."""
        for pipe in self._pipes:
            pipe.send(("end", {}))

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


def _connect(address: Path) -> Connection:
    # Polls until the rank listens.
    while True:
        try:
            return Client(str(address))
        except (FileNotFoundError, ConnectionRefusedError):
            time.sleep(0.02)


class Server:
    """A server as the rank sees it that leads it."""

    def __init__(self, number: int, layout: str, addresses: Sequence[Path]) -> None:
        self._url, self._layout, self._addresses, self._starts = f"http://127.0.0.1:{number + 1}", layout, addresses, 0
        self.session = self._connect()

    def _connect(self) -> Session:
        session = Session(self._url, self._addresses)
        self._starts += 1
        info = SimpleNamespace(
            start=str(self._starts), layout=self._layout, shard_obstacle="", tp=len(self._addresses), version="0",
            max_running=8, context=64, seeded=False, reads_text=True,
        )  # fmt: skip
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(remote_engine, "probe_server", lambda *_: info)
            patch.setattr(remote_engine, "JsonSession", lambda *_: session)
            self.engine = RemoteEngine(self._url, ServerRequirements(MODEL, 64), SETTINGS)
        return session

    def end(self) -> None:
        """Ends the server."""
        self.session.end()
        self.session.close()

    def restart(self) -> None:
        """A server that was started again, at the same address."""
        self.session.close()
        self.session = self._connect()
        self.query("restart")

    def query(self, path: str, **body: Any) -> list[Any]:
        """The answers of all ranks."""
        return self.session.query(path, body)


@contextmanager
def world(store: Path, rank: int, size: int) -> Iterator[None]:
    """Makes this process a rank of a smaller job than that of all ranks of the run."""
    dist.barrier()  # all are connected
    dist.destroy_process_group()
    init_process_group(dist.FileStore(str(store), size), rank, size)
    yield
