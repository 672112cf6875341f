"""Tuned tables: measured winners per device, as data beside each kernel.

A table is `<kernel>/tuned/<device>.json`, one JSON object a line:
`{"key": {...}, "tiles": {...}, "us": 12.3, "jax": "0.11.2", "date": "2026-12-01"}`. A lookup needs the exact key; what
the table doesn't hold, the kernel's `heuristic()` answers.
"""

import functools
import importlib.resources
import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Key = Mapping[str, int | str]


def freeze_key(key: Key) -> str:
    """Returns the canonical text of a key, in which the order of its items doesn't matter."""
    return json.dumps(dict(key), sort_keys=True)


def parse_table(text: str, *, source: str) -> dict[str, dict[str, int | str]]:
    """Returns tiles by frozen key.

    Raises:
      ValueError: a line is no JSON object with `key` and `tiles`, or a key occurs twice.
    """
    table: dict[str, dict[str, int | str]] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        entry = json.loads(line)
        if not isinstance(entry, dict) or not {"key", "tiles"} <= entry.keys():
            raise ValueError(f"{source} line {number}: expected an object with key and tiles, got {line[:80]!r}")
        frozen = freeze_key(entry["key"])
        if frozen in table:
            raise ValueError(f"{source} line {number}: key {frozen} occurs twice; keep the winner")
        table[frozen] = dict(entry["tiles"])
    return table


@functools.cache
def load_table(kernel: str, device: str) -> dict[str, dict[str, int | str]]:
    """Returns the tuned table of a kernel for a device, empty when none was measured.

    Args:
      kernel: folder of the kernel in this package, such as `int8_matmul`.
      device: as `device_name()` spells it.
    """
    path = importlib.resources.files("pallas_kernels") / kernel / "tuned" / f"{device}.json"
    return parse_table(path.read_text(), source=str(path)) if path.is_file() else {}


def lookup_tuned(kernel: str, device: str, key: Key) -> dict[str, int | str] | None:
    """Returns the measured tiles for exactly this key, or None."""
    return load_table(kernel, device).get(freeze_key(key))


def winner_lines(rows: Sequence[Mapping[str, Any]], *, jax_version: str, date: str) -> list[str]:
    """Returns the lines of a table, sorted by key: for each key the tiles with the least microseconds.

    Where several cases share a key, such as batches of attention, the tiles with the least geometric mean over all of
    them win; those that miss a case don't take part.

    Args:
      rows: results with `key`, `config` (the fields of the tiles), `case` and `us`.
    """
    times: dict[str, dict[str, dict[str, float]]] = {}
    for row in rows:
        tiles = times.setdefault(freeze_key(row["key"]), {}).setdefault(freeze_key(row["config"]), {})
        tiles[row["case"]] = float(row["us"])
    lines = []
    for key, by_tiles in sorted(times.items()):
        num_cases = max(len(cases) for cases in by_tiles.values())
        means = {t: statistics.geometric_mean(c.values()) for t, c in by_tiles.items() if len(c) == num_cases}
        winner = min(means, key=means.__getitem__)
        entry = {"key": json.loads(key), "tiles": json.loads(winner), "us": round(means[winner], 2)}
        lines.append(json.dumps(entry | {"jax": jax_version, "date": date}))
    return lines
