#!/usr/bin/env bash
# Make the project's environment in .venv: the locked packages, then the project itself (editable). Called by `make setup`.
# PYTHON            the interpreter to build it from (default: the first of python3.11, python3.12, python3 that is 3.11 or 3.12)
# TORCH_INDEX_URL   a package index that has CPU builds of torch, where the default one has only the CUDA build
set -euo pipefail
cd "$(dirname "$0")/.."
VENV="${VENV:-.venv}"
LOCK=requirements/cpu.lock

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3 python}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "setup: needs Python 3.11 or 3.12 (requirements/cpu.lock is made for them); set PYTHON=/path/to/python3.11" >&2
    exit 2
}

# Worth having, never required: an allocator that makes training faster, and `ip` for the tests with several nodes.
install_debian_packages() {
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || return 0
    ldconfig -p 2>/dev/null | grep -q libtcmalloc_minimal && command -v ip >/dev/null && return 0
    echo "setup: installing libtcmalloc-minimal4 and iproute2 (optional)"
    (apt-get update -qq && apt-get install -y -qq --no-install-recommends libtcmalloc-minimal4 iproute2) >/dev/null 2>&1 ||
        echo "setup: could not install them; going on without"
}

torch_works() { "$VENV/bin/python" -c 'import torch' 2>/dev/null; }

# The lock is installed without dependencies, so torch's CUDA build comes without the libraries that it loads.
install_torch_libraries() {
    torch_works && return 0
    echo "setup: this package index gave torch's CUDA build; fetching the CUDA libraries it loads (about 3 GB)."
    echo "setup: to avoid that, run 'make clean-env setup TORCH_INDEX_URL=<an index with CPU builds of torch>'."
    "$VENV/bin/python" -m pip install -qq "$(grep '^torch==' $LOCK)"
    torch_works || { "$VENV/bin/python" -c 'import torch'; exit 1; }
}

python="$(find_python)"
install_debian_packages
if [ ! -x "$VENV/bin/python" ]; then
    echo "setup: environment in $VENV from $("$python" --version)"
    "$python" -m venv "$VENV"
fi
pip="$VENV/bin/python -m pip --disable-pip-version-check"
if [ -n "${TORCH_INDEX_URL:-}" ]; then
    $pip install -qq --no-deps --index-url "$TORCH_INDEX_URL" "$(grep '^torch==' $LOCK)"
fi
echo "setup: installing the packages of $LOCK (about 3 GB; a few minutes)"
$pip install -qq --no-deps -r "$LOCK" -r requirements/demo.lock
install_torch_libraries
$pip install -qq --no-deps --no-build-isolation --editable .
"$VENV/bin/python" -c 'import torch, transformers, ray, pyarrow, rlcli; print(f"setup: ready (torch {torch.__version__}, ray {ray.__version__})")'
