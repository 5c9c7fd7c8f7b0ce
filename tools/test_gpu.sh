#!/usr/bin/env bash
# Test an installation on GPUs with the Python on PATH, and write a report as Markdown:
#
#   bash tools/test_gpu.sh [--quick] [--output FILE] [-k EXPRESSION]
#   bash tools/test_gpu.sh --rehearse                  # the same programs on ranks of the CPU, without a GPU
#   NODES=2 RENDEZVOUS=first-node:29400 JOB=mine bash tools/test_gpu.sh   # on each node: layouts that cross nodes
#
# The variables are the same as of launch/torchrun.sh. The exit code is 1 if something failed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec python -m tools.gpu_suite "$@"
