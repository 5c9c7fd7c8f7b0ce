"""megatron-core as the roles use it: models, process groups, the packed step, the optimizer.

Without a GPU, importing this package first installs the CPU platform, on which megatron-core runs unchanged.
"""

import torch

if not torch.cuda.is_available():
    from verl_mg.megatron import cpu

    cpu.install()
