"""Products of rows in limbs with the Mosaic kernel: beside the Triton kernel, whose sums differ in the last bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cuda_lowering import lower_for_cuda

from pallas_kernels import KernelUnsupportedError, LimbRows, limb_matmul_parts, split_limbs_reference
from pallas_kernels.int8_matmul.cases import Case, llama_1b_shapes, make_inputs
from pallas_kernels.int8_matmul.limb_tiles import LimbTiles
from pallas_kernels.int8_matmul.mosaic_tiles import MosaicTiles, wide_tiles


@pytest.mark.newer_jax
@pytest.mark.parametrize(
    ("case", "tiles"),
    [
        (Case(name="m8_g64", m=8, n=192, k=576, group_size=64), MosaicTiles(blocks=2)),
        (Case(name="ragged_m5", m=5, n=200, k=576), MosaicTiles(stages=3)),
        (Case(name="m64", m=64, n=328, k=256), MosaicTiles(warpgroups=2, stages=5, blocks=1)),
        (Case(name="ragged_m70_g32", m=70, n=128, k=256, group_size=32), MosaicTiles(warpgroups=2, stages=3)),
    ],
    ids=lambda one: getattr(one, "name", None),
)
def test_the_product_is_that_of_the_triton_kernel(case, tiles):
    x, q, scale = make_inputs(case)
    x = split_limbs_reference(x, group_size=case.group_size)
    found = limb_matmul_parts(x, q, scale, tiles=tiles, interpret=True)
    same = LimbTiles(tile_m=min(64, max(8, 1 << (case.m - 1).bit_length())))
    expected = limb_matmul_parts(x, q, scale, tiles=same, interpret=True)
    assert found.shape == expected.shape == (1, case.m, case.n)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())


@pytest.mark.newer_jax
@pytest.mark.parametrize("m", [17, 32, 64, 128])
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("shape", ["gate_up", "head"])
def test_it_lowers_for_cuda(shape, m, group_size):
    n, k = llama_1b_shapes()[shape]
    tiles = wide_tiles(m, (n, k), jnp.dtype("float32"), group_size)
    assert (tiles is None) == (m * 32 // group_size >= 64)  # the scales take the room
    if tiles is None:
        return
    scales = [((rows, k // group_size), jnp.float32) for rows in (m, n)]
    arrays = ((2, m, k), jnp.int8), scales[0], ((n, k), jnp.int8), scales[1]
    limbs, x_scale, q, scale = (jax.ShapeDtypeStruct(*one) for one in arrays)
    x = LimbRows(limbs=limbs, scale=x_scale, group_size=group_size)
    text = lower_for_cuda(lambda *given: limb_matmul_parts(*given, tiles=tiles), x, q, scale)
    assert text.count("mosaic_gpu") >= 1 and "xla.gpu.triton" not in text


def test_what_it_can_not_compute_is_named():
    x, q, scale = make_inputs(Case(name="wide", m=8, n=64, k=256))
    x = split_limbs_reference(x, group_size=128)
    with pytest.raises(KernelUnsupportedError, match="take fewer stages"):
        limb_matmul_parts(x, q, scale, tiles=MosaicTiles(stages=40))
    odd = split_limbs_reference(jnp.ones((8, 200)), group_size=128)
    with pytest.raises(KernelUnsupportedError, match="a multiple of 32 inputs and of 8 outputs, got 200 and 64"):
        limb_matmul_parts(odd, q[:, :200], scale, tiles=MosaicTiles())
    many = LimbRows(limbs=jnp.zeros((2, 129, 256), jnp.int8), scale=jnp.zeros((129, 2)), group_size=128)
    with pytest.raises(KernelUnsupportedError, match="takes at most 128 rows, got 129"):
        limb_matmul_parts(many, q, scale, tiles=MosaicTiles())
