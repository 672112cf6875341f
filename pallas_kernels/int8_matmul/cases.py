"""Named shapes of the small-M matmul for tests, benches and tuning."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One call; m rows, n outputs, k inputs, group_size 0 for dense weights."""

    name: str
    m: int
    n: int
    k: int
    group_size: int = 128
    dtype: str = "float32"


def make_inputs(case: Case, *, seed: int = 0) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns x, weights (int8 or dense) and scales (None if dense), of the sizes that real ones have."""
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.standard_normal((case.m, case.k)), case.dtype)
    if not case.group_size:
        return x, jnp.asarray(rng.standard_normal((case.n, case.k)) / case.k**0.5, case.dtype), None
    q = jnp.asarray(rng.integers(-127, 128, (case.n, case.k)), jnp.int8)
    scale = rng.uniform(0.5, 1.5, (case.n, -(-case.k // case.group_size))) / (127 * case.k**0.5)
    return x, q, jnp.asarray(scale, jnp.float16)


def small_cases() -> tuple[Case, ...]:
    """Returns cases that a CPU interprets in seconds, each for its own edge."""
    return (
        Case(name="one_row_g128", m=1, n=64, k=256),
        Case(name="odd_576_to_192_short_group", m=3, n=192, k=576),
        Case(name="odd_192_to_576_g32", m=16, n=576, k=192, group_size=32),
        Case(name="m8_g64", m=8, n=96, k=256, group_size=64),
        Case(name="m17_g32_bf16", m=17, n=64, k=128, group_size=32, dtype="bfloat16"),
        Case(name="dense_m1_odd", m=1, n=192, k=576, group_size=0),
        Case(name="dense_m16_bf16", m=16, n=192, k=576, group_size=0, dtype="bfloat16"),
    )


def llama_1b_shapes() -> dict[str, tuple[int, int]]:
    """Returns outputs and inputs of each linear layer of Llama-3.2-1B."""
    return {
        "qkv": (3072, 2048),
        "o": (2048, 2048),
        "gate_up": (16384, 2048),
        "down": (2048, 8192),
        "head": (128256, 2048),
    }


def real_cases() -> tuple[Case, ...]:
    """Returns the shapes of real models for a GPU."""
    shapes = llama_1b_shapes()
    wanted = [("qkv", m, group_size) for m in (1, 2, 4, 8, 16, 128) for group_size in (0, 128)]
    wanted += [("qkv", m, group_size) for m in (1, 8) for group_size in (32, 64)]
    wanted += [("gate_up", 1, 128), ("gate_up", 16, 128), ("down", 1, 128), ("down", 8, 128), ("down", 128, 128)]
    found = []
    for name, m, group_size in wanted:
        n, k = shapes[name]
        label = f"{name}_m{m}_g{group_size}"
        found.append(Case(name=label, m=m, n=n, k=k, group_size=group_size, dtype="bfloat16"))
    found.append(Case(name="short_group_bf16", m=1, n=576, k=576, dtype="bfloat16"))
    found.append(Case(name="short_group_m8_bf16", m=8, n=192, k=576, dtype="bfloat16"))
    found.append(Case(name="qkv_m4_f32", m=4, n=3072, k=2048))
    return tuple(found)
