#!/usr/bin/env bash
# Runs every check that a change must pass: ruff, mypy, and the tests that need neither a GPU nor minutes each.
#
#   scripts/test.sh [pytest argument ...]
#
# Makes its own environment (see make_venv.sh); the tests run against the installed package, not the checkout. Those of
# the chat page need a browser, which is installed where that can be done.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv="$(bash scripts/make_venv.sh dev eval server)"
unset PYTHONPATH PYTHONHOME

# Where it can't be installed, pytest says how many tests are NOT RUN.
install_chromium() {
  if command -v chromium >/dev/null || ! command -v apt-get >/dev/null || [ "$(id -u)" != 0 ]; then return; fi
  echo "Installing chromium ..." >&2
  apt-get update -qq >&2 || true
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null ||
    echo "chromium can't be installed here" >&2
}

install_chromium
"$venv/bin/ruff" check .
"$venv/bin/ruff" format --check .
"$venv/bin/mypy"
# A file's tests share a process, and files start in the order of tests/conftest.py. A third worker computes while
# another waits for a server or a browser.
"$venv/bin/pytest" -n 3 --dist=loadfile --no-loadscope-reorder -m "not gpu and not slow" "$@"
