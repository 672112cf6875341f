"""Checks structured outputs on a real model: are the answers valid, do they end, what do masks cost the others?

  PYTHONPATH=.:tests python scripts/check_structured.py --model=demo --num_schemas=200

Answers each of so many random JSON schemas once at temperature 1, validates what ended well, and says what the masks
took. Then it measures how fast plain requests come beside others that are plain, and beside others that have a form:
two batches of one size in turns, whose order changes from round to round. The bound that it holds is 10 % of the
plain requests' tokens per second, the median of the rounds' ratios. Only on a machine that does nothing else are its
numbers worth anything; --num_schemas=0 leaves the answers out. Needs the packages of the dev extra.
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
_ROUNDS = flags.DEFINE_integer("rounds", 12, "Times that the two batches are timed.", lower_bound=1)

STEPS = 48  # timed in each round
SKIPPED = 8  # before them, in which the prompts are computed
MOST_SLOWER = 0.10  # that forms may make the rest of the batch
OBJECT = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}


def main(_: list[str]) -> None:
    with LLM(_MODEL.value, max_num_seqs=_ROWS.value, max_model_len=1024) as llm:
        if _NUM_SCHEMAS.value:
            check_answers(llm)
        compare_speeds(llm)


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


def compare_speeds(llm: LLM) -> None:
    """Prints how fast plain requests come beside plain ones and ones with a form; ends with 1 beyond the bound."""
    plain = SamplingParams(max_tokens=STEPS + 16, ignore_eos=True, seed=1)
    formed = SamplingParams(max_tokens=STEPS + 16, seed=1, structured_outputs={"regex": '"[^"]{4000}"'})
    num_plain = _ROWS.value - _ROWS.value // 2
    others = {"plain": plain, "with a form": formed}
    speeds: dict[str, list[float]] = {name: [] for name in others}
    for index in range(-1, _ROUNDS.value):
        for name in sorted(others, reverse=bool(index % 2)):
            params = [plain] * num_plain + [others[name]] * (_ROWS.value - num_plain)
            speed = measure_speed(llm, params, num_plain)
            if index >= 0:  # the first round compiles
                speeds[name].append(speed)
    for name, values in speeds.items():
        print(f"{num_plain} plain requests beside {_ROWS.value - num_plain} {name}: {np.median(values):.1f} tokens/s")
    ratios = [b / a for a, b in zip(*speeds.values(), strict=True)]
    slower = 1 - float(np.median(ratios))
    print(f"forms make the rest of the batch {slower:.1%} slower, round by round {np.round(np.sort(ratios), 3)}")
    if slower > MOST_SLOWER:
        raise SystemExit(f"more than {MOST_SLOWER:.0%}")


def measure_speed(llm: LLM, params: list[SamplingParams], num_plain: int) -> float:
    """Returns tokens per second of wall time that the first `num_plain` requests of a batch get, all decoding."""
    prompts = [llm._encode("Once upon a time there was") for _ in params]
    submissions = llm.client.submit_all(prompts, params, score=False)
    counted = [sample for submission in submissions[:num_plain] for sample in submission.samples]
    for _ in range(SKIPPED):
        llm.client.step()
    num_before, begin = sum(sample.num_tokens for sample in counted), time.perf_counter()
    for _ in range(STEPS):
        llm.client.step()
    seconds = time.perf_counter() - begin
    num_tokens = sum(sample.num_tokens for sample in counted) - num_before
    assert not any(submission.is_finished for submission in submissions), "a request ended while it was timed"
    llm.client.abort_all(submissions)
    return num_tokens / seconds


if __name__ == "__main__":
    app.run(main)
