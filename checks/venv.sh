#!/bin/sh
# Makes .venv and installs the project into it, or says in one line why it cannot.
# TORCH_INDEX_URL names another package index for torch alone, such as one of CPU builds.
set -eu

venv=${1:-.venv}

fail() {
    echo "make: $1" >&2
    exit 2
}

is_new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

# The first interpreter that is new enough and can make environments.
find_python() {
    without_venv=
    for name in python3.11 python3.12 python3.13 python3; do
        if is_new_enough "$name"; then
            if "$name" -c 'import ensurepip, venv' 2>/dev/null; then
                python=$name
                return
            fi
            without_venv=${without_venv:-$name}
        fi
    done
    [ -z "$without_venv" ] || fail "$without_venv has no venv module: apt install python3-venv"
    fail "needs Python 3.11 or newer, found as python3.11, python3.12, python3.13 or python3"
}

if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    find_python
    "$python" -m venv --clear "$venv"
fi

pip() {
    "$venv/bin/python" -m pip --disable-pip-version-check --quiet install "$@"
}

if [ -n "${TORCH_INDEX_URL:-}" ]; then
    torch=$(sed -n 's/.*"\(torch==[^"]*\)".*/\1/p' pyproject.toml)
    echo "Installing $torch from TORCH_INDEX_URL"
    pip --index-url "$TORCH_INDEX_URL" "$torch"
fi
echo "Installing opengyre and what it needs into $venv (several minutes the first time)"
pip --editable '.[dev]'
touch "$venv/.installed"
