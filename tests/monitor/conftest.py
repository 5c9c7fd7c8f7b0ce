"""Inputs of the short jobs whose records are tested."""

import pytest

from tests.run.jobs import make_inputs


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return make_inputs(tmp_path_factory.mktemp("inputs"))
