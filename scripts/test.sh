#!/usr/bin/env bash
# Runs every check that a change must pass: ruff, mypy, and the tests that need neither a GPU nor minutes each.
#
#   scripts/test.sh [pytest argument ...]
#
# Makes its own environment (see make_venv.sh); the tests run against the installed package, not the checkout.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv="$(bash scripts/make_venv.sh dev)"
unset PYTHONPATH PYTHONHOME

"$venv/bin/ruff" check .
"$venv/bin/ruff" format --check .
"$venv/bin/mypy"
"$venv/bin/pytest" -m "not gpu and not slow" "$@"
