"""Roles with a value head: the critic judges tokens, the reward model whole rows."""

from __future__ import annotations

from torch import Tensor

from verl_mg.batch import Batch
from verl_mg.roles.role import Role
from verl_mg.roles.trainable import TrainableRole


class Critic(TrainableRole):
    """What the return from each token on will be, said before the token is known."""

    head = "value"

    def compute_values(self, batch: Batch) -> Tensor:
        """The value of the state in which each token under the loss mask was drawn; float32, 0 elsewhere."""
        return self.forward(batch, "compute_values")


class RewardModel(Role):
    """A score for each row, read at its last token, where `transformers` reads it in sequence classification."""

    head, behind = "value", 0

    def compute_scores(self, batch: Batch) -> Tensor:
        """(n,) float32."""
        rows = batch.select_columns(("tokens", "sample_id", "routed_experts"))
        rows["loss_mask"] = batch.last
        return self.forward(rows, "compute_scores", batch.last)


class TrainableRewardModel(TrainableRole, RewardModel):
    """One that learns."""
