"""A Hugging Face configuration as a megatron-core GPT model that works on packed sequences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
)
from torch import Tensor
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from verl_mg import device
from verl_mg.errors import UserError
from verl_mg.megatron.logprobs import vocab_parallel_logprobs
from verl_mg.megatron.lora import ADAPTER
from verl_mg.megatron.microbatch import MicroBatch
from verl_mg.megatron.process_groups import ParallelGroups
from verl_mg.megatron.transformer_config import block_spec, transformer_config
from verl_mg.sharding.weight_table import WeightTable

ROUTER_BIAS = "router.expert_bias"


class PackedModel(GPTModel):
    """One pipeline chunk. The last one answers values, or log-probabilities; logits never stand whole."""

    def __init__(self, weights: WeightTable, groups: ParallelGroups, **arguments: Any) -> None:
        super().__init__(pg_collection=groups.collection, position_embedding_type="none", **arguments)
        self.judges_by_value = weights.head == "value"
        self.logit_softcap = weights.config.logit_softcap
        if weights.config.scaled_embedding and self.pre_process:
            self.embedding.register_forward_hook(_scaled)
        if self.judges_by_value and self.post_process:
            self.output_layer = torch.nn.Linear(weights.config.hidden, 1, bias=False, dtype=self.config.params_dtype)
        self.first_token = groups.coordinates.tp * self.vocab_size // groups.layout.tp
        rows = self.vocab_size // groups.layout.tp
        self.real_rows = max(0, min(rows, weights.config.vocab - self.first_token))

    def forward(self, micro: MicroBatch, temperature: float) -> Tensor:  # type: ignore[override]
        """(2, n) float32, log-probabilities and entropies of the n judged tokens, or (1, n), their values, on the last
        stage, the same on every context-parallel rank; elsewhere the hidden states.
        """
        hidden = super().forward(micro.input_ids, None, None, packed_seq_params=micro.packed)
        if not self.post_process:
            return hidden
        own = self._values(hidden, micro) if self.judges_by_value else self._logprobs(hidden, micro, temperature)
        judged_here = own.new_zeros(len(own), len(micro.entries)).index_copy(1, micro.own, own)
        # The sum passes each rank the gradient of all n, of which it takes its own m: each is counted once.
        return reduce_from_tensor_model_parallel_region(judged_here, group=micro.packed.context)

    def _logprobs(self, hidden: Tensor, micro: MicroBatch, temperature: float) -> Tensor:
        logprobs, entropy = vocab_parallel_logprobs(
            self.gather_sequence(hidden)[micro.where],
            self.output_weight(),
            micro.targets,
            temperature,
            self.first_token,
            self.real_rows,
            self.pg_collection.tp,
            self.logit_softcap,
        )
        return torch.stack([logprobs, entropy])

    def _values(self, hidden: Tensor, micro: MicroBatch) -> Tensor:
        # Every tensor-parallel rank has the whole head, and so the whole gradient.
        states = self.gather_sequence(hidden, summed=False)[micro.where]
        return (states.float() @ self.output_layer.weight.float().T).T

    def gather_sequence(self, hidden: Tensor, summed: bool = True) -> Tensor:
        """Hidden states of a run of t tokens (t or t / tp, 1, h) -> (t, h); whether ranks' gradients are summed."""
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=summed, group=self.pg_collection.tp
            )
        return hidden.squeeze(1)

    def output_weight(self) -> Tensor:
        """The (rows, h) shard of the output projection, the embedding's where they are tied."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight

    def _postprocess(self, hidden_states: Tensor, **_: Any) -> Tensor:
        return hidden_states


def _scaled(_: torch.nn.Module, inputs: Any, embedded: Tensor) -> Tensor:
    """By the root of the width, which Gemma rounds to the type of the embedding first."""
    return embedded * torch.tensor(embedded.shape[-1] ** 0.5, dtype=embedded.dtype)


def build_chunks(
    weights: WeightTable, groups: ParallelGroups, dtype: torch.dtype, recompute: bool = False
) -> list[PackedModel]:
    """This rank's model chunks, with uninitialised weights, on this rank's device; `groups` must be active."""
    layout = groups.layout
    config = transformer_config(weights.config, layout, dtype, recompute)
    chunks = []
    for chunk in range(layout.vpp):
        stage = chunk if layout.vpp > 1 else None
        first = groups.coordinates.pp == 0 and chunk == 0
        last = groups.coordinates.pp == layout.pp - 1 and chunk == layout.vpp - 1
        layers = layout.layers(weights.config.layers, groups.coordinates.pp, chunk)
        model = PackedModel(
            weights,
            groups,
            config=config,
            transformer_layer_spec=block_spec(weights.config, layers),
            vocab_size=weights.padded_vocab(layout.tp),
            max_sequence_length=weights.config.max_positions,
            pre_process=first,
            post_process=last,
            share_embeddings_and_output_weights=weights.tied,
            vp_stage=stage,
        )
        _mark_tensor_parallel(model)
        chunks.append(model.to(device.current_device()))
    return chunks


def _mark_tensor_parallel(model: PackedModel) -> None:
    """Tell megatron-core which weights are shards, or the gradient norm would count those of rank 0 alone.

    It marks them while it initialises them, which we leave out because every weight comes from a checkpoint.
    Experts are summed over the expert data parallel ranks, of which megatron-core thinks only where ep > 1.
    """
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if weight is None or not isinstance(module, ColumnParallelLinear | RowParallelLinear | VocabParallelEmbedding):
            continue
        dimension = 1 if isinstance(module, RowParallelLinear) else 0
        stride = 2 if name.endswith("linear_fc1") else 1  # a shard is its part of gate, then its part of up
        set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=dimension, stride=stride)
        weight.allreduce = not getattr(module, "is_expert", False)


def chunks_by_prefix(chunks: list[PackedModel]) -> dict[str, PackedModel]:
    """The chunks, by how the names of their parameters begin in the weight table."""
    return {f"chunk{number}." if len(chunks) > 1 else "": chunk for number, chunk in enumerate(chunks)}


def parameters_by_name(chunks: list[PackedModel]) -> dict[str, Tensor]:
    """This rank's parameters under the names of the weight table, and the biases of routers, which are buffers.

    Adapters are not the table's.
    """
    named: dict[str, Tensor] = {}
    for prefix, chunk in chunks_by_prefix(chunks).items():
        own = {name: parameter for name, parameter in chunk.named_parameters() if ADAPTER not in name.split(".")}
        named |= {prefix + name: parameter for name, parameter in own.items()}
        named |= {prefix + name: buffer for name, buffer in chunk.named_buffers() if name.endswith(ROUTER_BIAS)}
    return named


def rotary_frequencies(model_dir: Path) -> tuple[Tensor, float]:
    """(head_dim / 2,) float32 inverse frequencies and the scaling of cos and sin, as `transformers` computes them."""
    try:
        config = AutoConfig.from_pretrained(model_dir)
        kind = config.rope_parameters["rope_type"]
        if kind != "default":
            return ROPE_INIT_FUNCTIONS[kind](config)
        theta = float(config.rope_parameters["rope_theta"])
    except Exception as error:  # transformers raises many kinds for a field it cannot read
        reason = str(error).splitlines()[0] if str(error) else ""
        raise UserError(
            f"{model_dir / 'config.json'}: transformers cannot read it ({type(error).__name__}: {reason}); "
            "correct rope_parameters or the field it names"
        ) from error
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim), 1.0
