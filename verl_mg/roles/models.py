"""Model roles by what their heads compute: policies, critics, reward models."""

from __future__ import annotations

from torch import Tensor

from verl_mg.batch import Batch
from verl_mg.layout.packing import MicroBatchPlan
from verl_mg.roles.context import JobContext
from verl_mg.roles.role import Batching, Role
from verl_mg.roles.trainable import TrainableRole
from verl_mg.training.logprobs import TokenOutputs
from verl_mg.weight_sync.transfer_plan import SourceWeights


class Policy(Role):
    """Language model that computes log-probs: a reference or a teacher; frozen unless it is an `Actor`."""

    def compute_logprobs(self, batch: Batch) -> Tensor:
        """Returns log p of every token under the loss mask, in nats: a float32 token column with 0 elsewhere.

        The distribution is softmax(logits / temperature), without top-k and top-p.
        """
        return self.forward(batch, "compute_logprobs")


class Actor(TrainableRole, Policy):
    """Policy with an optimizer."""

    keeps_multi_token = True  # engines use it for speculative decoding, and exports keep it

    @property
    def weights(self) -> SourceWeights:
        """The present weights, as they are transferred to engines."""
        return SourceWeights(self.runner, self.num_updates, self.save)


class UnadaptedPolicy(Policy):
    """Actor without its adapters (LoRA): the policy that training began with, without further memory."""

    def __init__(self, actor: Actor, batching: Batching, name: str, context: JobContext) -> None:
        super().__init__(actor.runner, batching, name, context)
        self.cpu_offload = actor.cpu_offload  # the memory is the actor's, which decides where it is

    def _compute_outputs(
        self, plan: MicroBatchPlan, micro_batches: list[Batch], outputs: TokenOutputs
    ) -> dict[int, Tensor]:
        assert self.runner.lora is not None
        with self.runner.lora.disabled():
            return super()._compute_outputs(plan, micro_batches, outputs)


class Critic(TrainableRole):
    """Value model V(s_t): predicts the return from the state before token t."""

    head = "value"

    def compute_values(self, batch: Batch) -> Tensor:
        """Returns the value of the state before every token under the loss mask; float32, 0 elsewhere."""
        return self.forward(batch, "compute_values")


class RewardModel(Role):
    """Sequence classifier that scores a row at its last token, as `transformers` does."""

    head, hidden_offset = "value", 0

    def compute_scores(self, batch: Batch) -> Tensor:
        """Returns the score of each row, (n,) float32."""
        return self.forward(batch, "compute_scores", batch.last)


class TrainableRewardModel(TrainableRole, RewardModel):
    """Reward model with an optimizer."""
