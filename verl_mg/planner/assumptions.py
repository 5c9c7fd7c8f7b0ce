"""Assumptions of a plan, as its report lists them."""

from __future__ import annotations

from collections.abc import Iterator

from verl_mg.planner.efficiency import CALIBRATION
from verl_mg.planner.inputs import PlanInputs
from verl_mg.planner.training_options import Recompute, TrainingOptions


def assumptions(inputs: PlanInputs) -> list[str]:
    """Returns the assumptions of a plan, one line each."""
    steps = f"{inputs.epochs} x {inputs.minibatches} optimizer steps"
    mean = f", {inputs.lengths.mean:g} in the mean" if inputs.mean_sequence else ""
    parallelism = "tokens whole on tensor-parallel ranks" if inputs.options.fsdp else "sequence parallelism"
    return [
        _states(inputs.options),
        f"activations: a micro-batch has {inputs.longest_micro_batch} tokens, {_recomputation(inputs.recompute)}; "
        f"flash attention, {parallelism}, experts evenly loaded, logits in chunks",
        f"an iteration has {inputs.tokens_per_iteration} tokens in samples of {inputs.sequence}{mean}, and {steps}; "
        "every role runs inference once over each token, roles on disjoint ranks compute at the same time; "
        "the KV cache is bf16",
        f"a device has {inputs.memory:g} GiB, of which {inputs.reserve:g} are kept free; {_residency(inputs)}",
        f"a rank moves {inputs.intra_node:g} GB/s within its node of {inputs.node}, {inputs.inter_node:g} GB/s "
        f"between nodes and {inputs.host:g} GB/s to its host",
        f"a device reaches {inputs.flops:g} TFLOP/s and reads {inputs.memory_bandwidth:g} GB/s of its memory",
        *_encodings(inputs),
        f"seconds are predicted by a model {CALIBRATION}; no run of this project was compared with it"
        + ", and no figure is of the backend fsdp" * bool(inputs.options.fsdp),
        *inputs.notes,
    ]


def _states(options: TrainingOptions) -> str:
    if options.fsdp is None:
        return (
            f"weights are bf16; gradients take {options.gradient_bytes} bytes and states of the optimizer "
            f"{options.state_bytes}, the latter sharded by the distributed optimizer over dp*cp, for experts over edp"
        )
    where = "in host memory" if options.fsdp.cpu_offload else "on the device"
    gathers = "for each pass" if options.fsdp.reshard_after_forward else "once for both passes"
    return (
        f"backend fsdp: float32 weights, gradients and moments take 16 bytes, {where}, sharded over dp*cp ranks in "
        f"{options.fsdp.replicas} copies; layers are gathered in bf16 {gathers}, each while another one computes"
    )


def _encodings(inputs: PlanInputs) -> Iterator[str]:
    if inputs.wire != "cast":
        yield (
            f"engines have weights in {inputs.wire}, whose values and scales the sync and the memory count; matrix "
            "products of engines are as fast as in bf16"
        )
    if inputs.delta:
        yield (
            "the sync is that of all values, as in the first update; later ones send what has changed, 0.03 of the "
            "bytes where that is 2 % of the elements (docs/benchmarks.md)"
        )


def _residency(inputs: PlanInputs) -> str:
    if inputs.rollout_ranks:
        return f"the last {inputs.rollout_ranks} ranks have only engines"
    roles = {"the actor": inputs.offload} | {role.name: role.offload for role in inputs.auxiliary_roles}
    waiting = " and ".join(name for name, offload in roles.items() if offload)
    staying = " and ".join(name for name, offload in roles.items() if not offload)
    waits = f"on the host while other roles compute and engines are awake: {waiting}" if waiting else ""
    stays = f"always on the device: {staying}" if staying else ""
    share = (
        f"engines take {inputs.memory_fraction:g} of the memory that is free when they start"
        if inputs.memory_fraction
        else ""
    )
    asleep = "engines release it while training computes" if inputs.sleep else "engines never release it"
    return ", ".join(line for line in (waits, stays, asleep, share) if line)


def _recomputation(modules: Recompute) -> str:
    if isinstance(modules, bool):
        return "a layer keeps its input and recomputes the rest" if modules else "a layer keeps all activations"
    return f"a layer recomputes {', '.join(modules)} and keeps the rest"
