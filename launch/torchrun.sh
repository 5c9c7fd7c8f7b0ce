#!/usr/bin/env bash
# Train on one node, or, started on each of them, on several:
#
#   bash launch/torchrun.sh recipes/grpo.py --config FILE [a.b=c ...]
#   NODES=4 RENDEZVOUS=first-node:29400 JOB=mine bash launch/torchrun.sh recipes/grpo.py --config FILE [a.b=c ...]
#
# RANKS        ranks of a node (default: its GPUs, or its cores where it has none)
# NODES        how many nodes (default: 1), or MIN:MAX of them
# SPARES       nodes that are started in addition, and take the place of a lost one (default: 0)
# RESTARTS     how often ranks are started again after a loss (default: 3)
# RENDEZVOUS   HOST:PORT where the nodes meet; any free port of any one of them
# JOB          a name that the nodes of this job share (default: verl_mg)
set -euo pipefail

options=(--nproc-per-node "${RANKS:-auto}" --max-restarts "${RESTARTS:-3}")
if [[ ${NODES:-1} != 1 || ${SPARES:-0} != 0 ]]; then
    : "${RENDEZVOUS:?error: several nodes need RENDEZVOUS=HOST:PORT, where HOST is one of them}"
    options+=(--nnodes "${NODES:-1}" --spares "${SPARES:-0}" --rdzv-backend c10d --rdzv-endpoint "$RENDEZVOUS" --rdzv-id "${JOB:-verl_mg}")
else
    options+=(--standalone)
fi
command=(python -m verl_mg.launch "${options[@]}" -m verl_mg train "$@")
echo "\$ ${command[*]@Q}"
exec "${command[@]}"
