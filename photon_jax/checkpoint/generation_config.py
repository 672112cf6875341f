"""generation_config.json: the sampling defaults that a checkpoint's makers recommend, checked when it is loaded."""

from collections.abc import Mapping

from photon_jax.models.config_fields import ConfigFields

FILE_NAME = "generation_config.json"


def read_sampling_defaults(values: Mapping[str, object]) -> dict[str, object]:
    """Returns temperature, top_p, top_k, min_p and repetition_penalty, those that the file gives.

    A null counts as absent, other keys are not read. `do_sample: false` asks for greedy decoding: it gives
    temperature 0, whatever temperature the file holds beside it; absent or true, the values are taken as they are.

    Args:
      values: the object that the file holds.

    Raises:
      CheckpointError: a value is of the wrong type or out of its range.
    """
    fields = ConfigFields(values, FILE_NAME)
    found: dict[str, object] = {}
    for key, low, high, is_open in (
        ("temperature", 0.0, 1e6, False),
        ("top_p", 0.0, 1.0, True),
        ("min_p", 0.0, 1.0, False),
        ("repetition_penalty", 0.0, 1e6, True),
    ):
        if fields.get(key) is not None:
            found[key] = fields.number_within(key, low, high, is_open=is_open)
    if fields.get("top_k") is not None:
        found["top_k"] = fields.integer("top_k", minimum=0)
    if not fields.boolean("do_sample", True):
        found["temperature"] = 0.0
    return found
