import os
import subprocess
import sys

import jax
import pytest
from absl import flags

from photon_jax.cli import command
from photon_jax.errors import CheckpointError

# What an installed command's wrapper does.
WRAPPER = "import sys; sys.argv[0] = '/somewhere/photon-x'; from photon_jax.cli.{} import run; sys.exit(run())"


def run_wrapper(name, *arguments):
    return subprocess.run(
        [sys.executable, "-c", WRAPPER.format(name), *arguments],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )


@pytest.fixture
def jax_cache_settings():
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: jax.config.values[name] for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def parse(*arguments):
    flag_values = flags.FlagValues()
    command.define_common_flags(flag_values)
    flag_values(["prog", *arguments])
    return flag_values


@pytest.mark.parametrize(("name", "flag"), [("generate", "--prompts_file"), ("bench", "--batch_sizes")])
def test_help_of_an_installed_command_shows_its_text_and_flags(name, flag):
    done = run_wrapper(name, "--help")
    assert f"photon-{name}:" in done.stdout
    assert flag in done.stdout
    assert "--block_size" in done.stdout and "tokens in a cache block" in done.stdout


def test_an_error_is_one_line_and_exit_code_2():
    done = run_wrapper("generate", "--prompt=a", "--prompts_file=b")
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("photon-x: give one of --prompt, --interactive, --prompts_file and --describe")


def test_a_misspelt_flag_and_a_stray_argument_are_refused():
    done = run_wrapper("generate", "--promt=a")
    assert done.returncode == 1 and "prompt" in done.stderr
    done = run_wrapper("generate", "hello")
    assert done.returncode == 1 and "unexpected argument 'hello'" in done.stderr


def test_a_multi_line_message_becomes_one_line(capsys):
    def fail():
        raise CheckpointError("tensor x\n  is missing")

    assert command.exit_code_of(fail) == 2
    assert capsys.readouterr().err.endswith(": tensor x is missing\n")


def test_an_interrupt_has_its_own_exit_code_and_other_faults_keep_their_traceback():
    def interrupt():
        raise KeyboardInterrupt

    def bug():
        raise ZeroDivisionError

    assert command.exit_code_of(interrupt) == 130
    with pytest.raises(ZeroDivisionError):
        command.exit_code_of(bug)
    assert command.exit_code_of(lambda: None) == 0


def test_a_reader_that_leaves_ends_the_command_quietly():
    program = (
        "import sys; from photon_jax.cli.command import exit_code_of\n"
        "def flood():\n    for _ in range(100_000): print('x' * 100)\n"
        "sys.exit(exit_code_of(flood))"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 2


def test_compiled_programs_are_kept_where_the_flag_says(jax_cache_settings, tmp_path):
    command.use_compile_cache(parse(f"--compile_cache_dir={tmp_path}"))
    assert jax.config.values["jax_compilation_cache_dir"] == str(tmp_path)
    assert jax.config.values["jax_persistent_cache_min_compile_time_secs"] == 0.0


def test_the_default_cache_is_in_the_users_home_and_an_empty_flag_means_none(jax_cache_settings, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    jax.config.update("jax_compilation_cache_dir", None)
    command.use_compile_cache(parse("--compile_cache_dir="))
    assert jax.config.values["jax_compilation_cache_dir"] is None
    command.use_compile_cache(parse())
    assert jax.config.values["jax_compilation_cache_dir"] == os.path.join(tmp_path, ".cache", "photon_jax", "xla")


def test_a_cache_that_jax_was_already_told_of_stays(jax_cache_settings, tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    command.use_compile_cache(parse())
    assert jax.config.values["jax_compilation_cache_dir"] == str(tmp_path)


def test_progress_follows_the_flag_else_the_terminal():
    assert command.shows_progress(parse("--progress"))
    assert not command.shows_progress(parse("--noprogress"))
    assert command.shows_progress(parse()) == sys.stderr.isatty()
