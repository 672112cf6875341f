"""Measures loading a checkpoint as int8: seconds, and the peaks of device and host memory beside the parameters.

  PYTHONPATH=.:tests python scripts/make_random_checkpoint.py --shape=llama-3.2-1b --output=FOLDER --tokenizer=SOME.gguf
  PYTHONPATH=. python scripts/measure_load.py --model=FOLDER --group_size=128

The host's peak includes the pages of the files that are read.
"""

import argparse
import os
import time

import jax

from photon_jax.checkpoint.load import load_checkpoint
from photon_jax.models.config import QuantizationConfig
from photon_jax.models.params import num_bytes


def host_peak():
    """Returns the most bytes that this process has held so far."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


def main():
    """Prints one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="bfloat16", help="of what does not become int8")
    parser.add_argument("--group_size", type=int, default=128)
    parser.add_argument("--quantize_embedding", action="store_true")
    flags = parser.parse_args()
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # read when the GPU is first used, in the next line
    device, before = jax.devices()[0], host_peak()
    quantization = QuantizationConfig(group_size=flags.group_size, has_embedding=flags.quantize_embedding)
    begin = time.perf_counter()
    params = jax.block_until_ready(load_checkpoint(flags.model, dtype=flags.dtype, quantization=quantization).params)
    seconds, size, host = time.perf_counter() - begin, num_bytes(params), host_peak() - before
    line = f"{device.device_kind}: {seconds:.1f} s, parameters {size / 2**20:.0f} MiB"
    stats = device.memory_stats()  # None on a CPU
    if stats:
        peak = stats["peak_bytes_in_use"]
        line += f", device peak {peak / 2**20:.0f} MiB ({peak / size - 1:+.1%})"
    print(f"{line}, host peak {host / 2**20:.0f} MiB above what it held before")


if __name__ == "__main__":
    main()
