"""Small-M int8 matmul, Pallas with the Mosaic backend: Hopper. Measured by the bench; not behind the API yet.

One warpgroup takes 64 outputs and one split of the inputs. TMA brings weights and activations in steps of one group,
several ahead; the weights become bf16 in registers and are the left operand of a wgmma whose columns are the rows of x,
8 or 16. Its result is scaled once a group. Parts of splits are float32 and added in order outside.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

_OUTPUTS = 64  # rows of a wgmma


def _kernel(
    w_gmem,  # int8[O I]
    x_gmem,  # [M I]
    scale_gmem,  # f32[I/g O]
    out_gmem,  # f32[splits M O]
    out_smem,  # f32[64 M]
    *,
    group_size: int,
    num_steps: int,
    num_stages: int,
):
    block, split = lax.axis_index("outputs"), lax.axis_index("splits")
    num_rows = x_gmem.shape[0]
    outputs = pl.ds(block * _OUTPUTS, _OUTPUTS)

    def tiled(dtype):
        return plgpu.TilingTransform((8, 128 // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(128)

    def multiply(indices, w_smem, x_smem, total):
        group = split * num_steps + indices[0]
        scale = plgpu.load(scale_gmem.at[group, outputs], (), layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
        weights = plgpu.load(w_smem, (), layout=plgpu.Layout.WGMMA_UPCAST_2X).astype(x_gmem.dtype)
        weights = plgpu.layout_cast(weights, plgpu.Layout.WGMMA)

        def accumulate(acc_ref):
            plgpu.wgmma(acc_ref, weights, x_smem.T)
            plgpu.wgmma_wait(0)
            return acc_ref[...]

        part = pl.run_scoped(accumulate, plgpu.WGMMAAccumulatorRef((_OUTPUTS, num_rows), jnp.float32))
        return total + part * lax.broadcast_in_dim(scale, part.shape, (0,))

    pipeline = plgpu.emit_pipeline(
        multiply,
        grid=(num_steps,),
        in_specs=[
            plgpu.BlockSpec(
                (_OUTPUTS, group_size), lambda k: (block, split * num_steps + k), transforms=tiled(jnp.int8)
            ),
            plgpu.BlockSpec(
                (num_rows, group_size), lambda k: (0, split * num_steps + k), transforms=tiled(x_gmem.dtype)
            ),
        ],
        max_concurrent_steps=min(num_stages, num_steps),
        init_carry=plgpu.layout_cast(jnp.zeros((_OUTPUTS, num_rows), jnp.float32), plgpu.Layout.WGMMA),
    )
    out_smem[...] = pipeline(w_gmem, x_gmem)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(out_smem, out_gmem.at[split, outputs])
    plgpu.wait_smem_to_gmem(0)


@functools.partial(jax.jit, static_argnames=("group_size", "k_splits", "num_stages"))
def matmul_mosaic(
    x: jax.Array,  # bf16[M I], M 8 or 16
    weight: jax.Array,  # int8[O I]
    scale: jax.Array,  # f32[I/g O], inputs first
    *,
    group_size: int,
    k_splits: int,
    num_stages: int,
) -> jax.Array:
    """Returns x @ dequantize(weight, scale).T in x's dtype; O is a multiple of 64, I of group_size * k_splits."""
    (m, k), n = x.shape, weight.shape[0]
    parts = plgpu.kernel(
        functools.partial(_kernel, group_size=group_size, num_steps=k // group_size // k_splits, num_stages=num_stages),
        out_type=jax.ShapeDtypeStruct((k_splits, n, m), jnp.float32),
        grid=(n // _OUTPUTS, k_splits),
        grid_names=("outputs", "splits"),
        scratch_types=[plgpu.SMEM((_OUTPUTS, m), jnp.float32)],
        kernel_name=f"matmul_mosaic_s{k_splits}_p{num_stages}",
    )(weight, x, scale)
    return parts.sum(axis=0).T.astype(x.dtype)
