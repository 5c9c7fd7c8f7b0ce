#!/usr/bin/env bash
# PF-PPO on deepseek-coder-6.7b, on the GPUs of this node. Arguments are overrides a.b=c.
set -euo pipefail
cd "$(dirname "$0")/../../.."
exec bash launch/torchrun.sh recipes/pf_ppo.py --config recipes/papers/pf_ppo_deepseek_coder_6_7b/config.yaml "$@"
