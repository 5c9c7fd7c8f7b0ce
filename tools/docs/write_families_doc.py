"""Writes docs/families.md, what works with every family: `python -m tools.docs.write_families_doc [--resume]`.

    forkserver, which has imported a job's modules ──▶ one process for each family and check, ended after TIMEOUT_S
    results, a line of JSON for each family and check as it ends ──▶ docs/families.md, by the last line of each

`--resume` leaves out what the results have. `--only FAMILY` and `--check CHECK`, both repeatable, leave out the others.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import socket
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.helpers import warm_start
from tools.docs.family_checks import PYTHON, run_check

DOCUMENT = Path(__file__).parents[2] / "docs" / "families.md"
CHECKS = {"rows": "rows", "tp2": "tp2", "train": "GRPO, export", "resume": "resume"}
"""Checks of every family in their order, and the names of their columns."""
ENGINE_CHECKS = {"sglang": "SGLang", "sglang2": "SGLang tp2", "vllm": "vLLM", "vllm2": "vLLM tp2"}
"""Checks on engines, which run where `--check` names them."""
BUILD = "build"
NEEDS = {"resume": "train"}
"""Checks that continue the run of another one, where it works; all others need only the model."""
UNTRIED = "-"
RANKS = {"tp2": 2, "sglang2": 2, "vllm2": 2}
TIMEOUT_S = 600  # of a check; an engine may compile kernels
PRELOADED = (
    "verl_mg.cli",
    "verl_mg.run.loop",
    "verl_mg.fsdp.model_runner",
    "tools.docs.family_checks",
    "matplotlib.backends.backend_agg",
    "pandas",
)
INTRODUCTION = """\
# Families of transformers

What the backend fsdp makes of every causal language model of `transformers` that its defaults, or the fields in
`tools/docs/family_checks.py`, can build: measured on a tiny random model of each family, with its kinds of layers, its
windows and its original lengths of rope crossed as by rows of 4096 tokens. [models.md](models.md) has the families
that the project names. Written by `python -m tools.docs.write_families_doc`, which resumes with `--resume` and checks
one family with `--only FAMILY`. A model may have other layers than its family's defaults: `verl-mg models DIR` reads
its own config.json.

- rows: log-probs against the family's module by itself, row by row, within 1e-5: *packed*, or *unpacked*, where each
  row is computed by itself; tp2: the same on two ranks of tensor parallelism
- GRPO, export: two iterations with the engine hf, whose log-probs are the trainer's, and the exported model loads;
  resume: a third iteration from the checkpoint
- SGLang, vLLM: an iteration with the engine's build for CPUs, whose log-probs are the trainer's, and which receives the
  fewest possible bytes; tp2 for one family of each kind of layers
- *refused*: in one line before training; the reasons are below. *-*: not tried, since another check refuses the family,
  or the engine has no class for it

Layers with a state are unpacked here, for torch's code on CPUs does not read where rows begin. Kernels of GPUs do,
where `transformers` passes it on: `causal-conv1d` with `flash-linear-attention` for Qwen3-Next, Qwen3.5, Qwen4 and OLMo
hybrid, `causal-conv1d` with `mamba-ssm` for Mamba-2 (Bamba, Falcon-H1, Granite hybrid, Nemotron-H, Zamba2), and
`causal-conv1d` for LFM2 and Inkling. Every job gives modules these arguments: its check chooses packed rows where the
kernels are installed, as a test has it with functions that compute each row by itself. `transformers` does not pass
them on to the kernels of Kimi-Linear, Jamba, Mamba and Zamba, whose rows are unpacked on GPUs too.
"""

Line = dict[str, Any]


def run(family: str, check: str, folder: Path) -> Line:
    """Runs a check of a family, on as many processes as it has ranks, and returns its line of the results."""
    context, started = multiprocessing.get_context("forkserver"), time.monotonic()
    processes = [
        context.Process(target=run_check, args=(family, check, str(folder), environment))
        for environment in _environments(RANKS.get(check, 1), check)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(max(0.0, started + TIMEOUT_S - time.monotonic()))
    for process in processes:
        process.kill()
        process.join()
    return {
        "family": family,
        "check": check,
        **_outcome(folder, check),
        "seconds": round(time.monotonic() - started, 1),
    }


def _environments(ranks: int, check: str) -> list[dict[str, str]]:
    engine, shared = check.rstrip("2"), {}
    if check in ENGINE_CHECKS:  # whose processes begin without the seconds of its imports
        shared[PYTHON(engine)] = getattr(warm_start, engine)().python
    if ranks == 1:
        return [shared]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    return [shared | {"LOCAL_WORLD_SIZE": str(ranks), "RANK": str(n), "LOCAL_RANK": str(n)} for n in range(ranks)]


def _outcome(folder: Path, check: str) -> Line:
    answer, log = folder / f"{check}.json", folder / f"{check}.log"
    if answer.exists():
        outcomes: Line = json.loads(answer.read_text())
    else:  # ended by the watchdog of its ranks, by a signal, or by the limit
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        refused = errors and not any("Traceback" in line for line in lines)
        detail = errors[-1] if refused else f"no outcome: {lines[-1] if lines else 'nothing printed'}"
        outcomes = {"outcome": "refused" if refused else "crashed", "detail": detail}
    return outcomes | {"detail": outcomes["detail"].replace(f"{folder}/model/", "").replace(str(folder), "")}


def sweep(families: Sequence[str], checks: Sequence[str], results: Path, done: set[tuple[str, str]]) -> None:
    """Runs the checks of families that are not done, and appends a line to the results as each ends."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    with results.open("a", encoding="utf-8") as file:
        for family in families:
            left = [check for check in checks if (family, check) not in done]
            if not left:
                continue
            with tempfile.TemporaryDirectory(prefix=f"{family}-") as folder:
                outcomes: dict[str, str] = {}
                for check in dict.fromkeys([BUILD, *(NEEDS[check] for check in left if check in NEEDS), *left]):
                    if check == BUILD or outcomes[NEEDS.get(check, BUILD)] == "works":
                        line = run(family, check, Path(folder))
                    else:
                        line = {"family": family, "check": check, "outcome": UNTRIED, "detail": "", "seconds": 0.0}
                    outcomes[check] = line["outcome"]
                    file.write(json.dumps(line) + "\n")
                    file.flush()
                    print(" ".join(str(value) for value in line.values()), flush=True)
                    if outcomes[BUILD] != "works":
                        break


def markdown(lines: Sequence[Line], about: str) -> str:
    """Returns the document; `about` says when and with which versions the results were measured."""
    by_family: dict[str, dict[str, Line]] = defaultdict(dict)
    for line in lines:
        outcomes = by_family[line["family"]]
        outcomes[line["check"]] = line
        for check, needed in NEEDS.items():
            if line["check"] == needed and line["outcome"] != "works":  # it continued what no longer works
                outcomes.pop(check, None)
    built = {
        family: outcomes for family, outcomes in sorted(by_family.items()) if outcomes[BUILD]["outcome"] == "works"
    }
    columns = CHECKS | {check: name for check, name in ENGINE_CHECKS.items() if any(check in f for f in built.values())}
    table = [f"| model_type | {' | '.join(columns.values())} |", "|---" * (len(columns) + 1) + "|"]
    for family, outcomes in built.items():
        cells = (outcomes[check]["outcome"] if check in outcomes else UNTRIED for check in columns)
        table.append(f"| `{family}` | {' | '.join(cells)} |")
    others = [f"`{family}` ({f[BUILD]['detail']})" for family, f in sorted(by_family.items()) if family not in built]
    return "\n".join(
        [
            INTRODUCTION,
            about,
            "",
            *table,
            "",
            "## Reasons",
            "",
            *_reasons(built, columns),
            "",
            "## Not built",
            "",
            *(f"- {each}" for each in others),
            "",
        ]
    )


def _reasons(built: Mapping[str, Mapping[str, Line]], columns: Mapping[str, str]) -> Iterator[str]:
    """Yields a line for each reason of an outcome, with the families that it holds for."""
    reasons: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for family, outcomes in built.items():
        for check, name in columns.items():
            line = outcomes.get(check)
            _, _, why = line["detail"].partition("; packed: ") if line else ("", "", "")
            if line and line["outcome"] not in ("works", "packed", "unpacked", UNTRIED):
                reasons[name, line["outcome"], line["detail"]].append(f"`{family}`")
            elif why:
                reasons[name, "unpacked, since packed", why].append(f"`{family}`")
    for (name, outcome, reason), families in sorted(reasons.items()):
        yield f"- {name}, {', '.join(families)}: {outcome}: {reason}"


def main() -> None:
    """Runs the checks that the command line names, and writes the document."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    parser = argparse.ArgumentParser(description="Checks every family of transformers.")
    parser.add_argument("--only", action="append", metavar="FAMILY")
    parser.add_argument("--check", action="append", choices=[*CHECKS, *ENGINE_CHECKS])
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--results", type=Path, default=Path("families.jsonl"))
    parser.add_argument("--document", type=Path, default=DOCUMENT)
    options = parser.parse_args()
    if not (options.resume or options.only):
        options.results.unlink(missing_ok=True)
    lines = _read(options.results)
    done = {(line["family"], line["check"]) for line in lines} if options.resume else set()
    unbuilt = {line["family"] for line in lines if done and line["check"] == BUILD and line["outcome"] != "works"}
    families = options.only or [
        each for each in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if (each, BUILD) not in done or each not in unbuilt
    ]
    sweep(families, options.check or list(CHECKS), options.results, done)
    versions = ", ".join(f"{name} {version(name)}" for name in ("transformers", "torch"))
    about = f"Measured on CPUs with {versions}, {datetime.now(UTC):%Y-%m-%d}."
    options.document.write_text(markdown(_read(options.results), about), encoding="utf-8")
    print(options.document)


def _read(results: Path) -> list[Line]:
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


if __name__ == "__main__":
    main()
