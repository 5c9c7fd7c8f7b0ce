"""Gathers of updated weights in flight: whoever reads a weight gets the updated one, however late its gather is."""

import pytest
import torch

from tests.helpers.roles import megatron_runner
from tests.helpers.tiny_models import rows_for, rows_of_rank
from tests.megatron.training import TEMPERATURE, update
from verl_mg.config import LoraConfig, MegatronConfig, OptimizerConfig
from verl_mg.megatron.trainer import MegatronTrainer
from verl_mg.training.offload import CpuOffload
from verl_mg.training.weights import weights

OVERLAP = MegatronConfig(ddp={"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 1000})
# A norm of gradients depends on how they are divided among ranks, in its last bits.
OPTIMIZER = OptimizerConfig(lr=0.02, clip_grad=0.0)
ROWS = 8


def updated(model, megatron, lora=None):
    """A trainer after one step; its rows."""
    trainer = MegatronTrainer(megatron_runner(model, lora=lora, megatron=megatron), OPTIMIZER)
    gathers = trainer.runner.gathers
    if gathers._groups:
        assert len(gathers._groups) >= 3
        for group in gathers._groups:
            make_late(group)
    rows = rows_for(model, ROWS)
    local = rows_of_rank(rows)
    update(trainer, [local], rows)
    assert bool(gathers._in_flight) == bool(gathers._groups)
    return trainer, local


def make_late(group):
    """Gathers the weights of a bucket as late as possible: when somebody waits for them."""
    start, finish = group.start_param_sync, group.finish_param_sync

    def late(**options):
        start()
        finish(**options)

    group.start_param_sync, group.finish_param_sync = lambda: None, late


def one_at_a_time(runner):
    found = {}
    for name, weight in reversed(runner.parameters(complete=False).items()):
        runner.gathers.wait([weight])
        found[name] = weight.detach().clone()
    return found


def after_an_offload(trainer):
    offload = CpuOffload(trainer.runner, trainer)
    offload.to_host()
    offload.to_device()
    return dict(trainer.runner.chunks[0].named_parameters())


def after_a_snapshot(trainer):
    kept = trainer.snapshot()
    kept.take()
    for weight in trainer.runner.parameters().values():
        weight.detach().zero_()
    kept.restore()
    return dict(trainer.runner.chunks[0].named_parameters())


READERS = {
    "parameters": lambda trainer, _: trainer.runner.parameters(),
    "one at a time": lambda trainer, _: one_at_a_time(trainer.runner),
    "forward pass": lambda trainer, rows: dict(enumerate(trainer.runner.infer([rows], TEMPERATURE)[0])),
    "checkpoint": lambda trainer, _: {f"{part.tensor} {part.box}": part.values for part in weights(trainer.runner)},
    "offload": lambda trainer, _: after_an_offload(trainer),
    "snapshot": lambda trainer, _: after_a_snapshot(trainer),
    "adapters": lambda trainer, _: trainer.runner.adapters(),
    "merged parameters": lambda trainer, _: dict(trainer.runner.served_parameters().items()),
}
OF_WEIGHTS = ("parameters", "one at a time", "forward pass", "checkpoint", "offload", "snapshot")


def differences(model, lora, readers):
    """Of each reader: the values that are not bitwise those without overlap; and how many it has read."""
    found = {}
    for name in readers:
        expected, got = (
            {key: values.detach().clone() for key, values in READERS[name](*updated(model, megatron, lora)).items()}
            for megatron in (MegatronConfig(), OVERLAP)
        )
        assert expected.keys() == got.keys()
        found[name] = ([key for key, values in expected.items() if not torch.equal(values, got[key])], len(expected))
    return found


@pytest.mark.parametrize(
    ("lora", "readers"),
    [(None, OF_WEIGHTS), (LoraConfig(rank=2), ("adapters", "merged parameters", "forward pass"))],
    ids=["weights", "adapters"],
)
def test_reader_of_weights_after_an_update_waits_for_their_gathers(ranks, families, lora, readers):
    for result in ranks.run(2, differences, families["qwen3"], lora, readers):
        assert all(not different and count > 1 for different, count in result.values()), result
