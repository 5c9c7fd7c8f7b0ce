"""Writes `plan.txt` of each folder in recipes/papers: the report of the command at the top of its config.yaml.

python -m tools.docs.write_paper_plans [FOLDER ...]
"""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stdout
from pathlib import Path

from verl_mg.cli import main as verl_mg

PAPERS = Path(__file__).parents[2] / "recipes" / "papers"


def plan_command(folder: Path) -> list[str]:
    """Returns the arguments of the command `verl-mg plan` in the comment at the top of a configuration."""
    lines = (folder / "config.yaml").read_text(encoding="utf-8").splitlines()
    words = " ".join(line[1:].rstrip("\\") for line in lines if line.startswith("#   ")).split()
    assert words[:2] == ["verl-mg", "plan"], folder
    return words[1:]


def plan_text(folder: Path) -> str:
    """Returns the report of a folder's plan. Paths of the command are relative to the root of the project."""
    with redirect_stdout(io.StringIO()) as out:
        verl_mg(plan_command(folder))
    return "".join(line.rstrip() + "\n" for line in out.getvalue().splitlines())


def main() -> None:
    folders = [Path(name) for name in sys.argv[1:]] or sorted(file.parent for file in PAPERS.glob("*/config.yaml"))
    for folder in folders:
        (folder / "plan.txt").write_text(plan_text(folder), encoding="utf-8")


if __name__ == "__main__":
    main()
