"""The policy that is trained."""

from __future__ import annotations

from verl_mg.roles.policy import Policy
from verl_mg.roles.trained import Trained


class Actor(Trained, Policy):
    """A policy with an optimizer."""
