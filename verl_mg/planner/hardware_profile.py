"""What was measured of devices and links, for a plan to count with.

A JSON object with any of these figures, each a positive number; `verl-mg plan` has an option of the same name for each:

    {"flops": 410, "memory": 80, "memory_bandwidth": 2500, "intra_node": 380, "inter_node": 45, "host": 25}

flops: TFLOP/s of bf16 matrix products. memory: GiB of a device. memory_bandwidth: GB/s at which it reads them.
intra_node, inter_node: GB/s of a rank to others of its node and to other nodes. host: GB/s between device and host.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

from verl_mg.errors import UserError

FIGURES = ("flops", "memory", "memory_bandwidth", "intra_node", "inter_node", "host")


def read_hardware_profile(path: str | Path) -> dict[str, float]:
    """The figures of a file. UserError naming what is not one."""
    try:
        figures = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not a readable JSON file ({error})") from None
    if not isinstance(figures, dict):
        raise UserError(f"{path}: a {type(figures).__name__}, not an object of figures: {', '.join(FIGURES)}")
    for name, value in figures.items():
        if name not in FIGURES:
            raise UserError(f"{path}: no figure {name!r}; there are {', '.join(FIGURES)}")
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (number and math.isfinite(value) and value > 0):
            raise UserError(f"{path}: {name} is {value!r}; write a number above 0")
    return {name: float(value) for name, value in figures.items()}
