"""A whole engine over FakeRunner, and a client of it: what the doors stand on, without a model."""

import threading

from helpers.fake_runner import VOCAB_SIZE, FakeRunner, expected_output, make_scheduler

from photon_jax.client.local_client import LocalClient
from photon_jax.client.submission import Prompt
from photon_jax.engine.engine import Engine
from photon_jax.request import Request, SamplingParams

LONG = tuple(range(30))
MATE = (4, 5, 6)


class Launched:
    """FakeRunner behind the engine's interface.

    Attributes:
      fault: what the next results raise instead of coming.
      deleted: the weight that is.
      uncompiled_for: returns what is to be compiled before requests come into a batch.
      compile: what compiling does.
      stands_in: whether steps can do without programs that are compiled; they can't without any.
      announced: what others compile.
    """

    def __init__(self, layout):
        self.layout = layout
        self.fake = FakeRunner(layout)
        self.fault = None
        self.deleted = None
        self.uncompiled_for = lambda requests, num_prompt_tokens: []
        self.compile = None
        self.stands_in = lambda layouts: not layouts
        self.announced = []
        self.allows_several = True
        self._allowed = None
        self._is_asked = threading.Semaphore(0)

    def hold(self):
        """From now on each step waits until it is allowed."""
        self._allowed = threading.Semaphore(0)

    def allow(self, num_steps=1):
        """Lets steps go on."""
        self._allowed.release(num_steps)

    def release(self):
        """Lets all steps go on, the one that waits among them."""
        held, self._allowed = self._allowed, None
        if held is not None:
            held.release()

    def wait_for_a_step(self):
        """Returns once a step waits to be allowed."""
        assert self._is_asked.acquire(timeout=60)

    def launch(self, plan):
        allowed = self._allowed
        if allowed is not None:
            self._is_asked.release()
            assert allowed.acquire(timeout=60)
        return self.fake.step(plan)

    def collect(self, result):
        if self.fault is not None:
            raise self.fault
        return result

    def reset(self):
        self.fake = FakeRunner(self.layout)

    def deleted_leaf(self):
        return self.deleted

    def calls_out(self, processor):
        return True

    def missing(self, requests, num_prompt_tokens):
        return self.uncompiled_for(requests, num_prompt_tokens)

    def announce(self, layouts):
        self.announced = layouts
        return self.stands_in(layouts)

    def compile_late(self, layout):
        self.compile(layout)


class Play:
    """A client with its engine in sight."""

    def __init__(self, tokenizer=None, *, scheduler=None, steps_ahead=0, **client_fields):
        self.scheduler = make_scheduler(**{"max_num_seqs": 2, "max_num_batched_tokens": 8, **(scheduler or {})})
        self.num_blocks = self.scheduler.num_free_blocks
        self.runner = Launched(self.scheduler._layout)
        self.engine = Engine(self.scheduler, self.runner, steps_ahead=steps_ahead)
        self.client = LocalClient(self.engine, tokenizer, vocab_size=VOCAB_SIZE, **client_fields)

    def submit(self, *prompts, score=False, **params):
        listed = [Prompt(token_ids=tuple(prompt)) for prompt in prompts]
        return self.client.submit_all(listed, [SamplingParams(**params)] * len(listed), score=score)

    def stream(self, prompt, **params):
        (submission,) = self.submit(prompt, **params)
        return self.client.iterate(submission)

    def check_idle(self):
        self.scheduler.check_integrity()
        assert not self.scheduler.has_unfinished
        assert self.scheduler.num_free_blocks == self.num_blocks


def expected(prompt, max_tokens, **fields):
    params = SamplingParams(max_tokens=max_tokens, min_tokens=fields.pop("min_tokens", 0))
    request = Request(request_id="", prompt_token_ids=tuple(prompt), params=params, **fields)
    tokens, reason = expected_output(request)
    return tuple(tokens), reason.value


def result(output, index=0):
    completion = output.outputs[index]
    return completion.token_ids, completion.finish_reason
