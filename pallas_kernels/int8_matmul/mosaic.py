"""Products of two-limb activations with int8 weights, Pallas with the Mosaic backend, for Hopper.

The tensor cores take weights and limbs as they are stored: a warpgroup's wgmma has 64 outputs as its rows and the rows
of the activations as its columns, the high limbs first. A producer warpgroup only copies: TMA brings steps of weights
and limbs into a ring of shared memory, and each tile's scales ahead of it. Consumer warpgroups multiply group by group
into accumulators of their own, and apply the scales of one group while the next one's product runs. Tiles that one
block takes in turn follow each other in the ring without a gap.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common.limbs import NUM_LIMBS, LimbRows
from pallas_kernels.int8_matmul.mosaic_tiles import (
    OUTPUTS,
    PRODUCER_REGISTERS,
    TILE_K,
    UNIT,
    MosaicTiles,
    Plan,
    check_support,
    make_plan,
)

# Of a wgmma's result, and of columns of scales that a thread holds for the outputs or rows whose products it has.
_PRODUCT = plgpu.Layout._WGMMA_ACC_32BIT
_OF_OUTPUTS = plgpu.Layout.TILED(
    plgpu.Tiling(((64, 1), (16, 1), (8, 1))),
    warp_dims=(-6,),
    lane_dims=(-2, plgpu.Replicated(4)),
    vector_dim=-1,
)
_OF_ROWS = plgpu.Layout.TILED(
    plgpu.Tiling(((8, 1), (2, 1))),
    warp_dims=(plgpu.Replicated(4),),
    lane_dims=(plgpu.Replicated(8), -4),
    vector_dim=-1,
)


def _num_block_tiles(plan: Plan):
    return lax.div(plan.num_tiles - 1 - lax.axis_index("blocks"), plan.blocks) + 1


def _first_output(plan: Plan, index):
    """Returns the first output of this block's index-th tile."""
    return (lax.axis_index("blocks") + index * plan.blocks) * plan.outputs


class _Copies:
    """Copies from global to shared memory, all by TMA."""

    def __init__(self, refs: dict[str, Any], plan: Plan) -> None:
        self._refs, self._plan = refs, plan

    def _inputs(self, step):
        index, inner = lax.div(step, self._plan.steps), lax.rem(step, self._plan.steps)
        return _first_output(self._plan, index), pl.ds(inner * TILE_K, TILE_K)

    def weights(self, step, slot):
        output, inputs = self._inputs(step)
        source = self._refs["w_gmem"].at[pl.ds(output, self._plan.outputs), inputs]
        plgpu.copy_gmem_to_smem(source, self._refs["w"].at[slot], self._refs["full"].at[slot])

    def limbs(self, step, slot):
        _, inputs = self._inputs(step)
        size = self._plan.copied_rows
        for place, (limb, first) in enumerate(self._plan.limb_copies):
            source = self._refs["x_gmem"].at[limb, pl.ds(first, size), inputs]
            target = self._refs["x"].at[slot, pl.ds(place * size, size)]
            plgpu.copy_gmem_to_smem(source, target, self._refs["full"].at[slot])

    def scales(self, name, index):
        """Copies a tile's scales of the weights, or of the rows (x_scale)."""
        source, target = self._refs[f"{name}_gmem"], self._refs[name].at[lax.rem(index, 2)]
        first = 0 if name == "x_scale" else _first_output(self._plan, index)
        source = source.at[pl.ds(first, target.shape[0]), pl.ds(0, target.shape[1])]
        plgpu.copy_gmem_to_smem(source, target, self._refs["scale_full"].at[lax.rem(index, 2)])


def _produce(refs: dict[str, Any], plan: Plan) -> None:
    """Copies scales and steps of all tiles of this block, each as soon as its place in shared memory is free."""
    stages, steps = plan.tiles.stages, plan.steps
    copies = _Copies(refs, plan)
    count = _num_block_tiles(plan)
    num_first = min(stages, steps)

    copies.scales("scale", 0)
    copies.scales("x_scale", 0)
    pl.loop(0, num_first)(lambda step: copies.weights(step, step))
    pl.loop(0, num_first)(lambda step: copies.limbs(step, step))

    @pl.loop(num_first, count * steps)
    def _(step):
        index = lax.div(step, steps)

        @pl.when(lax.rem(step, steps) == 0)
        def _():
            pl.when(index >= 2)(lambda: plgpu.barrier_wait(refs["scale_empty"].at[lax.rem(index, 2)]))
            copies.scales("scale", index)
            copies.scales("x_scale", index)

        slot = lax.rem(step, stages)
        pl.when(step >= stages)(lambda: plgpu.barrier_wait(refs["empty"].at[slot]))
        copies.weights(step, slot)
        copies.limbs(step, slot)

    @pl.loop(jnp.maximum(count * steps - stages, 0), count * steps)
    def _(step):  # what was copied must have been read before the block ends
        plgpu.barrier_wait(refs["empty"].at[lax.rem(step, stages)])

    @pl.loop(jnp.maximum(count - 2, 0), count)
    def _(index):
        plgpu.barrier_wait(refs["scale_empty"].at[lax.rem(index, 2)])


def _consume(refs: dict[str, Any], plan: Plan, warpgroup) -> None:
    """Multiplies, scales and stores the 64 outputs of this warpgroup, for all tiles of this block."""
    stages = plan.tiles.stages
    outputs = pl.ds(warpgroup * OUTPUTS, OUTPUTS)

    def run_tile(index, _):
        scale_slot = lax.rem(index, 2)
        plgpu.barrier_wait(refs["scale_full"].at[scale_slot])

        def run_step(inner, totals):
            slot = lax.rem(index * plan.steps + inner, stages)
            plgpu.barrier_wait(refs["full"].at[slot])
            return _multiply(refs, plan, outputs, slot, scale_slot, inner, totals)

        zeros = plgpu.layout_cast(jnp.zeros((OUTPUTS, plan.block_rows), jnp.float32), _PRODUCT)
        totals = lax.fori_loop(0, plan.steps, run_step, (zeros,) * plan.row_blocks)
        _store(refs, plan, warpgroup, index, totals)
        # Only now: the store's fence also orders the reads of the scales before the copy that overwrites them.
        plgpu.barrier_arrive(refs["scale_empty"].at[scale_slot])
        return _

    lax.fori_loop(0, _num_block_tiles(plan), run_tile, None)
    plgpu.wait_smem_to_gmem(0)


def _multiply(refs, plan: Plan, outputs, slot, scale_slot, inner, totals):
    """Returns the totals, one f32[64 rows] for each block of rows, with one step's products added."""
    width = NUM_LIMBS * plan.block_rows
    size = plan.group_size
    totals = list(totals)
    all_parts = [(group, block) for group in range(plan.groups) for block in range(plan.row_blocks)]

    def accumulate(parts, *accs):
        for (group, block), acc in zip(parts, accs, strict=True):
            inputs = pl.ds(group * size, size)
            columns = refs["x"].at[slot, pl.ds(block * width, width), inputs]
            plgpu.wgmma(acc, refs["w"].at[slot, outputs, inputs], columns.T)
        for number, ((group, block), acc) in enumerate(zip(parts, accs, strict=True)):
            column = inner * plan.groups + group
            product = plgpu.wgmma_accumulator_load(acc, wait_n=len(parts) - 1 - number)
            if (group, block) == all_parts[-1]:
                plgpu.barrier_arrive(refs["empty"].at[slot])
            product = plgpu.layout_cast(product, _PRODUCT)
            high, low = product[:, : plan.block_rows], product[:, plan.block_rows :]
            whole = (high * 256 + low).astype(jnp.float32)
            rows = pl.ds(block * plan.block_rows, plan.block_rows)
            scale = _load_column(refs["scale"].at[scale_slot, outputs], column, _OF_OUTPUTS, whole.shape, 0)
            x_scale = _load_column(refs["x_scale"].at[scale_slot, rows], column, _OF_ROWS, whole.shape, 1)
            totals[block] = totals[block] + whole * (scale * x_scale)
        return tuple(totals)

    for start in range(0, len(all_parts), plan.in_flight):
        parts = all_parts[start : start + plan.in_flight]
        accs = [plgpu.WGMMAAccumulatorRef((OUTPUTS, width), jnp.int32)] * len(parts)
        totals[:] = pl.run_scoped(functools.partial(accumulate, parts), *accs)
    return tuple(totals)


def _load_column(ref, column, layout, shape, axis: int):
    """Returns a column of scales as f32 of a product's shape, along one of its axes."""
    found = plgpu.load(ref.at[:, pl.ds(column, 1)], layout=layout, optimized=False).astype(jnp.float32).sum(axis=1)
    return plgpu.layout_cast(lax.broadcast_in_dim(found, shape, (axis,)), _PRODUCT)


def _store(refs, plan: Plan, warpgroup, index, totals) -> None:
    """Stores f32[R 64] as the rows of the parts; TMA leaves out what lies past the last row or output."""
    place = pl.ds(_first_output(plan, index) + warpgroup * OUTPUTS, OUTPUTS)
    for block, total in enumerate(totals):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        total = plgpu.layout_cast(plgpu.layout_cast(total, plgpu.Layout.WGMMA), plgpu.Layout.WGMMA_TRANSPOSED)
        refs["out"].at[warpgroup].T[...] = total
        plgpu.commit_smem()
        rows = pl.ds(block * plan.block_rows, plan.block_rows)
        plgpu.copy_smem_to_gmem(refs["out"].at[warpgroup], refs["out_gmem"].at[0, rows, place])


def _kernel(w_gmem, x_gmem, scale_gmem, x_scale_gmem, out_gmem, *, plan: Plan, **scratch) -> None:
    refs = {
        "w_gmem": w_gmem,
        "x_gmem": x_gmem,
        "scale_gmem": scale_gmem,
        "x_scale_gmem": x_scale_gmem,
        "out_gmem": out_gmem,
        **scratch,
    }
    warpgroup, consumers = lax.axis_index("warpgroup"), plan.tiles.warpgroups
    registers = plan.consumer_registers

    @pl.when(warpgroup == consumers)
    def _():
        if registers:
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        _produce(refs, plan)

    @pl.when(warpgroup < consumers)
    def _():
        if registers:
            plgpu.set_max_registers(registers, action="increase")
        _consume(refs, plan, warpgroup)


def _scratch(plan: Plan, scale_dtype) -> dict[str, Any]:
    swizzle = plan.swizzle
    tiled = (plgpu.TilingTransform((8, swizzle)), plgpu.SwizzleTransform(swizzle))
    tiles, consumers = plan.tiles, plan.tiles.warpgroups
    num_copies = 1 + len(plan.limb_copies)
    return {
        "w": plgpu.SMEM((tiles.stages, plan.outputs, TILE_K), jnp.int8, transforms=tiled),
        "x": plgpu.SMEM((tiles.stages, NUM_LIMBS * plan.rows, TILE_K), jnp.int8, transforms=tiled),
        "scale": plgpu.SMEM((2, plan.outputs, plan.scale_window), scale_dtype),
        "x_scale": plgpu.SMEM((2, plan.rows, plan.x_scale_window), jnp.float32),
        "out": plgpu.SMEM((consumers, plan.block_rows, OUTPUTS), jnp.float32),
        "full": plgpu.Barrier(num_arrivals=num_copies, num_barriers=tiles.stages),
        "empty": plgpu.Barrier(num_arrivals=consumers, num_barriers=tiles.stages),
        "scale_full": plgpu.Barrier(num_arrivals=2, num_barriers=2),
        "scale_empty": plgpu.Barrier(num_arrivals=consumers, num_barriers=2),
    }


def _aligned(scale: jax.Array) -> jax.Array:
    """Returns scales [N G], with groups added until a row is a multiple of 16 bytes, as TMA needs it."""
    multiple = UNIT // scale.dtype.itemsize
    return jnp.pad(scale, ((0, 0), (0, -scale.shape[1] % multiple))) if scale.shape[1] % multiple else scale


@functools.partial(jax.jit, static_argnames=("tiles", "interpret"))
def limb_parts_mosaic(
    x: LimbRows,  # [M I]
    q: jax.Array,  # i8[O I]
    scale: jax.Array,  # f32 or f16[O ceil(I/g)]
    *,
    tiles: MosaicTiles,
    interpret: bool = False,
) -> jax.Array:
    """Returns the product as its only part, f32[1 M O]; a row's bits don't depend on the others or on the tiles.

    Raises:
      KernelUnsupportedError: the kernel can't compute these shapes; other arguments are checked by the caller.
    """
    num_rows, num_outputs, limbs = x.shape[0], q.shape[0], x.limbs
    check_support(num_rows, q.shape, scale.dtype, x.group_size, tiles)
    if num_rows > 8:  # TMA takes rows in eights, a block of them from its first
        limbs = jnp.pad(limbs, ((0, 0), (0, -num_rows % (8 if num_rows <= 64 else 64)), (0, 0)))
    plan = make_plan(limbs.shape[1], q.shape, scale.dtype, x.group_size, tiles)
    if plan.is_joined:
        limbs = limbs.reshape(1, -1, limbs.shape[2])
    out: jax.Array = plgpu.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=jax.ShapeDtypeStruct((1, plan.num_rows, num_outputs), jnp.float32),
        scratch_types=_scratch(plan, scale.dtype),
        grid=(plan.blocks,),
        grid_names=("blocks",),
        num_threads=tiles.warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        kernel_name=f"limbs_{tiles.label}_m{plan.rows}_g{x.group_size}",
        interpret=plgpu.InterpretGPUParams() if interpret else None,
    )(q, limbs, _aligned(scale), _aligned(x.scale))
    return out[:, :num_rows]
