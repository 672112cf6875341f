"""Times fresh processes from their start to the first token, with a cold and with a warm compile cache.

    PYTHONPATH=. python scripts/bench_start.py --model=FOLDER --warmups=lazy,full --max_num_seqs=256

Each process imports the package, loads the model, starts the engine and makes one token of a prompt of 100. For each
warm-up there is one process with an empty compile cache and --warm more with the cache that it left. Prints a JSON line
a process: seconds from its start to the first token, and what they are made of.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

PROMPT_LEN = 100


def main() -> None:
    """Starts the processes one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--linear", default="auto")
    parser.add_argument("--warmups", default="lazy,full")
    parser.add_argument("--warm", type=int, default=2, help="processes that find the cache of the first one")
    parser.add_argument("--max_num_seqs", type=int, default=64)
    parser.add_argument("--max_num_batched_tokens", type=int, default=2048)
    parser.add_argument("--max_model_len", type=int, default=4096)
    parser.add_argument("--cache_dir", help="keeps the compile cache there; unset: in a folder that is removed")
    parser.add_argument("--started_at", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--state", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.started_at is not None:
        print(json.dumps(start_here(flags)), flush=True)
        return
    warmups = flags.warmups.split(",")
    if not set(warmups) <= {"lazy", "full"}:
        parser.error(f"--warmups must be lazy, full or both with a comma between, got {flags.warmups!r}")
    if flags.warm < 0:
        parser.error(f"--warm must be 0 or more, got {flags.warm}")
    for warmup in warmups:
        with tempfile.TemporaryDirectory() as folder:
            cache_dir = os.path.join(flags.cache_dir or folder, warmup)
            for state in ["cold", *["warm"] * flags.warm]:
                start_process(sys.argv[1:], warmup, cache_dir, state)


def start_process(arguments: list[str], warmup: str, cache_dir: str, state: str) -> None:
    """Runs this script once more, as the process that is timed."""
    own = [f"--warmups={warmup}", f"--cache_dir={cache_dir}", f"--state={state}", f"--started_at={time.time()}"]
    if status := subprocess.run([sys.executable, __file__, *arguments, *own], check=False).returncode:
        sys.exit(status)  # it has said why


def start_here(flags: argparse.Namespace) -> dict[str, object]:
    """Returns the seconds of each part of this process's way to its first token."""
    python_s = time.time() - flags.started_at
    begin = time.perf_counter()
    import photon_jax

    llm_class = photon_jax.LLM  # loads JAX
    import jax

    devices = jax.devices()
    import_s = time.perf_counter() - begin
    llm = llm_class(
        flags.model,
        progress=False,
        dtype=flags.dtype,
        linear=flags.linear,
        warmup=flags.warmups,
        compile_cache_dir=flags.cache_dir,
        max_num_seqs=flags.max_num_seqs,
        max_num_batched_tokens=flags.max_num_batched_tokens,
        max_model_len=flags.max_model_len,
    )
    ready_s, started = time.perf_counter() - begin, llm.started
    params = photon_jax.SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    llm.generate([list(range(3, PROMPT_LEN + 3))], params, progress=False)
    end_s = time.perf_counter() - begin
    return {
        "model": os.path.basename(os.path.normpath(flags.model)),
        "device": devices[0].device_kind,
        "warmup": flags.warmups,
        "compile_cache": flags.state,
        "first_token_s": round(python_s + end_s, 2),
        "python_s": round(python_s, 2),
        "import_s": round(import_s, 2),
        "load_s": round(ready_s - import_s - started.seconds, 2),
        "engine_s": round(started.seconds, 2),
        "first_request_s": round(end_s - ready_s, 3),
        "num_programs": started.num_programs,
        "num_compiled": started.num_compiles - started.num_fetched,
        "num_fetched": started.num_fetched,
    }


if __name__ == "__main__":
    main()
