"""Megatron training backend: model, process groups, packed forward and backward passes, optimizer.

Without a GPU, importing this package first installs the CPU platform, on which megatron-core runs unchanged.
"""

import warnings

import torch

# megatron-core warns every rank about optional packages that are not installed; the README lists these.
warnings.filterwarnings(
    "ignore", message=r"(Transformer Engine and )?Apex (is|are) not installed", module=r"megatron\."
)

# GPU: the CPU platform is not imported: torch and megatron-core are as installed.
# GPU-TEST: tests/megatron/test_cpu_shim.py
# GPU-RAN: h200-1, h100-1
if not torch.cuda.is_available():
    from verl_mg.megatron import cpu_shim

    cpu_shim.install()
