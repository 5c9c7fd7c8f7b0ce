"""Isolation of untrusted programs, such as programs that a policy writes.

run_python, command.run_command --> supervisor.run --> process namespace_jail.py --> bubblewrap or namespaces, program
             command.py <----- connections to the one address that a command may reach ------
"""

from verl_mg.sandbox.python import Outcome, run_python, run_python_async
from verl_mg.sandbox.supervisor import isolated

__all__ = ["Outcome", "isolated", "run_python", "run_python_async"]
