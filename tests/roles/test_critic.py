"""Value heads through Megatron under every layout, against `transformers` and plain torch."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from tests.helpers.tiny_models import random_rows
from tests.roles.updates import check_weights, classifier, heads, own_rows, role_on, square_loss, stepper
from verl_mg.algorithms.losses import bradley_terry_loss
from verl_mg.batch import Batch
from verl_mg.models.hf_config import read_config
from verl_mg.roles.models import Critic, TrainableRewardModel
from verl_mg.training.loss_inputs import LossInputs

COUNT = 12
LAYOUTS = [("tp1", 2), ("tp2-cp2", 4), ("tp2-pp2", 4)]
NIGHTLY_LAYOUTS = [("tp2", 2), ("pp2", 2)]


def rows(model: Path) -> Batch:
    """The same on every rank; rows 2i and 2i + 1 are a pair."""
    batch = random_rows(COUNT, read_config(model).vocab)
    batch["sample_id"] = torch.arange(COUNT)
    batch["pair"] = torch.arange(COUNT) // 2
    batch["chosen"] = torch.arange(COUNT) % 2 == 0
    batch["returns"] = batch["noise"] * 5
    return batch


def pair_loss(tokens: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    return bradley_terry_loss(tokens.values, tokens.mask, tokens["pair"], tokens["chosen"])


def train_critic(model: Path, layout: str, budget: int, folder: Path) -> tuple[list[int], Tensor, dict[str, float]]:
    critic = role_on(Critic, model, layout, budget, name="value_model")
    own = own_rows(rows(model))
    values = critic.compute_values(own)
    metrics = critic.update(own, square_loss, "token-mean")
    critic.save(folder, model)
    return own["sample_id"].tolist(), values.split(own.lengths.tolist()), metrics


def train_reward_model(
    model: Path, layout: str, budget: int, folder: Path
) -> tuple[list[int], Tensor, dict[str, float]]:
    reward_model = role_on(TrainableRewardModel, model, layout, budget, name="value_model")
    own = own_rows(rows(model))
    scores = reward_model.compute_scores(own)
    own["loss_mask"] = own.last
    metrics = reward_model.update(own, pair_loss, "seq-mean-token-mean", num_minibatches=2)
    reward_model.save(folder, model)
    return own["sample_id"].tolist(), scores, metrics


def compare(folder: Path, net: torch.nn.Module, before: dict[str, Tensor]) -> None:
    after = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    assert after.config.num_labels == 1
    check_weights(after, dict(net.named_parameters()), before)


@pytest.mark.parametrize(
    ("layout", "count"), [*LAYOUTS, *(pytest.param(*layout, marks=pytest.mark.nightly) for layout in NIGHTLY_LAYOUTS)]
)
@pytest.mark.parametrize("architecture", [pytest.param("qwen2", marks=pytest.mark.nightly), "qwen3"])
def test_critic_under_every_layout_equals_transformers(ranks, models, tmp_path, layout, count, architecture):
    model = models[architecture]
    batch, net = rows(model), classifier(model)
    before = {name: weight.detach().clone() for name, weight in net.state_dict().items()}
    expected = [heads(net, batch, row)[:-1][batch.row("loss_mask", row)[1:]] for row in range(COUNT)]
    results = ranks.run(count, train_critic, model, layout, 40, tmp_path / "critic")
    for ids, columns, _ in results:
        for row, column in zip(ids, columns, strict=True):
            mask = batch.row("loss_mask", row)
            assert torch.allclose(column[mask], expected[row].detach(), atol=1e-5)
            assert not column[~mask].any()
    returns = [batch.row("returns", row)[batch.row("loss_mask", row)] for row in range(COUNT)]
    loss = ((torch.cat(expected) - torch.cat(returns)) ** 2).mean()
    norm = stepper(net)(loss)
    assert results[0][2]["value_model/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert results[0][2]["value_model/grad_norm"] == pytest.approx(norm, rel=1e-5)
    compare(tmp_path / "critic", net, before)


@pytest.mark.parametrize(
    ("layout", "count", "budget"),
    [
        *((*layout, 60) for layout in LAYOUTS),
        ("tp1", 2, 1),
        *(pytest.param(*layout, 60, marks=pytest.mark.nightly) for layout in NIGHTLY_LAYOUTS),
    ],
)
def test_reward_model_trained_on_pairs_equals_transformers(ranks, models, tmp_path, layout, count, budget):
    """Also where rows of a pair lie on two ranks, and no two of them fit a micro-batch."""
    model = models["qwen3"]
    batch, net = rows(model), classifier(model)
    before = {name: weight.detach().clone() for name, weight in net.state_dict().items()}
    results = ranks.run(count, train_reward_model, model, layout, budget, tmp_path / "saved")
    with torch.no_grad():
        first = torch.stack([heads(net, batch, row)[-1] for row in range(COUNT)])
    for ids, scores, _ in results:
        assert torch.allclose(scores, first[ids], atol=1e-5)
    step, losses, accuracies = stepper(net), [], []
    for pairs in (range(0, 3), range(3, 6)):
        margins = [heads(net, batch, 2 * i)[-1] - heads(net, batch, 2 * i + 1)[-1] for i in pairs]
        loss = -torch.stack([torch.nn.functional.logsigmoid(margin) for margin in margins]).mean()
        losses.append(loss.item())
        accuracies.append(sum(margin.item() > 0 for margin in margins) / 3)
        step(loss)
    reported = results[0][2]
    assert reported["value_model/loss"] == pytest.approx(sum(losses) / 2, rel=1e-5)
    assert reported["value_model/accuracy"] == pytest.approx(sum(accuracies) / 2)
    compare(tmp_path / "saved", net, before)


def test_saved_value_head_is_loaded_unchanged(ranks, models, tmp_path):
    model = models["qwen3_moe"]
    ranks.run(2, train_critic, model, "tp2", 60, tmp_path / "first")
    assert json.loads((tmp_path / "first" / "config.json").read_text())["architectures"] == [
        "Qwen3MoeForSequenceClassification"
    ]
    ((ids, columns, _),) = ranks.run(1, train_critic, tmp_path / "first", "tp1", 60, tmp_path / "second")
    net = AutoModelForSequenceClassification.from_pretrained(tmp_path / "first", dtype=torch.float32)
    batch = rows(model)
    for row, column in zip(ids, columns, strict=True):
        mask = batch.row("loss_mask", row)
        assert torch.allclose(column[mask], heads(net, batch, row).detach()[:-1][mask[1:]], atol=1e-5)
