"""`verl-mg doctor`: whether installation, machines and network can run a job, and what to fix.

machine   installed packages, GPUs, limits and shared memory of this rank's machine
network   transfers between the ranks, and the folder that they share
command   the check of all ranks, printed by one
"""
