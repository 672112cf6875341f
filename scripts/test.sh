#!/usr/bin/env bash
# Runs every check that a change must pass: ruff, mypy, and the tests that need neither a GPU nor minutes each.
#
#   scripts/test.sh [pytest argument ...]
#
# Makes its own environment (see make_venv.sh); the tests run against the installed package, not the checkout. Those of
# the chat page need a browser, which is installed where that can be done. Of the tests that pytest's arguments name,
# those that lower programs for a GPU, and those that need a newer jax than Python 3.11 gets, run in a second environment
# then, which needs a Python 3.12.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
root="$PWD"
newer_jax=0.11.2
unset PYTHONPATH PYTHONHOME

# Where it can't be installed, pytest says how many tests are NOT RUN.
install_chromium() {
  if command -v chromium >/dev/null || ! command -v apt-get >/dev/null || [ "$(id -u)" != 0 ]; then return; fi
  echo "Installing chromium ..." >&2
  apt-get update -qq >&2 || true
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null ||
    echo "chromium can't be installed here" >&2
}

# Holds what the tests in it import, and no more: it takes half a minute to make.
make_newer_venv() {
  PHOTON_VENV="$root/.venv-newer-jax" PHOTON_PYTHON=python3.12 \
    PHOTON_REQUIREMENTS="jax==$newer_jax pytest>=9,<10 pytest-xdist>=3.6 hypothesis>=6.130" bash scripts/make_venv.sh
}

# Runs the tests of a file of ids, one a line.
run_with_newer_jax() {
  local venv num_tests
  num_tests="$(wc -l <"$1")"
  if [ "$num_tests" = 0 ]; then return; fi
  if ! venv="$(make_newer_venv)"; then
    echo "NOT RUN: $num_tests tests with jax $newer_jax, which needs Python 3.12; see above why it isn't there"
    return
  fi
  "$venv/bin/pytest" -n 2 --dist=loadfile "@$1"
}

venv="$(bash scripts/make_venv.sh dev eval server)"
install_chromium
"$venv/bin/ruff" check .
"$venv/bin/ruff" format --check .
"$venv/bin/mypy"
newer="$(mktemp)"
trap 'rm -f "$newer"' EXIT
status=0
# A file's tests share a process, and files start in the order of tests/conftest.py. A third worker computes while
# another waits for a server or a browser.
"$venv/bin/pytest" -n 3 --dist=loadfile --no-loadscope-reorder -m "not gpu and not slow" \
  --newer_jax_list="$newer" "$@" || status=$?
if [ "$status" = 5 ] && [ -s "$newer" ]; then status=0; fi # none was left for this environment
if [ "$status" != 0 ]; then exit "$status"; fi
run_with_newer_jax "$newer"
