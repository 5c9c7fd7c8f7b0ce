"""A job on paper: the memory, the bytes of a weight sync and the seconds of its layouts, before anything is started.

    setting.py       what a layout is judged by: model, ranks, device, links, tokens
    memory.py        GiB of one rank: weights, gradients, optimizer states, KV cache; activations.py the activations
    roles.py         the roles beside the actor: critic, reference, reward models
    phases.py        what stands on a device together, and whether it fits
    sync.py          bytes and seconds of a weight sync
    cost.py          predicted seconds of training, of judging and of generation
    iteration.py     those of an iteration of all roles, by which a search ranks layouts
    measured.py      figures of devices and links that were measured
    configured.py    a job's configuration as these numbers
    search.py        all admissible layouts, those nearest to a given one that fit, the best ones
    report.py        the numbers as a table and as JSON
    lengths.py       recorded lengths of prompts and responses

Nothing here needs a device, a process or a checkpoint. Sizes are in bytes and elements unless a name says GiB.
"""
