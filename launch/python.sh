# To be sourced: functions that find a Python and make environments of it. Python 3.12 comes first; PYTHON=/path/to/python3
# chooses. Packages are installed by uv, or by pip where uv cannot be had. `repository` is the root of the checkout.

# version_of PYTHON: prints its version, such as 3.12, if it runs: a shim of pyenv may exist and not run.
version_of() {
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null
}

# pythons VERSION: prints what may be a Python of this version: on PATH, of pyenv, of uv.
pythons() {
    printf '%s\n' "python$1" python3
    find "${PYENV_ROOT:-$HOME/.pyenv}/versions" -maxdepth 3 -path "*/$1.*/bin/python3" 2>/dev/null | sort -rV
    uv python find "$1" 2>/dev/null
}

# can_make_environments PYTHON
can_make_environments() {
    uv --version >/dev/null 2>&1 || "$1" -c 'import venv, ensurepip' >/dev/null 2>&1
}

find_python() {
    local version name
    for version in 3.12 3.13 3.11; do
        while read -r name; do
            if [[ $(version_of "$name") == "$version" ]] && can_make_environments "$name"; then
                command -v "$name"
                return
            fi
        done < <(if [[ -n ${PYTHON:-} ]]; then echo "$PYTHON"; else pythons "$version"; fi)
    done
    echo "error: no Python 3.11, 3.12 or 3.13 with venv; install one with its venv, or uv, or set PYTHON=/path/to/python3" >&2
    return 1
}

# make_venv VENV: with pip in it, and uv if it is on PATH or can be installed
make_venv() {
    local venv=$1 python
    python=$(find_python) || return
    echo "environment: making $venv with Python $(version_of "$python") ($python)"
    if uv --version >/dev/null 2>&1; then
        uv venv --quiet --seed --python "$python" "$venv"
    else
        "$python" -m venv "$venv" || return
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check uv ||
            echo "environment: uv cannot be installed; pip is slower"
    fi
}

# install_packages ARGUMENT...: pip install, into $venv if it is set, else into the environment of the project
install_packages() {
    local python=${venv:-$repository/.venv}/bin/python uv
    if uv=$(PATH=$PATH:$repository/.venv/bin:${python%/*} command -v uv); then
        # uv does not read the settings of pip, and has its own certificates by default.
        UV_SYSTEM_CERTS=1 UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-${PIP_INDEX_URL:-}} UV_INDEX=${UV_INDEX:-${PIP_EXTRA_INDEX_URL:-}} \
            UV_FIND_LINKS=${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}} \
            "$uv" pip install --quiet --python "$python" "$@" && return
        echo "environment: uv cannot install it; trying pip"
    fi
    "$python" -m pip install --quiet --disable-pip-version-check "$@"
}
