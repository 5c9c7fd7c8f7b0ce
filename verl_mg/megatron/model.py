"""megatron-core GPT model over packed sequences, built from a Hugging Face configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from verl_mg import device
from verl_mg.config import MegatronConfig
from verl_mg.errors import UserError
from verl_mg.megatron.core_version import sharded_linear_weights
from verl_mg.megatron.multi_token import MultiTokenPrediction, NextTokens, loss_factor
from verl_mg.megatron.packed_sequences import PackedSequences
from verl_mg.megatron.process_groups import ParallelGroups
from verl_mg.megatron.sparse_attention import StageSelections
from verl_mg.megatron.transformer_config import block_spec, transformer_config
from verl_mg.models.transformers_module import read_module_config
from verl_mg.sharding.weight_table import WeightTable
from verl_mg.training.logprobs import EVERYTHING, TokenOutputs, vocab_parallel_logprobs
from verl_mg.training.lora import ADAPTER
from verl_mg.training.microbatch import MicroBatch
from verl_mg.training.model_spec import ModelSpec
from verl_mg.training.output_layer import Draw, OutputLayer

ROUTER_BIAS = "router.expert_bias"  # end of the name of a router's bias, which is a buffer


class PackedModel(GPTModel):
    """One pipeline chunk. The last one returns log-probabilities or values; logits are never materialized whole."""

    def __init__(self, weights: WeightTable, groups: ParallelGroups, **arguments: Any) -> None:
        # Rotary embeddings are in the description of the packed sequences, computed once for all layers.
        super().__init__(pg_collection=groups.collection, position_embedding_type="none", **arguments)
        self.has_value_head = weights.head == "value"
        self.logit_softcap = weights.config.logit_softcap
        if weights.config.scaled_embedding and self.pre_process:
            self.embedding.register_forward_hook(_scaled)
        if self.has_value_head and self.post_process:
            # One row cannot be sharded: every tensor-parallel rank has it.
            self.output_layer = torch.nn.Linear(weights.config.hidden, 1, bias=False, dtype=self.config.params_dtype)
        self.first_token = groups.coordinates.tp * self.vocab_size // groups.layout.tp
        rows = self.vocab_size // groups.layout.tp
        self.real_rows = max(0, min(rows, weights.config.vocab - self.first_token))
        self.detaches_heads = False
        self.selections: StageSelections | None = None  # with sparse attention

    def _set_attention_backend(self) -> None:
        """Leaves the variables of Transformer Engine's attention as they are, unlike megatron-core."""
        # It would set NVTE_UNFUSED_ATTN=1, so that whole matrices are multiplied where there is no kernel, without a
        # warning: see `transformer_engine_spec`.

    def add_multi_token_layer(self, spec: ModuleSpec, groups: ParallelGroups, megatron: MegatronConfig) -> None:
        """Adds the layer of multi-token prediction to the last chunk; it is frozen where its loss has no factor."""
        is_trained = loss_factor(megatron) > 0
        rows = self.vocab_size // groups.layout.tp if is_trained and not self.pre_process else 0
        self.multi_token = MultiTokenPrediction(self.config, spec, groups, self.vp_stage, rows)
        self.multi_token.requires_grad_(is_trained)
        self.detaches_heads = bool(megatron.transformer.get("mtp_detach_heads"))

    def forward(  # type: ignore[override]
        self, micro: MicroBatch[PackedSequences], temperature: float, outputs: TokenOutputs = EVERYTHING
    ) -> Tensor:
        """Runs the chunk over a micro-batch; returns hidden states, or on the last stage float32 outputs (lines, n).

        Lines are as of `TokenOutputs.compute`, or values, the same on every context-parallel rank. Where multi-token
        prediction is trained, the last one has its log-probs, 0 for tokens that it does not predict.
        """
        packed, tp = micro.packed, self.pg_collection.tp
        if self.selections and not self.pre_process:
            hidden = self.selections.take(self.decoder.input_tensor, self.config.hidden_size, packed, tp)
            self.decoder.set_input_tensor(hidden)
        hidden = super().forward(micro.input_ids, None, None, packed_seq_params=packed)
        if not self.post_process:
            return self.selections.give(hidden, packed, tp) if self.selections else hidden
        if self.has_value_head:
            local = self._values(hidden, micro)
        else:
            local = self._logprobs(hidden, micro, temperature, outputs)
        whole = local.new_zeros(len(local), len(micro.token_index)).index_copy(1, micro.local_index, local)
        if micro.packed.next_tokens is not None:
            whole = torch.cat([whole, self._predictions(hidden, micro, micro.packed.next_tokens)])
        # The backward pass of the sum gives each rank the gradients of all n tokens. It uses only the gradients of its
        # m tokens, so that each is counted once.
        return reduce_from_tensor_model_parallel_region(whole, group=micro.packed.cp_group)

    def _logprobs(
        self, hidden: Tensor, micro: MicroBatch[PackedSequences], temperature: float, outputs: TokenOutputs
    ) -> Tensor:
        layer = self._output_layer(self.output_weight(), self.logit_softcap, self.config.gradient_accumulation_fusion)
        return outputs.compute(self.gather_sequence(hidden)[micro.hidden_index], micro, layer, temperature)

    def _output_layer(self, weight: Tensor, *options: Any) -> OutputLayer:
        return OutputLayer(weight, self.first_token, self.real_rows, self.pg_collection.tp, *options)

    def _predictions(self, hidden: Tensor, micro: MicroBatch[PackedSequences], following: NextTokens) -> Tensor:
        # Embedding and output layer are constants: only the layer and the hidden states get gradients.
        layer = self._output_layer(self.output_weight().detach())
        weight = self.embedding.word_embeddings.weight if self.pre_process else self.multi_token.embedding
        embedded = self.multi_token.embed(following.ids, weight)
        states = self.multi_token(hidden.detach() if self.detaches_heads else hidden, embedded, micro.packed)
        predicting = self.gather_sequence(states)[following.hidden_index]
        logprobs, _ = vocab_parallel_logprobs(predicting, following.targets, layer, Draw(1.0), extra=None)
        return logprobs.new_zeros(1, len(micro.token_index)).index_copy(1, following.scored_index, logprobs[None])

    def _values(self, hidden: Tensor, micro: MicroBatch[PackedSequences]) -> Tensor:
        # Every tensor-parallel rank has the whole head, and therefore the whole gradient.
        states = self.gather_sequence(hidden, sum_gradients=False)[micro.hidden_index]
        return (states.float() @ self.output_layer.weight.float().T).T

    def gather_sequence(self, hidden: Tensor, sum_gradients: bool = True) -> Tensor:
        """Gathers hidden states over the tensor-parallel ranks: (t / tp, 1, h) -> (t, h), t tokens of this cp rank."""
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=sum_gradients, group=self.pg_collection.tp
            )
        return hidden.squeeze(1)

    def output_weight(self) -> Tensor:
        """Returns the (rows, h) shard of the output projection, the embedding's where they are tied."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight

    # megatron-core would compute logits or its loss here.
    def _postprocess(self, hidden_states: Tensor, **_: Any) -> Tensor:
        return hidden_states


def _scaled(_: torch.nn.Module, inputs: Any, embedded: Tensor) -> Tensor:
    """Scales by the square root of the width, which Gemma rounds to the dtype of the embedding first."""
    return embedded * torch.tensor(embedded.shape[-1] ** 0.5, dtype=embedded.dtype)


def build_chunks(weights: WeightTable, groups: ParallelGroups, spec: ModelSpec) -> list[PackedModel]:
    """Builds this rank's pipeline chunks on its device, with uninitialized weights; `groups` must be active."""
    layout = groups.layout
    config = transformer_config(weights.config, layout, spec)
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
            transformer_layer_spec=block_spec(weights.config, layers, spec.kernels),
            vocab_size=weights.padded_vocab(layout.tp),
            max_sequence_length=weights.config.max_positions,
            pre_process=first,
            post_process=last,
            share_embeddings_and_output_weights=weights.tied,
            vp_stage=stage,
        )
        if weights.config.indexer:
            model.selections = StageSelections.of_layers(weights.config.indexer, layers)
        if last and weights.model.multi_token:
            behind = range(weights.config.layers, weights.config.layers + 1)
            (layer,) = block_spec(weights.config, behind, spec.kernels).layer_specs
            model.add_multi_token_layer(layer, groups, spec.megatron)
        _mark_experts(model)
        chunks.append(model.to(device.current_device()))
    return chunks


def _mark_experts(model: PackedModel) -> None:
    """Marks the weights of experts, whose gradients are summed over the expert-data-parallel ranks."""
    # megatron-core does that by itself only where these ranks differ from the data-parallel ones.
    for module, weight in sharded_linear_weights(model):
        weight.allreduce = not getattr(module, "is_expert", False)  # type: ignore[attr-defined]
    for name, weight in model.named_parameters():
        if "experts" in name.split("."):
            weight.allreduce = False  # type: ignore[attr-defined]


def chunks_by_prefix(chunks: list[PackedModel]) -> dict[str, PackedModel]:
    """Returns the chunks by the prefix of their parameters' names in the weight table."""
    return {f"chunk{number}." if len(chunks) > 1 else "": chunk for number, chunk in enumerate(chunks)}


def parameters_by_name(chunks: list[PackedModel]) -> dict[str, Tensor]:
    """Returns this rank's parameters by their names in the weight table, with routers' biases and without adapters."""
    named: dict[str, Tensor] = {}
    for prefix, chunk in chunks_by_prefix(chunks).items():
        weights = {name: weight for name, weight in chunk.named_parameters() if ADAPTER not in name.split(".")}
        named |= {prefix + name: weight for name, weight in weights.items()}
        named |= {prefix + name: buffer for name, buffer in chunk.named_buffers() if name.endswith(ROUTER_BIAS)}
    return named


def rotary_frequencies(model_dir: Path, rotary_dim: int) -> tuple[Tensor, float]:
    """Computes (rotary_dim / 2,) inverse frequencies and the factor of cosines and sines, as `transformers` does."""
    try:
        config = read_module_config(model_dir).get_text_config()
        kind = config.rope_parameters["rope_type"]
        if kind != "default":
            return ROPE_INIT_FUNCTIONS[kind](config)
        theta = float(config.rope_parameters["rope_theta"])
    except UserError:
        raise
    except Exception as error:  # transformers raises many kinds for a field it cannot read
        reason = str(error).splitlines()[0] if str(error) else ""
        raise UserError(
            f"{model_dir / 'config.json'}: transformers cannot read it ({type(error).__name__}: {reason}). "
            "Correct rope_parameters or the field that it names."
        ) from error
    return 1.0 / theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim), 1.0
