"""Roles that a checkpoint restores: what they still read of the model directory, and what nothing restores."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.helpers.tiny_models import random_rows, tiny_model, uninitialized_memory_is_nan
from tests.roles.updates import COUNT, noise_loss, own_rows, role_on, square_loss
from verl_mg.checkpoint.hf_safetensors import CheckpointReader
from verl_mg.config import LoraConfig
from verl_mg.models.hf_config import read_config
from verl_mg.roles.models import Actor, Critic, TrainableRole
from verl_mg.sharding.weight_table import WeightTable

LORA = LoraConfig(rank=4)


@contextmanager
def tensors_read() -> Iterator[set[str]]:
    """The names of the tensors that this rank reads of model directories."""
    names, read = set(), CheckpointReader.read

    def recording(self: CheckpointReader, tensor: str, box: Any) -> Tensor:
        names.add(tensor)
        return read(self, tensor, box)

    with mock.patch.object(CheckpointReader, "read", recording):
        yield names


def values_of(role: TrainableRole) -> dict[str, Tensor]:
    return {name: values.detach() for name, values in (role.runner.parameters() | dict(role.runner.adapters())).items()}


def restore(kind: type[TrainableRole], model: Path, layout: str, lora: LoraConfig | None) -> tuple[set[str], set[str]]:
    """Restores a role from another one; returns the tensors that were read and the parameters that have no values."""
    trained = role_on(kind, model, layout, 60, lora=lora)
    batch = random_rows(COUNT, read_config(model).vocab)
    batch["returns"] = batch["noise"]
    own = own_rows(batch)
    trained.update(own, square_loss if kind is Critic else noise_loss, "token-mean")
    stored = {part.key: part.values.clone() for part in trained.parts()}
    if lora:
        lora = lora.model_copy(update={"path": model / "removed"})
    with uninitialized_memory_is_nan(), tensors_read() as names:
        role = role_on(kind, model, layout, 60, lora=lora, from_checkpoint=True)
    role.load(lambda part: part.values.copy_(stored[part.key]), trained.counts())
    expected = values_of(trained)
    wrong = {name for name, values in values_of(role).items() if not torch.equal(values, expected[name])}
    assert wrong == role.runner.unrestored
    return names, wrong


def restore_as_if_routers_were_trained(*arguments: Any) -> tuple[set[str], set[str]]:
    with mock.patch.object(WeightTable, "router_biases", frozenset()):
        return restore(*arguments)


def restored(ranks: Any, *arguments: Any, work: Callable[..., Any] = restore) -> tuple[set[str], set[str]]:
    """The same of all ranks."""
    read, missing = zip(*ranks.run(4, work, *arguments), strict=True)
    return set().union(*read), set().union(*missing)


@pytest.mark.parametrize("layout", ["tp2", pytest.param("tp2-pp2", marks=pytest.mark.nightly)])
def test_restored_role_reads_nothing_where_all_weights_are_trained(ranks, models, layout):
    assert restored(ranks, Actor, models["qwen2"], layout, None) == (set(), set())


def test_restored_role_reads_the_biases_of_routers(ranks, tmp_path):
    model = tiny_model(tmp_path / "model", "deepseek_v3")
    biases = {f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2, 3)}
    assert restored(ranks, Actor, model, "tp2-ep2", None) == (biases, set())


def test_restored_role_with_adapters_reads_the_frozen_weights(ranks, models):
    model = models["qwen3"]
    frozen = load_file(model / "model.safetensors").keys() - {"lm_head.weight"}
    assert restored(ranks, Critic, model, "tp2-pp2", LORA) == (frozen, set())


def test_restored_role_knows_the_parameters_that_were_neither_read_nor_restored(ranks, tmp_path):
    model = tiny_model(tmp_path / "model", "deepseek_v3")
    biases = {f"decoder.layers.{layer}.mlp.router.expert_bias" for layer in (1, 2, 3)}
    found = restored(ranks, Actor, model, "tp2-ep2", None, work=restore_as_if_routers_were_trained)
    assert found == (set(), biases)
