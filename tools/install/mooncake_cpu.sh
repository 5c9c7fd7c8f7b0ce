#!/bin/bash
# Adds Mooncake, which transfers keys and values between the servers of a pair over TCP, for tests/rollout/test_paired_servers.py.
# It loads the library of InfiniBand also where it does not use it: apt-get install libibverbs1
set -euo pipefail
cd "$(dirname "$0")/../.."
.venv/bin/python -m pip install --no-deps mooncake-transfer-engine-non-cuda==0.3.13.post1
.venv/bin/python -c "import mooncake.engine"
