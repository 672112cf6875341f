#!/usr/bin/env bash
# Makes or refreshes the virtual environment of this checkout and installs photon_jax into it.
#
#   scripts/make_venv.sh [extra ...]
#
# Prints the environment's path as the last line of standard output. Does nothing, and needs no network, when the
# dependencies and the sources are those that were installed last.
#
#   PHOTON_VENV          where the environment is (default: .venv in the checkout)
#   PHOTON_PYTHON        name or path of the Python that makes it (default: the first of 3.11 or later that is found)
#   PHOTON_REQUIREMENTS  what to install instead of the package's own dependencies, one requirement a word
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${PHOTON_VENV:-$root/.venv}"
extras="$(printf '%s\n' "$@" | sort -u | paste -s -d, -)"
unset PYTHONPATH PYTHONHOME

say() { printf '%s\n' "$*" >&2; }

# A launcher can exist and still start nothing (a pyenv shim), be too old, or lack venv (Debian splits it off).
is_usable() {
  "$1" -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' >/dev/null 2>&1
}

# Lists what may start a Python of one of these names. pyenv keeps off the path what is not active: its shim then starts
# nothing, and the Python is beside the shims.
list_launchers() {
  local name launcher folder
  for name in "$@"; do type -aP "$name" || true; done
  for name in "$@"; do
    for folder in "${PYENV_ROOT:-$HOME/.pyenv}" $(type -aP "$name" | sed -n 's,/shims/[^/]*$,,p'); do
      for launcher in "$folder"/versions/*/bin/"$name"; do
        if [ -x "$launcher" ]; then printf '%s\n' "$launcher"; fi
      done
    done
  done
}

find_python() {
  local candidate names=(python3 python3.12 python3.11 python3.13 python3.14)
  if [ -n "${PHOTON_PYTHON:-}" ]; then names=("$PHOTON_PYTHON"); fi
  while IFS= read -r candidate; do
    if is_usable "$candidate"; then
      printf '%s\n' "$candidate"
      return
    fi
  done < <(list_launchers "${names[@]}")
  say "photon_jax needs Python 3.11, 3.12, 3.13 or 3.14 with its venv module; looked for" \
    "${PHOTON_PYTHON:-python3, python3.11 to python3.14, and versions of pyenv}."
  say "Install one (on Debian and Ubuntu: apt-get install python3 python3-venv) or set PHOTON_PYTHON to its path."
  exit 1
}

hash_of() { cksum | tr -d ' \n'; }

# The hash of what the wheel is made of, file names included.
hash_sources() {
  (cd "$root" && find photon_jax pallas_kernels pyproject.toml README.md LICENSE -type f \
    ! -name '*.pyc' -exec cksum {} + | LC_ALL=C sort | hash_of)
}

if ! "$venv/bin/python" -c 'import pip' >/dev/null 2>&1; then
  python="$(find_python)"
  say "Making $venv with $("$python" --version) ..."
  "$python" -m venv --clear "$venv"
fi
pip=("$venv/bin/python" -m pip --disable-pip-version-check --no-input)

# The backends come first: with its own in the environment the package is built with no network, and lm-eval's
# rouge-score, which has no wheel, needs setuptools.
dependencies="$venv/.photon-dependencies-${extras:-none}"
wanted="$(printf '%s' "${PHOTON_REQUIREMENTS:-}" | cat "$root/pyproject.toml" - | hash_of)"
if [ "$(cat "$dependencies" 2>/dev/null)" != "$wanted" ]; then
  say "Installing the dependencies${extras:+ with [$extras]}; this takes a few minutes once ..."
  if [ -n "${PHOTON_REQUIREMENTS:-}" ]; then
    read -ra requirements <<<"$PHOTON_REQUIREMENTS"
    "${pip[@]}" install --quiet 'hatchling>=1.27' "${requirements[@]}" >&2
  else
    "${pip[@]}" install --quiet 'hatchling>=1.27' 'setuptools>=77' >&2
    "${pip[@]}" install --quiet --no-build-isolation "$root${extras:+[$extras]}" >&2
  fi
  printf '%s' "$wanted" >"$dependencies"
  rm -f "$venv/.photon-package"
fi

package="$venv/.photon-package"
wanted="$(hash_sources)"
if [ "$(cat "$package" 2>/dev/null)" != "$wanted" ]; then
  say "Installing photon_jax ..."
  "${pip[@]}" install --quiet --no-index --no-deps --no-build-isolation --force-reinstall "$root" >&2
  printf '%s' "$wanted" >"$package"
fi
printf '%s\n' "$venv"
