"""FakeLLM: the doors of LLM without a model. It answers with the prompt's words in upper case, one word a token."""

import types

import numpy as np

from photon_jax.errors import RequestError, naming_prompt
from photon_jax.outputs import CompletionOutput, PromptLogprobs, RequestMetrics, RequestOutput, TokenLogprobs
from photon_jax.request import SamplingParams


class FakeLLM:
    def __init__(self, model="demo", *, engine_config=None, progress=True, has_template=True, longest=100):
        self.model = model
        self.engine_config = engine_config
        self.progress = progress
        self.longest = longest
        self.tokenizer = types.SimpleNamespace(has_chat_template=has_template, encode_chat=self._encode_chat)
        self.config = types.SimpleNamespace(
            vocab_size=64, architecture="FakeForCausalLM", num_layers=2, hidden_size=8, dtype="float32"
        )
        self.calls = []
        self.num_streams_ended = 0
        self.is_closed = False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.is_closed = True

    def generate(self, prompts, sampling_params=None, *, progress=True):
        is_one = isinstance(prompts, str)
        return self._answer_all("generate", [prompts] if is_one else prompts, sampling_params, progress)

    def chat(self, messages, sampling_params=None, *, progress=True):
        is_one = isinstance(messages[0], dict)
        return self._answer_all("chat", [messages] if is_one else messages, sampling_params, progress)

    def stream(self, prompt, sampling_params=None):
        return self._stream("stream", prompt, sampling_params)

    def stream_chat(self, messages, sampling_params=None):
        return self._stream("stream_chat", list(messages), sampling_params)

    def _encode_chat(self, messages):
        """Returns the words of the last message in the place of token ids."""
        if messages[-1]["content"] == "refused":
            raise RequestError("the chat template refuses the conversation")
        return words_of(messages)

    def _answer_all(self, door, asked, params, progress):
        self.calls.append((door, asked, params))
        each = params if isinstance(params, list) else [params or SamplingParams()] * len(asked)
        for index, item in enumerate(asked):
            with naming_prompt(index, len(asked)):
                self._check_length(item)
        return [self._output(item, p, p.max_tokens or 3, "length") for item, p in zip(asked, each, strict=True)]

    def _stream(self, door, asked, params):
        self.calls.append((door, asked, params))
        self._check_length(asked)
        try:
            num_tokens = len(words_of(asked))
            for n in range(1, num_tokens + 1):
                yield self._output(asked, params, n, "stop" if n == num_tokens else None)
        finally:
            self.num_streams_ended += 1

    def _check_length(self, asked):
        if len(words_of(asked)) > self.longest:
            raise RequestError(f"prompt of {len(words_of(asked))} tokens is too long")

    def _output(self, asked, params, num_tokens, finish_reason):
        words = words_of(asked)
        text = " ".join((words * num_tokens)[:num_tokens])
        logprobs = None
        if params.logprobs is not None:
            values = np.linspace(-1.0, -2.0, num_tokens, dtype=np.float32)
            tops = fake_tops(num_tokens, params.logprobs)
            logprobs = TokenLogprobs(raw=values, tempered=values, sampling=np.full_like(values, -np.inf), **tops)
        prompt_logprobs = None
        if params.prompt_logprobs is not None:
            values = np.linspace(-3.0, -2.0, len(words) - 1, dtype=np.float32)
            tops = fake_tops(len(values), params.prompt_logprobs)
            prompt_logprobs = PromptLogprobs(logprobs=values, is_greedy=values > -2.5, **tops)
        completions = tuple(
            CompletionOutput(
                index=i,
                text=text,
                token_ids=tuple(range(num_tokens)),
                logprobs=logprobs,
                cumulative_logprob=0.0,
                finish_reason=finish_reason,
                stop_reason=None,
            )
            for i in range(params.n)
        )
        return RequestOutput(
            request_id="r",
            prompt=asked if isinstance(asked, str) else None,
            prompt_token_ids=tuple(range(len(words))),
            outputs=completions,
            sampling_params=params,
            num_cached_tokens=0,
            metrics=RequestMetrics(queue_s=0.0, time_to_first_token_s=0.01, total_s=0.02, num_preemptions=0),
            prompt_logprobs=prompt_logprobs,
        )


def fake_tops(num_tokens, num_top):
    """Returns the likeliest tokens: id i in place i, of log-probability -i, the last one impossible."""
    ids = np.tile(np.arange(num_top, dtype=np.int32), (num_tokens, 1))
    values = -ids.astype(np.float32)
    values[:, -1:] = -np.inf
    return {"top_ids": ids, "top_logprobs": values}


def words_of(asked):
    if isinstance(asked, str):
        return asked.upper().split()
    if asked and isinstance(asked[0], dict):
        return asked[-1]["content"].upper().split()
    return [str(token_id) for token_id in asked]
