#!/usr/bin/env bash
# Unpacks the pieces of bare_stack.sh on a GPU machine without a package registry, which has torch 2.11:
#
#   bash tools/install/unpack_stack.sh FOLDER_OF_PIECES TARGET [--check] && source TARGET/environment.sh
#
# The pieces are compared with their checksums first. TARGET/environment.sh sets the variables that put the packages of the
# stack before the machine's. --check lets the loader resolve every symbol and imports the packages, in two minutes.
set -euo pipefail
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
PYTHONPATH="$repository${PYTHONPATH:+:$PYTHONPATH}" exec python -m tools.install.unpack_stack "$@"
