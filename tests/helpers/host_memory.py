"""How much memory a process keeps after many short requests went through scheduler, engine and client."""

import gc
import os
from pathlib import Path

import numpy as np
from helpers.fake_runner import VOCAB_SIZE, make_scheduler

from photon_jax.client.local_client import LocalClient
from photon_jax.client.submission import Prompt
from photon_jax.engine.engine import Engine
from photon_jax.request import SamplingParams
from photon_jax.scheduler.plan import StepResult

BATCH = 500


class ForgetfulRunner:
    """Answers every step with token 7; it keeps nothing, so what grows is the engine's or the client's."""

    allows_several = True

    def launch(self, plan):
        return len(plan.scheduled) * plan.num_steps

    def collect(self, count):
        return StepResult(np.full(count, 7, np.int32), np.full((count, 3), -1.0, np.float32))

    def reset(self):
        pass


def rss_bytes():
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def growth(num_requests, num_first):
    """Returns the bytes that the process grows by from `num_first` requests on until all are served."""
    scheduler = make_scheduler(
        num_blocks=2000, block_size=4, max_num_seqs=128, max_num_batched_tokens=2048, max_waiting=BATCH
    )
    client = LocalClient(Engine(scheduler, ForgetfulRunner(), steps_ahead=1), None, vocab_size=VOCAB_SIZE)
    rng, before = np.random.default_rng(0), None
    for begin in range(0, num_requests, BATCH):
        if begin >= num_first and before is None:
            before = rss_bytes()
        ids = rng.integers(VOCAB_SIZE, size=(BATCH, 9)).tolist()
        prompts = [Prompt(token_ids=tuple(row)) for row in ids]
        submissions = client.submit_all(prompts, [SamplingParams(max_tokens=3)] * BATCH, score=False)
        client.run(submissions)
        assert all(len(each.output().outputs[0].token_ids) == 3 for each in submissions)
    scheduler.check_integrity()
    return rss_bytes() - before
