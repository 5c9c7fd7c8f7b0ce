"""Launcher of the ranks of a node: torchrun with the exit code of the ranks, restarts that take seconds, and spares.

__main__      arguments, signals and exit codes
agent         torchrun's agent of a node, which starts the ranks again after a loss
restarts      which losses are followed by a restart, and after how long
program       the program of a rank in a fork of a process that has imported everything
"""
