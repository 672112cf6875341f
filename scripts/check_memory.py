"""Checks that the host's memory stays flat: short requests through scheduler, engine and client, with no model.

  PYTHONPATH=.:tests python scripts/check_memory.py --requests=100000

Prints what the process grew by after the first 10,000 requests; exits with 1 where that is 5 MB or more.
"""

import argparse
import sys
import time

from helpers.host_memory import growth

NUM_FIRST = 10_000
LIMIT_BYTES = 5_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    flags = parser.parse_args()
    begin = time.perf_counter()
    grown = growth(flags.requests, NUM_FIRST)
    print(f"{flags.requests} requests, {time.perf_counter() - begin:.0f} s: grew by {grown} bytes")
    sys.exit(grown >= LIMIT_BYTES)


if __name__ == "__main__":
    main()
