"""Memory: a model that can't fit is refused before it is read, and the cache gets what the steps leave."""

import pytest
from helpers.tiny_checkpoint import write_checkpoint
from helpers.tiny_model import tiny_config

from photon_jax.cache.kv_cache import bytes_per_block
from photon_jax.checkpoint import load
from photon_jax.config import make_engine_config
from photon_jax.engine import memory
from photon_jax.engine.controls import control_bytes
from photon_jax.errors import ConfigError
from photon_jax.llm import LLM
from photon_jax.models.params import abstract_params, num_bytes

CONFIG = make_engine_config(None, block_size=16, max_num_seqs=4)


def test_weights_and_the_smallest_cache_must_fit(monkeypatch):
    model = tiny_config()
    needed = num_bytes(abstract_params(model)) + 2 * bytes_per_block(model, 16, "auto")
    monkeypatch.setattr(memory, "free_bytes", lambda _: needed)
    memory.check_fits(model, CONFIG)
    monkeypatch.setattr(memory, "free_bytes", lambda _: needed - 1)
    with pytest.raises(ConfigError) as raised:
        memory.check_fits(model, CONFIG)
    for number in (num_bytes(abstract_params(model)), bytes_per_block(model, 16, "auto"), needed - 1):
        assert str(number) in str(raised.value)


def test_blocks_that_are_asked_for_count(monkeypatch):
    model = tiny_config()
    monkeypatch.setattr(memory, "free_bytes", lambda _: num_bytes(abstract_params(model)) + 10_000)
    with pytest.raises(ConfigError, match="the 999 blocks that it needs"):
        memory.check_fits(model, make_engine_config(None, block_size=16, num_blocks=999))


def test_no_weight_is_read_of_a_model_that_does_not_fit(monkeypatch, tmp_path):
    folder = write_checkpoint(tmp_path / "model")
    monkeypatch.setattr(memory, "free_bytes", lambda _: 1000)
    monkeypatch.setattr(load, "fill_params", None)  # calling it would fail otherwise
    with pytest.raises(ConfigError, match=r"the model doesn.t fit: .* but 1000 bytes are free"):
        LLM(folder, progress=False)


@pytest.mark.parametrize("workspace", [0, 50_000])
def test_the_fraction_is_of_what_is_free_and_holds_workspace_and_controls_too(monkeypatch, workspace):
    monkeypatch.setattr(memory.jax, "default_backend", lambda: "gpu")
    model, free = tiny_config(), 3_000_000
    config = make_engine_config(None, block_size=16, max_num_seqs=4, memory_fraction=0.5)
    layout = memory.plan_pool(model, config, max_model_len=10**6, free=free, workspace=workspace)
    block = bytes_per_block(model, 16, "auto")
    used = layout.num_blocks * block + workspace + control_bytes(vocab_size=model.vocab_size, num_slots=5)
    assert used <= free // 2 < used + block


def test_steps_that_leave_nothing_for_a_cache_are_an_error_with_the_numbers():
    with pytest.raises(ConfigError, match=r"1000000 bytes are free, memory_fraction 0.9 .* 2000000"):
        memory.plan_pool(
            tiny_config(),
            make_engine_config(None, max_num_seqs=1),
            max_model_len=100,
            free=1_000_000,
            workspace=2_000_000 - control_bytes(vocab_size=258, num_slots=2),
        )
