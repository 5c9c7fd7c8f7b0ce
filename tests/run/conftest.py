"""Inputs of the jobs that are interrupted and resumed."""

import pytest

from tests.run.jobs import make_resumable_inputs


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return make_resumable_inputs(tmp_path_factory.mktemp("inputs"))
