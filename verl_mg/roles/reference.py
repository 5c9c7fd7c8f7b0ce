from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch.distributed as dist

from verl_mg.checkpoint.sharded_safetensors import StoredBox
from verl_mg.reshard.routing import assign_writes
from verl_mg.roles.context import JobContext
from verl_mg.roles.models import Actor, Policy
from verl_mg.roles.role import Batching
from verl_mg.sharding.boxes import full_box, slices
from verl_mg.training.runner import Runner
from verl_mg.training.weights import WEIGHTS, stored_boxes
from verl_mg.weight_sync.transfer_plan import TransferPlan, plan_transfer


class Reference(Policy):
    """Frozen policy that starts as its model directory, and becomes the actor of a later iteration on request.

    Resetting the reference lets a policy move on where the penalty would hold it (ProRL, arXiv:2505.24864, section
    2.3). Where `is_refreshed`, the weights may differ from the model directory; checkpoints then contain them.
    """

    def __init__(self, runner: Runner, batching: Batching, name: str, context: JobContext) -> None:
        super().__init__(runner, batching, name, context)
        self.is_refreshed = False
        self._actor: Actor | None = None
        self._plan: TransferPlan | None = None

    def follow(self, actor: Actor) -> None:
        """Plans the transfer of an actor's weights; all ranks call it together. UserError if it has other tensors."""
        source, target = actor.runner.shard_map(), self.runner.shard_map()
        # The shorter of both types travels: rounding to it before or after the transfer gives the same values.
        dtype = min((actor.runner.dtype, self.runner.dtype), key=lambda dtype: dtype.itemsize)
        self._plan = plan_transfer(source, target, dtype)
        self._actor, self.is_refreshed = actor, True

    def refresh(self) -> None:
        """Copies the present weights of the actor, adapters merged into them; all ranks call it together."""
        assert self._actor is not None and self._plan is not None
        self._context.executor.require_outside_block("a refresh of the reference")
        offload, runner = self._context.offload, self._actor.runner
        offload.release_engines()
        # Both are on the device together: the transfer reads the actor and writes the reference.
        offload.load_exclusively(self._actor.cpu_offload, training=False)
        self.cpu_offload.to_device(training=False)
        with self._context.timer("weight_sync"):
            targets = self.runner.parameters()
            for values in self._plan.values(runner):
                values.send(targets)
        self._forget_former_weights()

    def parts(self) -> Iterator[StoredBox]:
        """Yields this rank's share of the weights for a checkpoint; all ranks together have each box once."""
        self._context.offload.release_engines()
        self._context.offload.load_exclusively(self.cpu_offload, training=False)
        parameters = self.runner.parameters()
        # Replicas have equal boxes: one rank is chosen for each.
        for write in assign_writes(self.runner.shard_map(), dist.get_rank()):
            values = parameters[write.parameter].detach()[slices(write.parameter_box)]
            yield StoredBox(f"{self.name}/{WEIGHTS}", write.tensor, write.box, values)

    def load(self, fill: Callable[[StoredBox], None]) -> None:
        """Restores the weights from a checkpoint that was written under any layout; all ranks call it together."""
        self._context.offload.release_engines()
        self._context.offload.load_exclusively(self.cpu_offload, training=False)
        shards, parameters = self.runner.shard_map().shards(dist.get_rank()), self.runner.parameters()
        for name, parameter in parameters.items():
            for part in stored_boxes(WEIGHTS, shards[name], parameter.detach(), full_box(tuple(parameter.shape))):
                fill(replace(part, namespace=f"{self.name}/{part.namespace}"))
        self._forget_former_weights()
        self.is_refreshed = True

    def _forget_former_weights(self) -> None:
        """Discards what was derived from the former weights: caches, and the host copy, which is made only once."""
        self.runner.drop_caches()
        self.cpu_offload.forget_weights()
