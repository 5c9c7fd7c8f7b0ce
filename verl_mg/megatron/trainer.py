"""Optimizer steps on a model: megatron-core's gradient buffers and distributed optimizer, its state, and our losses.

An update on this backend, see `training.trainer` for what surrounds it:

    micro-batches     gradients are added to DDP's float32 buffers, flat memory of many weights
    end of the pass   buffers are summed over data-parallel ranks, each of which has a range of the sum
    step              each rank updates its range, in float32; ranges are gathered into the weights of the model

State of the optimizer is memory as torch storages, and weights and moments as boxes of Hugging Face tensors: a rank's
range of a parameter is a few boxes. Each rank writes its boxes, nothing is gathered. Under the same layout each rank
reads them back, under another one the boxes that it needs instead. The weights that the model computes with then come
from the optimizers of all data-parallel ranks, as after a step.

Without an auxiliary loss (DeepSeek-V3, arXiv:2412.19437, section 2.1.2; arXiv:2408.15664, algorithm 1) experts are
balanced by the bias that a router adds to the scores for the choice of experts: after each optimizer step

    b_i += u * sign(mean load - load_i)

with the loads over all tokens of the mini-batch, on whatever ranks and in whatever micro-batches they are. Counts are
integers, so biases are bitwise the same under every layout that routes tokens alike.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from torch import Tensor, UntypedStorage

from verl_mg.checkpoint.sharded_safetensors import StoredBox
from verl_mg.config import MegatronConfig, OptimizerConfig
from verl_mg.distributed.collectives import sum_over_ranks
from verl_mg.megatron.balance_losses import BalanceLosses
from verl_mg.megatron.config_fields import DDP, OPTIMIZER, build_config, given_fields
from verl_mg.megatron.core_version import main_shard, optimizer_parts
from verl_mg.megatron.model_runner import MegatronRunner, ParameterGathers
from verl_mg.megatron.multi_token import copy_embedding, count_predicted
from verl_mg.megatron.muon import use_muon
from verl_mg.megatron.routing import Router
from verl_mg.megatron.streamed_adamw import MOMENTS, StreamedAdamW, stream_weights
from verl_mg.sharding.boxes import box_shape, contiguous_boxes, full_box, numel
from verl_mg.training.microbatch import MicroBatch
from verl_mg.training.runner import LossClosure, Report
from verl_mg.training.storages import storages
from verl_mg.training.trainer import LearningRateSchedule, MiniBatch, Trainer
from verl_mg.training.weights import WEIGHTS, stored_boxes

MULTI_TOKEN_LOSS = "mtp_loss"
"""Metric: the loss of multi-token prediction in nats, without its factor; it is not a part of `loss`."""


class MegatronTrainer(Trainer):
    """Model with gradients and an optimizer, both only on the ranks of its placement."""

    runner: MegatronRunner

    def _build(self) -> None:
        runner, config = self.runner, self._config
        ddp = ddp_config(runner.spec.megatron)
        with runner.groups.active(), runner.groups.placement_as_world(), optimizer_calls():
            runner.model_chunks = [
                # As in Megatron-LM's training loop: reductions of later chunks overlap with passes of others anyway.
                DistributedDataParallel(chunk.config, ddp, chunk, disable_bucketing=number > 0)
                for number, chunk in enumerate(runner.chunks)
            ]
            self.optimizer = get_megatron_optimizer(
                optimizer_config(config, runner.spec.megatron, runner.dtype),
                runner.model_chunks,
                use_gloo_process_groups=False,
            )
        if config.kind == "muon":
            use_muon(self.optimizer, runner, config, self._name)
        elif config.cpu_offload or config.moments_dtype != "float32":
            dtype = getattr(torch, config.moments_dtype)
            stream_weights(self.optimizer, config.cpu_offload, dtype, config.nvme_folder, self._name)
        for inner in self.inner_optimizers:
            # One pass over memory for all weights; optimizers of Transformer Engine and Apex are fused themselves.
            if type(inner) in (torch.optim.Adam, torch.optim.AdamW):
                for group in inner.param_groups:
                    group.update(fused=True, foreach=False)
        self.scheduler = LearningRateSchedule(self.optimizer, config)
        self._expert_loads = ExpertLoads(runner)
        for chunk in runner.chunks:
            # The schedule calls it after the last micro-batch.
            chunk.config.finalize_model_grads_func = _finalize_without_dividing
            chunk.config.grad_scale_func = self.optimizer.scale_loss
        if ddp.overlap_grad_reduce:
            # Gradients of a bucket are reduced when the last micro-batch has completed them.
            contexts = [model.no_sync for model in runner.model_chunks]
            runner.chunks[0].config.no_sync_func = contexts if len(contexts) > 1 else contexts[0]
        if ddp.overlap_param_gather:
            runner.gathers = ParameterGathers(runner.model_chunks)
        weakref.finalize(self, _unhook, runner.model_chunks)

    @property
    def inner_optimizers(self) -> list[torch.optim.Optimizer]:
        return [part.optimizer for part in optimizer_parts(self.optimizer)]

    def state_storages(self) -> list[UntypedStorage]:
        weights = {tensor.untyped_storage().data_ptr() for tensor in self.runner.model_tensors()}
        devices = {tensor.device for tensor in self.runner.model_tensors()}
        on_device = (tensor for tensor in self._optimizer_tensors() if tensor.device in devices)
        # On a CPU rank moments in a mapped file have the model's device too, and memory that cannot be freed.
        on_device = (tensor for tensor in on_device if tensor.untyped_storage().resizable())
        return storages(tensor for tensor in on_device if tensor.untyped_storage().data_ptr() not in weights)

    def _updated_storages(self) -> list[UntypedStorage]:
        frozen = {id(w) for chunk in self.runner.chunks for w in chunk.parameters() if not w.requires_grad}
        updated = (tensor for tensor in self.runner.model_tensors() if id(tensor) not in frozen)
        return storages(chain(updated, self._optimizer_tensors()))

    def _optimizer_tensors(self) -> Iterator[Tensor]:
        for inner in self.inner_optimizers:
            for group in inner.param_groups:
                yield from group["params"]
            for state in inner.state.values():
                yield from (value for value in state.values() if isinstance(value, Tensor))

    def _buffers(self) -> Iterator[Any]:
        """Yields megatron-core's buffers of the trained parameters on this rank and of their gradients."""
        for chunk in self.runner.model_chunks:
            model: Any = chunk
            yield from (*model.buffers, *model.expert_parallel_buffers)

    def _gradients(self) -> Iterator[Tensor]:
        return (buffer.grad_data for buffer in self._buffers())

    def _clear_gradients(self, mini_batch: MiniBatch, loss_closure: LossClosure) -> LossClosure:
        for chunk in self.runner.model_chunks:
            chunk.zero_grad_buffer()  # type: ignore[operator]
        self.optimizer.zero_grad()
        self._expert_loads.clear()
        rows, tokens, predicted = self._count(mini_batch)
        if self._expert_loads.losses:
            self._expert_loads.losses.num_rows, self._expert_loads.losses.num_tokens = rows, tokens
        if not self.runner.multi_token_factor:
            return loss_closure
        # With pipeline stages the last one has a copy of the embedding, which the last step has changed.
        copy_embedding(self.runner.chunks, self.runner.groups)
        return self._with_multi_token_loss(loss_closure, predicted)

    def _complete_gradients(self) -> Report:
        return self._expert_loads.sum_over_ranks()

    def _count(self, mini_batch: MiniBatch) -> tuple[float, float, float]:
        """Returns the rows of a mini-batch, their tokens, and those that multi-token prediction predicts."""
        # They are at least 1, and not counted where no loss has them as its divisor.
        if not (self.runner.multi_token_factor or self._expert_loads.losses):
            return 1.0, 1.0, 1.0
        counts = [
            {"rows": len(rows), "tokens": rows.total_tokens, "predicted": count_predicted(rows)}
            for rows in self.runner.select_outputs(mini_batch.micro_batches, mini_batch.cp_sizes)
            if rows is not None
        ]
        sums = sum_over_ranks(counts, self.runner.host_group)
        return max(sums["rows"], 1.0), max(sums["tokens"], 1.0), max(sums["predicted"], 1.0)

    def _with_multi_token_loss(self, loss_closure: LossClosure, num_predicted: float) -> LossClosure:
        """Adds the loss of multi-token prediction: the mean over the `num_predicted` tokens of all ranks."""
        factor = self.runner.multi_token_factor

        def with_loss(micro: MicroBatch[Any], output: Tensor) -> tuple[Tensor, Report]:
            # The last line of the output is the log-probs of this layer, which the recipe's loss does not see.
            loss, report = loss_closure(micro, output[:-1])
            predicted = -output[-1].sum() / num_predicted
            report[MULTI_TOKEN_LOSS] = predicted.detach().double()
            return loss + factor * predicted, report

        return with_loss

    def _step(self) -> float:
        # The step writes into the memory that gathers of the last one read.
        self.runner.gathers.wait()
        with self.runner.groups.active(), optimizer_calls(), self.runner.timer("optimizer"):
            _, grad_norm, _ = self.optimizer.step()
            self.runner.gathers.start()
            # Only with a step: an update that the guard skips leaves the biases as they are.
            self._expert_loads.update_biases()
        return float(grad_norm)

    def _state(self) -> Iterator[StoredBox]:
        # Data-parallel ranks have different shares. Tensor-parallel ranks have the same share of tensors that are
        # replicated on them, such as norms. Biases of routers, which the optimizer does not have, are whole on every
        # rank.
        shards = self.runner.trained_shards()
        for name, parameter in self.runner.trained().items():
            shard = shards[name]
            if not parameter.requires_grad:
                yield from stored_boxes(WEIGHTS, shard, parameter, full_box(tuple(parameter.shape)))
            for namespace, values, start in self._local_ranges(parameter):
                for box in contiguous_boxes(tuple(parameter.shape), start, start + len(values)):
                    in_box, values = values[: numel(box)], values[numel(box) :]
                    yield from stored_boxes(namespace, shard, in_box.view(box_shape(box)), box)

    def _local_ranges(self, parameter: Tensor) -> Iterator[tuple[str, Tensor, int]]:
        """Yields (namespace, flat values, their start in the flattened parameter) of this rank's optimizer shards."""
        for part in optimizer_parts(self.optimizer):
            located = main_shard(part, parameter)
            if located is not None:
                main, start = located
                yield WEIGHTS, main.detach(), start
                state = part.optimizer.state.get(main, {})
                yield from ((name, state[name], start) for name in MOMENTS if name in state)

    def _steps_taken(self) -> float | None:
        for inner in self.inner_optimizers:
            for group in inner.param_groups:
                for weight in group["params"]:
                    if weight in inner.state:
                        return float(inner.state[weight].get("step", group.get("step", 0)))
        return None

    def _make_moments(self, steps: float) -> None:
        for inner in self.inner_optimizers:
            counts_by_weight = isinstance(inner, torch.optim.Adam)  # other optimizers count in their parameter groups
            for group in inner.param_groups:
                if not counts_by_weight:
                    group["step"] = int(steps)
                for weight in group["params"]:
                    if isinstance(inner, StreamedAdamW):
                        inner.state[weight] = inner.new_state(weight, steps)
                        continue
                    zeros = {name: torch.zeros_like(weight) for name in MOMENTS}
                    # Where torch's own first step would put it: fused kernels read the count on the device.
                    count = torch.tensor(steps, device=weight.device if group.get("fused") else None)
                    inner.state[weight] = zeros | ({"step": count} if counts_by_weight else {})

    @torch.no_grad()
    def _use_restored_weights(self) -> None:
        trained = self.runner.trained()
        for parameter in trained.values():
            for namespace, values, start in self._local_ranges(parameter):
                if namespace == WEIGHTS:
                    parameter.detach().view(-1)[start : start + len(values)] = values
        # The other parts of the model's weights are from the optimizers of the other data-parallel ranks.
        with self.runner.groups.active():
            for chunk in self.runner.model_chunks:
                # With `overlap_param_gather` it would only start the gathers.
                chunk.start_param_sync(force_sync=True)  # type: ignore[operator]
        gathered = {id(parameter) for buffer in self._buffers() for parameter in buffer.params}
        self.runner.unrestored -= {
            name for name, parameter in trained.items() if id(parameter) in gathered or not parameter.requires_grad
        }


def optimizer_calls() -> AbstractContextManager[None]:
    """Returns the context manager in which a megatron-core optimizer is built and steps."""
    # GPU: tensors have CUDA's type names by themselves.
    # GPU-TEST: tests/megatron/test_cpu_shim.py::test_tensor_types_named_cuda_applies_only_inside
    # GPU-RAN: h200-1, h100-1
    if torch.cuda.is_available():
        return nullcontext()
    from verl_mg.megatron.cpu_shim import tensor_types_named_cuda

    return tensor_types_named_cuda()


def _finalize_without_dividing(model: list[torch.nn.Module], num_tokens: Tensor | None = None, **groups: Any) -> None:
    """Sums gradients over ranks without dividing them: the loss was divided by its global normalizer before."""
    finalize_model_grads(model, None, **groups)


def _unhook(models: list[Any]) -> None:
    """Releases autograd nodes whose hooks reference the model: Python's collector does not see these cycles."""
    for model in models:
        model.grad_accs.clear()
        # Methods of the optimizer, whose shards reference the same nodes, and of the model.
        model.config.grad_scale_func = model.config.no_sync_func = None


def ddp_config(megatron: MegatronConfig) -> DistributedDataParallelConfig:
    """Creates the configuration of gradient buffers and their reduction."""
    given = given_fields("ddp", DistributedDataParallelConfig, megatron.ddp, DDP)
    # Gradients of bfloat16 weights are summed in float32 too, over micro-batches and over ranks.
    fields = {"use_distributed_optimizer": True, "grad_reduce_in_fp32": True}
    return build_config("ddp", DistributedDataParallelConfig, fields, given)


def optimizer_config(config: OptimizerConfig, megatron: MegatronConfig, dtype: torch.dtype) -> MegatronOptimizerConfig:
    """Creates the configuration of the optimizer."""
    given = given_fields("optimizer", MegatronOptimizerConfig, megatron.optimizer, OPTIMIZER)
    fields = {
        "optimizer": "adam",
        "lr": config.lr,
        "min_lr": config.min_lr,
        "weight_decay": config.weight_decay,
        "adam_beta1": config.betas[0],
        "adam_beta2": config.betas[1],
        "adam_eps": config.eps,
        "clip_grad": config.clip_grad,
        "use_distributed_optimizer": True,
        "bf16": dtype is torch.bfloat16,
        "params_dtype": dtype,
        "overlap_param_gather": ddp_config(megatron).overlap_param_gather,
    }
    if megatron.transformer.get("fp8"):
        fields["fp8_recipe"] = megatron.transformer.get("fp8_recipe", "delayed")
    return build_config("optimizer", MegatronOptimizerConfig, fields, given)


MAX_LOAD = "max_expert_load"
"""Metric: the largest load of an expert as a multiple of the mean load, averaged over the layers with experts."""


class ExpertLoads:
    """Loads of all experts of a trained model on a rank of its placement.

    Attributes:
        losses: auxiliary losses that the routers compute; None without.
    """

    def __init__(self, runner: MegatronRunner) -> None:
        self._routers = [m for chunk in runner.chunks for m in chunk.modules() if isinstance(m, Router)]
        self._rate = runner.bias_update_rate
        self._group = runner.groups.collection.tp_dp_cp
        at = runner.groups.coordinates
        self._reports = at.tp == at.cp == at.dp == 0
        experts = runner.table.config.experts
        self._layers = len(experts.layers) + (runner.multi_token_factor > 0) if experts else 0
        self._loads = torch.empty(0)  # (layers of this rank with experts, experts) int64
        balance, z = runner.balance_factors
        self.losses = BalanceLosses(balance, z, runner.groups.collection.tp) if balance or z else None

    def clear(self) -> None:
        """Sets the sums to 0, for the next mini-batch."""
        if self.losses:
            self.losses.sums = None
        if self._routers:
            first = self._routers[0]
            shape = len(self._routers), first.config.num_moe_experts
            self._loads = torch.zeros(shape, dtype=torch.int64, device=first.weight.device)
        for router, load in zip(self._routers, self._loads, strict=True):
            router.losses, router.load = self.losses, load

    def sum_over_ranks(self) -> dict[str, Tensor]:
        """Completes the loads and returns this rank's part of the metrics, to be summed; a collective."""
        if not self._routers:
            return {}
        losses = {} if self.losses is None else self.losses.report(self._layers)
        dist.all_reduce(self._loads, group=self._group)
        # All ranks of a pipeline stage have the same sums now: one of them reports.
        if not self._reports:
            return losses
        loads = self._loads.double()
        mean = loads.mean(1).clamp_min(1 / loads.shape[1])  # a mini-batch without tokens has no loads
        return losses | {MAX_LOAD: (loads.amax(1) / mean).sum() / self._layers}

    def update_biases(self) -> None:
        """Raises the biases of experts below the mean load, and lowers them above it."""
        if not self._rate:
            return
        for router, load in zip(self._routers, self._loads, strict=True):
            # The sign of mean - load, in integers: a rounded mean could differ from a load that equals it.
            router.expert_bias += self._rate * (load.sum() - load * len(load)).sign()
