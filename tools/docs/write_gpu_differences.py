"""Writes docs/gpu_differences.md from markers in the code and reports: `python -m tools.docs.write_gpu_differences`.

A marker precedes a statement that does something else without a GPU:

    # GPU: NCCL instead of gloo.
    # GPU-TEST: tests/test_device.py::test_name, tests/fsdp/test_training.py
    # GPU-RAN: h200-1, h100-1

GPU-TEST names the tests that cover it on the CPU, or says `none`; GPU-RAN the folders of benchmarks/, or `not yet`.
"""

from __future__ import annotations

import ast
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from verl_mg.run.start_table import NEVER_RAN

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "gpu_differences.md"
KEYS = ("GPU", "GPU-TEST", "GPU-RAN")
VERSION = re.compile(r"\b(torch|NCCL|cuDNN|Transformer Engine|SGLang|vLLM|megatron-core) (\d+(?:\.\d+)+)")
BEGIN = re.compile(rf"# ({'|'.join(sorted(KEYS, reverse=True))}): (.*)")


@dataclass(frozen=True)
class Place:
    """A place in the code where a GPU and the CPU differ, as its marker describes it."""

    file: str  # below the root
    line: int  # of the code that follows the marker
    name: str  # function, class or variable; "" for another statement of the module
    on_gpus: str
    tests: tuple[str, ...]
    ran: tuple[str, ...]  # folders of benchmarks/


@dataclass(frozen=True)
class NotRun:
    """Something that has not run on a GPU, and how a report shows that it has."""

    what: str
    tests: tuple[str, ...] = ()  # of tests/gpu: one of them has passed
    reports: str = ""  # expression: a report has a path with it
    options: tuple[str, ...] = ()  # of which a job warns at its start


IMAGES = "test_rows_with_images_on_devices_have_log_probs_of_transformers"
NOT_RUN = (
    NotRun("The installation as documented, and the Docker image: the cards so far had the pinned packages, but an "
           "older cuDNN (9.19), and Transformer Engine compiled elsewhere"),
    NotRun("Training figures of an H100 (tokens per second, memory against the plan), with a cuDNN that has "
           "kernels of attention for Transformer Engine", reports=r"h100.*-1/.*bench"),
    NotRun("Several GPUs of a node: NVLink, handles of memory between GPUs, `verl-mg doctor` on all of them",
           reports=r"-([2-9]|\d\d)/"),
    NotRun("vLLM: start, answers, weight sync, sleep and wake, CUDA graphs, its second model runner, routed experts",
           tests=("test_engine_jobs.py::test_colocated_engine_serves_the_saved_checkpoint[megatron-vllm]",),
           options=("rollout.engine=vllm",)),
    NotRun("A deterministic job with SGLang, repeated and resumed bitwise: did not end within 191 s",
           tests=("test_jobs.py::test_deterministic_job_with_sglang_engines_repeats_and_resumes_bitwise",),
           options=("rollout.engine=sglang job.deterministic=true",)),
    NotRun("The whole quickstart", tests=("test_jobs.py::test_quickstart_raises_accuracy",)),
    NotRun("Weights of engines in INT4: was still compiling kernels for its first graph after 85 s",
           tests=("test_engine_jobs.py::test_engine_with_quantized_weights_serves_the_saved_checkpoint[int4]",),
           options=("rollout.wire=int4",)),
    NotRun("Images in bfloat16 under the pinned torch, which refuses cuDNN 9.19; under torch 2.11 they passed",
           tests=(f"test_fsdp.py::{IMAGES}[bfloat16-qwen2_5_vl]",)),
    NotRun("The number of the host's waits in an update with torch's kernels: 229 on an H200, before the gradient norm "
           "stayed on the device"),
    NotRun("Several nodes: RDMA, engines over nodes, `NODES=2 bash tools/test_gpu.sh`", reports="-nodes-"),
    NotRun("Servers outside of the job, over NCCL or a directory; engines on separate ranks",
           options=("rollout.urls", "rollout.num_ranks")),
    NotRun("A100 and other cards before Hopper", reports="a100"),
    NotRun("Weights of engines in MXFP8, which SGLang has from Blackwell on",
           tests=("test_engine_jobs.py::test_engine_with_quantized_weights_serves_the_saved_checkpoint[mxfp8]",),
           options=("rollout.wire=mxfp8",)),
    NotRun("Blackwell: experts and quantized weights, which SGLang stores in other forms there", reports="b[23]00"),
    NotRun("Training in FP8, MXFP8 and with Muon; moments in host memory",
           options=("megatron.transformer.fp8", "actor.optimizer.kind=muon", "actor.optimizer.cpu_offload=true")),
    NotRun("Speculative decoding with the model's own layer of multi-token prediction",
           options=("rollout.sglang.speculative_algorithm",)),
    NotRun("Agents and environments; panels of the dashboard for GPUs; NCCL's flight records of a hang"),
)  # fmt: skip
"""In the order in which users meet it. An entry is removed, as the error says, when a report shows what it names."""


def main() -> None:
    """Writes docs/gpu_differences.md, or says what is wrong in a marker."""
    try:
        text = document()
    except ValueError as error:
        sys.exit(f"error: {error}")
    DOCUMENT.write_text(text, encoding="utf-8")
    print(DOCUMENT)


def document() -> str:
    """Returns the page; ValueError for a marker or an entry that is not true."""
    marked = places()
    passed = passed_tests(ROOT / "benchmarks")
    for place in marked:
        check(place)
    for entry in NOT_RUN:
        check_not_run(entry, passed, ROOT)
    if options := set(NEVER_RAN) ^ {option for entry in NOT_RUN for option in entry.options}:
        raise ValueError(f"NOT_RUN: {min(options)!r} is only there or only in NEVER_RAN. Name it in both, or in none.")
    named = {name.partition("[")[0] for entry in NOT_RUN for name in entry.tests}
    others = [
        name for name in defined_tests(ROOT / "tests" / "gpu") if not report_of(name, passed) and name not in named
    ]
    folders = dict.fromkeys(file.parent for file in reports(ROOT / "benchmarks"))
    return PAGE.format(
        not_run="\n".join(f"{number}. {entry.what}.{_named(entry.options)}" for number, entry in enumerate(NOT_RUN, 1)),
        others="".join(f"- `{test}`\n" for test in others) or "None.\n",
        reports="\n".join(map(_report_line, folders)),
        places="\n".join(map(_line, marked)),
    )


PAGE = """# Differences between GPUs and the CPU

Generated by `python -m tools.docs.write_gpu_differences` from the markers `# GPU:` in the code and from the reports in
[benchmarks/](../benchmarks/README.md). That program describes the markers.

## Not yet run on a GPU

Users meet the first ones first:

{not_run}

Further tests of `tests/gpu` that no report names as passed:

{others}
## Reports

| report | card | versions |
|---|---|---|
{reports}

## Places in the code

What the code does on a GPU and not on the CPU, the tests below `tests/` that cover it without a GPU, and the reports
of cards on which it has run.

| place | on a GPU | tests without one | has run |
|---|---|---|---|
{places}
"""


# -- markers


def places(package: Path = ROOT / "verl_mg") -> list[Place]:
    """Returns the places of all markers of a package, by file and line."""
    files = sorted(file for file in package.rglob("*.py") if "recipes" not in file.relative_to(package).parts)
    return [
        place for file in files for place in places_of(file.read_text(encoding="utf-8"), _below_root(file, package))
    ]


def _below_root(file: Path, package: Path) -> str:
    return file.relative_to(package.parent).as_posix()


def places_of(source: str, file: str) -> Iterator[Place]:
    """Yields the places of the markers of a file; ValueError for an incomplete one."""
    if "# GPU: " not in source:
        return
    comments = {
        token.start[0]: token.string
        for token in tokenize.generate_tokens(StringIO(source).readline)
        if token.type == tokenize.COMMENT and token.line.lstrip().startswith("#")
    }
    tree = ast.parse(source)
    for line in [line for line, text in comments.items() if text.startswith("# GPU: ")]:
        values: dict[str, str] = {}
        last, key = line, ""
        while (text := comments.get(last)) is not None and key != KEYS[-1]:
            begin = BEGIN.fullmatch(text)
            if begin:
                key = begin[1]
                values[key] = begin[2]
            else:
                values[key] += " " + text.removeprefix("#").strip()
            last += 1
        if tuple(values) != KEYS:
            raise ValueError(f"{file}:{line}: the marker has the lines {', '.join(values)}. Write {', '.join(KEYS)}.")
        while last in comments:
            last += 1
        tests, ran = (_listed(values[name]) for name in KEYS[1:])
        yield Place(file, last, name_at(tree, last), values["GPU"], tests, ran)


def _listed(text: str) -> tuple[str, ...]:
    return () if text in ("none", "not yet") else tuple(part.strip() for part in text.replace(":: ", "::").split(","))


def name_at(tree: ast.AST, line: int) -> str:
    """Returns the name of the innermost function, class or variable that has a line, with those around it."""
    for node in ast.iter_child_nodes(tree):
        first = min([getattr(node, "lineno", 0), *(each.lineno for each in getattr(node, "decorator_list", ()))])
        if not first <= line <= (getattr(node, "end_lineno", None) or 0):
            continue
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            return f"{node.name}.{name_at(node, line)}".rstrip(".")
        if isinstance(tree, ast.Module | ast.ClassDef) and isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            return ast.unparse(target)
        return name_at(node, line)
    return ""


def check(place: Place, root: Path = ROOT) -> None:
    """Raises ValueError where a marker names a test or a report that does not exist."""
    for test in place.tests:
        file, _, name = test.partition("::")
        if not (root / file).is_file() or (name and name not in _functions(root / file)):
            raise ValueError(f"{place.file}:{place.line}: there is no {test}. Name a test, or write `none`.")
    for folder in place.ran:
        if not (root / "benchmarks" / folder / "README.md").is_file():
            raise ValueError(
                f"{place.file}:{place.line}: there is no benchmarks/{folder}. Name one, or write `not yet`."
            )


def _functions(file: Path) -> list[str]:
    nodes = ast.parse(file.read_text(encoding="utf-8")).body
    return [node.name for node in nodes if isinstance(node, ast.FunctionDef)]


# -- reports


def passed_tests(folder: Path) -> dict[str, Path]:
    """Returns the tests of tests/gpu that a report of a GPU names as passed, with the report: also files as a whole."""
    passed: dict[str, Path] = {}
    for report in reports(folder):
        outcome = 0
        for line in report.read_text(encoding="utf-8").splitlines():
            cells = [cell.strip() for cell in line.replace("\\|", "").split("|")]
            if "outcome" in cells:
                outcome = cells.index("outcome")
            elif len(cells) > outcome > 0 and cells[outcome].startswith("passed"):
                passed |= dict.fromkeys(re.findall(r"\btest_\w+\.py(?:::\w+(?:\[[^\]`]*\])?)?", cells[1]), report)
    return passed


def report_of(test: str, passed: dict[str, Path]) -> Path | None:
    """Returns a report of a test that passed; one that is named without parameters has passed with any of them."""
    if "[" in test:
        return passed.get(test)
    return next(
        (report for name, report in passed.items() if name.partition("[")[0] in (test, test.split("::")[0])), None
    )


def check_not_run(entry: NotRun, passed: dict[str, Path], root: Path) -> None:
    """Raises ValueError where a report shows what an entry of NOT_RUN says has not run."""
    shown = [report for test in entry.tests if (report := report_of(test, passed))]
    for file in reports(root / "benchmarks"):
        if entry.reports and re.search(entry.reports, f"{file.parent.name}/{file.name}"):
            shown.append(file)
    if shown:
        raise ValueError(f"NOT_RUN: {shown[0]} shows {entry.what[:40]!r}. Remove the entry, or say what is left.")


def defined_tests(folder: Path) -> list[str]:
    """Returns the tests of a folder, as FILE::NAME."""
    return [
        f"{file.name}::{name}"
        for file in sorted(folder.glob("test_*.py"))
        for name in _functions(file)
        if name.startswith("test_")
    ]


def reports(folder: Path) -> list[Path]:
    """Returns the reports from GPUs."""
    return [file for file in sorted(folder.glob("*/*.md")) if not file.parent.name.startswith("cpu")]


# -- text


def _named(options: tuple[str, ...]) -> str:
    return f" Options: {', '.join(f'`{option}`' for option in options)}." if options else ""


def _report_line(folder: Path) -> str:
    texts = [file.read_text(encoding="utf-8") for file in sorted(folder.glob("*.md"))]
    title = texts[0].splitlines()[0].removeprefix("# ") if texts else ""
    versions: dict[str, set[str]] = {}
    for name, version in VERSION.findall(" ".join(" ".join(text.split()) for text in texts)):
        versions.setdefault(name, set()).add(version)
    listed = "; ".join(f"{name} {', '.join(sorted(each, key=_numbers))}" for name, each in sorted(versions.items()))
    return f"| [{folder.name}](../benchmarks/{folder.name}/README.md) | {title} | {listed} |"


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def _line(place: Place) -> str:
    name = f" `{place.name}`" if place.name else ""
    tests = "<br>".join(f"`{test.removeprefix('tests/')}`" for test in place.tests) or "none"
    ran = ", ".join(place.ran) or "**not yet**"
    file = place.file.removeprefix("verl_mg/")
    return f"| [{file}](../{place.file}){name} | {place.on_gpus} | {tests} | {ran} |"


if __name__ == "__main__":
    main()
