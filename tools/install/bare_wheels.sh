#!/usr/bin/env bash
# Collects in build/bare_wheels the wheels that `bash tools/test_gpu.sh --bare` unpacks on a machine without a registry
# that has Python 3.12, torch 2.11 or newer and common packages, but not these; further names can be given:
#
#   bash tools/install/bare_wheels.sh [NAME...]
#
# Versions are as in launch/requirements-gpu.txt, or the newest one of a name that is not in it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

# transformers 5.17 is too old for tensor parallelism with FSDP, and for images.
names=(
    megatron-core transformers pydantic pydantic-core annotated-types typing-inspection starlette uvicorn tenacity
    math-verify latex2sympy2-extended antlr4-python3-runtime "$@"
)
folder=build/bare_wheels most_mib=40

wanted=()
for name in "${names[@]}"; do
    wanted+=("$(grep -E "^$name==" launch/requirements-gpu.txt || echo "$name")")
done
platforms=()
for version in 17 24 27 28 31 34 35 39; do
    platforms+=(--platform "manylinux_2_${version}_x86_64")
done
python=.venv/bin/python
[[ -x $python ]] || python=python3

partial=$(mktemp -d)
trap 'rm -rf "$partial"' EXIT
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 \
    --implementation cp "${platforms[@]}" --platform manylinux2014_x86_64 --dest "$partial" "${wanted[@]}"
mib=$(($(cat "$partial"/*.whl | wc -c) >> 20))
if ((mib > most_mib)); then
    echo "error: the wheels have $mib MiB, more than $most_mib. Name fewer, or carry a stack by tools/install/bare_stack.sh" >&2
    exit 1
fi
rm -rf "$folder"
mkdir -p "$folder"
mv "$partial"/*.whl "$folder"
echo "$folder: ${#wanted[@]} wheels, $mib MiB"
