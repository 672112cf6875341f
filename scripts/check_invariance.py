"""Runs many random schedules of the engine and compares each request, bit by bit, with the same request alone.

PYTHONPATH=.:tests python scripts/check_invariance.py --schedules=5000
"""

import argparse
import time

from helpers.invariance import Tally, World, run_schedule, without_extras


def main() -> None:
    """Prints what the schedules met; ends with an AssertionError at the first difference."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=5000)
    parser.add_argument("--first", type=int, default=0, help="seed of the first schedule")
    parser.add_argument("--plain", action="store_true", help="requests without extras, for several steps a dispatch")
    flags = parser.parse_args()
    begin, world, tally = time.perf_counter(), World(num_requests=400, seed=flags.first + 1), Tally()
    if flags.plain:
        world = world.with_requests([without_extras(request) for request in world.requests])
    for seed in range(flags.first, flags.first + flags.schedules):
        run_schedule(world, seed, tally)
        if tally.schedules % 250 == 0:
            print(f"{time.perf_counter() - begin:.0f} s: {tally}", flush=True)
    print(f"all equal: {tally}")


if __name__ == "__main__":
    main()
