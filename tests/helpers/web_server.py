"""A web server on a loopback port, in a thread, for as long as a test needs it."""

import contextlib
import dataclasses
import threading
import time

import httpx
import openai
import uvicorn
from helpers.byte_tokenizer import ByteTokenizer
from helpers.tiny_checkpoint import ENGINE_FIELDS, chain_params
from helpers.tiny_model import tiny_config, tiny_params

from photon_jax import LLM
from photon_jax.client.async_llm import AsyncLLM
from photon_jax.server.lifecycle import listen, uvicorn_config
from photon_jax.server.state import ServerSettings, ServerState

MODEL = "org/tiny"
TIMEOUT_S = 300.0  # programs compile while a test waits


@dataclasses.dataclass(frozen=True)
class Served:
    """A server that runs: its state, its address, its model."""

    state: ServerState
    url: str
    llm: LLM

    def client(self, kind=openai.OpenAI, **fields):
        """Returns OpenAI's client of it, which refuses answers that are not of its types."""
        fields = {
            "api_key": "none",
            "max_retries": 0,
            "timeout": TIMEOUT_S,
            "_strict_response_validation": True,
        } | fields
        return kind(base_url=f"{self.url}/v1", **fields)

    def post(self, path, body=None, **fields):
        """Returns the answer to a body, as JSON unless it is given as `content`."""
        return httpx.post(f"{self.url}{path}", json=body, timeout=TIMEOUT_S, **fields)

    def get(self, path):
        return httpx.get(f"{self.url}{path}", timeout=TIMEOUT_S)

    def num_held_blocks(self):
        stats = self.state.engine.stats()
        return stats.num_blocks - stats.num_free_blocks


def wait_until(holds):
    deadline = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.02)


def tiny_llm(*, tokenizer=None, **fields):
    """Returns the tiny model with random weights and a token for each byte."""
    config = tiny_config()
    tokenizer = tokenizer or ByteTokenizer()
    return LLM(params=tiny_params(config), config=config, tokenizer=tokenizer, **(ENGINE_FIELDS | fields))


class ScriptTokenizer(ByteTokenizer):
    """Tokens that are the pieces of a text, for a model that says the token after the last one: it reads them out.

    A prompt is the id before the first piece, once and again for every 8 bytes.
    """

    max_token_chars = 8

    def __init__(self, pieces, chat_template=None):
        self._pieces = [piece.encode() for piece in pieces]
        self.chat_template = self.tool_template = chat_template or ByteTokenizer.chat_template

    def token_bytes(self, token_id):
        return self._pieces[token_id - 1] if 1 <= token_id <= len(self._pieces) else b""

    def is_special(self, token_id):
        return not 1 <= token_id <= len(self._pieces)

    def encode(self, text, *, add_special_tokens=True):
        return [0] * (1 + len(text.encode()) // 8)


def script_llm(pieces, *, chat_template=None, **fields):
    """Returns a model that answers everything with the same text, a piece of it as each token."""
    config = tiny_config(tie_word_embeddings=False, eos_token_ids=(len(pieces) + 1,))
    tokenizer = ScriptTokenizer(pieces, chat_template)
    return LLM(params=chain_params(config, []), config=config, tokenizer=tokenizer, **(ENGINE_FIELDS | fields))


@contextlib.contextmanager
def serving(llm, **settings):
    """Serves a model, behind all limits; it is closed at the end."""
    state = ServerState(model_name=MODEL, settings=ServerSettings(**{"port": 0, **settings}), phase="ready")
    engine = AsyncLLM(llm, max_queue=state.settings.max_queue, on_finish=state.latencies.observe)
    state.engine = engine
    with listen(state.settings) as listener:
        config = uvicorn_config(state)
        config.timeout_graceful_shutdown = 1  # tests leave streams open
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield Served(state, f"http://127.0.0.1:{listener.getsockname()[1]}", llm)
        finally:
            server.should_exit = True
            thread.join()
            engine.close()
            llm.close()
