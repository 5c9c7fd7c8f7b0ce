"""Adam with its moments on the host, on a disk or in bfloat16 takes the steps of Adam on the device."""

import pytest
import torch

from tests.helpers.roles import megatron_runner
from tests.helpers.tiny_models import random_rows, tiny_model
from tests.megatron.training import update
from verl_mg.config import GuardConfig, OptimizerConfig
from verl_mg.errors import UserError
from verl_mg.megatron.streamed_adamw import StreamedAdamW, dithered_to_bfloat16
from verl_mg.megatron.trainer import MegatronTrainer

OPTIMIZER = OptimizerConfig(lr=0.01, eps=1e-3, betas=(0.9, 0.99), weight_decay=0.1, warmup_steps=2)


def loss(tokens):
    return -tokens["advantages"] * tokens.logprobs, {"approx_kl": tokens["noise"]}


ON_HOST = {"cpu_offload": True}


def trained(model, layout, dtype, options, guard=None):
    """The weights after three steps, how far they went, and the number, type and bytes of the moments."""
    runner = megatron_runner(model, layout, dtype)
    trainer = MegatronTrainer(runner, OPTIMIZER.model_copy(update=options), guard)
    inner = trainer.inner_optimizers
    assert inner and all(isinstance(one, StreamedAdamW) == bool(options) for one in inner)
    before = {name: weight.detach().clone() for name, weight in runner.parameters().items()}
    rows = random_rows(6, 24, seed=runner.groups.coordinates.dp)
    for _ in range(3):
        update(trainer, [rows], rows, loss, 1.0)
    after = {name: weight.detach().clone() for name, weight in runner.parameters().items()}
    of_weights = [state["exp_avg_sq"] for one in inner for state in one.state.values()]
    moments = [(len(of_weights), of_weights[0].dtype, sum(values.nbytes for values in of_weights))]
    return after, {name: (after[name] - before[name]).abs().max().item() for name in after}, moments


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("architecture", "layout"),
    [("qwen3", "tp2"), ("qwen3_moe", "ep2"), pytest.param("qwen2", "tp1", marks=pytest.mark.nightly)],
)
def test_streamed_adamw_takes_the_steps_of_device_adam(ranks, tmp_path, architecture, layout, dtype):
    model = tiny_model(tmp_path / "model", architecture, layers=2)
    device = ranks.run(2, trained, model, layout, dtype, {})
    host = ranks.run(2, trained, model, layout, dtype, ON_HOST)
    for (expected, went, moments), (found, _, own) in zip(device, host, strict=True):
        assert own == moments and all(moments)
        for name, weight in expected.items():
            assert went[name] > 1e-3, name
            rounding = 0 if dtype is torch.float32 else 2**-8 * weight.abs().max().item()
            assert (found[name] - weight).abs().max() <= 1e-5 * went[name] + rounding, name


def test_streamed_adamw_rollback_restores_moments(ranks, tmp_path):
    model = tiny_model(tmp_path / "model", "qwen3", layers=2)
    guard = GuardConfig(max_kl=1e-6, action="rollback")
    device = ranks.run(1, trained, model, "tp1", torch.float32, {}, guard)
    host = ranks.run(1, trained, model, "tp1", torch.float32, ON_HOST, guard)
    assert all(torch.allclose(host[0][0][name], weight, atol=1e-7) for name, weight in device[0][0].items())


def test_streamed_adamw_with_moments_on_a_disk_equals_those_in_memory(ranks, tmp_path):
    model = tiny_model(tmp_path / "model", "qwen3", layers=2)
    memory = ranks.run(2, trained, model, "tp1", torch.float32, ON_HOST)
    disk = ranks.run(2, trained, model, "tp1", torch.float32, ON_HOST | {"nvme_folder": tmp_path})
    for (expected, _, moments), (found, _, own) in zip(memory, disk, strict=True):
        assert moments == own and all(torch.equal(found[name], weight) for name, weight in expected.items())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


@pytest.mark.parametrize("options", [{}, ON_HOST], ids=["device", "host"])
def test_streamed_adamw_with_bfloat16_moments_is_close_and_takes_half_the_memory(ranks, tmp_path, options):
    model = tiny_model(tmp_path / "model", "qwen3", layers=2)
    exact = ranks.run(2, trained, model, "tp1", torch.float32, {})
    half = ranks.run(2, trained, model, "tp1", torch.float32, options | {"moments_dtype": "bfloat16"})
    for (expected, went, ((_, _, nbytes),)), (found, _, ((_, dtype, half_bytes),)) in zip(exact, half, strict=True):
        assert dtype is torch.bfloat16 and 2 * half_bytes == nbytes
        for name, weight in expected.items():
            assert 0 < (found[name] - weight).abs().max() < 2**-6 * went[name], name


def test_streamed_adamw_with_a_folder_that_does_not_exist_names_key_and_remedy(ranks, tmp_path):
    model = tiny_model(tmp_path / "model", "qwen3", layers=2)
    (message,) = ranks.run(1, refusal, model, tmp_path / "nowhere")
    assert message.startswith(f"actor.optimizer.nvme_folder: {tmp_path / 'nowhere'} has no space for ")
    assert message.endswith("Name a folder on a local disk with as much for each rank of the machine.")


def refusal(model, folder):
    """The message of a trainer whose moments have no disk."""
    with pytest.raises(UserError) as caught:
        trained(model, "tp1", torch.float32, ON_HOST | {"nvme_folder": folder})
    return str(caught.value)


def test_dithered_to_bfloat16_lets_small_changes_accumulate():
    start = torch.rand(1000, generator=torch.Generator().manual_seed(0)) + 0.5
    dithered, nearest = start.bfloat16(), start.bfloat16()
    for step in range(1000):
        nearest = (nearest.float() * 0.999).bfloat16()
        dithered = dithered_to_bfloat16(dithered.float() * 0.999, step)
    exact = start * 0.999**1000
    assert ((nearest.float() / exact).mean() - 1).abs() > 1  # it never decays
    assert ((dithered.float() / exact).mean() - 1).abs() < 0.05
    assert (dithered.float() / exact - 1).abs().max() < 0.5


@pytest.mark.parametrize("scale", [1e-30, 1e-8, 1.0, -3e4])
def test_dithered_to_bfloat16_returns_a_neighbour_and_is_unbiased(scale):
    values = torch.rand(100_000, generator=torch.Generator().manual_seed(1)) * scale
    rounded = dithered_to_bfloat16(values, 7).float()
    assert ((rounded - values).abs() <= 2**-7 * values.abs()).all()
    nearest = (values.bfloat16().float() - values).abs().mean()
    assert (rounded - values).mean().abs() < 0.02 * nearest
    assert torch.equal(dithered_to_bfloat16(values.bfloat16().float(), 3).float(), values.bfloat16().float())
