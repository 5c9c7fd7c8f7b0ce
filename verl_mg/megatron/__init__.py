"""megatron-core as the roles use it: models, process groups, the packed step, the optimizer.

Without a GPU, importing this package first installs the CPU platform, on which megatron-core runs unchanged.
"""

import warnings

import torch

# Both libraries tell every rank what they would rather have installed; the README says what is optional.
warnings.filterwarnings("ignore", module=r"(megatron|torch)\.")

if not torch.cuda.is_available():
    from verl_mg.megatron import cpu_shim

    cpu_shim.install()
