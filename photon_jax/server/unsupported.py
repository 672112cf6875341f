"""Fields of a request that the server does not heed: those that would change the answer are refused."""

import logging
import threading
from collections.abc import Mapping

from photon_jax.server.errors import FieldError
from photon_jax.server.protocol import Json, SamplingFields

# Fields of OpenAI's and vLLM's APIs that change the answer -> values that do not, besides null; and what to do instead.
_REFUSED: Mapping[str, tuple[tuple[Json, ...], str]] = {
    "audio": ((), "the model answers in text"),
    "modalities": ((["text"],), "the model answers in text"),
    "moderation": ((), "answers are not moderated"),
    "prediction": ((), "leave it out"),
    "web_search_options": ((), "the model can't search"),
    "functions": (([],), "use tools"),
    "function_call": (("none",), "use tool_choice"),
    "suffix": ((), "the models continue text, they don't fill it in"),
    "best_of": ((1,), "use n, and choose by logprobs"),
    "use_beam_search": ((False,), "use n, and choose by logprobs"),
    "length_penalty": ((1, 1.0), "there is no beam search"),
    "guided_json": ((), "use structured_outputs.json"),
    "guided_regex": ((), "use structured_outputs.regex"),
    "guided_choice": ((), "use structured_outputs.choice"),
    "guided_grammar": ((), "use structured_outputs.grammar"),
    "chat_template": ((), "the checkpoint's own is used"),
    "documents": (([],), "put them into a message, or into chat_template_kwargs"),
    "truncate_prompt_tokens": ((), "shorten the prompt"),
    "prompt_embeds": ((), "give a text or token ids"),
    "logits_processors": (([],), "use logit_bias, allowed_token_ids, bad_words or structured_outputs"),
    "mm_processor_kwargs": (({},), "the model reads text"),
    "spaces_between_special_tokens": ((True,), "leave it out"),
    "top_a": ((0, 0.0), "use min_p"),
    "tfs": ((1, 1.0), "use min_p"),
    "typical_p": ((1, 1.0), "use min_p"),
    "mirostat": ((0,), "use min_p"),
}
# Fields that could change how a request is served, though not what is right to answer -> why they don't.
_WITHOUT_EFFECT = {
    "priority": "requests are served in the order of their arrival",
    "reasoning_effort": "chat_template_kwargs holds what the model's template knows, such as enable_thinking",
}
# Fields that are known not to change the answer.
_SILENT = frozenset(
    {
        *("metadata", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier"),
        *("service_tier", "store", "user"),
    }
)
_MAX_LOGGED = 100  # names: a hostile client must not fill the log, or the memory
_logger = logging.getLogger(__name__)


class FieldCheck:
    """Refuses fields that would change an answer and aren't supported; logs others that are ignored, each once."""

    def __init__(self) -> None:
        self._logged: set[str] = set()
        self._lock = threading.Lock()

    def check(self, request: SamplingFields) -> None:
        """Raises FieldError for the first field that can't be ignored."""
        for name, value in (request.model_extra or {}).items():
            self._check_field(name, value)
        suffix = getattr(request, "suffix", None)
        if suffix is not None:
            self._check_field("suffix", suffix)

    def _check_field(self, name: str, value: Json) -> None:
        if name not in _REFUSED:
            if name in _WITHOUT_EFFECT:
                if value:
                    self._log(name, f"has no effect: {_WITHOUT_EFFECT[name]}")
            elif name not in _SILENT:
                self._log(name, "is unknown and ignored")
            return
        neutral, remedy = _REFUSED[name]
        if value is not None and value not in neutral:
            raise FieldError(name, f"{name} is not supported: {remedy}")

    def _log(self, name: str, what: str) -> None:
        with self._lock:
            if name in self._logged or len(self._logged) == _MAX_LOGGED:
                return
            self._logged.add(name)
        _logger.warning("the request field %.80r %s; this is said once", name, what)
