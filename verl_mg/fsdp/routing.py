"""Routing replay in modules of `transformers`: the experts that a batch prescribes in place of the router's own.

Families differ in what they make of a router's scores: softmax before or after the choice, sigmoid, biases, groups,
weights that are normalized or scaled. All choose by `topk`. Its result is replaced where it chooses experts, and the
rest is the family's own code, with its gradients:

    topk of (t, experts) scores    ids: the prescribed experts    values: their scores
    topk of (t, groups) scores     ids: groups of the prescribed experts first, for the others are excluded

`check_replay` proves of each family that its experts compute with what is prescribed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from verl_mg.errors import UserError

Given = Mapping[int, Tensor]  # (t, k) integers by layer: prescribed experts; -1 in a row: the router decides
_LAYER = re.compile(r"\.(\d+)\.")


def registered_experts(module: nn.Module) -> dict[int, tuple[str, Any]]:
    """Returns name and module, by layer, of the stacks of experts that `transformers` runs by registered functions."""
    # An attribute of every class that it registers.
    stacks = ((name, part) for name, part in module.named_modules() if hasattr(part, "_is_expert_parallel"))
    return {int(layer[1]): (name, part) for name, part in stacks if (layer := _LAYER.search(name))}


class RoutingReplay:
    """Replay in one module, whose mixtures it wraps; `layers` are those with experts."""

    def __init__(self, module: nn.Module, layers: Iterable[int], where: str) -> None:
        self.layers = tuple(sorted(layers))
        self._given: Given | None = None
        stacks = registered_experts(module)
        if sorted(stacks) != list(self.layers):
            raise UserError(
                f"rollout.replay_routing: {where}: transformers does not run all its experts by registered functions. "
                "Set it to false."
            )
        for layer, (name, experts) in stacks.items():
            mixture: Any = module.get_submodule(name.rpartition(".")[0])
            mixture.forward = partial(self._forward, mixture.forward, layer, experts.num_experts)

    @contextmanager
    def of(self, given: Given | None) -> Iterator[None]:
        """Context manager of a pass with prescribed experts; None: routers decide."""
        before, self._given = self._given, given
        try:
            yield
        finally:
            self._given = before

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Returns the contexts of a layer's pass and of the one that computes it again, for `checkpoint`."""
        # Rows may be computed each by itself, and are computed again when another one's experts are prescribed.
        return nullcontext(), self.of(self._given)

    def _forward(self, forward: Callable[..., Any], layer: int, count: int, *arguments: Any, **options: Any) -> Any:
        if self._given is None:
            return forward(*arguments, **options)
        with _PrescribedChoice(self._given[layer].long(), count):
            return forward(*arguments, **options)


class _PrescribedChoice(TorchFunctionMode):
    """Replaces the choice of experts within it, see the head of the file."""

    def __init__(self, given: Tensor, count: int) -> None:
        super().__init__()
        self._given, self._count = given, count
        self._known = (given >= 0).all(-1, keepdim=True)

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return result
        values: Tensor = args[0] if args else kwargs["input"]
        of_router, options = result.indices.flatten(0, -2), values.shape[-1]
        if len(of_router) != len(self._given):  # such as the best scores within each group
            return result
        if options == self._count and of_router.shape == self._given.shape:
            chosen = torch.where(self._known, self._given, of_router)
        elif options < self._count and self._count % options == 0:
            # Weights of experts outside of the chosen groups are zero in some families (DeepSeek-V2).
            groups = self._given.clamp(min=0) // (self._count // options)
            rated = values.detach().flatten(0, -2).scatter(-1, groups, torch.inf)
            chosen = torch.where(self._known, rated.topk(of_router.shape[-1], sorted=False).indices, of_router)
        else:
            return result
        chosen = chosen.view_as(result.indices)
        return type(result)((values.gather(-1, chosen), chosen))
