#!/usr/bin/env bash
# DAPO on Qwen2.5-32B, on 16 nodes under Slurm. Arguments are overrides a.b=c; RUN is the folder of the run.
set -euo pipefail
cd "$(dirname "$0")/../../.."
export RUN="${RUN:-runs/papers/dapo_qwen2_5_32b}"
exec sbatch --nodes 16 launch/slurm.sbatch recipes/dapo.py --config recipes/papers/dapo_qwen2_5_32b/config.yaml "$@"
