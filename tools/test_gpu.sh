#!/usr/bin/env bash
# Test an installation on GPUs with the Python on PATH, and write a report as Markdown:
#
#   bash tools/test_gpu.sh [--limit SECONDS] [--slice NAME] [--output FILE] [-k EXPRESSION]
#   bash tools/test_gpu.sh --rehearse                  # the same programs on ranks of the CPU, without a GPU
#   bash tools/test_gpu.sh --bare                      # where torch is, with the wheels of tools/install/bare_wheels.sh
#   bash tools/test_gpu.sh --stack PIECES              # the same with the pieces of tools/install/bare_stack.sh
#   NODES=2 RENDEZVOUS=first-node:29400 JOB=mine bash tools/test_gpu.sh   # on each node: layouts that cross nodes
#
# The variables are the same as of launch/torchrun.sh. The exit code is 1 if something failed.
set -euo pipefail
arguments=() bare='' stack=''
while (($#)); do
    case $1 in
    --bare) bare=yes arguments+=("$1") ;;
    --stack)
        if (($# == 1)); then
            echo "error: --stack: the folder is missing. Name the one with the pieces of tools/install/bare_stack.sh." >&2
            exit 2
        fi
        stack=$(realpath -m "$2")
        shift
        ;;
    *) arguments+=("$1") ;;
    esac
    shift
done
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Both stay in build/, where a second run on the same machine finds them with their modules compiled.
if [[ -n $bare ]]; then
    wheels=build/bare_wheels site=$PWD/build/bare_site
    if ! compgen -G "$wheels/*.whl" >/dev/null; then
        echo "error: $wheels: it has no wheels. Run bash tools/install/bare_wheels.sh where a registry is reached." >&2
        exit 2
    fi
    names=$(cd "$wheels" && echo *)
    if [[ ! -f $site/stamp || $(<"$site/stamp") != "$names" ]]; then
        rm -rf "$site"
        python -m pip install --quiet --disable-pip-version-check --no-deps --no-index --no-compile \
            --target "$site" "$wheels"/*.whl
        echo "$names" >"$site/stamp"
    fi
    export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
fi
if [[ -n $stack ]]; then
    bash tools/install/unpack_stack.sh "$stack" build/stack
    source build/stack/environment.sh
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec python -m tools.gpu_suite "${arguments[@]}"
