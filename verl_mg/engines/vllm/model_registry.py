"""Registry of vLLM's model classes."""

from __future__ import annotations


def inspect_models_here() -> None:
    """Inspects model classes in this process, on machines without a GPU.

    For each class that its cache does not have, vLLM would start a process that imports vLLM again, lest CUDA starts in
    this one: half a minute of a CPU.
    """
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        registry._run_in_subprocess = lambda inspect: inspect()  # there is no CUDA that could start
