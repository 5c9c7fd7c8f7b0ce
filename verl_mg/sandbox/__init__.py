"""Isolation of untrusted programs, such as those that a policy writes."""

from verl_mg.sandbox.python import Outcome, isolated, run_python, run_python_async

__all__ = ["Outcome", "isolated", "run_python", "run_python_async"]
