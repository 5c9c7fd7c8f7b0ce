"""Inputs of the short jobs whose records are tested."""

import pytest

from tests.run.short_jobs import write_inputs


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("inputs"))
