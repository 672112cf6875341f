"""Tuned tables: exact keys, one winner each, and what happens without a table."""

import json

import pytest

from pallas_kernels.common.device import device_name
from pallas_kernels.common.tuning import lookup_tuned, parse_table
from pallas_kernels.int8_matmul import tiles as matmul_tiles
from pallas_kernels.paged_attention import tiles as attention_tiles

ENTRY = {
    "key": {"m": 1, "n": 64},
    "tiles": {"method": "sum", "tile_n": 4},
    "us": 1.5,
    "jax": "0.11.2",
    "date": "2026-12-01",
}


def test_a_key_matches_in_any_order_of_its_items():
    table = parse_table(json.dumps(ENTRY), source="here")
    assert table == {'{"m": 1, "n": 64}': {"method": "sum", "tile_n": 4}}


def test_a_key_that_occurs_twice_is_refused():
    line = json.dumps(ENTRY)
    with pytest.raises(ValueError, match=r"here line 2: key .* occurs twice"):
        parse_table(f"{line}\n{line}", source="here")


def test_an_entry_without_tiles_is_refused():
    with pytest.raises(ValueError, match="line 1: expected an object with key and tiles"):
        parse_table('{"key": {}}', source="here")


def test_an_unmeasured_device_gets_the_heuristic():
    assert lookup_tuned("int8_matmul", "no_such_device", {"m": 1}) is None
    shape = {"m": 1, "n": 64, "k": 256, "group_size": 128}
    chosen = matmul_tiles.choose_tiles(device="no_such_device", dtype="bfloat16", **shape)
    assert chosen == matmul_tiles.heuristic(**shape)
    chosen = attention_tiles.choose_tiles(
        device="no_such_device", head_dim=64, num_groups=4, block_size=64, dtype="bfloat16"
    )
    assert chosen == attention_tiles.heuristic(head_dim=64, dtype="bfloat16")


def test_the_device_name_is_safe_in_a_file_name():
    class Device:
        device_kind = "NVIDIA H200 (SXM)"

    assert device_name(Device()) == "nvidia_h200_sxm"
    assert device_name() == "cpu"
