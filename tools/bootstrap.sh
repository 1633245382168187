#!/usr/bin/env bash
# Prepares .venv: finds or installs uv, finds or installs CPython 3.12, then installs the workspace with its exact pins.
# Does nothing when no pyproject.toml changed since the last time.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset VIRTUAL_ENV UV_PROJECT_ENVIRONMENT PYTHONPATH

PYTHON=3.12
UV_OLDEST=0.9.0 # the oldest that was tried
UV_PINNED=0.13.9
UV_HOME=.tools/uv
UV_LINK=.tools/bin/uv # where the other tools find the uv that was chosen
STAMP=.venv/.synced

say() { echo "setup: $*" >&2; }
die() { say "$*"; exit 1; }

inputs() { cat tools/bootstrap.sh pyproject.toml packages/*/pyproject.toml | cksum; }

recent_uv() { # PATH_OF_UV
    local version
    version=$("$1" --version 2>/dev/null | cut -d' ' -f2) && [[ -n $version ]] &&
        [[ $(printf '%s\n' "$UV_OLDEST" "$version" | sort -V | head -1) == "$UV_OLDEST" ]]
}

find_uv() {
    local candidate
    for candidate in "$(command -v uv || true)" "$UV_HOME/bin/uv"; do
        [[ -n $candidate ]] && recent_uv "$candidate" && { echo "$candidate"; return; }
    done
    say "no uv >= $UV_OLDEST on PATH: installing uv $UV_PINNED into $UV_HOME"
    rm -rf "$UV_HOME"
    python3 -m venv "$UV_HOME" >&2 || die "'python3 -m venv' failed: install python3-venv, or put uv on PATH"
    "$UV_HOME/bin/python" -m pip install --quiet "uv==$UV_PINNED" >&2 || die "pip could not install uv==$UV_PINNED"
    echo "$UV_HOME/bin/uv"
}

# A pyenv shim answers to the name python3.12 and then fails, so every candidate is run before it is believed.
works() { # PATH_OF_PYTHON
    [[ -n $1 ]] && "$1" -c "import sys; sys.exit(sys.implementation.name != 'cpython' or '%d.%d' % sys.version_info[:2] != '$PYTHON')" 2>/dev/null
}

find_python() { # PATH_OF_UV
    local candidate
    for candidate in "$("$1" python find --system "$PYTHON" 2>/dev/null || true)" \
        "${PYENV_ROOT:-$HOME/.pyenv}/versions/$PYTHON".*/bin/python; do
        works "$candidate" && { echo "$candidate"; return; }
    done
    say "no CPython $PYTHON found: uv installs one of its own"
    "$1" python install "$PYTHON" >&2 || die "uv could not install CPython $PYTHON: install it and try again"
    "$1" python find --managed-python "$PYTHON"
}

if [[ -x .venv/bin/python && -x $UV_LINK && -f $STAMP && $(inputs) == "$(<"$STAMP")" ]]; then
    exit 0
fi

uv=$(find_uv)
say "uv: $uv ($("$uv" --version | cut -d' ' -f2))"
mkdir -p "$(dirname "$UV_LINK")"
ln -sfn "$(realpath "$uv")" "$UV_LINK"
python=$(find_python "$uv")
say "python: $python"
[[ -d .venv ]] || say "the first time may fetch some 5 GB, and builds vLLM without device code"
say "installing the workspace into .venv"
"$uv" sync --all-packages --quiet --python "$python"
inputs >"$STAMP"
say "ready in ${SECONDS} s"
