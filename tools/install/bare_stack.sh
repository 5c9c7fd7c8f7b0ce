#!/usr/bin/env bash
# Packs the pinned stack (launch/requirements-gpu.txt) for a GPU machine that has Python 3.12, torch 2.11 with the libraries
# of CUDA 13, and no package registry, in pieces of a size that can be carried there:
#
#   bash tools/install/bare_stack.sh [--piece-megabytes 47] [--arch 90] [--without-transformer-engine] [--without-sglang]
#       [--with-liger] FOLDER
#
# It needs a registry, Python 3.12, a C++ compiler and GNU tar, but no GPU. FOLDER/pieces is what travels; FOLDER/cache has
# the packages and the compiled wheel, which a repeated run uses again. --arch is the architecture of the GPU: 90 is Hopper.
# On the GPU machine: bash tools/install/unpack_stack.sh PIECES TARGET
set -euo pipefail
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
source "$repository/launch/python.sh"

megabytes=47 arch=90 without=() peer=(--without liger) folder=
while (($#)); do
    case $1 in
        --piece-megabytes) megabytes=${2:-} && shift ;;
        --arch) arch=${2:-} && shift ;;
        --without-transformer-engine | --without-sglang) without+=(--without "${1#--without-}") ;;
        --with-liger) peer=() ;;
        -h | --help) sed -n "2,/^set/{s/^# \{0,1\}//p}" "${BASH_SOURCE[0]}" && exit ;;
        -*) echo "error: $1: no such option. See --help." >&2 && exit 2 ;;
        *)
            if [[ -n $folder ]]; then
                echo "error: $1: there is a FOLDER already, $folder. Name one." >&2
                exit 2
            fi
            folder=$1
            ;;
    esac
    (($# == 0)) || shift
done
for option in "--piece-megabytes:$megabytes" "--arch:$arch"; do
    if [[ ! ${option#*:} =~ ^[1-9][0-9]*$ ]]; then
        echo "error: ${option%%:*}: '${option#*:}' is no number above 0. Write one, such as 47 megabytes or architecture 90." >&2
        exit 2
    fi
done
if [[ -z $folder ]]; then
    echo "error: FOLDER: it is missing. Name the folder that gets the pieces." >&2
    exit 2
fi
without+=("${peer[@]}")
mkdir -p "$folder/cache"
cache=$(cd "$folder/cache" && pwd)
venv=$cache/venv
python=$venv/bin/python
export PYTHONPATH=$repository

[[ -x $python ]] || make_venv "$venv"
if [[ $(version_of "$python") != 3.12 ]]; then
    echo "error: $venv: it has Python $(version_of "$python"). Delete it, and set PYTHON to a Python 3.12." >&2
    exit 2
fi
requirements=$cache/requirements.txt
"$python" -m tools.install.bare_stack requirements "${without[@]}" >"$requirements"
wanted=$(cksum <"$requirements")
if [[ ! -f $venv/stamp || $(<"$venv/stamp") != "$wanted" ]]; then
    install_packages --no-deps -r "$requirements"
    # Last, so that an interrupted installation is done again.
    echo "$wanted" >"$venv/stamp"
fi
echo "packages installed: $SECONDS s"
site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

# compile REQUIREMENT WHEELS: Transformer Engine's part for torch, in the environment with the pinned torch
compile() {
    local nvidia=$site/nvidia
    NVTE_FRAMEWORK=pytorch NVTE_WITH_NCCL_EP=0 NVTE_PYTORCH_FORCE_BUILD=TRUE MAX_JOBS=${MAX_JOBS:-$(nproc)} \
        CUDA_HOME=$nvidia/cu13 PATH=$venv/bin:$PATH \
        CPLUS_INCLUDE_PATH=$nvidia/cu13/include:$nvidia/cu13/include/cccl:$nvidia/cudnn/include:$nvidia/nccl/include \
        "$python" -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$2" "$1"
}

if [[ " ${without[*]} " != *" transformer-engine "* ]]; then
    requirement=$(grep '^transformer-engine-torch==' "$repository/launch/requirements-gpu.txt")
    wheels=$cache/wheels-$(grep -E '^(torch|nvidia-.*|transformer-engine-cu13)==' "$requirements" | cksum | tr ' ' -)
    if ! compgen -G "$wheels/*.whl" >/dev/null; then
        echo "compiling $requirement, 13 minutes of one core and more; $cache keeps the wheel"
        compile "$requirement" "$wheels"
        echo "compiled: $SECONDS s"
    fi
    install_packages --no-deps "$wheels"/*.whl
fi
rm -rf "$folder/pieces" "$cache/unfinished"
"$python" -m tools.install.bare_stack pack "$site" "$cache/tree" "$cache/unfinished" --arch "$arch" \
    --piece-megabytes "$megabytes" "${without[@]}"
# Last, so that the folder has all pieces or none.
mv "$cache/unfinished" "$folder/pieces"
rm -rf "$cache/tree"
echo "$folder/pieces: $SECONDS s in all"
