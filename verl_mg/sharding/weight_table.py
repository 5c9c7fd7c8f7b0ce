"""Weight table of a model: its tensors, and their shards in Megatron, in rollout engines and in `transformers`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path

from verl_mg.errors import UserError
from verl_mg.layout import EngineLayout, EnginePlacement, Layout, Placement
from verl_mg.models.hf_config import HFConfig
from verl_mg.models.hf_families import UNTRAINED
from verl_mg.models.hf_tensors import model_spec
from verl_mg.models.tensor_index import TensorIndex, index_of
from verl_mg.models.tensor_tree import Experts, ModelSpec, TensorSpec, expert_tensors_of, linear_tensors_of
from verl_mg.sharding import engine_table, megatron, sglang, transformers, vllm
from verl_mg.sharding.boxes import Shard
from verl_mg.sharding.engine_table import EngineRules
from verl_mg.sharding.megatron import Kernels
from verl_mg.sharding.model_table import SCORE, Head, ModelTable
from verl_mg.sharding.param_spec import Axis, ParamBlock, ParamRow
from verl_mg.sharding.shard_map import DerivedShardMap, ParallelIndex
from verl_mg.sharding.traced_table import EngineName, TracedTable

ENGINE_RULES: Mapping[EngineName, EngineRules] = {"sglang": sglang.RULES, "vllm": vllm.RULES}
"""Rules of each engine by its name."""


@dataclass(frozen=True)
class WeightTable(ModelTable):
    """All weights of one model, as pure functions of its configuration."""

    drafts: bool = False  # whether the engine has the layer of multi-token prediction as its draft model

    def with_draft_model(self) -> WeightTable:
        """Returns this table with the draft model of SGLang."""
        if self.model.multi_token is None:
            return super().with_draft_model()
        return replace(self, drafts=True)

    def with_traced(self, traced: TracedTable, path: Path) -> WeightTable:
        """Returns this table with the engine's part from a traced table, without the tensors that are not trained.

        Args:
            traced, path: table of `verl-mg trace`, and its file; UserError where it is of another engine or model.
        """
        return super().with_traced(traced.without(UNTRAINED.get(self.config.architecture, ())), path)

    @cached_property
    def model(self) -> ModelSpec:
        """Tensors of the checkpoint, layer by layer."""
        model = model_spec(self.config)
        if self.head == "language":
            return model
        # A value model predicts no tokens, so it has no layer of multi-token prediction either.
        return replace(model, output=TensorSpec(SCORE, (1, self.config.hidden)), multi_token=None)

    @cached_property
    def tensor_index(self) -> TensorIndex:
        """Tensors of the checkpoint by name, in order."""
        return index_of(self.model)

    @cached_property
    def router_biases(self) -> frozenset[str]:
        """Names of the biases of routers, which have no gradient and keep the values of the checkpoint."""
        biases = {layer.mlp.router_bias for layer in self.model.all_layers if isinstance(layer.mlp, Experts)}
        return frozenset(name for name, entry in self.tensor_index.entries.items() if entry.tensor in biases)

    @cached_property
    def multi_token_tensors(self) -> frozenset[str]:
        """Names of the tensors of the layer of multi-token prediction, except for tensors that the model has too."""
        return frozenset(name for name, entry in self.tensor_index.entries.items() if entry.multi_token)

    @cached_property
    def indexers(self) -> frozenset[str]:
        """Names of the tensors of indexers of sparse attention: the choice of keys has no gradient."""
        return frozenset(name for name in self.tensor_index.entries if ".indexer." in name)

    @cached_property
    def routers(self) -> frozenset[str]:
        """Names of the weights of routers, which engines do not quantize."""
        routers = {layer.mlp.router for layer in self.model.all_layers if isinstance(layer.mlp, Experts)}
        return frozenset(name for name, entry in self.tensor_index.entries.items() if entry.tensor in routers)

    @cached_property
    def unquantized(self) -> frozenset[str]:
        """Names of the matrices of layers that engines do not quantize: routers, and head weights of indexers."""
        return self.routers | {name for name in self.indexers if name.endswith("weights_proj.weight")}

    def linear_tensors(self, of_experts: bool = False) -> tuple[str, ...]:
        """Returns the names of the weights of linear layers, which adapters can adapt; routers are not among them.

        Args:
            of_experts: return the weights of routed experts instead of the others.
        """
        select = expert_tensors_of if of_experts else linear_tensors_of
        return tuple(
            tensor.name.format(layer=number, expert=expert)
            for number, layer in enumerate(self.model.layers)
            for tensor in select(layer)
            for expert in range(layer.num_experts if tensor.per_expert else 1)
        )

    def megatron(self, layout: Layout, rank: int, kernels: Kernels = "torch") -> dict[str, Shard]:
        """Returns the parameters of one Megatron rank by their name in Megatron's state dict.

        With virtual pipeline stages a rank has several model chunks: the names of chunk v begin with `chunk{v}.`.

        Args:
            layout, rank: Megatron layout, and one of its ranks; IndexError for any other.
            kernels: kernels of the layers, whose parameter names are used.
        """
        layout.coordinates(rank)  # a shard map has no shards for ranks that it does not know, and no error
        return self.shard_map_megatron(Placement(layout, tuple(range(layout.ranks))), kernels).shards(rank)

    def shard_map_megatron(self, placement: Placement, kernels: Kernels = "torch") -> DerivedShardMap:
        """Returns the shards of Megatron's ranks.

        Args:
            placement: Megatron layout and its ranks; UserError where the layout does not divide the model.
            kernels: kernels of the layers, whose parameter names are used.
        """
        layout, config = placement.layout, self.config
        self.check_layout(layout, kernels)
        # Equal layers get the same ParamRow objects, by whose identity a shard map shares templates.
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
                # Megatron numbers the layers of a chunk, engines and checkpoints the layers of the model.
                for local, layer in enumerate(layout.layers(config.layers, stage, chunk)):
                    params = layer_params(self.model.layers[layer])
                    blocks.append(ParamBlock(f"{prefix}decoder.layers.{local}.", params, layer))
                if stage == layout.pp - 1 and chunk == layout.vpp - 1:
                    # A tied output layer is a parameter only where the embedding is on another stage: Megatron then has
                    # a copy of it there, whose gradient it sums with the embedding's.
                    blocks.append(ParamBlock(prefix, output[:1] if self.tied and first else output))
                    if self.model.multi_token:
                        inner = prefix + megatron.MULTI_TOKEN
                        params = megatron.multi_token_params(self.model.multi_token)
                        blocks.append(ParamBlock(inner, params, config.layers))
                        params = layer_params(self.model.all_layers[-1])
                        blocks.append(ParamBlock(f"{inner}transformer_layer.", params, config.layers))
            stages.append(blocks)
        places = {rank: layout.coordinates(number) for number, rank in enumerate(placement.ranks)}
        indices = {rank: ParallelIndex(at.pp, at.ep, _on_axes(0, at.tp, at.tp, at.etp)) for rank, at in places.items()}
        return self._derive(stages, _on_axes(1, layout.tp, layout.tp, layout.etp), layout.ep, indices)

    @property
    def has_engine_rules(self) -> bool:
        """True: the table of the engines has every architecture with a weight table."""
        return True

    def _check_rules(self, layout: EngineLayout) -> None:
        ENGINE_RULES[self.engine].check_supported(self.config, layout)
        if self.drafts and layout.pp > 1:
            raise UserError(
                f"rollout.layout={layout}: speculative decoding with pipeline stages is not supported. Leave out pp."
            )

    def _shard_map_by_rules(self, placement: EnginePlacement) -> DerivedShardMap:
        layout, config, rules = placement.layout, self.config, ENGINE_RULES[self.engine]
        layer_params = cache(lambda layer: engine_table.layer_params(layer, config, rules))
        embedding = engine_table.embedding_param(self.model, config, rules, layout)
        final_norm, output = engine_table.output_params(self.model)
        stages = []
        for stage in range(layout.pp):
            ends = rules.pipeline_ends(config, self.tied, stage == 0, stage == layout.pp - 1)
            blocks = [ParamBlock("", (embedding,))] if ends.embedding else []
            for layer in layout.layers(config.layers, stage):
                params = layer_params(self.model.layers[layer])
                blocks.append(ParamBlock(f"model.layers.{layer}.", params, layer))
            if ends.final_norm:
                blocks.append(ParamBlock("", (final_norm,)))
            if ends.output:
                blocks.append(ParamBlock("", (output,)))
            if self.drafts and self.model.multi_token:
                behind = engine_table.draft_params(self.model.multi_token, config)
                blocks.append(ParamBlock(engine_table.DRAFT, behind, config.layers))
                params, inner = layer_params(self.model.all_layers[-1]), engine_table.draft_layer(config)
                blocks.append(ParamBlock(engine_table.DRAFT + inner, params, config.layers))
            stages.append(blocks)
        places = {rank: placement.coordinates(rank) for rank in placement.ranks}
        indices = {
            rank: ParallelIndex(at.pp, at.ep, _on_axes(0, at.tp, at.attention_tp, at.expert_tp))
            for rank, at in places.items()
        }
        sizes = _on_axes(1, layout.tp, layout.attention_tp, layout.expert_tp)
        return self._derive(stages, sizes, layout.ep, indices)

    def shard_map_replicated(self, ranks: Sequence[int]) -> DerivedShardMap:
        """Returns the shards of ranks that each have the whole module of `transformers`."""
        config = self.config
        layer_params = cache(lambda layer: transformers.layer_params(layer, config))
        blocks = [
            ParamBlock("", (transformers.embedding_param(self.model),)),
            *(
                ParamBlock(f"{config.prefix}layers.{number}.", layer_params(layer), number)
                for number, layer in enumerate(self.model.layers)
            ),
            ParamBlock("", transformers.output_params(self.model)),
        ]
        indices = {rank: ParallelIndex(0, 0, {"replicated": 0}) for rank in ranks}
        return self._derive([blocks], {"replicated": 1}, 1, indices)

    def check_layout(self, layout: Layout, kernels: Kernels = "torch") -> None:
        """Checks that Megatron's layout divides the model.

        Args:
            layout, kernels: Megatron layout, and kernels of the layers; UserError with a dimension that is not divided.
        """
        layout.check(self.model_dims)
        if self.config.latent and kernels == "torch":  # Transformer Engine replicates the down projections
            latent = self.config.latent
            layout.check_down_projections(latent.q_rank, latent.kv_rank + latent.rope_dim)

    def check_training(self, layout: Layout, kernels: Kernels = "torch", exchanges_heads: bool = True) -> None:
        """Checks that the model can be trained on Megatron's layout.

        Args:
            layout, kernels: as in `check_layout`.
            exchanges_heads: whether context-parallel ranks exchange heads in attention, and not keys and values.
        """
        self.check_layout(layout, kernels)
        if exchanges_heads:
            layout.check_context(self.config.heads, self.config.linear_value_heads)

    def padded_vocab(self, tp: int) -> int:
        """Returns the rows of the vocabulary on all tensor-parallel ranks of Megatron, including padding."""
        return megatron.VOCABULARY.padded(self.config.vocab, tp)

    def _output_params(self) -> tuple[ParamRow, ...]:
        """Returns Megatron's final norm and output layer; a value head is whole on every rank."""
        norm, output = megatron.output_params(self.model)
        return (norm, ParamRow(output.name, output.tensors)) if self.head == "value" else (norm, output)

    def _derive(
        self,
        stages: list[list[ParamBlock]],
        sizes: dict[Axis, int],
        expert_groups: int,
        indices: dict[int, ParallelIndex],
    ) -> DerivedShardMap:
        experts = self.config.experts.count if self.config.experts else 0
        return DerivedShardMap(self.tensor_index, stages, sizes, experts // expert_groups, indices)


def _on_axes(replicated: int, tensor: int, attention: int, expert: int) -> dict[Axis, int]:
    # With data-parallel attention each attention group embeds other tokens, so the embedding is sharded in a group.
    dense: dict[Axis, int] = {"replicated": replicated, "tensor": tensor, "attention": attention}
    return {**dense, "vocabulary": attention, "expert": expert}


def weight_table(config: HFConfig, head: Head = "language") -> WeightTable:
    """Returns the weight table of a model.

    Args:
        config: configuration of the model.
        head: output layer of the model.
    """
    return WeightTable(config, head)
