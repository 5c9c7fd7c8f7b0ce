"""Proof that a family's experts compute with what is prescribed, on the shrunk copy of a model.

    routers' choice, in two orders    outputs and gradients are those without replay
    choice of the token before        the experts get it, with weights that are not 0

In another order, weights must follow their experts. Families whose routers do not choose by `topk`, or not in every
layer, are refused, such as Phi-3.5-MoE, and DeepSeek-V4, some layers of which choose by the token's id.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from verl_mg.errors import UserError
from verl_mg.fsdp.family_reference import TOLERANCE, FamilyReference
from verl_mg.fsdp.routing import Given, RoutingReplay, registered_experts

Taken = Mapping[int, tuple[Tensor, Tensor]]  # (t, k) experts and their weights by layer


def check_replay(reference: FamilyReference) -> None:
    """Checks the replay of prescribed experts; UserError if outputs, gradients or experts are not those expected."""
    module, where = reference.fresh_module(), reference.where
    if not (layers := registered_experts(module).keys()):
        raise _refused(where, "transformers does not run its experts by registered functions")
    replay = RoutingReplay(module, layers, where)
    free, taken = _pass(reference, module, replay, None)
    of_routers = {layer: chosen for layer, (chosen, _) in taken.items()}
    for change, is_same in ((torch.clone, True), (_reordered, True), (_shifted, False)):
        given = {layer: change(chosen) for layer, chosen in of_routers.items()}
        outputs, taken = _pass(reference, module, replay, given)
        for layer, (chosen, weights) in taken.items():
            if not chosen.equal(given[layer]) or not (weights.isfinite() & (weights != 0)).all():
                raise _refused(where, f"layer {layer} computes with other experts than are prescribed")
        for name, values in outputs.items() if is_same else ():
            error, size = (float(each.abs().max()) for each in (values - free[name], free[name]))
            if not error <= TOLERANCE * max(1.0, size):  # NaN is an error too
                raise _refused(where, f"with the routers' choice, {name} differs by {error:.2g} of at most {size:.2g}")


def _reordered(chosen: Tensor) -> Tensor:
    return chosen.flip(-1)


def _shifted(chosen: Tensor) -> Tensor:
    return chosen.roll(1, 0)


def _pass(
    reference: FamilyReference, module: Any, replay: RoutingReplay, given: Given | None
) -> tuple[dict[str, Tensor], Taken]:
    """Returns the outputs of a row and the gradients of parameters by name, and what the experts were given."""
    taken: dict[int, tuple[Tensor, Tensor]] = {}

    def recorder(layer: int) -> Any:
        def record(_: Any, arguments: tuple[Tensor, ...]) -> None:  # hidden states, experts, weights
            taken[layer] = arguments[1].detach().long(), arguments[2].detach()

        return record

    rows = reference.micro_batches[0]
    with ExitStack() as hooks:
        for layer, (_, experts) in registered_experts(module).items():
            hooks.callback(experts.register_forward_pre_hook(recorder(layer)).remove)
        with replay.of(given):
            outputs = reference.alone(module, rows.row("tokens", 0))
    module.zero_grad()
    (outputs * rows.row("weights", 0)[1:].to(outputs.device)).sum().backward()
    named = module.named_parameters()
    gradients = {f"the gradient of {name}": p.grad.clone() for name, p in named if p.grad is not None}
    return {"its output": outputs.detach(), **gradients}, taken


def _refused(where: str, what: str) -> UserError:
    return UserError(f"rollout.replay_routing: {where}: {what}. Set it to false.")
