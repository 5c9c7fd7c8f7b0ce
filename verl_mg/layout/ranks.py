"""Ranks of a job as people write them: `0-7`, or `0-3,8-11`."""

import re

from verl_mg.errors import UserError


def parse_ranks(text: str) -> tuple[int, ...]:
    """The ranks, rising. UserError naming the part that is not understood."""
    ranks: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", part.strip())
        if match is None:
            raise UserError(f"ranks {text!r}: {part.strip()!r} is neither a rank nor a run of them; write 0-7 or 0-3,8")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or (ranks and first <= ranks[-1]):
            raise UserError(f"ranks {text!r}: {part.strip()!r} does not rise; write each rank once, as in 0-3,8-11")
        ranks += range(first, last + 1)
    return tuple(ranks)


def format_ranks(ranks: tuple[int, ...]) -> str:
    """The way back, of rising ranks."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
