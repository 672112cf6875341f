"""Sizes of the two-limb products on Hopper: what a block works on, and what follows from it for a call."""

import dataclasses

import jax.numpy as jnp

from pallas_kernels.common.errors import KernelUnsupportedError
from pallas_kernels.common.limbs import NUM_LIMBS

OUTPUTS = 64  # rows of a wgmma, outputs of a warpgroup
TILE_K = 128  # inputs of one step of the ring
UNIT = 16  # bytes; TMA reads whole ones, from multiples of it
_MAX_BOX = 256  # elements of a TMA copy along an axis
MAX_ROWS = 128
_COLUMNS = 128  # of an accumulator at most, so that several fit into registers
_REGISTERS = 64  # of accumulators, in a thread
_ALL_REGISTERS = 512  # of one thread of each warpgroup together
_MANY = 256  # rows times consumers from which an even share of the registers is too little for a consumer
PRODUCER_REGISTERS = 40
_SHARED_BYTES = 226 * 1024  # of a block, barriers and alignment left out
_STAGES = range(3, 9)  # that hide the way from global memory


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MosaicTiles:
    """What a block works on.

    Attributes:
      warpgroups: consumers of a block, 64 outputs each.
      stages: steps of 128 inputs that the ring holds.
      blocks: largest number of blocks; each takes every so many'th tile.
    """

    warpgroups: int = 1
    stages: int = 8
    blocks: int = 264

    @property
    def label(self) -> str:
        """The sizes as a short name for kernels and tables."""
        return f"mosaic_g{self.warpgroups}_p{self.stages}_b{self.blocks}"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Sizes that follow from shapes and tiles; R are the padded rows."""

    group_size: int
    tiles: MosaicTiles
    num_rows: int  # M
    rows: int  # R: the rows, padded to 8, 16, 32, 64 or 128
    swizzle: int
    steps: int  # of a tile
    num_tiles: int
    scale_window: int  # groups whose weight scales a tile loads, a whole number of 16 bytes
    x_scale_window: int

    @property
    def outputs(self) -> int:
        """Outputs of a tile."""
        return OUTPUTS * self.tiles.warpgroups

    @property
    def groups(self) -> int:
        """Groups of a step."""
        return TILE_K // self.group_size

    @property
    def block_rows(self) -> int:
        """Rows whose limbs are the columns of one accumulator."""
        return min(self.rows, _COLUMNS // NUM_LIMBS)

    @property
    def in_flight(self) -> int:
        """Products whose accumulators, block_rows registers each, a warpgroup holds at a time."""
        return max(1, _REGISTERS // self.block_rows)

    @property
    def row_blocks(self) -> int:
        """Blocks of rows, each with an accumulator of its own."""
        return self.rows // self.block_rows

    @property
    def is_joined(self) -> bool:
        """Whether one copy brings high and low limbs."""
        return self.num_rows == self.block_rows

    @property
    def copied_rows(self) -> int:
        """Rows of limbs that one copy brings."""
        return self.block_rows * (NUM_LIMBS if self.is_joined else 1)

    @property
    def limb_copies(self) -> list[tuple[int, int]]:
        """Limb and first row of each copy, in their order in shared memory: a block's high limbs, then its low ones."""
        if self.is_joined:
            return [(0, 0)]
        return [(limb, block * self.block_rows) for block in range(self.row_blocks) for limb in range(NUM_LIMBS)]

    @property
    def blocks(self) -> int:
        """Blocks of the grid."""
        return min(self.tiles.blocks, self.num_tiles)

    def shared_bytes(self, scale_dtype: jnp.dtype) -> int:
        """Returns the bytes of shared memory that a block takes, without its barriers."""
        ring = self.tiles.stages * TILE_K * (self.outputs + NUM_LIMBS * self.rows)
        scales = (
            self.outputs * self.scale_window * jnp.dtype(scale_dtype).itemsize + self.rows * self.x_scale_window * 4
        )
        return ring + 2 * scales + self.tiles.warpgroups * self.block_rows * OUTPUTS * 4

    @property
    def consumer_registers(self) -> int | None:
        """Registers of a consumer's thread where it needs more than an even share, None elsewhere."""
        consumers = self.tiles.warpgroups
        if consumers * self.rows < _MANY:
            return None
        pool = _ALL_REGISTERS // (consumers + 1) // 8 * 8 * (consumers + 1)
        return (pool - PRODUCER_REGISTERS) // consumers // 8 * 8


def _padded_window(num_groups: int, itemsize: int) -> int:
    """Returns num_groups, raised to an odd number of 16 bytes, so that rows of scales fall into different banks."""
    unit = UNIT // itemsize
    return (-(-num_groups // unit) | 1) * unit


def make_plan(
    num_rows: int, weight_shape: tuple[int, ...], scale_dtype: jnp.dtype, group_size: int, tiles: MosaicTiles
) -> Plan:
    """Returns what follows from shapes and tiles, for weights [O I]."""
    num_outputs, num_inputs = weight_shape
    steps = -(-num_inputs // TILE_K)
    groups = steps * TILE_K // group_size
    return Plan(
        group_size=group_size,
        tiles=tiles,
        num_rows=num_rows,
        rows=max(8, 1 << (num_rows - 1).bit_length()),
        swizzle=_swizzle(num_inputs, group_size),
        steps=steps,
        num_tiles=-(-num_outputs // (OUTPUTS * tiles.warpgroups)),
        scale_window=_padded_window(groups, jnp.dtype(scale_dtype).itemsize),
        x_scale_window=_padded_window(groups, 4),
    )


def wide_tiles(
    num_rows: int, weight_shape: tuple[int, ...], scale_dtype: jnp.dtype, group_size: int
) -> MosaicTiles | None:
    """Returns tiles for many outputs: two consumers a block and as many steps as its memory holds, None if too few."""
    for stages in range(_STAGES.stop - 1, _STAGES.start - 1, -1):
        tiles = MosaicTiles(warpgroups=2, stages=stages, blocks=132)
        plan = make_plan(num_rows, weight_shape, scale_dtype, group_size, tiles)
        if plan.shared_bytes(scale_dtype) <= _SHARED_BYTES:
            return tiles
    return None


def _swizzle(num_inputs: int, group_size: int) -> int:
    """Returns the bytes of a row that TMA takes at a time: a whole number of them must fit groups and inputs."""
    return next((size for size in (128, 64, 32) if size <= group_size and num_inputs % size == 0), 0)


def check_support(
    num_rows: int, weight_shape: tuple[int, ...], scale_dtype: jnp.dtype, group_size: int, tiles: MosaicTiles
) -> None:
    """Raises KernelUnsupportedError for what the kernel can't compute."""
    num_outputs, num_inputs = weight_shape
    if num_rows > MAX_ROWS:
        raise KernelUnsupportedError(f"the Mosaic limb product takes at most {MAX_ROWS} rows, got {num_rows}")
    if not _swizzle(num_inputs, group_size) or num_outputs % 8:
        raise KernelUnsupportedError(
            "the Mosaic limb product takes a multiple of 32 inputs and of 8 outputs, "
            f"got {num_inputs} and {num_outputs}"
        )
    plan = make_plan(num_rows, weight_shape, scale_dtype, group_size, tiles)
    if max(plan.scale_window, plan.x_scale_window) > _MAX_BOX:
        raise KernelUnsupportedError(
            f"the Mosaic limb product has no room for the scales of {plan.steps * plan.groups} groups"
        )
    if plan.shared_bytes(scale_dtype) > _SHARED_BYTES:
        raise KernelUnsupportedError(
            f"{tiles.label} needs {plan.shared_bytes(scale_dtype)} bytes of shared memory for {plan.rows} rows, "
            f"{_SHARED_BYTES} are there; take fewer stages"
        )
