"""The weight table of a model, and its views in the dialects of Megatron, SGLang and `transformers`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Literal

from verl_mg.layout import EngineLayout, EnginePlacement, Layout, ModelDims, Placement
from verl_mg.models.hf_config import HFConfig
from verl_mg.models.hf_tensors import LayerSpec, ModelSpec, TensorSpec, model_spec
from verl_mg.models.tensor_index import TensorIndex
from verl_mg.sharding import megatron, sglang, transformers
from verl_mg.sharding.boxes import Piece, Shard, full_box
from verl_mg.sharding.megatron import Modules
from verl_mg.sharding.param_spec import Axis, ParamBlock, ParamSpec
from verl_mg.sharding.shard_map import DerivedShardMap, ParallelIndex

Head = Literal["language", "value"]
SCORE = "score.weight"
"""The value head's tensor, as `transformers` names it in models for token classification."""


@dataclass(frozen=True)
class WeightTable:
    """All weights of one model; pure functions of its configuration.

    With the head "value" a single row takes the place of the language model's output layer.
    """

    config: HFConfig
    head: Head = "language"

    @cached_property
    def model(self) -> ModelSpec:
        """The tensors of the checkpoint."""
        model = model_spec(self.config)
        if self.head == "language":
            return model
        return ModelSpec(model.embedding, model.blocks, model.final_norm, TensorSpec(SCORE, (1, self.config.hidden)))

    @cached_property
    def tensor_index(self) -> TensorIndex:
        """The tensors of the checkpoint by name, in order."""
        return TensorIndex(self.model)

    def megatron(self, layout: Layout, rank: int, modules: Modules = "local") -> dict[str, Shard]:
        """The parameters of `rank` (0 <= rank < layout.ranks), by their name in Megatron's state dict.

        With virtual pipeline stages a rank has several model chunks: the names of chunk v begin with `chunk{v}.`.
        """
        layout.coordinates(rank)  # IndexError beyond the layout
        return self.shard_map_megatron(Placement(layout, tuple(range(layout.ranks))), modules).shards(rank)

    def sglang(self, layout: EngineLayout, rank: int) -> dict[str, Shard]:
        """The parameters of `rank` of an engine (0 <= rank < layout.ranks), by their name in SGLang's model class."""
        return self.shard_map_sglang(EnginePlacement(layout, tuple(range(layout.ranks)))).shards(rank)

    def transformers(self) -> dict[str, Shard]:
        """The parameters of the module of `transformers` 5, whole."""
        return self.shard_map_replicated((0,)).shards(0)

    def huggingface(self) -> dict[str, Shard]:
        """The tensors of the checkpoint, each whole; a tied output layer is not among them."""
        shapes = {name: entry.tensor.shape for name, entry in self.tensor_index.entries.items()}
        return {name: Shard(shape, (Piece(name, full_box(shape), full_box(shape)),)) for name, shape in shapes.items()}

    def shard_map_megatron(self, placement: Placement, modules: Modules = "local") -> DerivedShardMap:
        """What Megatron's ranks hold. UserError where the layout does not divide the model."""
        layout, c = placement.layout, self.config
        self.check(layout, modules)
        block = cache(lambda b: megatron.block(b, c, modules))
        embedding, head = megatron.embedding(self.model), self._head(megatron.head(self.model))
        stages = []
        for stage in range(layout.pp):
            sections: list[ParamBlock] = []
            for chunk in range(layout.vpp):
                prefix = f"chunk{chunk}." if layout.vpp > 1 else ""
                first = stage == 0 and chunk == 0
                if first:
                    sections.append(ParamBlock(prefix, (embedding,)))
                for local, layer in enumerate(layout.layers(c.layers, stage, chunk)):
                    weights = block(self.model.blocks[layer])
                    sections.append(ParamBlock(f"{prefix}decoder.layers.{local}.", weights, layer))
                if stage == layout.pp - 1 and chunk == layout.vpp - 1:
                    # A tied output layer is a parameter of its own only where the embedding is on another stage.
                    sections.append(ParamBlock(prefix, head[:1] if self.tied and first else head))
            stages.append(sections)
        sizes: dict[Axis, int] = {"whole": 1, "tensor": layout.tp, "vocabulary": layout.tp, "expert": layout.etp}
        seats = {}
        for index, rank in enumerate(placement.ranks):
            at = layout.coordinates(index)
            on_axis: dict[Axis, int] = {"whole": 0, "tensor": at.tp, "vocabulary": at.tp, "expert": at.etp}
            seats[rank] = ParallelIndex(at.pp, at.ep, on_axis)
        return self._holdings(stages, sizes, layout.ep, seats)

    def shard_map_sglang(self, placement: EnginePlacement) -> DerivedShardMap:
        """What the ranks of SGLang's engines hold. UserError where SGLang cannot cut the model so."""
        layout, c = placement.layout, self.config
        self.check_engine(layout)
        block = cache(lambda b: sglang.block(b, c))
        stages = [
            self._sglang_stage(layout.layers(c.layers, stage), stage == 0, stage == layout.pp - 1, block)
            for stage in range(layout.pp)
        ]
        sizes: dict[Axis, int] = {
            "whole": 1,
            "tensor": layout.tp,
            "attention": layout.attention_tp,
            "vocabulary": layout.attention_tp,
            "expert": layout.expert_tp,
        }
        seats = {}
        for rank in placement.ranks:
            at = placement.coordinates(rank)
            on_axis: dict[Axis, int] = {
                "whole": 0,
                "tensor": at.tp,
                "attention": at.attention_tp,
                "vocabulary": at.attention_tp,
                "expert": at.expert_tp,
            }
            seats[rank] = ParallelIndex(at.pp, at.ep, on_axis)
        return self._holdings(stages, sizes, layout.ep, seats)

    def shard_map_replicated(self, ranks: Sequence[int]) -> DerivedShardMap:
        """What ranks hold that each have the whole module of `transformers`."""
        c = self.config
        block = cache(lambda b: transformers.block(b, c))
        layers = [ParamBlock(f"model.layers.{layer}.", block(b), layer) for layer, b in enumerate(self.model.blocks)]
        sections = [
            ParamBlock("", (transformers.embedding(self.model),)),
            *layers,
            ParamBlock("", transformers.head(self.model)),
        ]
        return self._holdings([sections], {"whole": 1}, 1, {rank: ParallelIndex(0, 0, {"whole": 0}) for rank in ranks})

    def check(self, layout: Layout, modules: Modules = "local") -> None:
        """UserError where Megatron's layout does not divide the model."""
        layout.check(self.dimensions)
        if self.config.latent and modules == "local":  # Transformer Engine's leave the down projections whole
            latent = self.config.latent
            layout.check_down_projections(latent.q_rank, latent.kv_rank + latent.rope_dim)

    def check_engine(self, layout: EngineLayout) -> None:
        """UserError where SGLang cannot cut the model so."""
        sglang.check(self.config, layout)
        layout.check(self.dimensions)

    @property
    def dimensions(self) -> ModelDims:
        """What layouts divide."""
        c, experts = self.config, self.config.experts
        dense = ModelDims(attention_heads=c.heads, kv_heads=c.kv_heads, layers=c.layers, ffn=c.ffn)
        if experts is None:
            return dense
        return replace(dense, experts=experts.count, expert_ffn=experts.ffn, shared_ffn=experts.shared_ffn)

    @property
    def tied(self) -> bool:
        """Whether the output layer is the embedding."""
        return self.model.output is self.model.embedding

    def _head(self, weights: tuple[ParamSpec, ...]) -> tuple[ParamSpec, ...]:
        """The final norm and the output layer; every rank has a value head whole."""
        norm, output = weights
        return (norm, ParamSpec(output.name, output.sources)) if self.head == "value" else weights

    def _sglang_stage(
        self, layers: range, first: bool, last: bool, block: Callable[[LayerSpec], tuple[ParamSpec, ...]]
    ) -> list[ParamBlock]:
        final_norm, output = sglang.head(self.model)
        sections = [ParamBlock(f"model.layers.{layer}.", block(self.model.blocks[layer]), layer) for layer in layers]
        if first:
            sections.insert(0, ParamBlock("", (sglang.embedding(self.model),)))
        if last:
            sections.append(ParamBlock("", (final_norm,)))
        # A tied output layer is the embedding, where that stands on the same stage.
        everywhere = self.config.architecture in sglang.OUTPUT_ON_EVERY_STAGE
        if (last or everywhere) and not (self.tied and first):
            sections.append(ParamBlock("", (output,)))
        return sections

    def _holdings(
        self,
        stages: list[list[ParamBlock]],
        sizes: dict[Axis, int],
        expert_groups: int,
        seats: dict[int, ParallelIndex],
    ) -> DerivedShardMap:
        experts = self.config.experts.count if self.config.experts else 0
        return DerivedShardMap(self.tensor_index, stages, sizes, experts // expert_groups, seats)

    def padded_vocab(self, tp: int) -> int:
        """Rows of the vocabulary over all tensor-parallel ranks of Megatron, padding included."""
        return megatron.VOCABULARY.padded(self.config.vocab, tp)


def weight_table(config: HFConfig, head: Head = "language") -> WeightTable:
    """The weight table of a model."""
    return WeightTable(config, head)
