"""Which attention vLLM has on GPUs for a dtype, by its own selector, against what the configuration refuses."""

import ast

import pytest

from tests.helpers.internals import printed
from tests.helpers.traces import needs_vllm
from tests.helpers.warm_start import VLLM_PYTHON
from verl_mg.engines.vllm.arguments import WITH_FLOAT32

pytestmark = needs_vllm


@pytest.fixture(scope="module")
def valid() -> dict[tuple[int, str, str], set[str]]:
    """Names of valid backends by (major compute capability, dtype, kind of attention)."""
    # Not forked from a process that has imported vLLM for the CPU.
    rows = printed(str(VLLM_PYTHON), "tests.engines.vllm.selection_probe")
    return {(major, dtype, kind): set(names) for (major, _), dtype, kind, names in rows}


def test_attention_in_float32_has_the_backends_that_are_permitted(valid):
    for (_, dtype, kind), names in valid.items():
        if dtype == "torch.float32" and kind != "latent":
            assert "TRITON_ATTN" in names <= set(WITH_FLOAT32), kind


def test_latent_attention_in_float32_has_no_backend(valid):
    chosen = {key: names for key, names in valid.items() if key[1:] == ("torch.float32", "latent")}
    assert len(chosen) == 3 and set(map(frozenset, chosen.values())) == {frozenset()}


def test_attention_in_bfloat16_has_a_backend_on_each_generation(valid):
    chosen = {key: names for key, names in valid.items() if key[1] == "torch.bfloat16"}
    assert len(chosen) == 15 and all(names for names in chosen.values())


def test_linear_attention_in_float32_is_refused_by_its_kernel():
    (file,) = VLLM_PYTHON.parents[1].glob(
        "lib/python3*/site-packages/vllm/third_party/flash_linear_attention/ops/chunk.py"
    )
    checks = [ast.unparse(node.test) for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Assert)]
    assert "q.dtype != torch.float32" in checks
