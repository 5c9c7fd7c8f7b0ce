"""Multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2): a layer that predicts the token after the next.

From the normalized hidden state h(t) of the model and the embedding of the next token,

    x(t) = projection [norm(embedding(t + 1)); norm(h(t))]
    log p(token t + 2) = log-softmax(output layer(norm(transformer layer(x)(t))))

Embedding and output layer are the model's, as constants: the loss trains the layer, and the model only through h,
unless `mtp_detach_heads` is set. A query attends to tokens before it in its row, so the last x of a row, for which
there is no next token, has no influence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import checkpoint, reduce_scatter_to_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from verl_mg.batch import Batch
from verl_mg.config import MegatronConfig
from verl_mg.device import copy_to
from verl_mg.errors import UserError
from verl_mg.megatron.layers import RMSNorm
from verl_mg.megatron.process_groups import ParallelGroups
from verl_mg.models.hf_config import HFConfig
from verl_mg.models.hf_tensors import projection
from verl_mg.training.microbatch import TokenOrder


@dataclass(frozen=True)
class NextTokens:
    """Inputs of the layer and tokens that it predicts in a micro-batch, on the device of a rank of the last stage.

    Rows a b c d and e f g, of which c d f g are scored: f is the second token of its row, and not predicted.

        ids   b c d 0   f g 0        hidden_index   a b e        targets   c d g        scored_index   0 1 3
    """

    ids: Tensor  # (T / cp,) int64, the token after each of this rank's tokens in its row; 0 after the last one
    # (p,) indices in this rank's tokens of those that predict a scored token: two in front of it.
    hidden_index: Tensor
    targets: Tensor  # (p,) int64, the scored tokens that they predict
    scored_index: Tensor  # (p,) indices of these among the n scored tokens of the micro-batch


def next_tokens(rows: Batch, order: TokenOrder, device: torch.device) -> NextTokens:
    """Selects the next tokens and the tokens that are predicted from them, of rows without shared prefixes."""
    # On the host and from whole rows: a rank's chunks of a sequence are not neighbours.
    tokens, positions = rows["tokens"], rows.positions
    has_next = (positions + 1 < rows.expand_to_tokens(rows.lengths)).nonzero().flatten()
    following = torch.zeros(order.total, dtype=torch.int64)
    following[order.places[has_next]] = tokens[has_next + 1]
    scored = (rows["loss_mask"] & (positions > 0)).nonzero().flatten()
    scored_index = (positions[scored] > 1).nonzero().flatten()
    hidden_index = order.local_index(order.places[scored[scored_index] - 2])
    is_local = hidden_index >= 0
    return NextTokens(
        ids=copy_to(device, following[order.local]),
        hidden_index=copy_to(device, hidden_index[is_local]),
        targets=copy_to(device, tokens[scored[scored_index[is_local]]]),
        scored_index=copy_to(device, scored_index[is_local]),
    )


def count_predicted(rows: Batch) -> int:
    """Returns the number of scored tokens of rows that the layer predicts: not the second one of a row."""
    return int((rows["loss_mask"] & (rows.positions > 1)).sum())


def loss_factor(megatron: MegatronConfig) -> float:
    """Returns the factor of the layer's loss; 0 where the layer is frozen."""
    return float(megatron.transformer.get("mtp_loss_scaling_factor", 0.0))


def check_multi_token(c: HFConfig, megatron: MegatronConfig, lora: bool) -> None:
    """Checks that multi-token prediction can be trained, where its loss has a factor."""
    factor, key = loss_factor(megatron), "megatron.transformer.mtp_loss_scaling_factor"
    if factor < 0:
        raise UserError(f"{key}: {factor} is below 0, which would train for wrong predictions. Write 0 or more.")
    if factor and c.multi_token is None:
        raise UserError(f"{key}: the model has no layer of multi-token prediction ({projection(c)}). Leave it out.")
    if factor and lora:
        raise UserError(f"{key}: with lora all weights are frozen, this layer's too. Leave one of them out.")


class MultiTokenPrediction(torch.nn.Module):
    """The layer, on the last pipeline stage."""

    embedding: Tensor
    """(rows, h), this rank's shard of the model's embedding; (0, h) where the stage has it or the layer is frozen."""

    def __init__(
        self,
        config: TransformerConfig,
        spec: ModuleSpec,
        groups: ParallelGroups,
        vp_stage: int | None,
        embedding_rows: int,
    ) -> None:
        super().__init__()
        options: dict[str, Any] = {"device": torch.cuda.current_device(), "dtype": config.params_dtype}
        self._config, self._groups = config, groups
        self.enorm, self.hnorm, self.final_layernorm = (
            RMSNorm(config, config.hidden_size, eps=config.layernorm_epsilon) for _ in range(3)
        )
        self.eh_proj = torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False, **options)
        # As of norms: each tensor-parallel rank multiplies its tokens only.
        self.eh_proj.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        behind = config.num_layers - get_transformer_layer_offset(config, vp_stage)
        self.transformer_layer = build_module(
            spec, config=config, layer_number=behind + 1, pg_collection=groups.collection, vp_stage=vp_stage
        )
        self.register_buffer("embedding", torch.empty(embedding_rows, config.hidden_size, **options), persistent=False)

    def forward(self, hidden: Tensor, embedded: Tensor, packed: Any) -> Tensor:
        """Computes the states (t, 1, h) that the output layer reads, from hidden states and next embeddings."""

        def layer(joined: Tensor) -> Tensor:
            output, _ = self.transformer_layer(joined, attention_mask=None, packed_seq_params=packed)
            return self.final_layernorm(output)

        joined = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))
        if self._config.recompute_granularity == "full":
            return checkpoint(layer, False, joined)
        return layer(joined)

    @torch.no_grad()
    def embed(self, ids: Tensor, weight: Tensor) -> Tensor:
        """Embeds (T / cp,) tokens by a vocabulary that tensor-parallel ranks divide; returns this rank's (t, 1, h)."""
        tp = self._groups.collection.tp
        local = ids - tp.rank() * len(weight)
        is_local = (local >= 0) & (local < len(weight))
        embedded = weight[torch.where(is_local, local, 0)] * is_local[:, None]
        if tp.size() > 1:
            embedded = reduce_scatter_to_sequence_parallel_region(embedded, group=tp)
        return embedded[:, None]


def copy_embedding(chunks: list[Any], groups: ParallelGroups) -> None:
    """Copies the embedding of the first stage to the last one, whose layer reads it; both stages call it."""
    stage, last = groups.coordinates.pp, groups.layout.pp - 1
    if last == 0 or stage not in (0, last):
        return
    source = chunks[0].embedding.word_embeddings.weight.detach() if stage == 0 else chunks[-1].multi_token.embedding
    # megatron-core's group of the stages with an embedding: the first and the last one.
    dist.broadcast(source, group=groups.collection.embd, group_src=0)
