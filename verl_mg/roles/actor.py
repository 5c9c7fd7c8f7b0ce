"""The policy that is trained."""

from __future__ import annotations

from verl_mg.roles.policy import Policy
from verl_mg.roles.trainable import TrainableRole


class Actor(TrainableRole, Policy):
    """A policy with an optimizer."""
