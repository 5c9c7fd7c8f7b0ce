#!/usr/bin/env bash
# Teach a tiny model to add, on any machine with Python 3.11, 3.12 or 3.13:
#
#   bash launch/quickstart.sh [--output FOLDER] [KEY=VALUE ...]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
verl-mg quickstart "$@"
