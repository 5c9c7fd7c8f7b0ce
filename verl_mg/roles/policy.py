"""A role that says how probable tokens are: reference, teacher, and what is trained to be a policy."""

from __future__ import annotations

from torch import Tensor

from verl_mg.batch import Batch
from verl_mg.roles.role import Role


class Policy(Role):
    """A language model; frozen unless it is an `Actor`."""

    def compute_logprobs(self, batch: Batch) -> Tensor:
        """log p of every token under the loss mask, a float32 token column with 0 elsewhere.

        Of the distribution that was sampled from: softmax(logits / temperature), without top-k and top-p.
        """
        return self.forward(batch, "compute_logprobs")
