#!/usr/bin/env bash
# Adds what tests compare with and nothing else needs to the environment that launch/environment.sh makes.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../launch/environment.sh"

python=$repository/.venv/bin/python
stamp=$repository/.venv/stamp-peers
wanted=$(cksum <"${BASH_SOURCE[0]}")

if [[ -f $stamp && $(<"$stamp") == "$wanted" ]]; then
    exit
fi
echo "environment: installing peft and verl, to compare with"
install=("$python" -m pip install --quiet --disable-pip-version-check --no-deps)
"${install[@]}" peft==0.21.2 accelerate==1.15.0
# verl brings packages named tests and scripts: in a folder of its own, which tests/algorithms/verl_peer.py looks into.
"${install[@]}" --upgrade --target "$repository/.venv/peers" verl==0.9.1
# Last, so that an interrupted installation is done again.
echo "$wanted" >"$stamp"
