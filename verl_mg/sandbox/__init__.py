"""Isolation of untrusted programs, such as those that a policy writes."""

from verl_mg.sandbox.python import Outcome, run_python, run_python_async
from verl_mg.sandbox.supervisor import isolated

__all__ = ["Outcome", "isolated", "run_python", "run_python_async"]
