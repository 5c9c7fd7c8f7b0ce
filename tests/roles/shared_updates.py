"""Updates of a role whose rows share prefixes, and the comparison of their results."""

import pytest
import torch
import torch.distributed as dist

from tests.megatron.training import assembled, gradients_here, token_loss
from tests.roles.updates import role_on
from verl_mg.monitor.metrics import Throughput
from verl_mg.roles.models import Actor


def passes(model, layout, budget, batch, shares, kind=Actor, options=()):
    """Numbers and outputs of this rank's rows, then metrics, gradients, tokens and FLOPs of an update."""
    batch = batch if shares else batch.select_columns(set(batch.names()) - {"prefix_of", "prefix_length"})
    own = list(range(dist.get_rank(), len(batch), dist.get_world_size()))
    role, mine = role_on(kind, model, layout, budget, **dict(options)), batch.select(own)
    outputs = role.forward(mine).split(mine.lengths.tolist())
    trainer, gradients, tokens = role.trainer, [], []
    step = trainer.optimizer.step

    def seen():
        gradients.extend(gradients_here(role.runner))
        return step()

    trainer.optimizer.step = seen
    throughput = Throughput([role.runner], peak=1.0)
    role.runner.chunks[0].register_forward_pre_hook(lambda _, given: tokens.append(int(given[0].packed.lengths.sum())))
    metrics = role.update(mine, token_loss, "token-mean")
    flops = throughput.iteration([mine], 1.0)["time/mfu"] * dist.get_world_size()
    return own, outputs, metrics, gradients, sum(tokens), flops


def assert_same(shared, whole, tolerance=1e-5):
    """The rows' outputs, the metrics, and every gradient of the weights; adapters' are in the metric of its norm."""
    for (own, outputs, *_), (_, expected, *_) in zip(shared, whole, strict=True):
        for row, found, wanted in zip(own, outputs, expected, strict=True):
            assert torch.allclose(found, wanted, atol=tolerance, rtol=tolerance), row
    metrics, expected = shared[0][2], whole[0][2]
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=tolerance, abs=1e-9), name
    gradients, wanted = (assembled([part for result in results for part in result[3]]) for results in (shared, whole))
    assert gradients.keys() == wanted.keys()
    for name, gradient in wanted.items():
        error = (gradients[name] - gradient).abs().max()
        assert error <= tolerance * gradient.abs().max(), f"{name}: {error / gradient.abs().max():.1e}"
