"""Gathers of updated weights in flight: whoever reads a weight gets the updated one, however late its gather is."""

import pytest
import torch
import torch.distributed as dist

from tests.helpers.roles import megatron_runner
from tests.helpers.tiny_models import random_rows, tiny_model
from tests.megatron.training import TEMPERATURE, update
from verl_mg.config import LoraConfig, MegatronConfig, OptimizerConfig
from verl_mg.megatron.trainer import MegatronTrainer
from verl_mg.models.hf_config import read_config
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
    rows = random_rows(ROWS, read_config(model).vocab)
    local = rows.select(range(dist.get_rank(), ROWS, dist.get_world_size()))
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


def clones(tensors):
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def by_parameters(trainer, _):
    return clones(trainer.runner.parameters())


def by_one_at_a_time(trainer, _):
    runner, found = trainer.runner, {}
    for name, weight in reversed(runner.parameters(complete=False).items()):
        runner.gathers.wait([weight])
        found[name] = weight.detach().clone()
    return found


def by_forward_pass(trainer, rows):
    return dict(enumerate(trainer.runner.infer([rows], TEMPERATURE)[0]))


def by_weights_of_a_checkpoint(trainer, _):
    return {f"{part.tensor} {part.box}": part.values.clone() for part in weights(trainer.runner)}


def by_cpu_offload(trainer, _):
    offload = CpuOffload(trainer.runner, trainer)
    offload.to_host()
    offload.to_device()
    return clones(dict(trainer.runner.chunks[0].named_parameters()))


def by_snapshot(trainer, _):
    kept = trainer.snapshot()
    kept.take()
    for weight in trainer.runner.parameters().values():
        weight.detach().zero_()
    kept.restore()
    return clones(dict(trainer.runner.chunks[0].named_parameters()))


def by_adapters(trainer, _):
    return clones(trainer.runner.adapters())


def by_merged_parameters(trainer, _):
    return clones(dict(trainer.runner.served_parameters().items()))


READERS = [
    *(by_parameters, by_one_at_a_time, by_forward_pass, by_weights_of_a_checkpoint),
    *(by_cpu_offload, by_snapshot),
]
LORA_READERS = [by_adapters, by_merged_parameters, by_forward_pass]


def differences(model, lora, readers):
    """Of each reader: the values that are not bitwise those without overlap; and how many it has read."""
    found = {}
    for read in readers:
        expected, got = (read(*updated(model, megatron, lora)) for megatron in (MegatronConfig(), OVERLAP))
        assert expected.keys() == got.keys()
        different = [name for name, values in expected.items() if not torch.equal(values, got[name])]
        found[read.__name__] = (different, len(expected))
    return found


@pytest.mark.parametrize(
    ("lora", "readers"), [(None, READERS), (LoraConfig(rank=2), LORA_READERS)], ids=["weights", "adapters"]
)
def test_reader_of_weights_after_an_update_waits_for_their_gathers(ranks, tmp_path, lora, readers):
    model = tiny_model(tmp_path / "model", "qwen3", layers=2)
    for result in ranks.run(2, differences, model, lora, readers):
        assert all(not different and count > 1 for different, count in result.values()), result
