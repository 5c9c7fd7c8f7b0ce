"""Capacity planner: memory, weight-sync bytes and predicted seconds of a job's layouts, without starting anything.

    inputs.py           model, ranks, device, links and tokens that a plan is computed from; measured hardware figures
    gpus.py             data sheets of GPUs
    efficiency.py       constants of the cost model, and their error on published figures
    training_options.py kernels, precision, recomputation and overlap, read from `model.kernels` and `megatron`
    length_spread.py    lengths of samples of which the mean and the longest are known
    activations.py      elements that each part of a layer keeps for the backward pass
    activation_memory.py  bytes of activations on one rank
    memory.py           bytes on one rank: weights, gradients, optimizer states, KV cache
    module_memory.py    the same of a role with the FSDP backend, and bytes of its collectives
    memory_phases.py    bytes that are on a device at the same time, and whether they fit
    roles.py            auxiliary roles: critic, reference, reward models
    layer_time.py       predicted seconds of one layer, by part
    sharding_time.py    seconds of the FSDP backend's collectives that nothing overlaps
    cost.py             predicted seconds of training and inference
    generation_time.py  predicted seconds of generation
    iteration_time.py   predicted seconds of a weight sync and of an iteration of all roles
    search.py           admissible layouts, the nearest ones that fit, the best ones
    from_config.py      a job's configuration as inputs of a plan
    assumptions.py      assumptions of a plan, one line each
    report.py           the numbers as tables and as JSON
    lengths.py          recorded lengths of prompts and responses
    simulate.py         simulation of an iteration with recorded lengths

Nothing here needs a device, a process or a checkpoint. Sizes are in bytes and elements unless a name says GiB. Seconds
are predicted by a model of the hardware with few constants, fitted on published figures of other systems:
`efficiency.CALIBRATION` is its error, `tools/calibrate_plan.py` prints that of each figure.
"""
