"""Draws what scripts/bench_decode.py measured, beside the roofline and other engines, from a checkout.

  PYTHONPATH=. python scripts/plot_decode.py bf16.jsonl int8.jsonl --output=decode.png

Each file holds the JSON lines of one run (its `--out`), all of one shape. Output tokens a second over the batch: ours,
the byte roofline of the same weights, and the engines of other_engines.json on that shape. Needs matplotlib.
"""

import argparse
import json
import sys
from pathlib import Path

OTHERS = Path(__file__).with_name("other_engines.json")
Record = dict[str, object]
Points = dict[int, float]  # batch -> output tokens a second


def main() -> int:
    """Reads the files and writes the picture; returns 2 where there is nothing that can be drawn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="JSON lines of bench_decode.py")
    parser.add_argument("--output", required=True, type=Path, help="file for the picture")
    flags = parser.parse_args()
    runs = [read_records(path) for path in flags.files]
    for path, run in zip(flags.files, runs, strict=True):
        if not run:
            parser.error(f"{path} has no record of a batch with a speed; give the --out file of bench_decode.py")
    shapes = {record["shape"] for run in runs for record in run}
    if len(shapes) > 1:
        parser.error(f"the files have the shapes {', '.join(sorted(shapes))}; draw those of one shape")
    draw(runs, flags.output)
    return 0


def read_records(path: Path) -> list[Record]:
    """Returns the records of batches that were right, in the order of their sizes."""
    records = [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{")]
    return sorted((record for record in records if "tokens_per_s" in record), key=lambda record: record["batch"])


def weights_name(record: Record) -> str:
    """Returns how a record's weights are kept, for people."""
    return f"{record['quantization']}, groups of {record['group_size']}" if record["quantization"] else record["dtype"]


def lines(runs: list[list[Record]]) -> list[tuple[str, str, Points]]:
    """Returns label, style and points of each line: ours with their rooflines, then the other engines."""
    found = []
    for run in runs:
        name = weights_name(run[0])
        speeds = {record["batch"]: record["tokens_per_s"] for record in run}
        limits = {record["batch"]: record["tokens_per_s"] / record["roofline_share"] for record in run}
        found += [(f"photon_jax, {name}", "o-", speeds), (f"bytes at 4.3 TB/s, {name}", "--", limits)]
    for other in json.loads(OTHERS.read_text()):
        if other["shape"] == runs[0][0]["shape"]:
            found.append((other["name"], ".-", {int(batch): speed for batch, speed in other["tokens_per_s"].items()}))
    return found


def draw(runs: list[list[Record]], path: Path) -> None:
    """Writes the picture."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 5), layout="constrained")
    axes, first = figure.subplots(), runs[0][0]
    for label, style, points in lines(runs):
        (line,) = axes.plot(list(points), list(points.values()), style, label=label)
        if style == "--":  # a roofline has the color of the line that it belongs to
            line.set_color(axes.lines[-2].get_color())
    axes.set(xscale="log", yscale="log", xlabel="rows that decode at once", ylabel="output tokens per second")
    axes.set_title(f"{first['shape']}, {first['device']}, prompt {first['context']}")
    batches = sorted({record["batch"] for run in runs for record in run})
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    sys.exit(main())
