"""A decode step made of kernels gives the logits of one made of references."""

import numpy as np
import pytest

from pallas_kernels.decode_step import bench
from pallas_kernels.decode_step.chain import Shape, Variant

SHAPE = Shape(num_layers=1, hidden=128, num_heads=4, num_kv_heads=2, mlp=128, vocabulary=96)


@pytest.mark.parametrize("matmul", ["fused", "parts"])
def test_a_step_of_fused_kernels_gives_the_logits_of_the_references(matmul):
    weights = bench.draw_weights(SHAPE, kind="int8")
    state, tables = bench.draw_state(SHAPE, 1)
    expected = bench.logits(weights, state, tables, Variant(name="exact", matmul="reference", attention="reference"))
    fused = Variant(name=matmul, matmul=matmul, append="kernel", interpret=True)
    found = np.asarray(bench.logits(weights, state, tables, fused))
    assert np.linalg.norm(found - np.asarray(expected)) / np.linalg.norm(expected) < 0.02
