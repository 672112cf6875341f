"""The parts of lm-evaluation-harness that are used here, or the error that says how to get them."""

from photon_jax.errors import ConfigError

try:
    # First: lm-eval lists its own models only while its registry is empty, so before ours is in it.
    import lm_eval.models as lm_eval_models
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ModuleNotFoundError as error:
    if not (error.name or "").startswith("lm_eval"):
        raise
    raise ConfigError(
        "evaluating with lm-evaluation-harness needs lm-eval; install it with: pip install 'photon_jax[eval]'"
    ) from error

__all__ = [
    "Instance",
    "TemplateLM",
    "cli_evaluate",
    "get_rolling_token_windows",
    "handle_stop_sequences",
    "lm_eval_models",
    "make_disjoint_window",
    "normalize_gen_kwargs",
    "postprocess_generated_text",
    "register_model",
]
