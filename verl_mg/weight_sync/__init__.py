"""Weight sync: transfers of the actor's weights into engines, in the job and outside of it.

    parameters of the actor, cut by its layout
      |  chunk by chunk: merge adapters; quantize with `rollout.wire`, compare with what was sent with `rollout.delta`
      v
    plan, schedule, execute: boxes travel straight to the ranks that need them, each into a node once
      |
      ├─ `HFEngineSync`         parameters of the module of this rank, shared where the rank has them already
      ├─ `ProcessEngineSync`    memory of this rank ──▶ process of the engine on its device, which copies it in place
      ├─ `AdapterSync`          only A and B, whole, to the rank that leads an engine; weights by the line above, once
      ├─ `ShardSync`            ranks of servers outside the job, which are further ranks of the plan
      ├─ `BroadcastSync`        rank 0 ──▶ whole tensors to all ranks of servers, which cut them themselves
      └─ `FolderChangesSync`    files with the changes for each rank of a server ──▶ servers apply them
    export of a directory
      └─ `SharedFolderSync`     files of whole tensors ──▶ servers load them

Plans are kept as long as the layouts of both sides stay the same.
"""
