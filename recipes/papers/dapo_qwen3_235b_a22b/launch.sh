#!/usr/bin/env bash
# DAPO on Qwen3-235B-A22B, on 32 nodes under Slurm. Arguments are overrides a.b=c; RUN is the folder of the run.
set -euo pipefail
cd "$(dirname "$0")/../../.."
export RUN="${RUN:-runs/papers/dapo_qwen3_235b_a22b}"
exec sbatch --nodes 32 launch/slurm.sbatch recipes/dapo.py --config recipes/papers/dapo_qwen3_235b_a22b/config.yaml "$@"
