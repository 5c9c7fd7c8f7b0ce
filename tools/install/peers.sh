#!/usr/bin/env bash
# Adds what tests and benchmarks compare with, and nothing else needs, to the environment that launch/environment.sh makes.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../launch/environment.sh"

stamp=$repository/.venv/stamp-peers
wanted=$(cksum <"${BASH_SOURCE[0]}")

if [[ -f $stamp && $(<"$stamp") == "$wanted" ]]; then
    exit
fi
echo "environment: installing peft, verl, TRL, reasoning-gym and if-verifiable, to compare with"
install_packages --no-deps peft==0.21.2 accelerate==1.15.0
# What TRL imports and the project does not have; the versions of tools/install/requirements-sglang-cpu.txt.
install_packages datasets==5.2.0 pandas==3.1.1
# In a separate folder, the last one on the path: verl brings packages named tests and scripts.
# tests/algorithms/verl_peer.py and tools/bench/end_to_end_trl.py look into it.
install_packages --no-deps --upgrade --target "$repository/.venv/peers" verl==0.9.1 trl==1.16.0
# One of its requirements is compiled.
install_packages reasoning-gym==0.1.25 || echo "environment: no reasoning-gym, its tests are skipped"
install_packages if-verifiable==0.1.2 || echo "environment: no if-verifiable, its tests are skipped"
# Last, so that an interrupted installation is done again.
echo "$wanted" >"$stamp"
