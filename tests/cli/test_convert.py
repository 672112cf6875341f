import pytest
from absl import flags
from helpers.tiny_checkpoint import write_checkpoint

from photon_jax.checkpoint.load import open_checkpoint
from photon_jax.cli import convert
from photon_jax.errors import CheckpointError, ConfigError


def run_main(*arguments):
    flag_values = flags.FlagValues()
    convert.define_flags(flag_values)
    flag_values(["photon-convert", *arguments])
    convert.main(flag_values)


def test_a_model_is_converted_and_the_result_named(tmp_path, capsys):
    model, output = write_checkpoint(tmp_path / "model"), tmp_path / "out"
    run_main(f"--model={model}", f"--output={output}", "--dtype=bfloat16")
    assert capsys.readouterr().out == f"{output}: LlamaForCausalLM, 0 MiB in bfloat16\n"
    assert open_checkpoint(output, dtype="float32").config.checkpoint_dtype == "bfloat16"
    with pytest.raises(CheckpointError, match="overwrite"):
        run_main(f"--model={model}", f"--output={output}")
    run_main(f"--model={model}", f"--output={output}", "--overwrite")
    assert open_checkpoint(output, dtype="float32").config.checkpoint_dtype == "float32"


@pytest.mark.parametrize("given", ["--model=x", "--output=x"])
def test_a_flag_that_is_missing_is_named(given):
    missing = {"--model=x": "--output", "--output=x": "--model"}[given]
    with pytest.raises(ConfigError, match=f"{missing} is missing"):
        run_main(given)
