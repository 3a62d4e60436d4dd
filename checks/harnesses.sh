#!/bin/sh
# Installs the real agent programs of tests/harness into .harnesses, or says in one line why it
# cannot. What is there in the wanted version is kept. Tests read `.harnesses/missing` and are
# skipped with its words, unless CI=true.
set -eu

root=${1:-.harnesses}
python=${2:-.venv/bin/python}
npm_packages="@anthropic-ai/claude-code@2.1.220 @openai/codex@0.171.0 @qwen-code/qwen-code@0.15.10"
mini_package="mini-swe-agent==2.4.6"
unlisted_package="openai-agents==0.24.0"
missing=$root/missing
log=$root/install.log

is_there() {
    [ "$(cat "$1/.installed" 2>/dev/null)" = "$2" ]
}

# Says why, keeps the words for the tests, and goes on with the other programs.
lacks() {
    echo "make: $1" | tee -a "$missing" >&2
}

# Agents run under user ids of their own, which reach the system's Python but not one of a home.
any_users_python() {
    if /usr/bin/python3 -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 10))' \
        2>/dev/null; then
        echo /usr/bin/python3
    else
        echo "$python"
    fi
}

install_node() {
    if ! command -v npm >/dev/null; then
        lacks "claude, codex and qwen need npm (Node 20 or newer): it is not on the PATH"
        return
    fi
    echo "Installing $npm_packages into $root/node"
    mkdir -p "$root/node"
    # shellcheck disable=SC2086
    if npm install --prefix "$root/node" --no-audit --no-fund --no-update-notifier \
        --save-exact $npm_packages >"$log" 2>&1; then
        echo "$npm_packages" >"$root/node/.installed"
    else
        lacks "npm could not install claude, codex and qwen: $(grep -v 'complete log' "$log" |
            grep -m 1 'npm error')"
    fi
}

install_mini() {
    install_venv mini "$mini_package" mini-swe-agent
}

# One that no shipped profile knows: a library's agent with a tool, in an environment of its own.
install_unlisted() {
    install_venv unlisted "$unlisted_package" openai-agents
    { echo "#!$(cd "$root" && pwd)/unlisted/bin/python"; cat tests/harness/unlisted_agent.py; } \
        >"$root/unlisted/bin/unlisted-agent"
    chmod 755 "$root/unlisted/bin/unlisted-agent"
}

install_venv() {
    echo "Installing $2 into $root/$1"
    if "$(any_users_python)" -m venv --clear "$root/$1" >"$log" 2>&1 &&
        "$root/$1/bin/python" -m pip --disable-pip-version-check --quiet \
            install "$2" >"$log" 2>&1; then
        echo "$2" >"$root/$1/.installed"
    else
        lacks "pip could not install $3: $(tail -n 1 "$log")"
    fi
}

mkdir -p "$root"
rm -f "$missing"
is_there "$root/node" "$npm_packages" || install_node
is_there "$root/mini" "$mini_package" || install_mini
is_there "$root/unlisted" "$unlisted_package" || install_unlisted
if [ -f "$missing" ] && [ "${CI:-}" = true ]; then
    exit 2
fi
