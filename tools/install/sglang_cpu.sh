#!/usr/bin/env bash
# Adds SGLang, for the CPU, to the environment that launch/environment.sh makes. What is there already stays as it is.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../launch/environment.sh"

requirements=$repository/tools/install/requirements-sglang-cpu.txt
shims=$repository/tools/install/sglang_cpu
python=$repository/.venv/bin/python
stamp=$repository/.venv/stamp-sglang-cpu
wanted=$(cat "${BASH_SOURCE[0]}" "$requirements" "$(requirements_of "$repository/.venv")" "$shims"/*.py "$shims"/*/*.py | cksum)

if [[ -f $stamp && $(<"$stamp") == "$wanted" ]]; then
    exit
fi
echo "environment: installing $(grep -m 1 '^sglang==' "$requirements") for the CPU"
install_packages --no-deps -c "$(requirements_of "$repository/.venv")" -r "$requirements"
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cp -R "$shims/sgl_kernel" "$packages"
if ! "$python" -W ignore -c 'import torchvision' 2>/dev/null; then
    # The torch of the fallback is built for the CPU.
    cp "$shims/sglang_cpu_torchvision.py" "$packages"
    echo 'import sglang_cpu_torchvision' >"$packages/sglang_cpu_torchvision.pth"
fi
SGLANG_USE_CPU_ENGINE=1 "$python" -W ignore -c 'import sglang.srt.server_args'
# Last, so that an interrupted installation is done again.
echo "$wanted" >"$stamp"
