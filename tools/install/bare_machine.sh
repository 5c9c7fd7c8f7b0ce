#!/usr/bin/env bash
# Makes in FOLDER the Python environment of a machine with GPUs that was not prepared for this project, to rehearse
# `bash tools/test_gpu.sh --bare` with it:
#
#   bash tools/install/bare_machine.sh FOLDER
set -euo pipefail
venv=${1:?"the folder of the environment"}
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
source "$repository/launch/python.sh"

make_venv "$venv"
install_packages --no-deps -r "$repository/tools/install/requirements-bare-machine.txt"
