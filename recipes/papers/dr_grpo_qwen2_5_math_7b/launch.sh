#!/usr/bin/env bash
# Dr. GRPO on Qwen2.5-Math-7B, on the GPUs of this node. Arguments are overrides a.b=c.
set -euo pipefail
cd "$(dirname "$0")/../../.."
exec bash launch/torchrun.sh recipes/dr_grpo.py --config recipes/papers/dr_grpo_qwen2_5_math_7b/config.yaml "$@"
