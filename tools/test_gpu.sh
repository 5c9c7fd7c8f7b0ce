#!/usr/bin/env bash
# Test an installation on GPUs with the Python on PATH, and write a report as Markdown:
#
#   bash tools/test_gpu.sh [--limit SECONDS] [--slice NAME] [--output FILE] [-k EXPRESSION]
#   bash tools/test_gpu.sh --rehearse                  # the same programs on ranks of the CPU, without a GPU
#   bash tools/test_gpu.sh --bare                      # with the wheels of tools/install/bare_wheels.sh
#   bash tools/test_gpu.sh --stack FOLDER              # with the pieces of tools/install/bare_stack.sh
#   NODES=2 RENDEZVOUS=first-node:29400 JOB=mine bash tools/test_gpu.sh   # on each node: layouts that cross nodes
#
# The variables are the same as of launch/torchrun.sh. The exit code is 1 if something failed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
arguments=() bare='' stack=''
while (($#)); do
    case $1 in
    --bare) bare=yes arguments+=("$1") ;;
    --stack)
        stack=${2:?"--stack needs the folder with the pieces of tools/install/bare_stack.sh"}
        shift
        ;;
    *) arguments+=("$1") ;;
    esac
    shift
done

carried=$(mktemp -d "${TMPDIR:-/tmp}/test-gpu-XXXXXX")
trap 'rm -rf "$carried"' EXIT
if [[ -n $bare ]]; then
    compgen -G 'build/bare_wheels/*.whl' >/dev/null || {
        echo "error: no wheels in build/bare_wheels. Run bash tools/install/bare_wheels.sh where a registry is reached" >&2
        exit 2
    }
    python -m pip install --quiet --disable-pip-version-check --no-deps --no-index --no-compile \
        --target "$carried/site" build/bare_wheels/*.whl
    export PYTHONPATH="$carried/site${PYTHONPATH:+:$PYTHONPATH}"
fi
if [[ -n $stack ]]; then
    bash tools/install/unpack_stack.sh "$stack" "$carried/stack"
    source "$carried/stack/environment.sh"
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
python -m tools.gpu_suite "${arguments[@]}"
