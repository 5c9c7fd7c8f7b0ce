"""The weight table of a model, and its views in the dialects of Megatron and Hugging Face."""

from __future__ import annotations

from dataclasses import dataclass

from verl_mg.layout import Layout
from verl_mg.weights.architectures import ARCHITECTURES, VOCABULARY_MULTIPLE, ModelWeights, Weight
from verl_mg.weights.boxes import Piece, Shard, full_box
from verl_mg.weights.model_config import HFConfig
from verl_mg.weights.rules import padded_vocabulary


@dataclass(frozen=True)
class WeightTable:
    """All weights of one model; pure functions of its configuration."""

    config: HFConfig
    weights: ModelWeights

    def megatron(self, layout: Layout, rank: int) -> dict[str, Shard]:
        """The parameters of `rank` (0 <= rank < layout.ranks), by their name in Megatron's state dict.

        With virtual pipeline stages a rank has several model chunks: the names of chunk v begin with `chunk{v}.`.
        """
        at = layout.coordinates(rank)
        shards: dict[str, Shard] = {}
        for chunk in range(layout.vpp):
            prefix = f"chunk{chunk}." if layout.vpp > 1 else ""
            first = at.pp == 0 and chunk == 0
            last = at.pp == layout.pp - 1 and chunk == layout.vpp - 1
            for name, weight, layer in self._chunk(layout, at.pp, chunk, first, last):
                shards[prefix + name] = _at_layer(weight.rule(weight.sources, at.tp, layout.tp), layer)
        return shards

    def _chunk(
        self, layout: Layout, pp_rank: int, chunk: int, first: bool, last: bool
    ) -> list[tuple[str, Weight, int]]:
        entries: list[tuple[str, Weight, int]] = []
        if first:
            entries.append((self.weights.embedding.megatron, self.weights.embedding, 0))
        for local, layer in enumerate(layout.layers(self.config.layers, pp_rank, chunk)):
            entries += [(f"decoder.layers.{local}.{w.megatron}", w, layer) for w in self.weights.layer]
        if last:
            entries.append((self.weights.final_norm.megatron, self.weights.final_norm, 0))
            # A tied output layer is a parameter of its own only where the embedding is on another stage.
            if not (self.config.tied and first):
                entries.append((self.weights.output.megatron, self.weights.output, 0))
        return entries

    def huggingface(self) -> dict[str, Shard]:
        """The tensors of the checkpoint, each whole; a tied output layer is not among them."""
        shapes: dict[str, tuple[int, ...]] = {}
        w = self.weights
        once = [w.embedding, w.final_norm, w.output]
        for weight, layers in [(w.embedding, 1), *((x, self.config.layers) for x in w.layer), *((x, 1) for x in once)]:
            for layer in range(layers):
                shapes |= {t.name.format(layer=layer): t.shape for t in weight.sources}
        return {
            name: Shard(shape, (Piece(name, full_box(shape), full_box(shape)),)) for name, shape in shapes.items()
        }

    def padded_vocab(self, tp: int) -> int:
        """Rows of the vocabulary over all tensor-parallel ranks, padding included."""
        return padded_vocabulary(self.config.vocab, tp, VOCABULARY_MULTIPLE)


def table(config: HFConfig) -> WeightTable:
    """The weight table of a model."""
    return WeightTable(config, ARCHITECTURES[config.architecture](config))


def _at_layer(shard: Shard, layer: int) -> Shard:
    pieces = tuple(Piece(p.tensor.format(layer=layer), p.source, p.target) for p in shard.pieces)
    return Shard(shard.shape, pieces, shard.padding)
