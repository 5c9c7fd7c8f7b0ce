"""Auxiliary losses of routers: balance of experts within each sequence, and size of logits. They are off by default.

- Balance (DeepSeek-V3, arXiv:2412.19437, eq. 17 to 20), of a row with T tokens, E experts and k experts of a token,
  with scores s that are normalized to a sum of 1 over the experts of a token:

      f(i) = E / (k T) * number of tokens with i among their k highest scores,  P(i) = mean of s(i),  sum of f(i) P(i)

  as a mean over the rows of the mini-batch. f is a constant.
- z (ST-MoE, arXiv:2202.08906, eq. 5): logsumexp(logits)^2, as a mean over the tokens of the mini-batch.

Both are sums over tokens with divisors of the whole mini-batch, so that they do not depend on its division. A balance
over more than a row, as in arXiv:2501.11873, would: gradients of earlier micro-batches need the choices of later ones.
Losses of layers are added up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl_mg.config import MegatronConfig
from verl_mg.errors import UserError
from verl_mg.models.hf_config import ExpertsConfig, HFConfig

BALANCE, Z = "moe_aux_loss_coeff", "moe_z_loss_coeff"  # fields of `TransformerConfig` with the factors of the losses
KIND = "moe_router_load_balancing_type"  # field of `TransformerConfig` with the kind of balance


@dataclass(frozen=True)
class RowsOfTokens:
    """Rows that the tokens of a rank belong to, on its device; t tokens of a tensor- and context-parallel rank."""

    rows: Tensor  # (t,) int64, number of the row in the micro-batch; the number of rows for padding
    lengths: Tensor  # (rows + 1,) float32, tokens of each row; infinity for padding, whose share in every mean is 0


@dataclass
class BalanceLosses:
    """Factors and divisors of the losses in a mini-batch, and the sums that the routers of a rank have computed."""

    balance: float  # factor of the balance loss; 0: it is not computed
    z: float  # factor of the z loss; 0: it is not computed
    tp: dist.ProcessGroup  # tensor-parallel ranks, which have different tokens
    num_rows: float = 1.0  # rows of the mini-batch
    num_tokens: float = 1.0  # tokens of these rows
    # (2,) float64, balance and z loss of this rank's tokens in all layers, without factors; None before the first.
    sums: Tensor | None = None

    def attach(self, logits: Tensor, packed: Any, experts: ExpertsConfig) -> Tensor:
        """Returns the logits (t, experts), with the gradients of the losses added to theirs in the backward pass."""
        # The gradients are computed here, since no later stage of a pipeline sees the routers of this one.
        with torch.enable_grad():
            leaf = logits.detach().float().requires_grad_()
            losses = torch.stack([self._balance(leaf, packed, experts), self._z(leaf, packed)])
            factors = losses.new_tensor([self.balance, self.z])
            (gradient,) = torch.autograd.grad((losses * factors).sum(), leaf)
        values = losses.detach().double()
        self.sums = values if self.sums is None else self.sums + values
        return _WithGradient.apply(logits, gradient.to(logits.dtype))

    def report(self, layers: int) -> dict[str, Tensor]:
        """Returns the losses of this rank's tokens, to be summed over all ranks: without factors, means over layers."""
        if self.sums is None:
            return {}
        names = {"moe_aux_loss": self.balance, "moe_z_loss": self.z}
        return {name: self.sums[i] / layers for i, (name, factor) in enumerate(names.items()) if factor}

    def _balance(self, logits: Tensor, packed: Any, experts: ExpertsConfig) -> Tensor:
        if not self.balance:
            return logits.sum() * 0  # `autograd.grad` needs a path to the logits
        of = packed.rows_of_tokens
        scores = logits.sigmoid() if experts.sigmoid else logits.softmax(-1)
        highest = scores.detach().topk(experts.top_k, dim=-1).indices
        chosen = torch.zeros_like(scores, dtype=torch.int32).scatter(1, highest, 1)
        counts = torch.zeros(len(of.lengths), experts.count, dtype=torch.int32, device=logits.device)
        counts.index_add_(0, of.rows, chosen)
        # Other ranks have tokens of the same rows. Counts are integers, so their sum does not depend on an order.
        for group in (self.tp, packed.cp_group):
            if group.size() > 1:
                dist.all_reduce(counts, group=group)
        # One 1 / T is of f, the other of P, whose sum over the row's tokens is below.
        shares = counts * experts.count / (experts.top_k * of.lengths[:, None] ** 2)
        if experts.sigmoid:
            scores = scores / scores.sum(-1, keepdim=True)
        return (shares[of.rows] * scores).sum() / self.num_rows

    def _z(self, logits: Tensor, packed: Any) -> Tensor:
        return (logits.logsumexp(-1) ** 2 * packed.occurrences).sum() / self.num_tokens if self.z else logits.sum() * 0


class _WithGradient(torch.autograd.Function):
    """Identity with a further gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return grad + gradient, None


def factors(megatron: MegatronConfig, c: HFConfig) -> tuple[float, float]:
    """Returns the factors of balance and z loss; 0 without experts."""
    if c.experts is None:
        return 0.0, 0.0
    balance, z = (float(megatron.transformer.get(name) or 0.0) for name in (BALANCE, Z))
    return balance, z


def check_balance_losses(c: HFConfig, megatron: MegatronConfig) -> None:
    """Checks that a trained model has the losses that a configuration gives factors for."""
    given, prefix = megatron.transformer, "megatron.transformer."
    if given.get(KIND, "seq_aux_loss") != "seq_aux_loss":
        raise UserError(
            f"{prefix}{KIND}={given[KIND]}: only the balance within a sequence does not depend on micro-batches and "
            "ranks. Write seq_aux_loss."
        )
    for name in (BALANCE, Z):
        if isinstance(given.get(name), list):
            raise UserError(f"{prefix}{name}: there is one kind of balance. Write one number.")
        factor = float(given.get(name) or 0.0)
        if factor < 0:
            raise UserError(f"{prefix}{name}: {factor} is below 0. Write 0 or more.")
        if factor and c.experts is None:
            raise UserError(f"{prefix}{name}: the model has no experts. Leave it out.")
