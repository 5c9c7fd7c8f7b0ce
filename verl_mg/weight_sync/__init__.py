"""Weight sync: transfers of weights into engines, in the job and outside of it.

    parameters of a runner, cut by its layout
      |  `TransferPlan`, chunk by chunk: merge adapters; quantize with `rollout.wire`, compare with `rollout.delta`
      v
    boxes travel straight to the ranks that need them, each into a node once
      |
      ├─ hf_module.py   parameters of the module of this rank, shared where the rank has them already
      ├─ ipc.py         memory of this rank ──▶ process of the engine on its device, which copies it in place
      ├─ adapters.py    only A and B, whole, to the rank that leads an engine; weights by the line above, once
      ├─ shards.py      ranks of servers outside the job, which are further ranks of the plan
      ├─ broadcast.py   rank 0 ──▶ whole tensors to all ranks of servers, which cut them themselves
      └─ folder.py      files of whole tensors, or of the changes for each rank of a server ──▶ servers read them

      engines of the job ──kept_weights.py──▶ ranks that start again, by a plan in the other direction

The last three ways to engines implement `servers.ServerTransport`; servers that cannot receive shards receive
broadcasts. A transport knows a `Runner` and a version. Plans are kept as long as the layouts of both sides stay the
same.
"""
