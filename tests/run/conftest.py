"""Inputs of the jobs that are interrupted and resumed."""

import pytest

from tests.run.resumed_jobs import write_inputs


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("inputs"))
