"""The FSDP backend on a fake GPU: what is on the device and what is in host memory, and values of `transformers`."""

import pytest
import torch

from tests.fsdp import fake_cuda_cases as cases
from tests.helpers.tiny_models import oracle, oracle_outputs, tiny_model
from tests.megatron.fake_cuda_cases import TEMPERATURE, rows_of
from tests.megatron.training import assert_logprobs_near


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("family", "layout", "ranks"),
    [
        ("qwen3_moe", "tp1", 1),
        ("deepseek_v3", "tp1", 1),
        ("gemma2", "tp1", 2),
        ("gemma2", "cp2", 2),
        ("qwen3", "tp2", 2),
    ],
)
def test_weights_in_host_memory_train_as_those_on_the_device(fake_cuda, tmp_path, family, layout, ranks):
    """Gradients, moments and weights are on the host, and nothing that engines or activations read."""
    model = tiny_model(tmp_path / "model", family, 2, 64)
    device, host = (fake_cuda.run(cases.train, model, layout, ranks, in_host) for in_host in (False, True))
    for trained in (device, host):
        assert trained.grad_norms[1] > 0 and trained.changed > 0
        if ranks == 1:
            rows = rows_of(model)
            expected, _ = oracle_outputs(oracle(model), rows, TEMPERATURE)
            scored = rows["loss_mask"] & (rows.positions > 0)
            assert_logprobs_near((trained.logprobs - expected[scored]).detach().abs())
    # The second gradient is that of the weights which the first step has changed.
    assert host.grad_norms == pytest.approx(device.grad_norms, rel=1e-5)
    assert torch.equal(host.logprobs, device.logprobs)
    assert set(map(frozenset, device.devices.values())) == {frozenset({"cuda"})}
    # Routers' biases are buffers, which are on the device.
    kept = {"cuda"} if family == "deepseek_v3" else set()
    on_host = {"weights": {"cpu"} | kept, "gradients": {"cpu"}, "moments": {"cpu"}}
    assert host.devices == device.devices | on_host
    assert host.moved < device.moved and host.pinned
