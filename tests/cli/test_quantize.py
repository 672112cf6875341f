import pytest
from absl import flags
from helpers.tiny_checkpoint import write_checkpoint

from photon_jax.checkpoint.load import open_checkpoint
from photon_jax.cli import quantize
from photon_jax.errors import ConfigError


def run_main(*arguments):
    flag_values = flags.FlagValues()
    quantize.define_flags(flag_values)
    flag_values(["photon-quantize", *arguments])
    quantize.main(flag_values)


def test_the_table_and_what_the_text_says_are_printed(tmp_path, capsys):
    model, output = write_checkpoint(tmp_path / "model"), tmp_path / "out"
    text = tmp_path / "text.txt"
    text.write_text("It was a bright cold day in April. " * 20, encoding="utf-8")
    run_main(
        *(f"--model={model}", f"--output={output}", "--group_size=32", f"--eval_text={text}", "--eval_window=32"),
        "--compile_cache_dir=",
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["matrix", "relative", "error", "worst", "group", "clipped"]
    assert lines[1].startswith("layers[0].qkv_proj") and lines[-1].startswith("perplexity ")
    assert open_checkpoint(output, dtype="float32").config.quantization.group_size == 32


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(ConfigError, match="--output is missing"):
        run_main("--model=x")
    with pytest.raises(ConfigError, match=r"--eval_text=.*nowhere\.txt can't be read"):
        run_main("--model=x", "--output=y", f"--eval_text={tmp_path / 'nowhere.txt'}", "--compile_cache_dir=")
