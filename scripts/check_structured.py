"""Checks structured outputs on a real model: are the answers valid, do they end, what do masks cost the others?

  PYTHONPATH=.:tests python scripts/check_structured.py --model=demo --num_schemas=200

Answers each of so many random JSON schemas once at temperature 1, and validates what ended well. Then it takes the CPU
time of the steps of a batch of plain requests, and of one in which half of them have a form, in turns. Needs the
packages of the dev extra.
"""

import json
import random
import time

import jsonschema
import numpy as np
from absl import app, flags
from helpers.grammars import random_schema

from photon_jax import LLM, SamplingParams
from photon_jax.text.grammar import GrammarMatcher

_MODEL = flags.DEFINE_string("model", "demo", "Checkpoint.")
_NUM_SCHEMAS = flags.DEFINE_integer("num_schemas", 200, "Random JSON schemas.")
_MAX_TOKENS = flags.DEFINE_integer("max_tokens", 256, "Tokens of an answer at most.")
_IS_BOUNDED = flags.DEFINE_bool("bounded", False, "Whether each text and list of a schema has a greatest length.")
_ROWS = flags.DEFINE_integer("rows", 8, "Requests that run at once.")
_ROUNDS = flags.DEFINE_integer("rounds", 6, "Times that the two batches are timed.")

STEPS = 48  # timed in each round
OBJECT = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}


def main(_: list[str]) -> None:
    with LLM(_MODEL.value, max_num_seqs=_ROWS.value, max_model_len=1024) as llm:
        check_answers(llm)
        compare_steps(llm)


def check_answers(llm: LLM) -> None:
    """Prints how many answers ended, and how long their masks took; raises if one that ended is not valid."""
    schemas = [random_schema(random.Random(seed), is_bounded=_IS_BOUNDED.value) for seed in range(_NUM_SCHEMAS.value)]
    ask = "Write an example of a JSON object that fits this JSON schema: "
    chats = [[{"role": "user", "content": ask + json.dumps(schema)}] for schema in schemas]
    params = [
        SamplingParams(temperature=1.0, max_tokens=_MAX_TOKENS.value, seed=seed, structured_outputs={"json": schema})
        for seed, schema in enumerate(schemas)
    ]
    times: list[float] = []
    consume = GrammarMatcher.consume

    def timed(self: GrammarMatcher, token_id: int) -> bool:
        begin = time.thread_time()
        is_open = consume(self, token_id)
        times.append(time.thread_time() - begin)
        return is_open

    GrammarMatcher.consume = timed  # type: ignore[method-assign]
    begin = time.perf_counter()
    outputs = llm.chat(chats, params)
    seconds = time.perf_counter() - begin
    GrammarMatcher.consume = consume  # type: ignore[method-assign]
    completions = [output.outputs[0] for output in outputs]
    ended = [completion.finish_reason for completion in completions]
    for completion, schema in zip(completions, schemas, strict=True):
        if completion.finish_reason == "stop":
            jsonschema.validate(json.loads(completion.text), schema)
    microseconds = np.sort(times) * 1e6
    print(f"{ended.count('stop')} of {len(ended)} answers ended and are valid, {ended.count('length')} were cut")
    print(f"{sum(len(completion.token_ids) for completion in completions)} tokens in {seconds:.0f} s")
    quantiles = [float(np.quantile(microseconds, each)) for each in (0.5, 0.99, 1.0)]
    print(
        f"a mask takes {microseconds.mean():.0f} us of CPU time on average, "
        f"median {quantiles[0]:.0f}, 99 % {quantiles[1]:.0f}, the longest {quantiles[2]:.0f}"
    )


def compare_steps(llm: LLM) -> None:
    """Prints how much longer a step takes when half of its rows have a form."""
    plain = SamplingParams(max_tokens=STEPS + 16, ignore_eos=True, seed=1)
    formed = SamplingParams(max_tokens=STEPS + 16, seed=1, structured_outputs={"regex": '"[^"]{4000}"'})
    half = _ROWS.value // 2
    batches = {"plain": [plain] * _ROWS.value, "half with a form": [plain] * half + [formed] * (_ROWS.value - half)}
    seconds: dict[str, list[float]] = {name: [] for name in batches}
    for _ in range(_ROUNDS.value + 1):
        for name, params in batches.items():
            seconds[name].append(time_step(llm, params))
    medians = {name: float(np.median(values[1:])) for name, values in seconds.items()}  # the first compiles
    for name, median in medians.items():
        print(f"{name}: {median * 1e3:.2f} ms of CPU time a step")
    ratios = [b / a for a, b in zip(*(values[1:] for values in seconds.values()), strict=True)]
    print(f"a step takes {np.median(ratios):.3f} times as long, round by round {np.round(sorted(ratios), 3)}")


def time_step(llm: LLM, params: list[SamplingParams]) -> float:
    """Returns the CPU seconds of a decode step in all threads, the median of many."""
    prompts = [llm._encode("Once upon a time there was") for _ in params]
    submissions = llm.client.submit_all(prompts, params, score=False)
    times = []
    for _ in range(STEPS + 8):
        begin = time.process_time()
        llm.client.step()
        times.append(time.process_time() - begin)
    llm.client.abort_all(submissions)
    return float(np.median(times[8:]))


if __name__ == "__main__":
    app.run(main)
