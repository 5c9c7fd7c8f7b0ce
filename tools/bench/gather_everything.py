"""The weight sync that verl and slime do, as a baseline: every rank materialises every tensor of the model.

Bucket by bucket, as slime's `update_weight_from_tensor` does it, with asynchronous collectives in each step:

    broadcast over PP -> broadcast over EP (experts) -> all-gather over TP (ETP) -> Hugging Face tensors -> slices

What each rank receives is counted at the calls: the shard for a broadcast, which is the least it can be done with,
and n - 1 shards for an all-gather over n ranks. That is written as n - 1 messages to and from each rank, which over
gloo takes less time than its own ring.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl_mg.megatron.process_groups import ParallelGroups
from verl_mg.models.hf_config import HFConfig
from verl_mg.sharding.boxes import Shard, slices

NAMES = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "mlp.router.weight": "mlp.gate.weight",
}


@dataclass(frozen=True)
class Info:
    """A parameter of the whole model: its name there, the shape of a shard, what cuts it, and who has it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    cut: bool
    expert: bool
    stage: int
    expert_group: int


class GatherEverything:
    """One rank of the baseline; every rank makes one and calls `run` at the same time."""

    def __init__(
        self,
        source: Mapping[str, Tensor],
        target: Mapping[str, Tensor],
        needed: Mapping[str, Shard],
        groups: ParallelGroups,
        config: HFConfig,
        bucket_bytes: int,
    ) -> None:
        self._target, self._config = target, config
        self._at, self._pp, self._ep = groups.coordinates, groups.collection.pp, groups.collection.ep
        self._tp, self._etp = groups.collection.tp, groups.collection.expt_tp
        named = {_global_name(name, groups, config): tensor for name, tensor in of_each_expert(source.items())}
        self._local = {name: tensor.detach() for name, tensor in named.items()}
        infos: list[list[Info]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(infos, [self._info(name, tensor) for name, tensor in named.items()])
        unique = {info.name: info for infos_of_rank in infos for info in infos_of_rank}
        self._buckets = list(self._bucketed(list(unique.values()), bucket_bytes))
        self._needed = defaultdict(list)
        for parameter, shard in needed.items():
            for piece in shard.pieces:
                self._needed[piece.tensor].append((slices(piece.source), parameter, slices(piece.target)))
        self.bytes_received = 0

    def run(self) -> int:
        """Fill the target; returns the bytes received."""
        self.bytes_received = 0
        for bucket in self._buckets:
            for info, parts in zip(bucket, self._gather(bucket, self._broadcast(bucket)), strict=True):
                for name, tensor in to_huggingface(info.name, parts, self._config):
                    for box, parameter, at in self._needed[name]:
                        target = self._target[parameter][at]
                        target.copy_(tensor[box].view(target.shape))
        return self.bytes_received

    def _info(self, name: str, tensor: Tensor) -> Info:
        expert = ".local_experts." in name
        cut = getattr(tensor, "tensor_model_parallel", False)
        return Info(name, tuple(tensor.shape), tensor.dtype, cut, expert, self._at.pp, self._at.ep if expert else 0)

    def _bucketed(self, infos: list[Info], limit: int) -> Iterator[list[Info]]:
        """Runs of parameters that are at most `limit` bytes when gathered."""
        bucket: list[Info] = []
        size = 0
        for info in infos:
            nbytes = torch.Size(info.shape).numel() * info.dtype.itemsize * self._shard_group(info).size()
            if bucket and size + nbytes > limit:
                yield bucket
                bucket, size = [], 0
            bucket.append(info)
            size += nbytes
        yield bucket

    def _shard_group(self, info: Info) -> dist.ProcessGroup:
        return self._etp if info.expert else self._tp

    def _broadcast(self, bucket: list[Info]) -> list[Tensor]:
        """This rank's tensor-parallel shard of every parameter, wherever it came from."""
        shards = [
            self._local[info.name] if info.name in self._local else torch.empty(info.shape, dtype=info.dtype)
            for info in bucket
        ]
        over_stages = [
            self._broadcast_from(self._pp, info.stage, shard)
            for info, shard in zip(bucket, shards, strict=True)
            if self._pp.size() > 1 and (not info.expert or info.expert_group == self._at.ep)
        ]
        for work in over_stages:
            work.wait()
        over_experts = [
            self._broadcast_from(self._ep, info.expert_group, shard)
            for info, shard in zip(bucket, shards, strict=True)
            if self._ep.size() > 1 and info.expert
        ]
        for work in over_experts:
            work.wait()
        return shards

    def _broadcast_from(self, group: dist.ProcessGroup, member: int, tensor: Tensor) -> dist.Work:
        if group.rank() != member:
            self.bytes_received += tensor.nbytes
        return dist.broadcast(tensor, dist.get_global_rank(group, member), group, async_op=True)

    def _gather(self, bucket: list[Info], shards: list[Tensor]) -> list[Tensor]:
        """(ranks that cut it, *shape of a shard) of every parameter."""
        gathered, works = [], []
        for info, shard in zip(bucket, shards, strict=True):
            group = self._shard_group(info)
            if not info.cut or group.size() == 1:
                gathered.append(shard[None])
                continue
            parts = torch.empty((group.size(), *info.shape), dtype=info.dtype)
            works += self._exchange(parts, shard, group)
            gathered.append(parts)
        for work in works:
            work.wait()
        return gathered

    def _exchange(self, parts: Tensor, shard: Tensor, group: dist.ProcessGroup) -> list[dist.Work]:
        """An all-gather of `shard` into `parts` (n, *shape of a shard)."""
        local, works = group.rank(), []
        parts[local].copy_(shard)
        for step in range(1, group.size()):
            to, of = (local + step) % group.size(), (local - step) % group.size()
            works.append(dist.isend(shard, dist.get_global_rank(group, to), group))
            works.append(dist.irecv(parts[of], dist.get_global_rank(group, of), group))
            self.bytes_received += shard.nbytes
        return works


def of_each_expert(parameters: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yields parameters, each expert's separately, under the names of megatron-core's local modules."""
    for name, parameter in parameters:
        stack, stacked, leaf = name.partition(".mlp.experts.")
        if not stacked:
            yield name, parameter
            continue
        marks: Any = parameter
        for number, each in enumerate(parameter.detach()):
            weight: Any = each
            weight.tensor_model_parallel, weight.allreduce = marks.tensor_model_parallel, False
            weight.partition_dim, weight.partition_stride = marks.partition_dim - 1, marks.partition_stride
            yield f"{stack}.mlp.experts.local_experts.{number}.{leaf}", weight


def to_huggingface(name: str, parts: Tensor, c: HFConfig) -> Iterator[tuple[str, Tensor]]:
    """The whole tensors in a parameter of Qwen3's families, given its shards (n, *shape)."""
    if name in NAMES:
        yield NAMES[name], parts.flatten(0, 1)[: c.vocab]
        return
    _, _, layer, rest = name.split(".", 3)
    prefix = f"model.layers.{layer}."
    if expert := re.fullmatch(r"mlp\.experts\.local_experts\.(\d+)\.(.*)", rest):
        prefix, rest = f"{prefix}mlp.experts.{expert[1]}.", f"mlp.{expert[2]}"
    if rest == "self_attention.linear_qkv.weight":
        by_group = parts.view(c.kv_heads, -1, c.head_dim, c.hidden)
        for x, rows in zip("qkv", (by_group[:, :-2], by_group[:, -2], by_group[:, -1]), strict=True):
            yield f"{prefix}self_attn.{x}_proj.weight", rows.reshape(-1, c.hidden)
    elif rest == "mlp.linear_fc1.weight":
        of_gate_and_up = parts.view(len(parts), 2, -1, c.hidden)
        base = prefix if expert else prefix + "mlp."
        yield f"{base}gate_proj.weight", of_gate_and_up[:, 0].reshape(-1, c.hidden)
        yield f"{base}up_proj.weight", of_gate_and_up[:, 1].reshape(-1, c.hidden)
    elif rest in ("self_attention.linear_proj.weight", "mlp.linear_fc2.weight"):
        leaf = "down_proj.weight" if expert else NAMES[rest]
        yield prefix + leaf, torch.cat(tuple(parts), dim=1)
    else:
        yield prefix + NAMES[rest], parts[0]


def _global_name(name: str, groups: ParallelGroups, c: HFConfig) -> str:
    """With the layer's and the expert's number in the whole model."""
    first_layer = groups.layout.layers(c.layers, groups.coordinates.pp).start
    experts = c.experts.count // groups.layout.ep if c.experts else 0
    first_expert = groups.coordinates.ep * experts
    name = re.sub(r"(?<=layers\.)\d+", lambda number: str(int(number[0]) + first_layer), name)
    return re.sub(r"(?<=local_experts\.)\d+", lambda number: str(int(number[0]) + first_expert), name)
