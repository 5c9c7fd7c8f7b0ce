# To be sourced: puts first on PATH a `.venv` in the repository root that holds the tested versions and the project.
# It is made with Python 3.12 or 3.13 and megatron-core 0.19 where such a Python is found, otherwise with Python 3.11 and
# megatron-core 0.16.1, as python.sh finds and makes it.

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$repository/launch/python.sh"

# requirements_of VENV: prints the file of its versions
requirements_of() {
    local suffix=
    [[ ! -d $1/lib/python3.11 ]] || suffix=-python311
    echo "$repository/tools/install/requirements-cpu$suffix.txt"
}

# stamp_of VENV: prints the checksum of what is to be installed
stamp_of() {
    cat "$(requirements_of "$1")" "$repository/setup.py" | cksum
}

make_environment() {
    local venv=$repository/.venv requirements
    if [[ -f $venv/stamp && $(<"$venv/stamp") == "$(stamp_of "$venv")" ]]; then
        return
    fi
    [[ -x $venv/bin/python ]] || make_venv "$venv" || return
    requirements=$(requirements_of "$venv")
    echo "environment: installing $(grep -m 1 '^megatron-core==' "$requirements") and the other requirements"
    install_packages -r "$requirements" || return
    echo "environment: installing the project"
    install_packages --no-deps --no-build-isolation -e "$repository" || return
    # It also compiles the modules, which uv does not do.
    env -u PYTHONDONTWRITEBYTECODE "$venv/bin/python" -W ignore -c 'import verl_mg.job.job' || return
    # Last, so that an interrupted installation is done again.
    stamp_of "$venv" >"$venv/stamp"
}

make_environment
export PATH="$repository/.venv/bin:$PATH"
