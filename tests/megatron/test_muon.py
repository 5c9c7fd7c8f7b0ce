"""Muon takes the steps of torch.optim.Muon on whole matrices under every layout, and can be skipped and rolled back."""

import math

import pytest
import torch

from tests.helpers.roles import megatron_runner
from tests.helpers.tiny_models import random_rows, tiny_model
from tests.megatron.layout_models import make_model
from tests.megatron.training import (
    OPTIMIZER,
    TEMPERATURE,
    assembled,
    assert_equal,
    one_rank,
    parts_of,
    recorded_gradients,
    token_loss,
    train,
)
from verl_mg.config import GuardConfig, LoraConfig, MegatronConfig, OptimizerConfig
from verl_mg.errors import UserError
from verl_mg.megatron import muon
from verl_mg.megatron.muon import assign, orthogonalized
from verl_mg.megatron.trainer import MegatronTrainer, optimizer_config
from verl_mg.training.trainer import MiniBatch, Objective

RANKS, ROWS, STEPS = 8, 12, 3
MUON = OptimizerConfig(kind="muon", lr=0.02, weight_decay=0.1, momentum=0.9, eps=1e-3, betas=(0.9, 0.99), clip_grad=0.0)
ELEMENTS_OF_A_ROUND = 3000
"""So few that the tiny models need several rounds."""


def trainer_of(model, layout, dtype=torch.float32, config=MUON, guard=None, lora=None):
    return MegatronTrainer(megatron_runner(model, layout, dtype, lora=lora), config, guard)


def update(trainer, approx_kl=0.0):
    runner = trainer.runner
    rows = random_rows(6, runner.table.config.vocab, seed=runner.groups.coordinates.dp)
    scored = int(rows["loss_mask"].sum())

    def loss(tokens):
        values, _ = token_loss(tokens)
        return values, {"approx_kl": torch.full_like(values, approx_kl)}

    return trainer.update(MiniBatch([rows], None, scored, 0), Objective(loss, "token-mean", TEMPERATURE))


def steps(model, layout, dtype, config):
    """The weights before each step and after the last, and the gradients of each step."""
    weights = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(muon, "ROUND_ELEMENTS", ELEMENTS_OF_A_ROUND)
        trainer = trainer_of(model, layout, dtype, config)
    runner, gradients = trainer.runner, recorded_gradients(trainer)
    for number in range(STEPS + 1):
        weights.append(parts_of(runner, runner.parameters()))
        if number < STEPS:
            update(trainer)
    return weights, gradients


def by_torch(weights, gradients, config):
    """The weights after the steps that torch's own Muon and AdamW take on whole tensors of the checkpoint."""
    parameters = {name: torch.nn.Parameter(values.clone()) for name, values in weights.items()}
    outside = ("model.embed_tokens.weight", "lm_head.weight")
    matrices = [weight for name, weight in parameters.items() if weight.ndim == 2 and name not in outside]
    embeddings = [parameters[name] for name in outside]
    vectors = [weight for weight in parameters.values() if weight.ndim == 1]
    assert len(matrices) + len(embeddings) + len(vectors) == len(parameters)
    options = {"lr": config.lr, "weight_decay": config.weight_decay}
    muon = torch.optim.Muon(matrices, momentum=config.momentum, adjust_lr_fn="match_rms_adamw", **options)
    adamw = torch.optim.AdamW(embeddings, betas=config.betas, eps=config.eps, **options)
    adamw.add_param_group({"params": vectors, "weight_decay": 0.0})
    for of_step in gradients:
        for name, weight in parameters.items():
            weight.grad = of_step[name].clone()
        muon.step()
        adamw.step()
    return {name: weight.detach() for name, weight in parameters.items()}


@pytest.mark.parametrize(
    ("architecture", "layout", "count"),
    [
        ("qwen3_moe", "tp2-ep2", 4),
        pytest.param("qwen3_moe", "tp1", 1, marks=pytest.mark.nightly),
        pytest.param("llama", "tp2", 4, marks=pytest.mark.nightly),
        pytest.param("deepseek_v3", "pp2", 4, marks=pytest.mark.nightly),
    ],
)
def test_muon_takes_the_steps_of_torch_on_whole_matrices(ranks, tmp_path, monkeypatch, architecture, layout, count):
    """torch.optim.Muon iterates in bfloat16; here it is made to do so in float32."""
    model = tiny_model(tmp_path / "model", architecture, layers=2)
    results = ranks.run(count, steps, model, layout, torch.float32, MUON)
    weights = [assembled([part for of_rank, _ in results for part in of_rank[step]]) for step in range(STEPS + 1)]
    gradients = [assembled([part for _, of_rank in results for part in of_rank[step]]) for step in range(STEPS)]
    trained = {name: values for name, values in weights[0].items() if name in gradients[0]}
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    expected = by_torch(trained, gradients, MUON)
    for name, values in expected.items():
        assert (values - weights[0][name]).abs().max() > MUON.lr / 10, name
        assert (values - weights[STEPS][name]).abs().max() < 1e-5, name


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {name: make_model(folder / name, name) for name in ("dense", "mixture", "latent")}


def train_with_muon(model, layout, overlap=False):
    rows = random_rows(ROWS, vocab=24)
    config = OPTIMIZER.model_copy(update={"kind": "muon"})
    fields = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 1000} if overlap else {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(muon, "ROUND_ELEMENTS", ELEMENTS_OF_A_ROUND)
        return train(model, layout, rows, "vpp" in layout, megatron=MegatronConfig(ddp=fields), optimizer=config)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("mixture", "tp2-pp2-ep2-etp1"),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in (
                ("dense", "tp1"),
                ("dense", "tp4"),
                ("dense", "tp2-cp2-pp2-vpp3"),
                ("dense", "cp4-pp2"),
                ("mixture", "ep4"),
                ("mixture", "tp4-ep2-etp2"),
                ("mixture", "tp2-cp2-ep4-etp1"),
                ("latent", "tp2-cp2-pp2-vpp2-ep2-etp1"),
            )
        ),
    ],
)
def test_train_with_muon_under_layout_equals_one_rank(ranks, models, name, layout):
    alone = one_rank(ranks.run(1, train_with_muon, models[name], "tp1")[0])
    assert_equal(ranks.run(RANKS, train_with_muon, models[name], layout), alone, 1e-5)


@pytest.mark.nightly
def test_train_with_muon_and_overlap_equals_one_rank(ranks, models):
    alone = one_rank(ranks.run(1, train_with_muon, models["mixture"], "tp1")[0])
    assert_equal(ranks.run(RANKS, train_with_muon, models["mixture"], "tp2-ep2", True), alone, 1e-5)


@pytest.mark.nightly
def test_muon_of_bfloat16_weights_is_close_to_that_of_torch(ranks, tmp_path):
    model = tiny_model(tmp_path / "model", "qwen3_moe", layers=2)
    results = ranks.run(2, steps, model, "ep2", torch.bfloat16, MUON)
    weights = [assembled([part for of_rank, _ in results for part in of_rank[step]]) for step in range(STEPS + 1)]
    gradients = [assembled([part for _, of_rank in results for part in of_rank[step]]) for step in range(STEPS)]
    for name, values in by_torch(weights[0], gradients, MUON).items():
        went, error = values - weights[0][name], values - weights[STEPS][name]
        rounding = 2**-8 * values.abs().max() * values.numel() ** 0.5
        assert error.norm() < 0.05 * went.norm() + rounding, name


def rolled_back(model):
    """Weights after one update, after two, after a rollback, and after the second one again."""
    trainer = trainer_of(model, "tp2", guard=GuardConfig(max_kl=0.5, action="rollback"))
    weights = []
    for approx_kl in (0.0, 0.0, 1.0, 0.0):
        update(trainer, approx_kl)
        weights.append({name: weight.detach().clone() for name, weight in trainer.runner.parameters().items()})
    return weights


def test_muon_after_a_rollback_takes_the_same_step_again(ranks, tmp_path):
    model = tiny_model(tmp_path / "model", "qwen3", layers=2)
    for first, second, back, again in ranks.run(4, rolled_back, model):
        for name in first:
            assert torch.equal(back[name], first[name]) and torch.equal(again[name], second[name]), name
            assert not torch.equal(second[name], first[name]), name


def moments(model, dtype):
    """Elements of each moment on this rank, by name, and the types of the moments."""
    trainer = trainer_of(model, "tp1", config=MUON.model_copy(update={"moments_dtype": dtype}))
    update(trainer)
    sizes, types = {"exp_avg": 0, "exp_avg_sq": 0}, set()
    for inner in trainer.inner_optimizers:
        for state in inner.state.values():
            for name in sizes.keys() & state.keys():
                sizes[name] += state[name].numel()
                types.add(state[name].dtype)
    return sizes, types, {name: weight.detach().clone() for name, weight in trainer.runner.parameters().items()}


def test_muon_has_one_moment_of_a_matrix_which_is_sharded(ranks, tmp_path):
    model = tiny_model(tmp_path / "model", "qwen3", layers=2)
    exact, half = (ranks.run(4, moments, model, dtype) for dtype in ("float32", "bfloat16"))
    shapes = {name: weight.shape for name, weight in exact[0][2].items()}
    matrices = sum(math.prod(shape) for name, shape in shapes.items() if ".layers." in name and len(shape) == 2)
    everything = sum(map(math.prod, shapes.values()))
    for results, dtype in ((exact, torch.float32), (half, torch.bfloat16)):
        sizes = [sizes for sizes, _, _ in results]
        assert sum(size["exp_avg"] for size in sizes) == everything
        assert sum(size["exp_avg_sq"] for size in sizes) == everything - matrices
        assert max(size["exp_avg"] for size in sizes) < 0.3 * everything
        assert all(types == {dtype} for _, types, _ in results)
    for name, weight in exact[0][2].items():
        assert (half[0][2][name] - weight).abs().max() <= 0.02 * MUON.lr * 5, name


@pytest.mark.parametrize("shape", [(48, 32), (32, 48), (1, 7)])
def test_orthogonalized_in_bfloat16_is_as_exact_as_that_of_torch(shape):
    matrices = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    halves = orthogonalized(matrices)
    for found, exact, matrix in zip(halves, orthogonalized(matrices.float()), matrices, strict=True):
        theirs = torch.optim._muon._zeropower_via_newtonschulz(matrix.clone(), (3.4445, -4.7750, 2.0315), 5, 1e-7)
        assert (found - exact).norm() < 1.5 * (theirs - exact).norm() + 1e-3 < 0.1 * exact.norm()
        assert torch.linalg.svdvals(exact).sub(1).abs().max() < 0.4


def test_orthogonalized_of_zeros_is_zero():
    assert not orthogonalized(torch.zeros(2, 4, 6)).any()


def test_assign_gives_every_matrix_to_a_rank_that_has_a_part_and_balances_work(monkeypatch):
    shapes = {f"m{number}": (8, 8) for number in range(40)} | {"wide": (8, 64), "lonely": (4, 4)}
    held = [[(name, ((2 * rank, 2 * rank + 2), (0, 8))) for name in shapes if name != "lonely"] for rank in range(4)]
    held[3].append(("lonely", ((0, 4), (0, 4))))
    monkeypatch.setattr(muon, "ROUND_ELEMENTS", 256)
    assigned = assign(held, shapes)
    assert assigned.keys() == shapes.keys() and assigned["lonely"].owner == 3
    work = [sum(math.prod(shapes[name]) for name, to in assigned.items() if to.owner == rank) for rank in range(4)]
    assert max(work) - min(work) <= 64 + 16
    for rank in range(4):
        for number in range(1 + max(to.round for to in assigned.values())):
            names = [name for name, to in assigned.items() if (to.owner, to.round) == (rank, number)]
            assert sum(math.prod(shapes[name]) for name in names[:-1]) < 256


def refusal(model):
    with pytest.raises(UserError) as caught:
        trainer_of(model, "tp1", lora=LoraConfig())
    return str(caught.value)


def test_muon_with_adapters_names_key_and_remedy(ranks, tmp_path):
    (message,) = ranks.run(1, refusal, tiny_model(tmp_path / "model", "qwen3", layers=2))
    assert message == (
        "actor.optimizer.kind: muon trains matrices of the model, not adapters. Write adamw, or remove actor.lora."
    )


@pytest.mark.parametrize(
    ("field", "remedy"),
    [
        ("optimizer", r"Write actor\.optimizer\.kind\.$"),
        ("muon_momentum", r"Write actor\.optimizer\.momentum, with actor\.optimizer\.kind=muon\.$"),
        ("muon_scale_mode", r"Write actor\.optimizer\.kind=muon\.$"),
    ],
)
def test_optimizer_config_with_fields_of_another_muon_names_the_remedy(field, remedy):
    with pytest.raises(UserError, match=remedy):
        optimizer_config(MUON, MegatronConfig(optimizer={field: "muon"}), torch.float32)
