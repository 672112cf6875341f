"""Measures loading a checkpoint as int8: seconds, and the peaks of device and host memory beside the parameters.

  PYTHONPATH=.:tests python scripts/make_random_checkpoint.py --shape=llama-3.2-1b --output=FOLDER --tokenizer=SOME.gguf
  PYTHONPATH=. python scripts/measure_load.py --model=FOLDER --group_size=128

Prints one JSON line. The host's peak is what was added to the process's, pages of the files that are read included.
"""

import argparse
import json
import os
import time

import jax

from photon_jax.checkpoint.load import load_checkpoint
from photon_jax.errors import PhotonError
from photon_jax.models.config import QuantizationConfig
from photon_jax.models.params import num_bytes


def host_peak() -> int:
    """Returns the most bytes that this process has held so far."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


def main() -> None:
    """Prints what loading took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="bfloat16", help="of what does not become int8")
    parser.add_argument("--group_size", type=int, default=128)
    parser.add_argument("--quantize_embedding", action="store_true")
    flags = parser.parse_args()
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # read when the GPU is first used, in the next line
    device, before = jax.devices()[0], host_peak()
    begin = time.perf_counter()
    try:
        quantization = QuantizationConfig(group_size=flags.group_size, has_embedding=flags.quantize_embedding)
        loaded = load_checkpoint(flags.model, dtype=flags.dtype, quantization=quantization)
    except PhotonError as error:
        parser.error(str(error))
    params = jax.block_until_ready(loaded.params)
    record = {
        "model": os.path.basename(os.path.normpath(flags.model)),
        "device": device.device_kind,
        "dtype": flags.dtype,
        "group_size": flags.group_size,
        "quantize_embedding": flags.quantize_embedding,
        "load_s": round(time.perf_counter() - begin, 2),
        "params_bytes": num_bytes(params),
        "host_peak_bytes": host_peak() - before,
        "device_peak_bytes": (device.memory_stats() or {}).get("peak_bytes_in_use"),  # null on a CPU
    }
    print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
