"""Weight table of any model that `transformers` can load, derived from the module itself and its weight loader."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from verl_mg.dtypes import dtype_name
from verl_mg.errors import UserError
from verl_mg.layout import EngineLayout, EnginePlacement
from verl_mg.lazy_import import lazy_import
from verl_mg.models.hf_config import HFConfig, read_config
from verl_mg.models.tensor_index import TensorEntry, TensorIndex
from verl_mg.models.tensor_tree import TensorSpec, expert_shapes
from verl_mg.models.transformers_module import module_config
from verl_mg.sharding.boxes import Piece, Shard, full_box
from verl_mg.sharding.model_table import SCORE, Head, ModelTable
from verl_mg.sharding.shard_map import ExplicitShardMap, ShardMap
from verl_mg.sharding.weight_table import WeightTable, weight_table

if TYPE_CHECKING:
    import torch

    from verl_mg.sharding import module_shards
    from verl_mg.sharding.module_shards import ModuleShards
else:
    module_shards = lazy_import("verl_mg.sharding.module_shards")

_LAYER, _EXPERT = re.compile(r"\.(\d+)\."), re.compile(r"\.experts\.(\d+)\.")


@dataclass(frozen=True)
class ModuleTable(ModelTable):
    """All weights of the module that `transformers` builds for a model directory."""

    model_dir: Path = field(kw_only=True)
    module: ModuleShards = field(kw_only=True, compare=False)
    """Parameters of the module; without an output layer where there is a value head."""
    builtin: WeightTable | None = field(kw_only=True, compare=False)
    """Weight table of the architecture, where the project has one with the same tensors."""

    def parameter_shards(self) -> dict[str, Shard]:
        """Returns parameters and filled persistent buffers of the whole module; tied ones once."""
        if self.head == "language":
            return dict(self.module.shards)
        shape = (1, self.config.hidden)
        return {**self.module.shards, SCORE: Shard(shape, (Piece(SCORE, full_box(shape), full_box(shape)),))}

    @cached_property
    def tensor_index(self) -> TensorIndex:
        """Tensors of the checkpoint by name, in the order of the built-in table if there is one, else the module's."""
        if self.builtin:
            return self.builtin.tensor_index
        vision, shards = self._tensors_of(self.vision_parameters), self.module.shards
        dtypes = {p.tensor: dtype for name, dtype in self.module.dtypes.items() for p in shards[name].pieces}
        shapes = {**self.module.shapes, **({SCORE: (1, self.config.hidden)} if self.head == "value" else {})}
        entries = {
            name: replace(self._entry(name, shape, dtypes.get(name)), position=position, vision=name in vision)
            for position, (name, shape) in enumerate(shapes.items())
        }
        tied = self.config.tied and self.head == "language"
        return TensorIndex(entries, tied, self.module.copies if tied else {})

    @cached_property
    def router_biases(self) -> frozenset[str]:
        """Names of the tensors without a gradient, which keep the values of the checkpoint."""
        return self._tensors_of(self.module.constant)

    @cached_property
    def routers(self) -> frozenset[str]:
        """Names of the matrices with one row for each expert, which engines do not quantize."""
        if self.builtin:
            return self.builtin.routers
        count = self.config.experts.count if self.config.experts else None
        entries = self.tensor_index.entries.items()
        # By its shape: `transformers` has no common name or class for routers.
        return frozenset(name for name, e in entries if e.is_layer_matrix and e.tensor.shape[0] == count)

    def linear_tensors(self, of_experts: bool = False) -> tuple[str, ...]:
        """Returns the names of the weights of linear layers for text; without routers and stacked experts."""
        if self.builtin:
            return self.builtin.linear_tensors(of_experts)
        linear, excluded = self._tensors_of(self.module.linear & self.module.text), self.routers
        entries = self.tensor_index.entries.items()
        return tuple(n for n, entry in entries if n in linear - excluded and entry.of_experts == of_experts)

    @cached_property
    def vision_parameters(self) -> frozenset[str]:
        """Names in the module of the parameters that only images pass through."""
        return frozenset(self.module.shards.keys() - self.module.text)

    def shard_map_replicated(self, ranks: Sequence[int]) -> ExplicitShardMap:
        """Returns the shards of ranks that each have the whole module of `transformers`."""
        return ExplicitShardMap(dict.fromkeys(ranks, self.parameter_shards()), self.tensor_index.tensors)

    @property
    def has_engine_rules(self) -> bool:
        """Whether there is a built-in table of the engine for this architecture; otherwise the engine is traced."""
        return self.builtin is not None

    def _check_rules(self, layout: EngineLayout) -> None:
        self._rules().check_engine_layout(layout)

    def _shard_map_by_rules(self, placement: EnginePlacement) -> ShardMap:
        return self._rules().shard_map_engine(placement)

    def _rules(self) -> WeightTable:
        if self.builtin is None:
            raise UserError(
                f"rollout.engine={self.engine}: there is no built-in table for {self.config.architecture!r}. Write "
                f"rollout.sharding_table=FILE, where verl-mg trace {self.model_dir} --engine {self.engine} wrote FILE."
            )
        return self.builtin.for_engine(self.engine)

    def _tensors_of(self, parameters: frozenset[str]) -> frozenset[str]:
        return frozenset(piece.tensor for name in parameters for piece in self.module.shards[name].pieces)

    def _entry(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None) -> TensorEntry:
        """Returns the entry of a tensor, with the numbers of layer and expert from its name."""
        expert, layer = _EXPERT.search(name), _LAYER.search(name)
        template = _EXPERT.sub(".experts.{expert}.", name) if expert else name
        template = _LAYER.sub(".{layer}.", template, count=1) if layer else template
        count = self.config.experts.count if self.config.experts else None
        stacked = not expert and shape[:1] == (count,) and (len(shape) > 2 or ".experts." in name)
        return TensorEntry(
            0,
            TensorSpec(template, shape, dtype_name(dtype) if dtype else None),
            int(layer[1]) if layer else None,
            int(expert[1]) if expert else None,
            stacked,
        )


def module_table(model_dir: str | Path, head: Head = "language") -> ModuleTable:
    """Returns the weight table of a model directory for `transformers`; reads config.json and headers, no weights."""
    module = module_shards.module_shards(model_dir, headless=head == "value")
    builtin = _builtin(Path(model_dir), head, module)
    config = builtin.config if builtin else _config(Path(model_dir), module)
    if builtin and (stacked := builtin.tensor_index.stacked):
        # The built-in table has the stacks as separate tensors of experts, of which Megatron's ranks have some.
        described, stacks = builtin.transformers(), {place.name for place in stacked.values()}
        module = replace(module, shards={**module.shards, **{name: described[name] for name in stacks}})
    return ModuleTable(config, head, model_dir=Path(model_dir), module=module, builtin=builtin)


def _builtin(model_dir: Path, head: Head, module: ModuleShards) -> WeightTable | None:
    try:
        table = weight_table(read_config(model_dir), head)
    except UserError:  # not an architecture of the project, or a variant that Megatron does not have
        return None
    # Only with exactly the same tensors: a variant, such as a Llama with biases, has the general table.
    shapes = {name: info.shape for name, info in table.tensor_index.tensors.items() if name != SCORE}
    return table if shapes == expert_shapes(module.shapes, table.tensor_index.stacked) else None


def _config(model_dir: Path, module: ModuleShards) -> HFConfig:
    layers = (_LAYER.search(name) for name in module.text if ".experts." in name)
    mixtures = frozenset(int(layer[1]) for layer in layers if layer)
    return module_config(module.config, model_dir, tied=not module.output, mixtures=mixtures)
