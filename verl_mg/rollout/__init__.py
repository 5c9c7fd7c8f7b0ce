"""The role that generates: groups of samples, the queue of their requests, and the loop of each engine.

rollout  async_rollout       what a recipe calls: synchronous and one step off, asynchronous
pending_groups  staleness    groups in flight; how many may be
work_queue  filtered_queue   distribution of requests over engines
engine_loop  engine_stream   the loop of one engine within a call, and across calls
engine_group                 engines of the job; remote_engine_group: servers outside of it
group_rows  rollout_source   rows of a batch from samples; the interface of whatever gives a recipe its samples
"""
