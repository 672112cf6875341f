"""LLM: a checkpoint, its tokenizer and an engine behind a few methods."""

import functools
import logging
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Unpack, overload

import jax

from photon_jax.checkpoint.load import LoadedCheckpoint
from photon_jax.client.continuations import Continuations, encode_continuations
from photon_jax.client.interrupts import HeldInterrupts
from photon_jax.client.local_client import LocalClient
from photon_jax.client.prompts import PromptLike, as_list, encode_each, encode_prompt, params_for_each
from photon_jax.client.submission import Prompt, Submission
from photon_jax.config import EngineConfig, EngineSettings, make_engine_config
from photon_jax.describe import ModelCard, make_card
from photon_jax.engine.memory import check_fits
from photon_jax.engine.metrics import EngineMetrics
from photon_jax.engine.start import StartedEngine, start_engine
from photon_jax.errors import ConfigError, EngineDeadError, RequestError
from photon_jax.loading import read_model, take_params
from photon_jax.models.check_params import check_params
from photon_jax.models.config import ModelConfig
from photon_jax.models.params import Params
from photon_jax.outputs import RequestOutput, ScoreOutput
from photon_jax.progress import OnProgress, check_bar, compile_bar, on_submission, request_bar, when_finished
from photon_jax.request import SamplingParams
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
        model: str | Path | None = None,
        *,
        params: Params | None = None,
        config: ModelConfig | None = None,
        tokenizer: Tokenizer | None = None,
        engine_config: EngineConfig | None = None,
        seed: int = 0,
        progress: bool | OnProgress = True,
        **settings: Unpack[EngineSettings],
    ) -> None:
        """Loads a checkpoint, or takes parameters in hand, and starts an engine on it.

        Args:
          model: "demo", which is the default; a folder in Hugging Face's layout or one that photon-convert wrote; a
            GGUF file; or a Hugging Face id, org/name or org/name@revision.
          params: instead of a model, the weights themselves: JAX arrays, which are shared and never copied, donated or
            deleted, or NumPy arrays. A function that donates them takes them away from the LLM: give it copies.
          config: of `params`.
          tokenizer: instead of the checkpoint's own.
          engine_config: all settings at once, instead of single ones.
          seed: of the key from which requests without a seed of their own draw one.
          progress: whether to show a bar while loading and a line when ready, on standard error; or a function that is
            told instead: "loading" with bytes done and in all, then "compiling" with step programs.
          **settings: fields of EngineConfig and its parts, see EngineSettings.

        Raises:
          CheckpointError: the checkpoint can't be used, or `params` don't fit `config`.
          ConfigError: a setting is wrong, or no cache fits the memory.
        """
        begin = time.perf_counter()
        engine_config = make_engine_config(engine_config, **settings)
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise ConfigError(f"seed must be an integer, got {seed!r}")
        if not isinstance(progress, bool) and not callable(progress):
            raise ConfigError(f"progress must be True, False or a function, got {progress!r:.100}")
        if params is None and config is None:
            fits = functools.partial(check_fits, config=engine_config)
            checkpoint = read_model("demo" if model is None else model, engine_config, progress, fits)
        elif params is None or config is None or model is not None:
            raise ConfigError("give a model, or params and their config; not more, and not one of the two alone")
        else:
            checkpoint = take_params(params, config, engine_config)
        self._owns_params = params is None
        self._start(checkpoint, tokenizer or find_tokenizer(checkpoint.tokenizer_source), engine_config, seed, progress)
        self._report_ready(time.perf_counter() - begin, progress is True)

    def _start(
        self,
        checkpoint: LoadedCheckpoint,
        tokenizer: Tokenizer | None,
        engine_config: EngineConfig,
        seed: int,
        progress: bool | OnProgress,
    ) -> None:
        self.config: ModelConfig = checkpoint.config
        self.tokenizer = tokenizer
        self._card = make_card(checkpoint, tokenizer, checkpoint.params, kv_dtype=engine_config.cache.kv_dtype)
        with compile_bar(progress) as on_program:
            self._started: StartedEngine | None = start_engine(
                checkpoint.params, checkpoint.config, engine_config, on_program
            )
        self.params: Params = self._started.runner.params
        self._client = LocalClient(
            self._started.engine,
            tokenizer,
            vocab_size=self.config.vocab_size,
            eos_token_ids=self._card.eos_token_ids,
            sampling_defaults=checkpoint.generation_config,
            seed_words=(seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF),
        )

    def _report_ready(self, seconds: float, progress: bool) -> None:
        started = self._engine()
        line = (
            f"ready in {seconds:.1f} s: {started.num_programs} step programs, "
            f"{started.num_compiles - started.num_fetched} compiled and {started.num_fetched} from the compile cache; "
            f"{self.memory_report()}"
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
        on_output: Callable[[int, RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Returns the continuation of each prompt, in the prompts' order.

        Args:
          prompts: a text, the token ids of one prompt, or a list of either.
          sampling_params: for all prompts, or one for each.
          progress: whether to show a bar with requests and tokens per second.
          on_output: called as prompts finish, with the place of the prompt and its output.

        Raises:
          RequestError: a prompt or its params can't be served, or its logits_processor failed; none of the prompts is
            answered then, though steps of those before it may have run.
          CheckpointError: the weights gave NaN, or were deleted.
        """
        return self._generate(encode_each(as_list(prompts), self._encode), sampling_params, progress, on_output)

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
        return self._generate(encode_each(conversations, self._encode_chat), sampling_params, progress)  # type: ignore[arg-type]

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

    @overload
    def score(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        continuations: None = None,
        *,
        progress: bool = True,
        on_output: Callable[[int, ScoreOutput], None] | None = None,
    ) -> list[ScoreOutput]: ...
    @overload
    def score(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        continuations: Continuations,
        *,
        progress: bool = True,
        on_output: Callable[[int, ScoreOutput], None] | None = None,
    ) -> list[ScoreOutput] | list[list[ScoreOutput]]: ...
    def score(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        continuations: Continuations | None = None,
        *,
        progress: bool = True,
        on_output: Callable[[int, ScoreOutput], None] | None = None,
    ) -> list[ScoreOutput] | list[list[ScoreOutput]]:
        """Returns log-probabilities of tokens that are given, each given the tokens before it.

        Args:
          prompts: a text, the token ids of one prompt, or a list of either.
          continuations: None scores the prompts' own tokens after the first. Else for each prompt a text or token ids,
            of which only those tokens are scored, or a list of several, whose scores then come as a list. A text is
            tokenized together with its prompt, and begins after as many tokens as the prompt has alone; ids are taken
            as they are. Several continuations of one prompt share its computation.
          progress: whether to show a bar with finished requests.
          on_output: called as scores are there, with the place among all continuations and the score.

        Raises:
          RequestError: a prompt or a continuation can't be scored; none is scored then, though steps of those before
            it may have run.
          CheckpointError: the weights gave NaN, or were deleted.
        """
        if continuations is None:
            groups, has_several = [[each] for each in encode_each(as_list(prompts), self._encode)], False
        else:
            groups, has_several = encode_continuations(prompts, continuations, self.tokenizer)
        flat = [each for group in groups for each in group]
        owners = [index for index, group in enumerate(groups) for _ in group]
        params = [SamplingParams(max_tokens=1, temperature=0.0)] * len(flat)
        submissions = self._run(
            flat,
            params,
            progress,
            score=True,
            owners=owners,
            on_finished=on_submission(on_output, Submission.score_output),
        )
        outputs = iter([each.score_output() for each in submissions])
        nested = [[next(outputs) for _ in group] for group in groups]
        return nested if has_several else [output for (output,) in nested]

    @property
    def client(self) -> LocalClient:
        """What takes prompts and runs the steps, for whoever serves the LLM in a way of their own, as AsyncLLM does.

        Raises:
          ConfigError: strict_compile without a full warm-up; requests that come in company would fail.
        """
        self._engine().config.check_serves()
        return self._client

    @property
    def weights_version(self) -> int:
        """How often `update_params` replaced the weights."""
        return self._engine().engine.weights_version

    @property
    def max_model_len(self) -> int:
        """Tokens that the model reads of one sequence at most."""
        started = self._engine()
        return min(started.max_model_len, started.layout.max_tokens)

    def update_params(self, params: Params) -> int:
        """Replaces the weights, also while other threads generate; returns the new weights version.

        Requests whose computation has begun are finished on the old weights first, which this call does, so it takes
        as long as they do; those that wait, or come meanwhile, get the new ones. So each output is made by the weights
        of one version, the one that it carries, as a new engine on those weights would make it. Of a request with
        n > 1 each sample carries its own. Nothing is compiled, and the prefix cache starts anew.

        Args:
          params: of the structure, shapes and dtypes of `self.params`. JAX arrays on the device are used as they are:
            no copy is made, and none of them is ever deleted; see the constructor for functions that donate them.
            NumPy arrays are copied to the device.

        Raises:
          CheckpointError: a leaf is missing, surplus, or of another shape or dtype; the old weights serve on.

        Example:
          for batch in batches:
              outputs = llm.generate(batch)
              params, opt_state = train_step(params, opt_state, outputs)
              llm.update_params(params)
        """
        started = self._engine()
        check_params(params, self.params)
        try:
            return self._client.update_params(params)
        finally:  # an interrupt may come right after the update
            if started.runner.params is not self.params:
                self.params, self._owns_params = started.runner.params, False

    def memory_report(self) -> str:
        """Returns where the device memory goes, in one line."""
        return str(self._engine().memory_ledger())

    def describe(self) -> ModelCard:
        """Returns what the model is and takes: shape, bytes, tokens, defaults; `print` shows it as a table."""
        return self._card

    def metrics(self) -> EngineMetrics:
        """Returns what the engine has done since it started, as plain numbers."""
        return self._engine().metrics()

    def close(self) -> None:
        """Gives memory back, that of weights only if the LLM loaded them; it can't be used afterwards, streams end."""
        if self._started is None:
            return
        self._client.close()
        runner = self._started.runner
        for array in jax.tree.leaves((runner.cache, runner.state, self.params if self._owns_params else None)):
            array.delete()
        self._started = None

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def started(self) -> StartedEngine:
        """The engine with what its start found out, for tools that look inside."""
        return self._engine()

    def _engine(self) -> StartedEngine:
        if self._started is None:
            raise EngineDeadError("this LLM is closed; make a new one")
        return self._started

    def _generate(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        progress: bool,
        on_output: Callable[[int, RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        params = params_for_each(sampling_params, len(prompts))
        submissions = self._run(
            prompts,
            params,
            progress,
            score=False,
            on_finished=on_submission(on_output, Submission.output),
        )
        return [submission.output() for submission in submissions]

    def _run(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        progress: bool,
        *,
        score: bool,
        owners: Sequence[int] | None = None,
        on_finished: Callable[[int, Submission], None] | None = None,
    ) -> list[Submission]:
        self._engine()
        check_bar(progress)
        submissions: list[Submission] = []
        try:
            self._client.submit_all(prompts, params, score=score, owners=owners, into=submissions, starts=True)
            with request_bar(submissions, progress) as show, when_finished(submissions, on_finished, show) as on_step:
                self._client.run(submissions, on_step)
        finally:
            self._client.abort_all(submissions)
        return submissions

    def _stream(self, prompt: Prompt, params: SamplingParams | None) -> Generator[RequestOutput, None, None]:
        self._engine()
        with HeldInterrupts():  # until there is an iterator, which aborts it when it is dropped
            (submission,) = self._client.submit_all([prompt], params_for_each(params, 1), score=False)
            return self._client.iterate(submission)

    def _encode(self, prompt: PromptLike) -> Prompt:
        return encode_prompt(prompt, self.tokenizer)

    def _encode_chat(self, messages: Messages) -> Prompt:
        if self.tokenizer is None:
            raise RequestError(
                "this checkpoint has no tokenizer, so it has no chat template; give token ids to generate()"
            )
        return Prompt(token_ids=tuple(self.tokenizer.encode_chat(messages)))
