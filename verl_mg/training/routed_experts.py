"""Column of the experts that the rollout chose, which training chooses too (routing replay, arXiv:2510.11370).

batch["routed_experts"]     token column, int16, (sum(lengths), layers, k): the k different experts of a token in
                            each layer; -1: not known, the router decides. A layer without experts has entries
                            like any other, which are not read. On the ranks of a pipeline stage the column has
                            the layers of `replayed_layers` only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from verl_mg.batch import Batch
from verl_mg.device import copy_to
from verl_mg.layout import Stage
from verl_mg.models.hf_config import HFConfig
from verl_mg.training.microbatch import ROUTED_EXPERTS, TokenOrder, TokenShard


def replayed_layers(config: HFConfig, stage: Stage) -> tuple[int, ...]:
    """Returns the layers of a pipeline stage that read prescribed experts, ascending: those with experts."""
    return tuple(layer for layer in stage.layers if config.experts and layer in config.experts.layers)


def routed_experts(
    rows: Batch, order: TokenOrder, shard: TokenShard, layers: Sequence[int], device: torch.device
) -> dict[int, Tensor] | None:
    """Selects the prescribed experts of this rank's tokens by layer, (T / (cp * tp), k); None without the column."""
    if ROUTED_EXPERTS not in rows:
        return None
    known = rows[ROUTED_EXPERTS]
    # Padding is left to the router.
    given = known.new_full((order.total, *known.shape[1:]), -1)
    given[order.places] = known
    local = copy_to(device, given[order.local].chunk(shard.tp)[shard.tp_index])
    return dict(zip(layers, local.unbind(1), strict=True))
