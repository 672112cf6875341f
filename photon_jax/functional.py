"""generate(): the functional form, an explicit PyTree of weights in and the outputs out."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from photon_jax.client.local_client import LocalClient
from photon_jax.client.prompts import PromptLike, as_list, encode_each, encode_prompt, params_for_each
from photon_jax.client.submission import Prompt
from photon_jax.config import CacheConfig, EngineConfig, SchedulerConfig
from photon_jax.engine.memory import affordable_blocks
from photon_jax.engine.start import start_engine
from photon_jax.errors import ConfigError, RequestError
from photon_jax.models.check_params import check_params
from photon_jax.models.config import ModelConfig
from photon_jax.models.params import Params, abstract_params
from photon_jax.outputs import RequestOutput
from photon_jax.progress import request_bar
from photon_jax.request import SamplingParams
from photon_jax.text.tokenizer import Tokenizer, all_eos_token_ids

MAX_NUM_SEQS = 64


def generate(
    params: Params,
    config: ModelConfig,
    prompts: PromptLike | Sequence[PromptLike],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    key: int | jax.Array = 0,
    tokenizer: Tokenizer | None = None,
    progress: bool = True,
) -> list[RequestOutput]:
    """Returns the continuation of each prompt under `params`: a pure function of its arguments.

    It makes an engine for this batch, with a cache just large enough, and leaves nothing behind but compiled
    programs: a second call with as many prompts of like lengths compiles nothing.

    Args:
      params: weights, as `load_checkpoint` or `random_params` gives them.
      config: their shape.
      prompts: a text, the token ids of one prompt, or a list of either.
      sampling_params: for all prompts, or one for each; max_tokens None is the rest of the model's context.
      key: an int or a `jax.random.key`; requests without a seed of their own draw one from it.
      tokenizer: for text prompts, text in the outputs and stop strings; its end-of-sequence ids end a sequence.
      progress: whether to show a bar with requests and tokens per second.

    Raises:
      RequestError: a prompt or its params can't be served, before any step has run; or a logits_processor failed.
      CheckpointError: the params don't fit the config, or gave NaN.
      ConfigError: the config is none, or the cache that the batch needs doesn't fit the memory.
    """
    listed = encode_each(as_list(prompts), lambda prompt: encode_prompt(prompt, tokenizer))
    seed_words = _key_words(key)
    each = params_for_each(sampling_params, len(listed))
    if not isinstance(config, ModelConfig):
        raise ConfigError(f"config must be the ModelConfig of the params, got {config!r:.100}")
    check_params(params, abstract_params(config))
    if not listed:
        return []
    started = start_engine(params, config, _config_for(config, listed, each))
    client = LocalClient(
        started.engine,
        tokenizer,
        vocab_size=config.vocab_size,
        eos_token_ids=all_eos_token_ids(config.eos_token_ids, tokenizer, vocab_size=config.vocab_size),
        seed_words=seed_words,
    )
    submissions = client.submit_all(listed, each, score=False)
    with request_bar(submissions, progress) as on_step:
        client.run(submissions, on_step)
    return [submission.output() for submission in submissions]


def _config_for(config: ModelConfig, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> EngineConfig:
    """Returns an engine config for one batch; sizes are rounded up to powers of two, so that like batches share it."""
    most = config.max_position_embeddings
    lengths = [
        (min(len(prompt.token_ids) + (each.max_tokens or most), most), each.n)
        for prompt, each in zip(prompts, params, strict=True)
    ]
    num_seqs = min(sum(count for _, count in lengths), MAX_NUM_SEQS)
    block_size = CacheConfig().block_size
    longest = sorted((-(-length // block_size) for length, count in lengths for _ in range(count)), reverse=True)
    num_blocks = (
        min(_power_of_two(sum(longest[:MAX_NUM_SEQS])), max(affordable_blocks(config, CacheConfig()), longest[0])) + 1
    )
    return EngineConfig(
        dtype=config.dtype,  # type: ignore[arg-type]
        max_model_len=min(_power_of_two(max(length for length, _ in lengths)), most),
        cache=CacheConfig(num_blocks=num_blocks),
        scheduler=SchedulerConfig(max_num_seqs=_power_of_two(num_seqs)),
    )


def _power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()


def _key_words(key: int | jax.Array) -> tuple[int, ...]:
    if isinstance(key, int | np.integer) and not isinstance(key, bool):
        return int(key) >> 32 & 0xFFFFFFFF, int(key) & 0xFFFFFFFF
    if not isinstance(key, jax.Array | np.ndarray) or key.size == 0:
        raise RequestError(f"key must be an int or a jax.random.key, got {key!r:.100}")
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.key_data(key)
    if key.dtype != np.uint32:
        raise RequestError(f"key must be an int or a jax.random.key, got an array of {key.dtype}")
    return tuple(int(word) for word in np.asarray(key).reshape(-1))
