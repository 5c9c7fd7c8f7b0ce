"""Rollout engine vLLM: `AsyncLLM` in a separate process, which may have a Python environment of its own.

arguments        a layout and a device as vLLM's engine arguments and environment
unloaded_model   vLLM's model of a rank, for traces of its weight loader
"""
