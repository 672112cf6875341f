"""The picture of decode speeds: which lines it has, and what it refuses."""

import json
import sys

import pytest
from helpers.scripts import load_script, run_script

RECORD = {"shape": "llama-3.2-1b", "device": "a device", "context": 100, "dtype": "bfloat16", "group_size": 128}


def write_lines(path, quantization, speeds, **changes):
    """A file as bench_decode.py writes it: facts of the start, a batch that was wrong, and speeds at half the limit."""
    about = RECORD | {"quantization": quantization} | changes
    records = [{"batch": batch, "tokens_per_s": speed, "roofline_share": 0.5} for batch, speed in speeds.items()]
    lines = [{"start_s": 1.0}, {"batch": 2, "error": "differs"}, *records]
    path.write_text("\n".join(json.dumps(about | line) for line in lines))
    return str(path)


class Figure:
    """Takes all calls, and keeps the lines and the file."""

    drawn = None

    def __init__(self, **_):
        Figure.drawn = {}
        self.lines = [self, self]

    def plot(self, batches, speeds, _style, *, label):
        Figure.drawn[label] = dict(zip(batches, speeds, strict=True))
        return (self,)

    def savefig(self, path, **_):
        Figure.drawn["file"] = path

    def __getattr__(self, name):
        return lambda *args, **kwargs: self


def test_the_picture_has_our_speeds_their_rooflines_and_the_engines_of_that_shape(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", type("Module", (), {"Figure": Figure}))
    dense = write_lines(tmp_path / "bf16.jsonl", None, {8: 800.0, 1: 100.0})
    int8 = write_lines(tmp_path / "int8.jsonl", "int8", {1: 150.0})
    run_script("plot_decode", monkeypatch, dense, int8, f"--output={tmp_path / 'a.png'}")
    others = json.loads(load_script("plot_decode").OTHERS.read_text())
    assert Figure.drawn.pop("file") == tmp_path / "a.png"
    assert Figure.drawn.pop("photon_jax, bfloat16") == {1: 100.0, 8: 800.0}
    assert Figure.drawn.pop("bytes at 4.3 TB/s, bfloat16") == {1: 200.0, 8: 1600.0}
    assert Figure.drawn.pop("photon_jax, int8, groups of 128") == {1: 150.0}
    assert Figure.drawn.pop("bytes at 4.3 TB/s, int8, groups of 128") == {1: 300.0}
    assert Figure.drawn.keys() == {other["name"] for other in others if other["shape"] == RECORD["shape"]}


@pytest.mark.parametrize(
    ("speeds", "changes", "message"),
    [({}, {}, "no record of a batch with a speed"), ({1: 5.0}, {"shape": "tiny"}, "shapes llama-3.2-1b, tiny")],
)
def test_files_that_can_not_be_drawn_together_are_named(monkeypatch, tmp_path, capsys, speeds, changes, message):
    files = [write_lines(tmp_path / "a", None, {1: 5.0}), write_lines(tmp_path / "b", "int8", speeds, **changes)]
    with pytest.raises(SystemExit):
        run_script("plot_decode", monkeypatch, *files, "--output=c.png")
    assert message in capsys.readouterr().err
