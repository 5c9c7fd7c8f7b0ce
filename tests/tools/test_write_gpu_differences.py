"""docs/gpu_differences.md: markers of the code, what reports show, and that every place is there."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import warm_start
from tests.helpers.internals import printed
from tests.helpers.traces import needs_sglang, needs_vllm
from tools.docs import write_gpu_differences as writer
from tools.docs.write_gpu_differences import DOCUMENT, ROOT, NotRun, check, check_not_run, document, places, places_of

MARKED = """
# GPU: other
#   kernels.
# GPU-TEST: tests/a.py::
#  test_a,
# tests/b.py
# GPU-RAN: h200-1, h100-1
# Why.
FIELD: int = 1


class Engine:
    @property
    def place(self):
        x = 1
        # GPU: nothing.
        # GPU-TEST: none
        # GPU-RAN: not yet
        return x
"""


def test_page_is_what_the_markers_and_reports_say():
    assert DOCUMENT.read_text(encoding="utf-8") == document(), "run python -m tools.docs.write_gpu_differences"


def test_marker_has_sentence_tests_and_reports_of_the_code_behind_it():
    field, place = places_of(MARKED, "x.py")
    assert (field.name, field.on_gpus, field.line) == ("FIELD", "other kernels.", 9)
    assert (field.tests, field.ran) == (("tests/a.py::test_a", "tests/b.py"), ("h200-1", "h100-1"))
    assert (place.name, place.tests, place.ran) == ("Engine.place", (), ())


def test_marker_without_all_lines_raises():
    with pytest.raises(ValueError, match=r"x.py:1: the marker has the lines GPU\. Write GPU, GPU-TEST, GPU-RAN"):
        list(places_of("# GPU: other.\nx = 1\n", "x.py"))


@pytest.mark.parametrize("wrong", ["tests/tools/test_write_gpu_differences.py::test_no", "tests/no.py", "h1-1"])
def test_marker_that_names_what_is_not_there_raises(wrong):
    tests, ran = ("none", wrong) if wrong == "h1-1" else (wrong, "not yet")
    (place,) = places_of(f"# GPU: other.\n# GPU-TEST: {tests}\n# GPU-RAN: {ran}\nx = 1\n", "x.py")
    with pytest.raises(ValueError, match=f"x.py:4: there is no .*{wrong}"):
        check(place)


@pytest.mark.parametrize(
    ("entry", "report", "shown"),
    [
        (NotRun("int4", tests=("test_a.py::test_b[int4]",)), "h200-1/tests.md", True),
        (NotRun("fp8", tests=("test_a.py::test_b[fp8]",)), "h200-1/tests.md", False),
        (NotRun("int4", tests=("test_a.py::test_b[int4]",)), "cpu-2/tests.md", False),
        (NotRun("several GPUs", reports=r"-([2-9]|\d\d)/"), "h200-8/tests.md", True),
        (NotRun("several GPUs", reports=r"-([2-9]|\d\d)/"), "h200-1/tests.md", False),
    ],
)
def test_entry_is_refused_when_a_report_shows_it(tmp_path, entry, report, shown):
    root = tmp_path / "of-several-23"  # a folder above the reports says nothing about what they show
    file = root / "benchmarks" / report
    file.parent.mkdir(parents=True)
    rows = [("test", "outcome", "reason"), ("`test_a.py::test_b[int4]`", "passed", ""),
            ("`test_a.py::test_b[fp8]`", "failed", "passed before")]  # fmt: skip
    file.write_text("".join(f"| {' | '.join(row)} |\n" for row in rows))
    passed = writer.passed_tests(root / "benchmarks")
    try:
        check_not_run(entry, passed, root)
    except ValueError as error:
        assert shown and entry.what in str(error)
    else:
        assert not shown


# -- every place has a marker


def decisions(file: Path) -> Iterator[ast.AST]:
    """Expressions that ask whether there is a GPU, or where a tensor is."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        match node:
            case ast.Call(func=ast.Attribute(attr="is_available" | "is_cpu")) | ast.Attribute(attr="is_cuda"):
                yield node
            case ast.Compare(left=ast.Attribute(attr="type"), comparators=[ast.Constant(value="cuda" | "cpu")]):
                yield node


def test_place_where_the_device_decides_has_a_marker():
    marked, missing = {(place.file, place.name) for place in places()}, []
    for file in sorted((ROOT / "verl_mg").rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for node in decisions(file):
            place = file.relative_to(ROOT).as_posix(), writer.name_at(tree, node.lineno)
            if place not in marked:
                missing.append(f"{place[0]}:{node.lineno} {place[1]}: {ast.unparse(node)}")
    assert missing == []


OF_MEGATRON = (
    *("torch", "torch.distributed", "megatron.core.models.gpt", "megatron.core.optimizer"),
    *("megatron.core.distributed", "megatron.core.transformer.moe.token_dispatcher"),
    *("megatron.core.transformer.multi_latent_attention", "megatron.core.tensor_parallel"),
)
IN_AN_OPTIMIZER = """
import verl_mg.megatron.trainer
from verl_mg.megatron.cpu_shim import tensor_types_named_cuda
active = tensor_types_named_cuda()
active.__enter__()
"""


def unnamed(*names: str) -> list[str]:
    """Those of the names that the page does not have, with or without the packages in front."""
    named = set(re.findall(r"`([\w.]+)`", DOCUMENT.read_text(encoding="utf-8")))
    return [name for name in names if name not in named and not any(name.endswith(f".{n}") for n in named if "." in n)]


def replaced(python: str, packages: str, imports: tuple[str, ...], statement: str) -> list[str]:
    return printed(python, "tests.helpers.replaced", packages, ",".join(imports), statement)


@pytest.mark.nightly
def test_functions_that_the_cpu_platform_replaces_are_on_the_page():
    names = replaced(sys.executable, "torch,megatron", OF_MEGATRON, IN_AN_OPTIMIZER)
    assert len(names) > 30 and {"torch.Tensor.type", "torch.cuda.Stream", "transformer_engine"} <= set(names)
    assert unnamed(*names) == []


@needs_sglang
@pytest.mark.nightly  # imports SGLang
def test_functions_of_sglang_that_the_cpu_replaces_are_on_the_page():
    imports = ("torch", "sglang.srt.managers.scheduler", "sglang.srt.mem_cache.pool_host.common")
    statement = "from verl_mg.engines.sglang import internals; internals._do_without_gpu()"
    names = replaced(warm_start.sglang().python, "torch,sglang", imports, statement)
    assert "sglang.srt.mem_cache.pool_host.common._cuda_host_register" in names
    assert unnamed(*names) == []


@needs_vllm
@pytest.mark.nightly  # imports vLLM: the server of the session has replaced them already
def test_functions_of_vllm_that_the_cpu_replaces_are_on_the_page():
    imports = ("torch", "vllm.distributed.device_communicators.shm_broadcast", "vllm.model_executor.models.registry")
    statement = (
        "from verl_mg.engines.vllm import internals; internals.do_without_gpu(); internals.inspect_models_here()"
    )
    names = replaced(str(warm_start.VLLM_PYTHON), "vllm", imports, statement)
    assert "vllm.distributed.device_communicators.shm_broadcast.SpinCondition.__init__" in names
    assert unnamed(*names) == []
