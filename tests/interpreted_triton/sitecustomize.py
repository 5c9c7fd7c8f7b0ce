"""Has vLLM for the CPU use its second model runner's kernels, which Triton interprets (TRITON_INTERPRET=1).

vLLM's own condition is a build of Triton with a compiler for the CPU. Python imports this module at the start of every
process that has the folder in PYTHONPATH.
"""

import importlib.abc
import sys
from types import SimpleNamespace


class BeforeImports(importlib.abc.MetaPathFinder):
    """Finds nothing; prepares what modules of vLLM depend on."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "vllm.triton_utils.importing":
            from triton.backends import backends

            backends["cpu"] = SimpleNamespace(driver=None)
        elif name == "vllm.v1.worker.gpu.sample.sampler":
            from vllm.v1.sample.ops import topk_topp_sampler

            topk_topp_sampler.HAS_TRITON = False  # its kernel cannot be interpreted


sys.meta_path.insert(0, BeforeImports())
