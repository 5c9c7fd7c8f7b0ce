"""All-gathers of updated weights that run while their rank already computes with other weights, or sends them.

Each data-parallel rank updates its part of every bucket of weights. After the step all buckets are gathered, in the
order of the layers; whoever reads a weight waits for its bucket only:

    optimizer step   [embedding, layers 0 to 3]   [layers 4 to 7]   ...    gathers, one after the other
                     forward pass of layer 0 waits for the first bucket, that of layer 4 for the second
                     weight sync                      waits for the bucket of the weight that it sends next

On GPUs the stream that calls `wait` waits, not the host. megatron-core would start each gather in the forward pass of
the layer before; weight sync, offload and checkpoints read weights too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Module


class ParameterGathers:
    """Gathers in flight of a trained model on this rank; none without megatron-core's `overlap_param_gather`."""

    def __init__(self, models: Sequence[Any] = ()) -> None:
        self._in_flight: dict[Any, None] = {}
        # Buckets are in the order of the backward pass.
        self._groups = [
            group
            for model in models
            for group in (*reversed(model.bucket_groups), *reversed(model.expert_parallel_bucket_groups))
        ]
        self._group_of = {weight: group for group in self._groups for weight in group.params}
        for model in models:
            # Its hooks miss weights that are read outside of their modules: of adapters and of the output layer.
            model.disable_forward_pre_hook(param_sync=False)
            self._watch(model.module)

    def start(self) -> None:
        """Starts the gathers of all buckets; all data-parallel ranks call it after each optimizer step."""
        for group in self._groups:
            group.start_param_sync()
            self._in_flight[group] = None

    def wait(self, weights: Iterable[Tensor]) -> None:
        """Waits until weights are complete; weights that are not trained always are."""
        if self._in_flight:
            self._finish(dict.fromkeys(self._group_of.get(weight) for weight in weights))

    def wait_for_all(self) -> None:
        """Waits until all weights are complete."""
        self._finish(tuple(self._in_flight))

    def _finish(self, groups: Iterable[Any]) -> None:
        for group in groups:
            if group in self._in_flight:
                # All buckets are dispatched already; megatron-core would start the next one here.
                group.finish_param_sync(skip_next_bucket_dispatch=True)
                del self._in_flight[group]

    def _watch(self, chunk: Any) -> None:
        def before(module: Module, _: Any) -> None:
            self.wait(module.parameters())

        def after(decoder: Module, *_: Any) -> None:
            self.wait(chunk.parameters())  # the output layer's, which is read as a tensor, not by its module

        ends = (getattr(chunk, "embedding", None), chunk.decoder.final_layernorm, getattr(chunk, "multi_token", None))
        for module in (*ends, *chunk.decoder.layers):
            if module is not None:
                module.register_forward_pre_hook(before)
        chunk.decoder.register_forward_hook(after)
