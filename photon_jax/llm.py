"""LLM: a checkpoint, its tokenizer and an engine behind a few methods."""

import logging
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path

import jax

from photon_jax.checkpoint.load import LoadedCheckpoint, load_checkpoint
from photon_jax.config import EngineConfig, make_engine_config
from photon_jax.engine.engine import StartedEngine, start_engine
from photon_jax.errors import EngineDeadError, RequestError
from photon_jax.local_client import LocalClient, Prompt, Submission
from photon_jax.models.config import ModelConfig
from photon_jax.models.params import Params
from photon_jax.progress import loading_bar, request_bar
from photon_jax.prompts import PromptLike, as_list, encode_prompt, params_for_each
from photon_jax.request import RequestOutput, SamplingParams, ScoreOutput
from photon_jax.text.tokenizer import Tokenizer, find_tokenizer

Messages = Sequence[Mapping[str, object]]


class LLM:
    """A model that answers prompts, many at a time.

    Example:
      llm = photon_jax.LLM("demo")
      outputs = llm.generate(["Once upon a time"], photon_jax.SamplingParams(max_tokens=20))
      print(outputs[0].outputs[0].text)

    Attributes:
      tokenizer: `encode(str) -> list[int]` and `decode`; None for a checkpoint without one, which serves token ids.
      config: the model's shape.
      params: its weights.
    """

    def __init__(
        self,
        model: str | Path = "demo",
        *,
        dtype: str | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        block_size: int | None = None,
        num_blocks: int | None = None,
        memory_fraction: float | None = None,
        enable_prefix_caching: bool | None = None,
        warmup: str | None = None,
        use_generation_config: bool | None = None,
        linear: str | None = None,
        attention: str | None = None,
        engine_config: EngineConfig | None = None,
        seed: int = 0,
        progress: bool = True,
    ) -> None:
        """Loads a checkpoint and starts an engine on it.

        Args:
          model: "demo", a folder in Hugging Face's layout, or a GGUF file.
          dtype, ..., attention: the fields of EngineConfig and its parts, with their defaults.
          engine_config: all of them at once, instead.
          seed: of the key from which requests without a seed of their own draw one.
          progress: whether to show a bar while loading and a line when ready, on standard error.

        Raises:
          CheckpointError: the checkpoint can't be used.
          ConfigError: a setting is wrong, or no cache fits the memory.
        """
        config = make_engine_config(
            engine_config,
            dtype=dtype,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=block_size,
            num_blocks=num_blocks,
            memory_fraction=memory_fraction,
            enable_prefix_caching=enable_prefix_caching,
            warmup=warmup,
            use_generation_config=use_generation_config,
            linear=linear,
            attention=attention,
        )
        self._start(model, config, seed, progress)

    def _start(self, model: str | Path, config: EngineConfig, seed: int, progress: bool) -> None:
        begin = time.perf_counter()
        checkpoint = _load(model, config, progress)
        self.config: ModelConfig = checkpoint.config
        self.params: Params = checkpoint.params
        self.tokenizer = _find_tokenizer(checkpoint)
        self._started: StartedEngine | None = start_engine(checkpoint.params, checkpoint.config, config)
        self._client = LocalClient(
            self._started.engine,
            self.tokenizer,
            vocab_size=self.config.vocab_size,
            eos_token_ids=_eos_union(checkpoint, self.tokenizer),
            sampling_defaults=checkpoint.generation_config if config.use_generation_config else None,
            seed_words=(seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF),
        )
        self._report_ready(time.perf_counter() - begin, progress)

    def _report_ready(self, seconds: float, progress: bool) -> None:
        started = self._engine()
        line = (
            f"ready in {seconds:.1f} s: {started.num_programs} step programs "
            f"({started.num_compiles} compiled or fetched); {self.memory_report()}"
        )
        logging.info(line)
        if progress:
            print(line, file=sys.stderr)

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Returns the continuation of each prompt, in the prompts' order.

        Args:
          prompts: a text, the token ids of one prompt, or a list of either.
          sampling_params: for all prompts, or one for each.
          progress: whether to show a bar with requests and tokens per second.

        Raises:
          RequestError: a prompt or its params can't be served; nothing has run then.
        """
        listed = as_list(prompts)
        return self._generate([self._encode(prompt) for prompt in listed], sampling_params, progress)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Returns the answer to each conversation, written out by the checkpoint's chat template.

        Args:
          messages: one conversation, a list of {"role": ..., "content": ...}, or a list of conversations.
        """
        if isinstance(messages, Mapping) or not isinstance(messages, Sequence):
            raise RequestError(
                f"messages must be a list of {{role, content}}, or a list of such lists, got {messages!r}"
            )
        is_one = not messages or isinstance(messages[0], Mapping)
        conversations = [messages] if is_one else messages
        return self._generate([self._encode_chat(each) for each in conversations], sampling_params, progress)  # type: ignore[arg-type]

    def stream(
        self, prompt: PromptLike, sampling_params: SamplingParams | None = None
    ) -> Generator[RequestOutput, None, None]:
        """Yields the output so far whenever a token came; the last one has its finish_reason. Closing it aborts."""
        return self._stream(self._encode(prompt), sampling_params)

    def stream_chat(
        self, messages: Messages, sampling_params: SamplingParams | None = None
    ) -> Generator[RequestOutput, None, None]:
        """Yields the answer to a conversation as `stream` does."""
        return self._stream(self._encode_chat(messages), sampling_params)

    def score(self, prompts: PromptLike | Sequence[PromptLike], *, progress: bool = True) -> list[ScoreOutput]:
        """Returns the log-probability of each token of each prompt after the first, given those before it."""
        listed = [self._encode(prompt) for prompt in as_list(prompts)]
        params = [SamplingParams(max_tokens=1, temperature=0.0)] * len(listed)
        return [submission.score_output() for submission in self._run(listed, params, progress, score=True)]

    def memory_report(self) -> str:
        """Returns where the device memory goes, in one line."""
        return str(self._engine().memory_ledger())

    def close(self) -> None:
        """Gives the cache's and the weights' memory back; the LLM can't be used afterwards, open streams end."""
        if self._started is None:
            return
        self._client.close()
        runner = self._started.runner
        for array in jax.tree.leaves((runner.cache, runner.state, self.params)):
            array.delete()
        self._started = None

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _engine(self) -> StartedEngine:
        if self._started is None:
            raise EngineDeadError("this LLM is closed; make a new one")
        return self._started

    def _generate(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        progress: bool,
    ) -> list[RequestOutput]:
        params = params_for_each(sampling_params, len(prompts))
        return [submission.output() for submission in self._run(prompts, params, progress, score=False)]

    def _run(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], progress: bool, *, score: bool
    ) -> list[Submission]:
        self._engine()
        submissions = self._client.submit_all(prompts, params, score=score)
        with request_bar(submissions, progress) as on_step:
            self._client.run(submissions, on_step)
        return submissions

    def _stream(self, prompt: Prompt, params: SamplingParams | None) -> Generator[RequestOutput, None, None]:
        self._engine()
        (submission,) = self._client.submit_all([prompt], [params or SamplingParams()], score=False)
        return self._client.iterate(submission)

    def _encode(self, prompt: PromptLike) -> Prompt:
        return encode_prompt(prompt, self.tokenizer)

    def _encode_chat(self, messages: Messages) -> Prompt:
        if self.tokenizer is None:
            raise RequestError(
                "this checkpoint has no tokenizer, so it has no chat template; give token ids to generate()"
            )
        return Prompt(token_ids=tuple(self.tokenizer.encode_chat(messages)))


def _load(model: str | Path, config: EngineConfig, progress: bool) -> LoadedCheckpoint:
    dtype = config.dtype
    if dtype == "auto":
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    with loading_bar(progress) as on_tensor:
        return load_checkpoint(model, dtype=dtype, on_tensor=on_tensor)


def _find_tokenizer(checkpoint: LoadedCheckpoint) -> Tokenizer | None:
    source = checkpoint.tokenizer_source
    if source is None:
        return None
    return Tokenizer.from_gguf(source) if isinstance(source, dict) else find_tokenizer(source)


def _eos_union(checkpoint: LoadedCheckpoint, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Returns every id that ends a sequence: those of the configs, and the tokenizer's own; each can be sampled."""
    own = () if tokenizer is None else tokenizer.eos_token_ids
    union = dict.fromkeys((*checkpoint.eos_token_ids, *own))
    return tuple(token_id for token_id in union if 0 <= token_id < checkpoint.config.vocab_size)
