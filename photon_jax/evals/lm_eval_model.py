"""The model class of lm-evaluation-harness over LLM: its three kinds of requests, answered as its hf backend does."""

import collections
import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

import jax
from tqdm import tqdm

from photon_jax.config import EngineSettings
from photon_jax.errors import ConfigError, RequestError
from photon_jax.evals.arguments import check_arguments, check_ids
from photon_jax.evals.bars import EvalBar
from photon_jax.evals.generation import answer_of, for_repeat, read_gen_kwargs
from photon_jax.evals.harness import (
    Instance,
    TemplateLM,
    get_rolling_token_windows,
    make_disjoint_window,
    register_model,
)
from photon_jax.evals.model_facts import model_facts, tokenizer_facts
from photon_jax.evals.windows import Pair, fit_window, sharing_order
from photon_jax.llm import LLM
from photon_jax.outputs import RequestOutput, ScoreOutput
from photon_jax.text.tokenizer import Tokenizer

CHUNK = 4096  # requests that are in the engine's queue at once


@register_model("photon_jax")
class PhotonLM(TemplateLM):
    """A model for `lm_eval.simple_evaluate(model=...)`, and `--model photon_jax` of its command line.

    Log-likelihoods, rolling ones, generations, chat templates, prefix tokens and truncation follow the harness's hf
    backend. Requests run in the order that lets them share the most; results come in the order asked for, and do not
    depend on it. Each result is given to the harness's cache when it is there, so a run that was killed goes on from
    where it was.

    Args:
      model: an LLM, or what `LLM` loads; "demo" is the default.
      pretrained: another name for it, as the hf backend calls it.
      max_length: tokens that the model reads at most; by default what the engine serves.
      max_gen_toks: tokens of an answer where the task does not say.
      add_bos_token: whether texts begin with BOS, where the tokenizer would do otherwise.
      prefix_token_id: what an empty context stands for: by default BOS, and EOS where there is none.
      think_end_token: text or id after which the answer begins.
      enable_thinking: given to the chat template; True needs think_end_token, and has no log-likelihoods.
      chat_template_args: more values for the chat template.
      batch_size, max_batch_size: accepted and not used: the engine packs requests, see max_num_seqs and
        max_num_batched_tokens.
      device: accepted and not used: JAX chooses it.
      **settings: fields of EngineConfig and its parts, see EngineSettings. On a CPU block_size is 2 and max_num_seqs
        192 where they are not given: choices share the whole blocks of their question, and are short.

    Raises:
      ConfigError: arguments contradict each other, or the model has no tokenizer.

    Example:
      model = PhotonLM("demo", max_model_len=2048)
      results = lm_eval.simple_evaluate(model=model, tasks=["hellaswag"])
    """

    def __init__(
        self,
        model: str | Path | LLM | None = None,
        *,
        pretrained: str | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        think_end_token: str | int | None = None,
        enable_thinking: bool | None = None,
        chat_template_args: Mapping[str, object] | None = None,
        batch_size: str | int | None = None,
        max_batch_size: str | int | None = None,
        device: str | None = None,
        **settings: Unpack[EngineSettings],
    ) -> None:
        super().__init__()
        if model is not None and pretrained is not None:
            raise ConfigError(f"give model or pretrained, not both: {model!r:.100} and {pretrained!r:.100}")
        # the command line gives numbers as text too
        if isinstance(think_end_token, str) and think_end_token.isdecimal():
            think_end_token = int(think_end_token)
        ids = {"prefix_token_id": prefix_token_id, "think_end_token": think_end_token}
        own = {"max_length": max_length, "max_gen_toks": max_gen_toks, "add_bos_token": add_bos_token}
        check_arguments({**own, **ids, "enable_thinking": enable_thinking, "chat_template_args": chat_template_args})
        self.llm = _llm(next(each for each in (model, pretrained, "demo") if each is not None), settings)
        if self.llm.tokenizer is None:
            raise ConfigError(
                "evaluating needs texts as tokens, and the model has no tokenizer; give tokenizer= to LLM"
            )
        self._texts: Tokenizer = self.llm.tokenizer
        check_ids(ids, self._texts.vocab_size)
        self._card = self.llm.describe()
        longest = self.llm.max_model_len
        if max_length is not None and max_length > longest:
            raise ConfigError(
                f"max_length must be at most {longest}, which the engine serves, got {max_length}; lower it, or raise "
                "max_model_len"
            )
        self._max_length = max_length or longest
        self._max_gen_toks = max_gen_toks
        self._add_bos_token = add_bos_token
        self._think_end_token = think_end_token
        self._enable_thinking = enable_thinking
        thinking = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        self._chat_template_args: dict[str, object] = {**(chat_template_args or {}), **thinking}
        self._prefix_token_id = prefix_token_id
        self.tokenizer = tokenizer_facts(self._texts, self._card, self.eot_token_id)

    @property
    def eot_token_id(self) -> int:
        """The id that ends a text."""
        ids = (*self._texts.eos_token_ids, *self._card.eos_token_ids)
        if not ids:
            raise ConfigError("the model declares no end-of-sequence token, which the harness needs")
        return ids[0]

    @property
    def prefix_token_id(self) -> int:
        """The token before a text that has none before it: the caller's, else BOS, else EOS."""
        chosen = (self._prefix_token_id, self._texts.bos_token_id, self.eot_token_id)
        return next(token_id for token_id in chosen if token_id is not None)

    @property
    def max_length(self) -> int:
        """Tokens that the model reads at most."""
        return self._max_length

    @property
    def max_gen_toks(self) -> int:
        """Tokens of an answer where the task does not say."""
        return self._max_gen_toks

    @property
    def tokenizer_name(self) -> str:
        """Name in the keys of the harness's request cache."""
        return str(self._card.path).replace("/", "__")

    def get_model_info(self) -> dict[str, object]:
        """Returns what the results file says about the model."""
        return model_facts(self._card, self.llm.params)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: object) -> list[int]:
        """Returns the ids of a text; nothing is added to one that begins with the prefix token's own text."""
        if add_special_tokens is None:
            prefix = self._texts.decode([self.prefix_token_id], skip_special_tokens=False)
            has_prefix = bool(prefix) and string.startswith(prefix)
            add_special_tokens = not has_prefix and self._add_bos_token is not False
        return self._texts.encode(string, add_special_tokens=add_special_tokens)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Returns a conversation as text; without its system messages if the template refuses those."""
        variables: dict[str, Any] = {"continue_final_message": not add_generation_prompt, **self._chat_template_args}
        render = functools.partial(
            self._texts.apply_chat_template, add_generation_prompt=add_generation_prompt, **variables
        )
        try:
            return str(render(messages=chat_history))
        except RequestError:
            others = [message for message in chat_history if message["role"] != "system"]
            if len(others) == len(chat_history):
                raise
            return str(render(messages=others))

    # log-likelihoods

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Returns of each (context, continuation) the log-probability, and whether greedy decoding gives it."""
        if self._enable_thinking:
            names = ", ".join(sorted({str(request.task_name) for request in requests}))
            raise ConfigError(f"enable_thinking=True has no log-likelihoods, which these tasks need: {names}")
        pairs = []
        for request in tqdm(requests, desc="Tokenizing inputs", disable=disable_tqdm):
            with _naming(request):
                pairs.append((request.args, *self._encode_request(*request.args)))
        return self._loglikelihood_tokens(pairs, disable_tqdm=disable_tqdm)

    def _encode_request(self, context: str, continuation: str) -> Pair:
        if context:
            pair = self._encode_pair(context, continuation)
            if continuation and not pair[1]:
                raise RequestError(
                    f"the continuation {continuation!r:.100} has no token of its own: it becomes one with the "
                    "context's last; move the border between the two"
                )
        else:
            ids = self.tok_encode(continuation, add_special_tokens=False)
            begins = bool(ids) and ids[0] == self.prefix_token_id
            pair = (ids[:1], ids[1:]) if begins else ([self.prefix_token_id], ids)
        return fit_window(pair[0], pair[1], self.max_length)

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        **_: object,
    ) -> list[tuple[float, bool]]:
        """Returns the answers to encoded requests; those with texts also go to the harness's cache."""

        def keep(index: int, score: ScoreOutput) -> None:
            texts = requests[index][0]
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, (score.sum, score.is_all_greedy))

        pairs = [fit_window(context, continuation, self.max_length) for _, context, continuation in requests]
        scores = self._score(pairs, "Running loglikelihood requests", keep, disable_tqdm)
        return [(score.sum, score.is_all_greedy) for score in scores]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Returns the log-probability of each whole text, read in windows that predict each token once."""
        windows: list[Pair] = []
        owners: list[int] = []  # of each window: which request's it is
        firsts: list[int] = []  # of each request: its first window
        sums: list[list[float]] = []  # of each request: the log-probability of each of its windows
        for index, request in enumerate(tqdm(requests, desc="Tokenizing inputs", disable=disable_tqdm)):
            with _naming(request):
                found = list(self._rolling_windows(request.args[0]))
            firsts.append(len(windows))
            sums.append([0.0] * len(found))
            owners += [index] * len(found)
            windows += found
        num_left = [len(each) for each in sums]

        def keep(window: int, score: ScoreOutput) -> None:
            owner = owners[window]
            sums[owner][window - firsts[owner]] = score.sum
            num_left[owner] -= 1
            if num_left[owner] == 0:
                self.cache_hook.add_partial("loglikelihood_rolling", requests[owner].args, sum(sums[owner]))

        self._score(windows, "Running loglikelihood_rolling requests", keep, disable_tqdm)
        return [sum(each) for each in sums]

    def _rolling_windows(self, text: str) -> Iterator[Pair]:
        token_ids = self.tok_encode(text)
        for window in get_rolling_token_windows(token_ids, self.prefix_token_id, self.max_length, context_len=1):
            yield make_disjoint_window(window)

    def _score(
        self, pairs: Sequence[Pair], what: str, on_score: Callable[[int, ScoreOutput], None], disable_tqdm: bool
    ) -> list[ScoreOutput]:
        """Returns the score of each pair, in order; tells each when it is there."""
        scores: dict[int, ScoreOutput] = {}
        order = sharing_order(pairs)
        with EvalBar(what, len(pairs), disable_tqdm, self.llm) as bar:
            for places in _chunks(order):

                def take(index: int, score: ScoreOutput, places: Sequence[int] = places) -> None:
                    place = places[index]
                    scores[place] = score
                    on_score(place, score)
                    bar.add(len(score.prompt_token_ids) + len(score.token_ids))

                contexts, continuations = zip(*(pairs[place] for place in places), strict=True)
                self.llm.score(contexts, continuations, progress=False, on_output=take)
        return [scores[place] for place in range(len(pairs))]

    # generations

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Returns the text generated after each context, up to the first of the texts that end it."""
        eos = self._texts.decode([self.eot_token_id], skip_special_tokens=False)
        prompts, generations = [], []
        num_before: collections.Counter[int] = collections.Counter()  # a request with repeats comes as often
        for request in requests:
            context, gen_kwargs = request.args
            with _naming(request):
                generation = read_gen_kwargs(
                    gen_kwargs,
                    eos=eos,
                    max_gen_toks=self.max_gen_toks,
                    is_thinking=self._think_end_token is not None,
                )
                prompts.append(self._fit_prompt(context, generation.params.max_tokens or 0))
                generations.append(for_repeat(generation, num_before[id(request)]))
                num_before[id(request)] += 1
        answers: dict[int, str] = {}
        order = sorted(range(len(prompts)), key=prompts.__getitem__)  # those that begin alike are together
        with EvalBar("Running generate_until requests", len(prompts), disable_tqdm, self.llm) as bar:
            for places in _chunks(order):

                def take(index: int, output: RequestOutput, places: Sequence[int] = places) -> None:
                    place = places[index]
                    token_ids = output.outputs[0].token_ids
                    until = generations[place].until
                    answers[place] = answer_of(token_ids, until, self._texts, self._think_end_token)
                    self.cache_hook.add_partial("generate_until", requests[place].args, answers[place])
                    bar.add(len(token_ids))

                chosen = [prompts[place] for place in places], [generations[place].params for place in places]
                self.llm.generate(*chosen, progress=False, on_output=take)
        return [answers[place] for place in range(len(prompts))]

    def _fit_prompt(self, context: str, max_gen_toks: int) -> list[int]:
        """Returns the last tokens of the context, as many as leave room for the answer."""
        room = self.max_length - max_gen_toks
        if room < 1:
            raise RequestError(
                f"an answer of {max_gen_toks} tokens leaves no room for a context in the model's window of "
                f"{self.max_length}; lower max_gen_toks or raise max_length"
            )
        return self.tok_encode(context)[-room:] or [self.prefix_token_id]


def _llm(model: str | Path | LLM, settings: EngineSettings) -> LLM:
    """Returns the LLM that is there, or else loads it."""
    if not isinstance(model, LLM):
        return LLM(model, **_for_short_requests(settings))
    if settings:
        raise ConfigError(f"the LLM is there already; give it {', '.join(sorted(settings))} when it is made")
    return model


def _for_short_requests(settings: EngineSettings) -> EngineSettings:
    """Returns the settings with what suits short requests on a CPU where they say nothing about it.

    Choices share the whole blocks of their question. With blocks of 2 tokens 1,800 tokens were computed of 150 short
    questions where blocks of 8 took 2,900; and the fewer tokens a request has left, the more requests fill a step.
    """
    if jax.default_backend() != "cpu":
        return settings
    default: EngineSettings = {"block_size": 2}
    if settings.get("max_num_batched_tokens") is None:
        default["max_num_seqs"] = 192
    return {**default, **settings}


def _chunks(order: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yields the places in parts, so that the engine's queue stays short."""
    remaining = iter(order)
    while places := tuple(itertools.islice(remaining, CHUNK)):
        yield places


@contextlib.contextmanager
def _naming(request: Instance) -> Iterator[None]:
    """Makes an error that is raised inside say which document it is about."""
    try:
        yield
    except RequestError as error:
        raise RequestError(f"task {request.task_name}, document {request.doc_id}: {error}") from error
