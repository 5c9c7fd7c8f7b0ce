"""Base of the tables of a model's weights: its tensors by name, and their shards in rollout engines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Self

from verl_mg.errors import UserError
from verl_mg.layout import EngineLayout, EnginePlacement, ModelDims
from verl_mg.models.hf_config import HFConfig
from verl_mg.models.tensor_index import TensorIndex
from verl_mg.sharding.boxes import Piece, Shard, full_box
from verl_mg.sharding.shard_map import ShardMap
from verl_mg.sharding.traced_table import EngineName, TracedTable, read_traced_table

Head = Literal["language", "value"]
"""Output layer of a model: the language model's, or the single row of a value or reward model."""
SCORE = "score.weight"  # name of the value head's tensor, as in `transformers`' models for token classification


@dataclass(frozen=True)
class ModelTable(ABC):
    """All weights of one model, by the names of its Hugging Face checkpoint."""

    config: HFConfig
    head: Head = "language"  # with "value" a single row replaces the language model's output layer
    engine: EngineName = "sglang"  # rollout engine whose shards `shard_map_engine` returns; see `for_engine`
    # Not compared: tables are keys of the planner's caches, and a traced table has no hash.
    # Traced table of the rollout engine, which replaces the built-in table; see `with_traced_table`.
    traced: TracedTable | None = field(default=None, compare=False)

    def for_engine(self, engine: EngineName) -> Self:
        """Returns this table with the parameters of a rollout engine."""
        return replace(self, engine=engine)

    def with_draft_model(self) -> Self:
        """Returns this table with the draft model of SGLang, for speculative decoding."""
        raise UserError(
            "rollout.sglang.speculative_algorithm: the actor's model has no layer of multi-token prediction to draft "
            "tokens with. Leave it out, or write speculative_draft_model_path too."
        )

    def with_traced_table(self, path: Path | None) -> Self:
        """Returns this table with the engine's part read from a file of `verl-mg trace`."""
        return self if path is None else self.with_traced(read_traced_table(path), path)

    def with_traced(self, traced: TracedTable, path: Path) -> Self:
        """Returns this table with the engine's part from a traced table."""
        traced.check_engine(path, self.engine)
        traced.check_model(path, self.tensor_index.tensors)
        return replace(self, traced=traced)

    @property
    @abstractmethod
    def tensor_index(self) -> TensorIndex:
        """Tensors of the checkpoint by name, in order."""

    @property
    @abstractmethod
    def router_biases(self) -> frozenset[str]:
        """Names of the biases of routers, which have no gradient and keep the values of the checkpoint."""

    @property
    @abstractmethod
    def routers(self) -> frozenset[str]:
        """Names of the weights of routers, which engines do not quantize."""

    @property
    def unquantized(self) -> frozenset[str]:
        """Names of the matrices of layers that engines do not quantize."""
        return self.routers

    @abstractmethod
    def linear_tensors(self, of_experts: bool = False) -> tuple[str, ...]:
        """Returns the names of the weights of linear layers, which adapters can adapt; routers are not among them."""

    @abstractmethod
    def shard_map_replicated(self, ranks: Sequence[int]) -> ShardMap:
        """Returns the shards of ranks that each have the whole module of `transformers`."""

    @property
    @abstractmethod
    def has_engine_rules(self) -> bool:
        """Whether there is a built-in table of the engine for this architecture; otherwise the engine is traced."""

    @abstractmethod
    def _check_rules(self, layout: EngineLayout) -> None:
        """Raises a UserError where the engine's model class does not support a layout."""

    @abstractmethod
    def _shard_map_by_rules(self, placement: EnginePlacement) -> ShardMap:
        """Returns the shards of the ranks of engines by the built-in table."""

    def shard_map_engine(self, placement: EnginePlacement) -> ShardMap:
        """Returns the shards of the ranks of engines, from the traced table where there is one."""
        self.check_engine_layout(placement.layout)
        if self.traced:
            return self.traced.shard_map(placement, self.tensor_index.tensors)
        return self._shard_map_by_rules(placement)

    def check_engine_layout(self, layout: EngineLayout) -> None:
        """Checks that the engine can shard the model in this way."""
        if self.traced:
            # The engine has loaded the model in this layout, so what its model class supports needs no other check.
            self.traced.check_layout(layout)
            return
        self._check_rules(layout)
        layout.check(self.model_dims)

    def engine_shards(self, layout: EngineLayout, rank: int) -> Mapping[str, Shard]:
        """Returns the parameters of one rank of an engine by their name in the engine's model class."""
        return self.shard_map_engine(EnginePlacement(layout, tuple(range(layout.ranks)))).shards(rank)

    def transformers(self) -> Mapping[str, Shard]:
        """Returns the parameters of the module of `transformers` 5, unsharded."""
        return self.shard_map_replicated((0,)).shards(0)

    def huggingface(self) -> dict[str, Shard]:
        """Returns the tensors of the checkpoint, unsharded; a tied output layer is not among them."""
        shapes = {name: entry.tensor.shape for name, entry in self.tensor_index.entries.items()}
        return {name: Shard(shape, (Piece(name, full_box(shape), full_box(shape)),)) for name, shape in shapes.items()}

    @property
    def model_dims(self) -> ModelDims:
        """Dimensions that layouts divide."""
        c, experts = self.config, self.config.experts
        dense = ModelDims(attention_heads=c.heads, kv_heads=c.kv_heads, layers=c.layers, ffn=c.ffn)
        if c.linear:
            dense = replace(dense, key_heads=c.linear.key_heads)
        if experts is None:
            return dense
        return replace(dense, experts=experts.count, expert_ffn=experts.ffn, shared_ffn=experts.shared_ffn)

    @property
    def tied(self) -> bool:
        """Whether the output layer is the embedding."""
        return self.tensor_index.tied
