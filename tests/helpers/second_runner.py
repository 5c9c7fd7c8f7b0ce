"""Engines of vLLM with its second model runner, which it has on GPUs, on the CPU: Triton interprets the kernels."""

import importlib.util
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.helpers.warm_start import VLLM_PYTHON
from verl_mg.engines.engine_options import EngineOptions
from verl_mg.engines.kinds import VLLM, ProcessKind

INTERPRETED = Path(__file__).parents[1] / "interpreted_triton"
# As on GPUs, the engine returns the experts itself, also of tokens whose keys and values are cached.
OPTIONS: dict[str, Any] = {
    "python": VLLM_PYTHON,
    "extra": {"enable_return_routed_experts": True, "enable_prefix_caching": True},
}


def path_with_triton(folder: Path) -> str:
    """A folder for the path of vLLM's processes with the Triton of this environment: vLLM's has none."""
    triton = importlib.util.find_spec("triton")
    assert triton and triton.submodule_search_locations
    (folder / "triton").symlink_to(triton.submodule_search_locations[0])
    return str(folder)


def kind_with_links_in(folder: Path) -> ProcessKind:
    """The kind of these engines, whose processes find Triton in a folder."""
    added = [str(INTERPRETED), path_with_triton(folder)]

    def environment(model: Path, options: EngineOptions) -> dict[str, str]:
        variables = VLLM.environment(model, options)
        path = os.pathsep.join([variables["PYTHONPATH"], *added])
        return variables | {"PYTHONPATH": path, "TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}

    return replace(VLLM, environment=environment)
