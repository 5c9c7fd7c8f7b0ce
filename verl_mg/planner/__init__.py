"""Capacity planner: memory, weight-sync bytes and predicted seconds of a job's layouts, without starting anything.

    inputs.py           model, ranks, device, links and tokens that a plan is computed from; measured hardware figures
    memory.py           bytes on one rank: weights, gradients, optimizer states, activations, KV cache
    memory_phases.py    bytes that are on a device at the same time, and whether they fit
    roles.py            auxiliary roles: critic, reference, reward models
    cost.py             predicted seconds of training, inference and generation
    iteration_time.py   predicted seconds of a weight sync and of an iteration of all roles
    search.py           admissible layouts, the nearest ones that fit, the best ones
    from_config.py      a job's configuration as inputs of a plan
    report.py           the numbers as tables and as JSON
    lengths.py          recorded lengths of prompts and responses
    simulate.py         simulation of an iteration with recorded lengths

Nothing here needs a device, a process or a checkpoint. Sizes are in bytes and elements unless a name says GiB. Seconds
are predicted by a model of the hardware that is not calibrated against measured runs: they only rank layouts.
"""
