#!/usr/bin/env bash
# Adds bubblewrap of the system, the preferred sandbox for untrusted programs. It is optional: without it verl_mg builds
# the same namespaces itself, and the tests of bubblewrap are skipped.
set -euo pipefail

command -v bwrap >/dev/null && exit
if ! command -v apt-get >/dev/null || ((EUID != 0)); then
    echo "environment: no bubblewrap, its tests are skipped: installing it requires apt-get and root"
    exit 0
fi
echo "environment: installing bubblewrap, a sandbox to test"
export DEBIAN_FRONTEND=noninteractive
{ apt-get update -qq && apt-get install -y -qq --no-install-recommends bubblewrap; } >/dev/null 2>&1 ||
    echo "environment: no bubblewrap, its tests are skipped: apt-get cannot install it"
