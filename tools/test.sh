#!/usr/bin/env bash
# Linter, type checker and tests, all three whatever fails; the arguments go to pytest: tools/test.sh -k resume
#   --quick: a first answer in two minutes: the linter, and the tests that start no ranks, engines and processes
#   --all: the nightly tests too
# Two test processes run side by side, each file in one of them; -n 4 for more, -n 0 for one (for --pdb).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../launch/environment.sh"
cd "$repository"

# Without compiled modules, each of the many starts of Python would compile the project again.
unset PYTHONDONTWRITEBYTECODE

mode=usual
if [[ ${1:-} == --quick || ${1:-} == --all ]]; then
    mode=${1#--}
    shift
fi
arguments=(-n 2 --dist loadfile --no-loadscope-reorder --durations=20 "$@")
case $mode in
    quick) arguments+=(--quick) ;;
    all) arguments+=(-m "nightly or not nightly") ;;
esac

if [[ $mode != quick ]]; then
    # Rollouts are tested on the real SGLang and vLLM, algorithms against verl's, adapters by PEFT, the page in a
    # browser, the endpoint of metrics by Prometheus.
    bash tools/install/sglang_cpu.sh
    bash tools/install/vllm_cpu.sh
    bash tools/install/peers.sh
    bash tools/install/browser.sh
    bash tools/install/sandbox.sh
    bash tools/install/prometheus.sh
    [[ $mode != all ]] || bash tools/install/environments.sh
fi

failed=()
# check NAME COMMAND...
check() {
    echo "== $1"
    "${@:2}" || failed+=("$1")
}

wait_for_mypy() {
    local code=0
    wait $mypy || code=$?
    cat "$mypy_output"
    return $code
}

check ruff ruff check --config tools/ruff.toml .
if [[ $mode != quick ]]; then
    # It runs while tests wait for processes and for each other.
    mypy_output=$(mktemp)
    mypy --config-file tools/mypy.ini >"$mypy_output" 2>&1 &
    mypy=$!
    trap 'kill $mypy 2>/dev/null || true; rm -f "$mypy_output"' EXIT
fi
check pytest python -m pytest tests "${arguments[@]}"
[[ $mode == quick ]] || check mypy wait_for_mypy

if ((${#failed[@]})); then
    echo "failed: ${failed[*]}" >&2
    exit 1
fi
