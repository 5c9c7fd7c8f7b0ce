#!/usr/bin/env bash
# Writes the files of pinned versions from the ranges in setup.py; a pin changes only where a range no longer admits it.
# bash tools/install/lock.sh --upgrade takes the newest versions.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../launch/environment.sh"
cd "$repository"

# lock FILE ARGUMENT...
lock() {
    uv pip compile --quiet --custom-compile-command "bash tools/install/lock.sh" --no-annotate --python-version 3.12 \
        setup.py --output-file "$@"
}

lock launch/requirements-gpu.txt --extra gpu --extra sglang --extra mcp --extra s3 --extra trackers --python-platform x86_64-manylinux_2_39 "$@"
# The torch and transformers of SGLang on GPUs.
lock tools/install/requirements-cpu.txt --extra mcp --extra mpi --extra openenv --extra s3 --extra trackers --extra test --universal \
    --constraints <(grep -E '^(torch|transformers|tokenizers|megatron-core)==' launch/requirements-gpu.txt) "$@"
