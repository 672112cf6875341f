"""A web server's process over FakeRunner: `python -m helpers.fake_server OPTIONS`, where OPTIONS is a JSON object.

It starts in the time that imports take, and each of its steps takes as long as a test wants. Options:
  settings: of ServerSettings.
  scheduler: of make_scheduler.
  step_s: seconds that each step takes.
  load: "at once"; "late": after a file `gate` is there; or the name of an error that loading raises.
  send_buffer: bytes that a connection takes from the server ahead of its reader.
  gate: that file; with "dies_after": the engine fails in a step once this file is there.
"""

import json
import socket
import sys
import time
import types
from pathlib import Path

from helpers.byte_tokenizer import ByteTokenizer
from helpers.fake_engine import Play
from helpers.fake_runner import VOCAB_SIZE

from photon_jax import errors
from photon_jax.engine.metrics import LaunchCounters
from photon_jax.server import lifecycle
from photon_jax.server.state import ServerSettings, ServerState

SCHEDULER = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "num_blocks": 401}


class SmallTokenizer(ByteTokenizer):
    """Its ids are all in FakeRunner's vocabulary."""

    def encode(self, text, *, add_special_tokens=True):
        return [token_id % VOCAB_SIZE for token_id in super().encode(text, add_special_tokens=add_special_tokens)]


class PlayLLM:
    """What the server needs of an LLM."""

    def __init__(self, scheduler, step_s, fault_file=None):
        play = Play(SmallTokenizer(), scheduler=SCHEDULER | scheduler)
        collect = play.runner.collect

        def slow_collect(result):
            time.sleep(step_s)
            if fault_file is not None and fault_file.exists():
                raise RuntimeError("the device fell off the bus")
            return collect(result)

        play.runner.collect = slow_collect
        self.client = play.client
        self.tokenizer = SmallTokenizer()
        self.config = types.SimpleNamespace(vocab_size=VOCAB_SIZE)
        self.started = types.SimpleNamespace(runner=types.SimpleNamespace(launched=LaunchCounters()))

    def metrics(self):
        return self.started.runner.launched

    def close(self):
        print("closed", file=sys.stderr, flush=True)


def main(options):
    gate = Path(options.get("gate", "/nowhere"))
    kind = options.get("load", "at once")

    def load(on_progress):
        on_progress("loading", 1 << 20, 4 << 20)
        while kind == "late" and not gate.exists():
            time.sleep(0.01)
        on_progress("compiling", 2, 7)
        if kind not in ("at once", "late"):
            raise getattr(errors, kind)("the model is no good")
        fault_file = gate if kind == "at once" else None
        return PlayLLM(options.get("scheduler", {}), options.get("step_s", 0.001), fault_file)

    if "send_buffer" in options:
        listen = lifecycle.listen

        def listen_with_small_buffers(settings):
            listener = listen(settings)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, options["send_buffer"])
            return listener

        lifecycle.listen = listen_with_small_buffers
    settings = ServerSettings(**{"port": 0, **options.get("settings", {})})
    state = ServerState(model_name="fake", settings=settings)
    try:
        lifecycle.serve(state, load)
    except errors.PhotonError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
