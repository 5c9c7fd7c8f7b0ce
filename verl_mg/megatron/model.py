"""A Hugging Face configuration as a megatron-core GPT model that works on packed sequences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    gather_from_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from verl_mg import platform
from verl_mg.errors import UserError
from verl_mg.layout import Layout
from verl_mg.megatron.attention import PackedAttention, PackedSequences
from verl_mg.megatron.groups import ParallelGroups
from verl_mg.megatron.logprobs import vocab_parallel_logprobs
from verl_mg.megatron.norm import RMSNorm
from verl_mg.weights import HFConfig, WeightTable


class PackedModel(GPTModel):
    """One pipeline chunk. The last one answers log-probabilities instead of logits, which never stand whole."""

    def __init__(self, weights: WeightTable, groups: ParallelGroups, **arguments: Any) -> None:
        super().__init__(pg_collection=groups.collection, position_embedding_type="none", **arguments)
        self.first_token = groups.coordinates.tp * self.vocab_size // groups.layout.tp
        rows = self.vocab_size // groups.layout.tp
        self.real_rows = max(0, min(rows, weights.config.vocab - self.first_token))

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, packed: PackedSequences, where: Tensor, targets: Tensor, temperature: float
    ) -> Tensor:
        """input_ids (1, T); `where` (n,): the tokens whose successors are judged; targets (n,): those successors.

        Returns (2, n) float32, log-probabilities and entropies, on the last stage; elsewhere the hidden states.
        """
        hidden = super().forward(input_ids, None, None, packed_seq_params=packed)
        if not self.post_process:
            return hidden
        logprobs, entropy = vocab_parallel_logprobs(
            self.whole_sequence(hidden)[where],
            self.output_weight(),
            targets,
            temperature,
            self.first_token,
            self.real_rows,
            self.pg_collection.tp,
        )
        return torch.stack([logprobs, entropy])

    def whole_sequence(self, hidden: Tensor) -> Tensor:
        """Hidden states (T or T / tp, 1, h) -> (T, h); the gradient is summed over the group on its way back."""
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, group=self.pg_collection.tp)
        return hidden.squeeze(1)

    def output_weight(self) -> Tensor:
        """The (rows, h) shard of the output projection, the embedding's where they are tied."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight

    def _postprocess(self, hidden_states: Tensor, **_: Any) -> Tensor:
        return hidden_states


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
        layers = len(layout.layers(weights.config.layers, groups.coordinates.pp, chunk))
        model = PackedModel(
            weights,
            groups,
            config=config,
            transformer_layer_spec=_block_spec(weights.config, layers),
            vocab_size=weights.padded_vocab(layout.tp),
            max_sequence_length=weights.config.max_positions,
            pre_process=first,
            post_process=last,
            share_embeddings_and_output_weights=weights.config.tied,
            vp_stage=stage,
        )
        _mark_tensor_parallel(model)
        chunks.append(model.to(platform.device()))
    return chunks


def _mark_tensor_parallel(model: PackedModel) -> None:
    """Tell megatron-core which weights are shards, or the gradient norm would count those of rank 0 alone.

    It marks them while it initialises them, which we leave out because every weight comes from a checkpoint.
    """
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if weight is None or not isinstance(module, ColumnParallelLinear | RowParallelLinear | VocabParallelEmbedding):
            continue
        dimension = 1 if isinstance(module, RowParallelLinear) else 0
        set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=dimension, stride=1)


def parameters_by_name(chunks: list[PackedModel]) -> dict[str, Tensor]:
    """This rank's parameters under the names of the weight table."""
    named: dict[str, Tensor] = {}
    for number, chunk in enumerate(chunks):
        prefix = f"chunk{number}." if len(chunks) > 1 else ""
        named |= {prefix + name: parameter for name, parameter in chunk.named_parameters()}
    return named


def transformer_config(c: HFConfig, layout: Layout, dtype: torch.dtype, recompute: bool) -> TransformerConfig:
    """megatron-core's configuration of the model under a layout."""
    on_gpu = torch.cuda.is_available()
    return TransformerConfig(
        num_layers=c.layers,
        hidden_size=c.hidden,
        num_attention_heads=c.heads,
        num_query_groups=c.kv_heads,
        kv_channels=c.head_dim,
        ffn_hidden_size=c.ffn,
        normalization="RMSNorm",
        layernorm_epsilon=c.norm_eps,
        qk_layernorm=c.qk_norm,
        add_bias_linear=False,
        add_qkv_bias=c.qkv_bias,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        sequence_parallel=layout.tp > 1,
        variable_seq_lengths=layout.pp > 1,
        moe_token_dispatcher_type="alltoall",  # checked against variable lengths, without experts too
        # With two stages the previous and the next rank are one: batched P2P would mix activations and gradients.
        overlap_p2p_comm=layout.vpp > 1,
        batch_p2p_comm=layout.vpp == 1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        # Losses come normalised by the whole mini-batch: gradients are summed, never divided again.
        calculate_per_token_loss=True,
        perform_initialization=False,
        use_cpu_initialization=not on_gpu,
        bias_dropout_fusion=on_gpu,
        bias_activation_fusion=on_gpu,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        recompute_granularity="full" if recompute else None,
        recompute_method="uniform" if recompute else None,
        recompute_num_layers=1 if recompute else None,
    )


def _block_spec(c: HFConfig, layers: int) -> TransformerBlockSubmodules:
    layer: ModuleSpec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=c.qk_norm)
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    attention = parts.self_attention.submodules
    attention.core_attention = PackedAttention
    if c.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=RMSNorm)


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
