#!/usr/bin/env bash
# Adds the projects whose environments agents can use, each in its own Python environment below .venv/environments,
# since their requirements exclude the engines'. Only nightly tests of tests/recipes/environments use them.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../launch/environment.sh"

for package in openenv==0.10.0 harbor==0.24.0 verifiers==0.4.0 nemo-gym==0.4.0 "mini-swe-agent==2.4.6 mcp==2.3.0"; do
    name=${package%%==*}
    venv=$repository/.venv/environments/${name//-/_}
    if [[ -f $venv/stamp && $(<"$venv/stamp") == "$package" ]]; then
        continue
    fi
    [[ -x $venv/bin/python ]] || make_venv "$venv"
    echo "environment: installing $package in $venv"
    install_packages $package || { echo "environment: no $package, its tests are skipped" && continue; }
    # Last, so that an interrupted installation is done again.
    echo "$package" >"$venv/stamp"
done
