"""Weight table of a model: its tensors, and their shards in Megatron, in rollout engines and in `transformers`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Literal

from verl_mg.layout import EngineLayout, EnginePlacement, Layout, ModelDims, Placement
from verl_mg.models.hf_config import HFConfig
from verl_mg.models.hf_tensors import Experts, ModelSpec, TensorIndex, TensorSpec, model_spec
from verl_mg.sharding import engine_table, megatron, sglang, transformers, vllm
from verl_mg.sharding.boxes import Piece, Shard, full_box
from verl_mg.sharding.engine_table import EngineRules
from verl_mg.sharding.megatron import Kernels
from verl_mg.sharding.param_spec import Axis, ParamBlock, ParamSpec
from verl_mg.sharding.shard_map import DerivedShardMap, ParallelIndex, ShardMap
from verl_mg.sharding.traced_table import EngineName, TracedTable, read_traced_table

Head = Literal["language", "value"]
"""Output layer of a model: the language model's, or the single row of a value or reward model."""
ENGINE_RULES: Mapping[EngineName, EngineRules] = {"sglang": sglang.RULES, "vllm": vllm.RULES}
"""Differences of each engine from the common table."""
SCORE = "score.weight"
"""Name of the value head's tensor, as in `transformers`' models for token classification."""


@dataclass(frozen=True)
class WeightTable:
    """All weights of one model, as pure functions of its configuration."""

    config: HFConfig
    """Configuration of the model."""
    head: Head = "language"
    """With "value" a single row replaces the language model's output layer."""
    engine: EngineName = "sglang"
    """Rollout engine whose shards `shard_map_engine` returns; see `for_engine`."""
    traced: TracedTable | None = field(default=None, compare=False)
    """Traced table of the rollout engine, which replaces the built-in table; see `with_traced_table`."""

    def for_engine(self, engine: EngineName) -> WeightTable:
        """Returns this table with the parameters of a rollout engine."""
        return replace(self, engine=engine)

    def with_traced_table(self, path: Path | None) -> WeightTable:
        """Returns this table with the engine's part read from a file of `verl-mg trace`.

        Args:
            path: value of `rollout.sharding_table`; None keeps the built-in table.

        Raises:
            UserError: the file cannot be read, is damaged, or was traced for another engine or model.
        """
        if path is None:
            return self
        traced = read_traced_table(path)
        traced.check_engine(path, self.engine)
        traced.check_model(path, self.tensor_index.tensors)
        return replace(self, traced=traced)

    @cached_property
    def model(self) -> ModelSpec:
        """Tensors of the checkpoint, layer by layer."""
        model = model_spec(self.config)
        if self.head == "language":
            return model
        return replace(model, output=TensorSpec(SCORE, (1, self.config.hidden)))

    @cached_property
    def tensor_index(self) -> TensorIndex:
        """Tensors of the checkpoint by name, in order."""
        return TensorIndex(self.model)

    @cached_property
    def router_biases(self) -> frozenset[str]:
        """Names of the biases of routers, which have no gradient and keep the values of the checkpoint."""
        biases = {layer.mlp.router_bias for layer in self.model.layers if isinstance(layer.mlp, Experts)}
        return frozenset(name for name, entry in self.tensor_index.entries.items() if entry.tensor in biases)

    def megatron(self, layout: Layout, rank: int, kernels: Kernels = "torch") -> dict[str, Shard]:
        """Returns the parameters of one Megatron rank by their name in Megatron's state dict.

        With virtual pipeline stages a rank has several model chunks: the names of chunk v begin with `chunk{v}.`.

        Args:
            layout: Megatron layout.
            rank: 0 <= rank < layout.ranks; IndexError beyond.
            kernels: kernels of the layers, whose parameter names are used.
        """
        layout.coordinates(rank)  # IndexError beyond the layout
        return self.shard_map_megatron(Placement(layout, tuple(range(layout.ranks))), kernels).shards(rank)

    def engine_shards(self, layout: EngineLayout, rank: int) -> Mapping[str, Shard]:
        """Returns the parameters of one rank of an engine by their name in the engine's model class.

        Args:
            layout: engine layout.
            rank: 0 <= rank < layout.ranks.
        """
        return self.shard_map_engine(EnginePlacement(layout, tuple(range(layout.ranks)))).shards(rank)

    def transformers(self) -> dict[str, Shard]:
        """Returns the parameters of the module of `transformers` 5, unsharded."""
        return self.shard_map_replicated((0,)).shards(0)

    def huggingface(self) -> dict[str, Shard]:
        """Returns the tensors of the checkpoint, unsharded; a tied output layer is not among them."""
        shapes = {name: entry.tensor.shape for name, entry in self.tensor_index.entries.items()}
        return {name: Shard(shape, (Piece(name, full_box(shape), full_box(shape)),)) for name, shape in shapes.items()}

    def shard_map_megatron(self, placement: Placement, kernels: Kernels = "torch") -> DerivedShardMap:
        """Returns the shards of Megatron's ranks.

        Args:
            placement: Megatron layout and its ranks.
            kernels: kernels of the layers, whose parameter names are used.

        Raises:
            UserError: the layout does not divide the model.
        """
        layout, config = placement.layout, self.config
        self.check_layout(layout, kernels)
        layer_params = cache(lambda layer: megatron.layer_params(layer, config, kernels))
        embedding, output = megatron.embedding_param(self.model), self._output_params()
        stages = []
        for stage in range(layout.pp):
            blocks: list[ParamBlock] = []
            for chunk in range(layout.vpp):
                prefix = f"chunk{chunk}." if layout.vpp > 1 else ""
                first = stage == 0 and chunk == 0
                if first:
                    blocks.append(ParamBlock(prefix, (embedding,)))
                for local, layer in enumerate(layout.layers(config.layers, stage, chunk)):
                    params = layer_params(self.model.layers[layer])
                    blocks.append(ParamBlock(f"{prefix}decoder.layers.{local}.", params, layer))
                if stage == layout.pp - 1 and chunk == layout.vpp - 1:
                    # A tied output layer is a parameter only where the embedding is on another stage.
                    blocks.append(ParamBlock(prefix, output[:1] if self.tied and first else output))
            stages.append(blocks)
        sizes: dict[Axis, int] = {"replicated": 1, "tensor": layout.tp, "vocabulary": layout.tp, "expert": layout.etp}
        indices = {}
        for number, rank in enumerate(placement.ranks):
            at = layout.coordinates(number)
            axis_index: dict[Axis, int] = {"replicated": 0, "tensor": at.tp, "vocabulary": at.tp, "expert": at.etp}
            indices[rank] = ParallelIndex(at.pp, at.ep, axis_index)
        return self._derive(stages, sizes, layout.ep, indices)

    def shard_map_engine(self, placement: EnginePlacement) -> ShardMap:
        """Returns the shards of the ranks of engines, from the traced table where there is one.

        Args:
            placement: engine layout and its ranks.

        Raises:
            UserError: the engine cannot shard the model in this way, or the table was traced for another layout.
        """
        layout, config, rules = placement.layout, self.config, ENGINE_RULES[self.engine]
        self.check_engine_layout(layout)
        if self.traced:
            return self.traced.shard_map(placement, self.tensor_index.tensors)
        layer_params = cache(lambda layer: engine_table.layer_params(layer, config, rules))
        embedding, (final_norm, output) = (
            engine_table.embedding_param(self.model),
            engine_table.output_params(self.model),
        )
        stages = []
        for stage in range(layout.pp):
            ends = rules.pipeline_ends(config, self.tied, stage == 0, stage == layout.pp - 1)
            blocks = [ParamBlock("", (embedding,))] if ends.embedding else []
            for layer in layout.layers(config.layers, stage):
                blocks.append(ParamBlock(f"model.layers.{layer}.", layer_params(self.model.layers[layer]), layer))
            if ends.final_norm:
                blocks.append(ParamBlock("", (final_norm,)))
            if ends.output:
                blocks.append(ParamBlock("", (output,)))
            stages.append(blocks)
        sizes: dict[Axis, int] = {
            "replicated": 1,
            "tensor": layout.tp,
            "attention": layout.attention_tp,
            "vocabulary": layout.attention_tp,
            "expert": layout.expert_tp,
        }
        indices = {}
        for rank in placement.ranks:
            at = placement.coordinates(rank)
            axis_index: dict[Axis, int] = {
                "replicated": 0,
                "tensor": at.tp,
                "attention": at.attention_tp,
                "vocabulary": at.attention_tp,
                "expert": at.expert_tp,
            }
            indices[rank] = ParallelIndex(at.pp, at.ep, axis_index)
        return self._derive(stages, sizes, layout.ep, indices)

    def shard_map_replicated(self, ranks: Sequence[int]) -> DerivedShardMap:
        """Returns the shards of ranks that each have the whole module of `transformers`."""
        config = self.config
        layer_params = cache(lambda layer: transformers.layer_params(layer, config))
        blocks = [
            ParamBlock("", (transformers.embedding_param(self.model),)),
            *(
                ParamBlock(f"model.layers.{number}.", layer_params(layer), number)
                for number, layer in enumerate(self.model.layers)
            ),
            ParamBlock("", transformers.output_params(self.model)),
        ]
        indices = {rank: ParallelIndex(0, 0, {"replicated": 0}) for rank in ranks}
        return self._derive([blocks], {"replicated": 1}, 1, indices)

    def check_layout(self, layout: Layout, kernels: Kernels = "torch") -> None:
        """Checks that Megatron's layout divides the model.

        Args:
            layout: Megatron layout.
            kernels: kernels of the layers.

        Raises:
            UserError: with the dimension that is not divisible.
        """
        layout.check(self.model_dims)
        if self.config.latent and kernels == "torch":  # Transformer Engine replicates the down projections
            latent = self.config.latent
            layout.check_down_projections(latent.q_rank, latent.kv_rank + latent.rope_dim)

    def check_engine_layout(self, layout: EngineLayout) -> None:
        """Checks that the engine can shard the model in this way.

        Raises:
            UserError: the engine does not support it, or the traced table has another layout.
        """
        if self.traced:
            self.traced.check_layout(layout)
        else:
            ENGINE_RULES[self.engine].check_supported(self.config, layout)
        layout.check(self.model_dims)

    @property
    def model_dims(self) -> ModelDims:
        """Dimensions that layouts divide."""
        c, experts = self.config, self.config.experts
        dense = ModelDims(attention_heads=c.heads, kv_heads=c.kv_heads, layers=c.layers, ffn=c.ffn)
        if experts is None:
            return dense
        return replace(dense, experts=experts.count, expert_ffn=experts.ffn, shared_ffn=experts.shared_ffn)

    @property
    def tied(self) -> bool:
        """Whether the output layer is the embedding."""
        return self.model.output is self.model.embedding

    def padded_vocab(self, tp: int) -> int:
        """Returns the rows of the vocabulary on all tensor-parallel ranks of Megatron, including padding."""
        return megatron.VOCABULARY.padded(self.config.vocab, tp)

    def _output_params(self) -> tuple[ParamSpec, ...]:
        """Returns Megatron's final norm and output layer; a value head is whole on every rank."""
        norm, output = megatron.output_params(self.model)
        return (norm, ParamSpec(output.name, output.tensors)) if self.head == "value" else (norm, output)

    def _derive(
        self,
        stages: list[list[ParamBlock]],
        sizes: dict[Axis, int],
        expert_groups: int,
        indices: dict[int, ParallelIndex],
    ) -> DerivedShardMap:
        experts = self.config.experts.count if self.config.experts else 0
        return DerivedShardMap(self.tensor_index, stages, sizes, experts // expert_groups, indices)


def weight_table(config: HFConfig, head: Head = "language") -> WeightTable:
    """Returns the weight table of a model.

    Args:
        config: configuration of the model.
        head: output layer of the model.
    """
    return WeightTable(config, head)
