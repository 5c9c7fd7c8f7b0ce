# To be sourced: puts first on PATH a `.venv` in the repository root that holds the tested versions and the project.
# PYTHON=/path/to/python3 chooses the Python that it is made with.

find_python() {
    local name
    for name in ${PYTHON:-python3.11 python3.12 python3.13 python3.14 python3}; do
        if "$name" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$name"
            return
        fi
    done
    echo "error: no Python 3.11 or newer with venv; install one or set PYTHON=/path/to/python3" >&2
    return 1
}

# make_environment ROOT
make_environment() {
    local root=$1 venv=$1/.venv requirements=$1/tools/requirements-cpu.txt wanted python torch
    wanted=$(cat "$requirements" "$root/setup.py" | cksum)
    if [[ -f $venv/stamp && $(<"$venv/stamp") == "$wanted" ]]; then
        return
    fi
    if [[ ! -x $venv/bin/pip ]]; then
        python=$(find_python) || return
        echo "environment: making $venv with $python"
        "$python" -m venv "$venv" || return
    fi
    local install=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check)
    # Alone and first: whatever else wants torch then takes the build that is there.
    torch=$(grep -m 1 '^torch==' "$requirements") || return
    echo "environment: installing $torch"
    "${install[@]}" "$torch" || return
    echo "environment: installing the other requirements"
    "${install[@]}" -r "$requirements" || return
    echo "environment: installing the project"
    "${install[@]}" --no-deps --no-build-isolation -e "$root" || return
    # Last, so that an interrupted installation is done again.
    echo "$wanted" >"$venv/stamp"
}

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
make_environment "$repository"
export PATH="$repository/.venv/bin:$PATH"
