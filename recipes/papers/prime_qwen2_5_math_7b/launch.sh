#!/usr/bin/env bash
# PRIME on Eurus-2-7B-SFT, on the GPUs of this node. Arguments are overrides a.b=c.
set -euo pipefail
cd "$(dirname "$0")/../../.."
exec bash launch/torchrun.sh recipes/prime.py --config recipes/papers/prime_qwen2_5_math_7b/config.yaml "$@"
