"""Perplexity of a text under a model, as its engine computes it, in windows."""

import dataclasses
import math

from photon_jax.errors import ConfigError
from photon_jax.evals.bars import EvalBar
from photon_jax.evals.windows import strided_windows
from photon_jax.llm import LLM
from photon_jax.outputs import ScoreOutput


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TextScore:
    """What a model makes of a text.

    Attributes:
      num_tokens: that were scored, each given the tokens before it in its window.
      num_windows: that were read.
      log_likelihood: of the scored tokens together, in nats.
      greedy_share: share of them that are the likeliest in their place.
    """

    num_tokens: int
    num_windows: int
    log_likelihood: float
    greedy_share: float

    @property
    def perplexity(self) -> float:
        """e to the mean loss of a token."""
        return math.exp(-self.log_likelihood / self.num_tokens)


def score_text(
    llm: LLM, text: str, *, window: int, stride: int, max_windows: int | None = None, progress: bool = True
) -> TextScore:
    """Returns what the model makes of a text.

    Args:
      window: tokens that are read together.
      stride: tokens between the beginnings of windows; `window` for windows that share nothing, less for more context.
      max_windows: to read of the text's beginning; None for all.

    Raises:
      ConfigError: the model has no tokenizer, the text is too short, or the window or the stride can't be.
    """
    if llm.tokenizer is None:
        raise ConfigError("the perplexity of a text needs a tokenizer, and the model has none")
    if not 2 <= window <= llm.max_model_len + 1:
        raise ConfigError(f"window must be between 2 and {llm.max_model_len + 1}, which the engine reads, got {window}")
    if not 1 <= stride <= window:
        raise ConfigError(f"stride must be between 1 and the window, {window}, got {stride}")
    pairs = list(strided_windows(llm.tokenizer.encode(text), size=window, stride=stride))[:max_windows]
    if not pairs:
        raise ConfigError("the text has fewer than 2 tokens; nothing of it can be scored")
    contexts, continuations = zip(*pairs, strict=True)
    with EvalBar("scoring", len(pairs), not progress, llm) as bar:

        def count(_: int, score: ScoreOutput) -> None:
            bar.add(len(score.prompt_token_ids) + len(score.token_ids))

        scores = llm.score(contexts, continuations, progress=False, on_output=count)
    flat = [score for score in scores if isinstance(score, ScoreOutput)]
    num_tokens = sum(len(score.token_ids) for score in flat)
    return TextScore(
        num_tokens=num_tokens,
        num_windows=len(flat),
        log_likelihood=math.fsum(score.sum for score in flat),
        greedy_share=sum(int(score.is_greedy.sum()) for score in flat) / num_tokens,
    )
