#!/usr/bin/env bash
# Installs photon_jax into an environment of its own, fetches the demo model and prints its answer as it comes.
#
#   scripts/quickstart.sh ["prompt"]
#
# The first run needs a network; the next ones do not. On a machine with an NVIDIA GPU the CUDA build of JAX is
# installed (PHOTON_CUDA=cuda13 takes the CUDA 13 build, PHOTON_CUDA= the CPU build).
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
extra=""
if nvidia-smi >/dev/null 2>&1; then
  extra="${PHOTON_CUDA-cuda12}"
fi
venv="$(bash scripts/make_venv.sh ${extra:+"$extra"})"
unset PYTHONPATH PYTHONHOME

exec "$venv/bin/photon-generate" --model=demo --temperature=0 --max_tokens=256 \
  --prompt="${1:-What is the capital of France?}"
