"""One role's model on this rank: built, filled from a checkpoint, run over packed micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from verl_mg import device
from verl_mg.batch import Batch
from verl_mg.checkpoint.hf_safetensors import CheckpointReader, load_shards
from verl_mg.config import LoraConfig
from verl_mg.layout import Layout, Placement
from verl_mg.megatron.lora import Adapters
from verl_mg.megatron.microbatch import MicroBatch, make_micro_batch
from verl_mg.megatron.model import build_chunks, chunks_by_prefix, parameters_by_name, rotary_frequencies
from verl_mg.megatron.process_groups import ParallelGroups
from verl_mg.megatron.routing import check_routed_experts
from verl_mg.models.hf_config import HFConfig, read_config
from verl_mg.phase_timer import PhaseTimer
from verl_mg.sharding.shard_map import ShardMap
from verl_mg.sharding.weight_table import SCORE, Head, WeightTable, weight_table

T = TypeVar("T")
Report = dict[str, Tensor]
Judge = Callable[[MicroBatch, Tensor], tuple[Tensor, Report]]
"""(micro-batch, output of the last stage) -> (scalar to differentiate, what to report)."""

HEAD_SEED = 1


class ModelRunner:
    """A model on the placement of its groups. Every method that computes is called by all ranks of that at once.

    Ranks of the job outside the placement have the description, no chunk and no parameter. head: what judges tokens;
    a value head that the directory lacks begins small and random. behind: see `make_micro_batch`. lora: adapters to
    train, and nothing else but a value head.
    """

    def __init__(
        self,
        model_dir: Path,
        groups: ParallelGroups,
        dtype: torch.dtype,
        recompute: bool = False,
        head: Head = "language",
        behind: int = 1,
        lora: LoraConfig | None = None,
        timer: PhaseTimer | None = None,
    ) -> None:
        self.table = weight_table(read_config(model_dir), head)
        self._behind, self.timer = behind, timer or PhaseTimer()
        check_layout(self.table.config, groups.layout)
        self.groups, self.dtype = groups, dtype
        frequencies, self._attention_scaling = rotary_frequencies(model_dir)
        self._frequencies = frequencies.to(device.current_device())
        with groups.active():
            self.chunks = build_chunks(self.table, groups, dtype, recompute) if self.is_member else []
        self.runnable: list[torch.nn.Module] = list(self.chunks)
        with CheckpointReader(model_dir, _fresh_head(self.table)) as reader:
            reader.check(self.table.huggingface())
            shards = self.shard_map().shards(torch.distributed.get_rank())
            load_shards(reader, shards, self.parameters())
        self.lora = Adapters(self.table, chunks_by_prefix(self.chunks), shards, lora) if lora else None

    @property
    def layout(self) -> Layout:
        """The layout the model stands on."""
        return self.groups.layout

    @property
    def placement(self) -> Placement:
        """The layout and the ranks of the job that it stands on."""
        return self.groups.placement

    @property
    def is_member(self) -> bool:
        """Whether this rank is in the placement, and computes."""
        return self.groups.is_member

    def output_rank(self, seat: int) -> int:
        """The rank that answers for a seat, see `layout.contexts`: the first of its last pipeline stage."""
        dp, cp = divmod(seat, self.layout.cp)
        return self.placement.ranks[self.layout.rank_of(cp=cp, dp=dp, pp=self.layout.pp - 1)]

    @property
    def is_output_rank(self) -> bool:
        """Whether this rank answers for its data-parallel index."""
        return self.is_output_rank_for(self.layout.cp)

    def is_output_rank_for(self, context: int) -> bool:
        """Whether this rank answers for what `context` context-parallel ranks share, itself one of them."""
        if not self.is_member:
            return False
        at = self.groups.coordinates
        return at.tp == 0 and at.pp == self.layout.pp - 1 and at.cp % context == 0

    def select_outputs(self, reports: Sequence[T], cp_sizes: Sequence[int] | None = None) -> list[T | None]:
        """Of what `run` reports, an entry for each micro-batch, those that this rank answers for."""
        cp_sizes = cp_sizes or [self.layout.cp] * len(reports)
        return [
            report if self.is_output_rank_for(context) else None
            for report, context in zip(reports, cp_sizes, strict=bool(reports))
        ]

    def parameters(self) -> dict[str, Tensor]:
        """This rank's parameters under the names of the weight table; {} outside the placement."""
        return parameters_by_name(self.chunks)

    def adapters(self) -> Mapping[str, Tensor]:
        """What is trained in place of the weights: adapters, a value head; {} where the weights are trained."""
        return self.lora.parameters if self.lora else {}

    @property
    def adapted(self) -> frozenset[str]:
        """The parameters that have adapters on this rank."""
        return self.lora.of if self.lora else frozenset()

    def served_parameters(self) -> Mapping[str, Tensor]:
        """`parameters`, as the model computes with them: each with its adapters in it, made anew when asked for.

        The sum is rounded to the dtype of the weights: in bfloat16 engines lose the smallest part of small adapters.
        """
        return self.lora.served(self.parameters()) if self.lora else self.parameters()

    def shard_map(self) -> ShardMap:
        """What every rank holds, by the weight table."""
        return self.table.shard_map_megatron(self.placement)

    def judge(
        self, micro_batches: Sequence[Batch], temperature: float, cp_sizes: Sequence[int] | None = None
    ) -> list[tuple[Tensor, Tensor] | None]:
        """(places in the token columns, log-probs or values there) by micro-batch, where this rank speaks for it."""

        def report(micro: MicroBatch, output: Tensor) -> tuple[Tensor, Report]:
            return output.sum(), {"entries": micro.entries, "judged": output[0].cpu()}

        with torch.no_grad():
            reports = self.run(micro_batches, temperature, report, forward_only=True, cp_sizes=cp_sizes)
        select_outputs = self.select_outputs(reports, cp_sizes)
        return [None if report is None else (report["entries"], report["judged"]) for report in select_outputs]

    def run(
        self,
        micro_batches: Sequence[Batch],
        temperature: float,
        judge: Judge,
        forward_only: bool,
        cp_sizes: Sequence[int] | None = None,
    ) -> list[Report]:
        """Megatron's pipeline schedule over the micro-batches; the reports in order, on the last stage alone.

        contexts: how many context-parallel ranks share each of them, all unless given.
        """
        if not self.is_member:
            return []
        # Temperature 0 is greedy sampling, whose log-probs are those of the unscaled distribution.
        scale = temperature if temperature > 0 else 1.0
        for rows in micro_batches:
            check_routed_experts(rows, self.table.config)
        filled = [*micro_batches, *_fillers(micro_batches, self.layout)]
        cp_sizes = [*(cp_sizes or []), *[self.layout.cp] * (len(filled) - len(cp_sizes or []))]
        cuts = [self.groups.cut(context) for context in cp_sizes]
        description = (self._frequencies, self._attention_scaling, self.dtype)
        prepared = [
            make_micro_batch(rows, *description, cut, self._behind) for rows, cut in zip(filled, cuts, strict=True)
        ]

        def step(iterator: Any, model: torch.nn.Module) -> tuple[Tensor, Callable[[Tensor], Any]]:
            micro = next(iterator)
            return model(micro, scale), partial(_judged, judge, micro)

        iterators = [iter(prepared) for _ in self.runnable]
        with self.groups.active(), self.timer("forward" if forward_only else "update"):
            reports = get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=iterators if len(iterators) > 1 else iterators[0],
                model=self.runnable,
                num_microbatches=len(prepared),
                seq_length=1,  # not read: each micro-batch has its own length
                micro_batch_size=1,
                forward_only=forward_only,
            )
        return list(reports)[: len(micro_batches)]


def _fillers(micro_batches: Sequence[Batch], layout: Layout) -> list[Batch]:
    """Empty micro-batches: interleaved pipelines take as many as make the number a multiple of their stages."""
    return [micro_batches[0].select([])] * (-len(micro_batches) % layout.pp) if layout.vpp > 1 else []


def _judged(judge: Judge, micro: MicroBatch, output: Tensor) -> tuple[Tensor, Tensor, Report]:
    loss, report = judge(micro, output)
    # megatron divides by this count of tokens; ours are normalised already, see Trainer.
    return loss, torch.zeros((), dtype=torch.int, device=output.device), report


def _fresh_head(weight_table: WeightTable) -> dict[str, Tensor]:
    """Normal with deviation 1 / (h + 1), so that first values are near 0 (arXiv:2009.01325, appendix B)."""
    if weight_table.head == "language":
        return {}
    generator = torch.Generator().manual_seed(HEAD_SEED)
    return {SCORE: torch.randn(1, weight_table.config.hidden, generator=generator) / (weight_table.config.hidden + 1)}


def check_layout(config: HFConfig, layout: Layout) -> None:
    """UserError where the model cannot be trained on the layout."""
    weight_table(config).check_layout(layout)
    layout.check_context(config.heads)
