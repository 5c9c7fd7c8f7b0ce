#!/usr/bin/env bash
# GSPO on Qwen3-30B-A3B, on 8 nodes under Slurm. Arguments are overrides a.b=c; RUN is the folder of the run.
set -euo pipefail
cd "$(dirname "$0")/../../.."
export RUN="${RUN:-runs/papers/gspo_qwen3_30b_a3b}"
exec sbatch --nodes 8 launch/slurm.sbatch recipes/gspo.py --config recipes/papers/gspo_qwen3_30b_a3b/config.yaml "$@"
