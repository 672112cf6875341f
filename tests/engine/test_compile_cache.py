"""The compile cache: a folder that an engine's programs come from, with no setting of the process left changed."""

import threading

import jax
import jax.numpy as jnp

from photon_jax.engine.compile_cache import compile_cache
from photon_jax.engine.metrics import CompileCounter

SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


def settings():
    return [jax.config.values[name] for name in SETTINGS]


def compile_one():
    """Compiles a program of its own, the same at each call."""
    return jax.jit(lambda x: jnp.sin(x) * 12345.0).lower(jnp.zeros(3)).compile()


def test_a_program_is_kept_however_quickly_it_compiled_and_fetched_the_next_time(tmp_path):
    with CompileCounter() as first, compile_cache(tmp_path):
        compile_one()
    assert list(tmp_path.iterdir())
    with CompileCounter() as second, compile_cache(tmp_path):
        compile_one()
    with CompileCounter() as outside:
        compile_one()
    assert (first.num_fetched, second.num_fetched, outside.num_fetched) == (0, 1, 0)


def test_the_settings_of_the_process_are_those_before_also_after_a_failure(tmp_path):
    before = settings()
    try:
        with compile_cache(tmp_path):
            assert settings() == [str(tmp_path), 0.0, -1]
            with compile_cache(tmp_path / "inner"):
                assert settings()[0] == str(tmp_path / "inner")
            assert settings()[0] == str(tmp_path)
            raise RuntimeError("out of memory")
    except RuntimeError:
        pass
    assert settings() == before


def test_no_folder_changes_nothing():
    before = settings()
    with compile_cache(None):
        assert settings() == before


def test_threads_with_one_folder_are_inside_at_once_and_the_last_one_puts_the_settings_back(tmp_path):
    before, both, seen = settings(), threading.Barrier(2, timeout=60), []

    def compile_beside(is_slow):
        with compile_cache(tmp_path):
            both.wait()
            if is_slow:
                gone.wait(0.05)
            seen.append(settings()[0])

    gone = threading.Event()
    threads = [threading.Thread(target=compile_beside, args=(is_slow,)) for is_slow in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [str(tmp_path)] * 2
    assert settings() == before
