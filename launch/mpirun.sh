#!/usr/bin/env bash
# Train on ranks that the mpirun on PATH starts; mpi4py has to be installed:
#
#   RANKS=16 MPI_OPTIONS="--hostfile hosts" bash launch/mpirun.sh recipes/grpo.py --config FILE [a.b=c ...]
#
# RANKS         of the whole job
# MPI_OPTIONS   further options of mpirun, such as --hostfile FILE or -x NAME
set -euo pipefail

: "${RANKS:?error: RANKS is not set. Write the number of ranks.}"
read -ra options <<<"${MPI_OPTIONS:-}"
# Ranks choose their cores and devices themselves.
command=(mpirun -n "$RANKS" --bind-to none "${options[@]}" python -m verl_mg train "$@")
echo "\$ ${command[*]@Q}"
exec "${command[@]}"
