"""Engine arguments and environment of vLLM for a layout and a device."""

from __future__ import annotations

from verl_mg.layout import EngineLayout

ON_CPU = {
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}
"""Environment of vLLM's processes on the CPU. vLLM's own binding pins all engines to the same cores, and refuses more
tensor-parallel ranks than the machine has NUMA nodes. The few small functions that it compiles would delay the first
request by seconds."""


def layer_partition(layers: int, layout: EngineLayout) -> dict[str, str]:
    """Returns the environment variable for the layers of each pipeline stage.

    vLLM gives the remaining layers to other stages than the weight table (`EngineLayout.layers`).

    Args:
        layers: layers of the model.
        layout: layout of the engine.
    """
    sizes = [len(layout.layers(layers, stage)) for stage in range(layout.pp)]
    return {"VLLM_PP_LAYER_PARTITION": ",".join(map(str, sizes))}
