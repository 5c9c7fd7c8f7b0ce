"""Writes docs/families.md from checks of every family: `python -m tools.docs.write_families_doc [--only FAMILY] [--resume]`."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

DOCUMENT = Path(__file__).parents[2] / "docs" / "families.md"
RANKS = {"tp2": 2}
ORDER = ("build", "rows", "tp2", "train", "resume")
TIMEOUT_S = 240


def run(family: str, check: str, folder: Path) -> dict[str, Any]:
    context = multiprocessing.get_context("forkserver")
    from tools.docs.family_checks import run_check

    ranks, started = RANKS.get(check, 1), time.monotonic()
    environments: list[dict[str, str]] = [{}]
    if ranks > 1:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
        shared |= {"LOCAL_WORLD_SIZE": str(ranks)}
        environments = [shared | {"RANK": str(n), "LOCAL_RANK": str(n)} for n in range(ranks)]
    processes = [context.Process(target=run_check, args=(family, check, str(folder), each)) for each in environments]
    for process in processes:
        process.start()
    deadline = started + TIMEOUT_S
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    for process in processes:
        if process.is_alive():
            process.kill()
            process.join()
    answer = folder / f"{check}.json"
    if not answer.exists():
        log = (folder / f"{check}.log").read_text(errors="replace").strip().splitlines()
        found = {"outcome": "crashed", "detail": f"ended without an outcome: {log[-1] if log else 'no output'}"}
        errors = [line for line in log if line.startswith("error: ")]
        if errors and "Traceback (most recent call last)" not in log:
            found = {"outcome": "refused", "detail": errors[-1].removeprefix("error: ")}
    else:
        found = json.loads(answer.read_text())
    return {"family": family, "check": check, **found, "seconds": round(time.monotonic() - started, 1)}


def main() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append")
    parser.add_argument("--check", action="append")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--results", type=Path, default=Path("families.jsonl"))
    arguments = parser.parse_args()
    done = set()
    if arguments.resume and arguments.results.exists():
        lines = map(json.loads, arguments.results.read_text().splitlines())
        done = {(line["family"], line["check"]) for line in lines}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "verl_mg.cli",
            "verl_mg.run.main",
            "verl_mg.run.loop",
            "verl_mg.fsdp.model_runner",
            "verl_mg.recipes.grpo",
            "verl_mg.models.shrunk_config",
            "tools.docs.family_checks",
        ]
    )
    with arguments.results.open("a" if arguments.resume else "w") as results:
        for family in arguments.only or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            checks = [check for check in arguments.check or ORDER if (family, check) not in done]
            if not checks:
                continue
            with tempfile.TemporaryDirectory(prefix=f"family-{family}-") as folder:
                if "build" not in checks:
                    checks.insert(0, "build")
                for check in checks:
                    line = run(family, check, Path(folder))
                    results.write(json.dumps(line) + "\n")
                    results.flush()
                    print(
                        f"{line['family']} {line['check']} {line['outcome']} {line['detail'][:150]} {line['seconds']}",
                        flush=True,
                    )
                    if os.environ.get("KEEP"):
                        shutil.copytree(folder, os.environ["KEEP"] + "/" + family, dirs_exist_ok=True)
                    if check in ("build", "rows") and line["outcome"] in (
                        "unbuildable",
                        "crashed" if check == "build" else "-",
                    ):
                        break


if __name__ == "__main__":
    main()
