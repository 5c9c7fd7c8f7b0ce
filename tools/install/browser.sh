#!/usr/bin/env bash
# Adds what the test of the page of `verl-mg view` needs: Chromium, of the system, and Playwright, which drives it.
# Where that cannot be had it says why, and the test is left out.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../launch/environment.sh"

python=$repository/.venv/bin/python
wanted=1.65.2

find_browser() {
    command -v chromium || command -v chromium-browser || command -v google-chrome
}

install_browser() {
    if ! command -v apt-get >/dev/null || ((EUID != 0)); then
        echo "it takes apt-get and root; install chromium yourself"
        return 1
    fi
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core
}

# without WHAT LOG
without() {
    echo "environment: no $1, the page of verl-mg view is not tested in a browser: $(tail -n 1 "$2")"
    exit 0
}

log=$(mktemp)
trap 'rm -f "$log"' EXIT
if ! find_browser >/dev/null; then
    echo "environment: installing chromium, to test a page with"
    install_browser >"$log" 2>&1 && find_browser >/dev/null || without chromium "$log"
fi
found=$("$python" -c 'from importlib.metadata import version; print(version("playwright"))' 2>/dev/null || true)
if [[ $found != "$wanted" ]]; then
    echo "environment: installing playwright, to test a page with"
    install_packages "playwright==$wanted" >"$log" 2>&1 ||
        without playwright "$log"
fi
