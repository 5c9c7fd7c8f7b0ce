"""Internals of vLLM that are used: the installed version has them."""

from pathlib import Path

from tests.helpers import warm_start
from tests.helpers.internals import missing_internals
from tests.helpers.traces import needs_vllm
from verl_mg.engines import vllm


@needs_vllm
def test_internals_of_the_installed_vllm_are_all_there():
    files = sorted(Path(vllm.__file__).parent.glob("*.py"))
    assert missing_internals(warm_start.vllm().python, "vllm", *files) == []
