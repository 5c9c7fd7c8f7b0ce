"""The learning-rate schedule, step by step, against its formulas; what is float32 where weights are bfloat16."""

import math

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.helpers.roles import megatron_runner
from tests.helpers.tiny_models import random_rows, tiny_model
from tests.megatron.training import TEMPERATURE, assembled, gradients_here, token_loss
from verl_mg.config import OptimizerConfig
from verl_mg.errors import UserError
from verl_mg.megatron.trainer import MegatronTrainer
from verl_mg.models.hf_config import read_config
from verl_mg.training.trainer import LearningRateSchedule, MiniBatch, Objective, check_schedule, count_non_finite

ROWS = 16


class NewTensors(TorchDispatchMode):
    """Names of the operations whose result is new memory for as many elements as one of these tensors has."""

    def __init__(self, tensors):
        super().__init__()
        self._sizes = {tensor.numel() for tensor in tensors}
        self.operations, self.host_reads = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.host_reads += func is torch.ops.aten._local_scalar_dense.default
        given = {one.untyped_storage().data_ptr() for one in tree_leaves(args) if isinstance(one, torch.Tensor)}
        for one in tree_leaves(result):
            new = isinstance(one, torch.Tensor) and one.untyped_storage().data_ptr() not in given
            if new and one.numel() in self._sizes:
                self.operations.append(str(func))
        return result


class Groups:
    """All that a schedule asks of an optimizer."""

    def __init__(self):
        self.param_groups = [{"lr": 0.0, "weight_decay": 0.0, "wd_mult": 1.0}]


def rates(steps, **config):
    optimizer = Groups()
    schedule = LearningRateSchedule(optimizer, OptimizerConfig(lr=1.0, **config))
    seen = []
    for _ in range(steps):
        schedule.step(1)
        seen.append(optimizer.param_groups[0]["lr"])
    return seen


def test_learning_rate_schedule_constant_after_warm_up():
    assert rates(6, warmup_steps=4) == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1])
    assert rates(3) == [1, 1, 1]


def test_learning_rate_schedule_linear_decays_to_minimum():
    got = rates(7, schedule="linear", decay_steps=5, warmup_steps=1, min_lr=0.2)
    assert got == pytest.approx([1, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2])


def test_learning_rate_schedule_cosine_decays_to_minimum():
    got = rates(5, schedule="cosine", decay_steps=4, min_lr=0.1)
    expected = [0.1 + 0.9 * (1 + math.cos(math.pi * k / 4)) / 2 for k in (1, 2, 3, 4)]
    assert got == pytest.approx([*expected, 0.1])


def test_warmup_ratio_is_of_the_decay_or_of_the_whole_job():
    whole = OptimizerConfig(warmup_ratio=0.25, schedule="linear").with_steps(8)
    assert (whole.warmup_steps, whole.decay_steps, whole.warmup_ratio) == (2, 8, None)
    optimizer = OptimizerConfig(warmup_ratio=0.3, schedule="cosine", decay_steps=5)
    assert optimizer.with_steps(800).warmup_steps == 2 and optimizer.with_steps(800).decay_steps == 5
    assert OptimizerConfig(warmup_ratio=0.9).with_steps(1).warmup_steps == 0
    assert OptimizerConfig(warmup_steps=4).with_steps(800) == OptimizerConfig(warmup_steps=4)


def test_check_schedule_decay_without_steps_raises():
    with pytest.raises(UserError, match=r"Set actor\.optimizer\.decay_steps"):
        check_schedule(OptimizerConfig(schedule="cosine"))


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe"])
def model(request, tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("models") / request.param, request.param, layers=2)


def in_bfloat16(model, **config):
    return MegatronTrainer(megatron_runner(model, dtype=torch.bfloat16), OptimizerConfig(**config))


def rows(model):
    return random_rows(ROWS, read_config(model).vocab)


def update(trainer, micro_batches, scored):
    return trainer.update(MiniBatch(micro_batches, None, scored, 0), Objective(token_loss, "token-mean", TEMPERATURE))


def two_small_steps(model, lr):
    """[weights before, after one step, after two], and the same of the optimizer's."""
    trainer = in_bfloat16(model, lr=lr, betas=(0.9, 0.9), clip_grad=0.0)
    batch = rows(model)
    parameters = {name: p for name, p in trainer.runner.parameters().items() if p.requires_grad}
    weights, mains = [], []
    for step in range(3):
        if step:
            update(trainer, [batch], 1)
        weights.append({name: p.detach().clone() for name, p in parameters.items()})
        mains.append({name: p.main_param.detach().clone().view(p.shape) for name, p in parameters.items()})
    return weights, mains


def test_update_steps_below_bfloat16_resolution_accumulate(ranks, model):
    # Between 1/4 and 1/2 bfloat16 has steps of 2**-9: one of ours is less than half of that, two are more.
    lr = 0.65 * 2**-10
    ((weights, mains),) = ranks.run(1, two_small_steps, model, lr)
    for name in weights[0]:
        before, after_one, after_two = (stage[name] for stage in weights)
        assert before.dtype is torch.bfloat16 and mains[0][name].dtype is torch.float32
        for step in range(3):
            assert torch.equal(weights[step][name], mains[step][name].bfloat16()), (name, step)
        moved = (mains[1][name] - mains[0][name]).abs()
        assert (moved > 0.9 * lr).float().mean() > 0.8, name
        between = (before.abs() > 0.26) & (before.abs() < 0.49) & (moved > 0.9 * lr)
        assert torch.equal(after_one[between], before[between]), name
        if between.any():
            assert (after_two[between] != before[between]).float().mean() > 0.8, name


def summed_gradients(model, cuts):
    """The gradients of the rows in float32, cut into micro-batches in each of these ways, by rank."""
    trainer, batch = in_bfloat16(model), rows(model)
    runner, found = trainer.runner, []
    trainer.optimizer.step = lambda: (found.append(assembled(gradients_here(runner))), 0.0, 0)
    for cut in cuts:
        update(trainer, [batch.select(numbers) for numbers in cut[dist.get_rank()]], 100)
    assert {buffer.dtype for buffer in trainer._gradients()} == {torch.float32}
    return found


def test_gradients_of_bfloat16_weights_accumulate_in_float32(ranks, model):
    each = [[row] for row in range(ROWS)]
    alone = ranks.run(1, summed_gradients, model, [[[numbers]] for numbers in each])[0]
    together = ranks.run(1, summed_gradients, model, [[each], [each[::-1]]])[0]
    divided = ranks.run(2, summed_gradients, model, [[each[::2], each[1::2]]])
    coarse = 0.0
    for name in alone[0]:
        parts = [gradients[name] for gradients in alone]
        exact, largest = torch.stack(parts).double().sum(0), torch.stack(parts).abs().max()
        assert largest > 0, name
        for found in (*together, divided[0][0], divided[1][0]):
            assert (found[name] - exact).abs().max() <= 2e-6 * largest, name
        rounded = parts[0].bfloat16()
        for part in parts[1:]:
            rounded += part.bfloat16()
        coarse = max(coarse, float((rounded - exact).abs().max() / largest))
    assert coarse > 1e-3  # what it would be in bfloat16


def watched_gradients(model):
    """With one reported metric and with ten: operations as large as a buffer, and scalars that the host reads."""
    trainer, batch = in_bfloat16(model), rows(model)
    found = []
    for count in (1, 10):

        def closure(micro, output, count=count):
            loss = output.float().mean()
            return loss, {f"metric {number}": loss.detach().double() for number in range(count)}

        with NewTensors(list(trainer._gradients())) as watched:
            trainer._compute_gradients(
                MiniBatch([batch], None, 0, 0), Objective(token_loss, "token-mean", TEMPERATURE), closure
            )
        found.append((watched.operations, watched.host_reads))
    return found


def test_gradient_check_needs_no_copy_of_a_buffer_and_metrics_reach_the_host_at_once(ranks, model):
    (few, few_reads), (many, many_reads) = ranks.run(1, watched_gradients, model)[0]
    assert few == many == []
    assert few_reads == many_reads


@pytest.mark.parametrize("position", [0, 77_777, 99_999])
@pytest.mark.parametrize(("value", "count"), [("nan", 1), ("inf", 1), ("-inf", 1), ("-3e38", 0), ("0", 0)])
def test_count_non_finite_finds_each_kind_anywhere(value, count, position):
    buffer = torch.randn(100_000)
    buffer[position] = float(value)
    assert count_non_finite([torch.ones(5), buffer, torch.empty(0)]).item() == count
    assert count_non_finite([buffer, buffer.bfloat16(), torch.full((3,), torch.inf)]).item() == 2 * count + 1


def three_steps(model, allocates):
    """Weights after each of three updates; whether the moments were there before the first."""
    trainer, batch = in_bfloat16(model, lr=1e-2), rows(model)
    if allocates:
        trainer.allocate_moments()
    seen, steps = [], trainer.counters().moments
    for _ in range(3):
        update(trainer, [batch], 1)
        seen.append({name: weight.detach().clone() for name, weight in trainer.runner.parameters().items()})
    return seen, steps


def test_updates_with_moments_allocated_before_are_bitwise_identical(ranks, model):
    (lazy, none), (early, zero) = (ranks.run(1, three_steps, model, allocates)[0] for allocates in (False, True))
    assert none is None and zero == 0
    for expected, found in zip(lazy, early, strict=True):
        assert all(torch.equal(found[name], expected[name]) for name in expected)
