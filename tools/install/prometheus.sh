#!/usr/bin/env bash
# Adds Prometheus of the system's packages, which scrapes the endpoint of a run in tests. It is unpacked in .venv, without
# root and without starting a service. Where it cannot be had it says why, and the test is left out.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../launch/environment.sh"

folder=$repository/.venv/prometheus

command -v prometheus >/dev/null && exit
[[ -x $folder/usr/bin/prometheus ]] && exit
log=$(mktemp)
download=$(mktemp -d)
trap 'rm -rf "$log" "$download"' EXIT

unpack() {
    if ! command -v apt-get >/dev/null || ! command -v dpkg-deb >/dev/null; then
        echo "it takes apt-get and dpkg-deb; install prometheus yourself"
        return 1
    fi
    cd "$download"
    # The lists of packages can be read without root, and renewed only as root.
    apt-get download -qq prometheus || { apt-get update -qq && apt-get download -qq prometheus; } || return
    dpkg-deb -x prometheus_*.deb "$download/root" && rm -rf "$folder" && mv "$download/root" "$folder"
}

echo "environment: unpacking prometheus, to scrape an endpoint with"
unpack >"$log" 2>&1 ||
    echo "environment: no prometheus, the endpoint of a run is not tested with it: $(tail -n 1 "$log")"
