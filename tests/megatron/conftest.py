"""Tiny models of a test session, each made when it is first read."""

import pytest

from tests.helpers.tiny_models import tiny_model
from tests.megatron.layout_models import ModelFolders


@pytest.fixture(scope="session")
def families(tmp_path_factory) -> ModelFolders:
    """Models of two layers by their architectures; tests do not change them."""
    return ModelFolders(tmp_path_factory.mktemp("families"), lambda folder, name: tiny_model(folder, name, layers=2))


@pytest.fixture(scope="session")
def layout_models(tmp_path_factory) -> ModelFolders:
    """The models of MODELS by their names there."""
    return ModelFolders(tmp_path_factory.mktemp("layouts"))
