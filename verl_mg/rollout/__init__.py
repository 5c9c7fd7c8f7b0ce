"""The role that generates: groups of samples, the queue of their requests, and the worker of each engine.

rollout                      the interface of whatever gives a recipe its samples, and the core of all modes
sync_rollout  async_rollout  the modes: what is submitted, when `generate` returns, when weights arrive
groups                       states of groups, the bound of staleness, what checkpoints contain
work_queue  engine_worker    distribution of requests over engines; the worker that feeds one engine
engine_group                 engines of the job; remote_engine_group: servers outside of it
"""
