"""A small model, started once for the benchmarks."""

import pytest


@pytest.fixture(scope="session")
def llm():
    # Not at the top: this file is read before the test settings of the folder above are made.
    from photon_jax.bench.shapes import draw_weights, shape_config
    from photon_jax.config import make_engine_config
    from photon_jax.llm import LLM

    config = shape_config("tiny", "auto")
    settings = make_engine_config(
        None,
        max_num_seqs=3,
        max_num_batched_tokens=8,
        max_model_len=32,
        num_blocks=9,
        block_size=16,
        steps_ahead=1,
        max_steps_per_dispatch=2,
        strict_compile=True,
        warmup="lazy",
    )
    with LLM(params=draw_weights(config), config=config, engine_config=settings, progress=False) as llm:
        yield llm
