"""Rollout engine vLLM: `AsyncLLM` in a separate process, which may have a separate Python environment.

vLLM pins another torch than SGLang, which training follows. What its process imports of verl_mg needs torch, NumPy and
pydantic; the two processes exchange JSON and names of memory.

arguments        a layout and a device as vLLM's engine arguments and environment
host             the main object of such an engine's process; load and caches, as vLLM's schedulers report them
worker           methods that vLLM adds to its workers: they write shards into the parameters
internals        everything that is used or replaced in vLLM and is not public, for one version of it
"""
