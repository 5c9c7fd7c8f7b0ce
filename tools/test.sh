#!/usr/bin/env bash
# Linter, type checker and tests, all three whatever fails; arguments go to pytest: tools/test.sh -k resume
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../launch/environment.sh"
cd "$repository"
# Rollouts are tested on the real SGLang, algorithms beside those of verl, adapters by PEFT, the page in a browser.
bash tools/install_sglang_cpu.sh
bash tools/install_peers.sh
bash tools/install_browser.sh
bash tools/install_sandbox.sh

failed=()
# check NAME COMMAND...
check() {
    echo "== $1"
    "${@:2}" || failed+=("$1")
}

check ruff ruff check --config tools/ruff.toml .
check mypy mypy --config-file tools/mypy.ini
check pytest python -m pytest tests "$@"

if ((${#failed[@]})); then
    echo "failed: ${failed[*]}" >&2
    exit 1
fi
