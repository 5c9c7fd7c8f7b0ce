"""Megatron training backend: model, process groups, packed forward and backward passes, optimizer.

Without a GPU, importing this package first installs the CPU platform, on which megatron-core runs unchanged.
"""

import warnings

import torch

# megatron-core warns every rank about optional packages that are not installed, which the README lists, and about parts
# that are deprecated or experimental, of which a user has no choice. Warnings of torch are shown.
warnings.filterwarnings("ignore", module=r"megatron\.")

# GPU: the CPU platform is not imported: torch and megatron-core are as installed.
# GPU-TEST: tests/megatron/test_cpu_shim.py
# GPU-RAN: h200-1, h100-1
if not torch.cuda.is_available():
    from verl_mg.megatron import cpu_shim

    cpu_shim.install()
