"""The local client over a runner that computes by arithmetic: submitting, taking turns, leaving in every state."""

import threading

import numpy as np
import pytest
from helpers.byte_tokenizer import ByteTokenizer
from helpers.fake_engine import LONG, MATE, Play, expected, result
from helpers.fake_runner import VOCAB_SIZE, expected_logprobs, make_scheduler

from photon_jax.client.local_client import LocalClient
from photon_jax.client.submission import Prompt
from photon_jax.errors import CapacityError, EngineDeadError, RequestError
from photon_jax.outputs import FinishReason, TokenDelta
from photon_jax.request import MAX_STOP_IDS, Request, SamplingParams
from photon_jax.scheduler.plan import StepPlan

# what is submitted


def test_results_belong_to_their_prompts_whatever_order_they_end_in():
    play = Play()
    prompts = [LONG, MATE, (7,), LONG[5:]]
    submissions = [s for i, p in enumerate(prompts) for s in play.submit(p, max_tokens=9 - 2 * i)]
    play.client.run(submissions)
    assert [result(s.output()) for s in submissions] == [expected(p, 9 - 2 * i) for i, p in enumerate(prompts)]
    play.check_idle()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ((), "prompt 1: .*empty prompt"),
        ((1, VOCAB_SIZE), f"prompt 1: prompt_token_ids holds {VOCAB_SIZE}; the model's ids are 0 to {VOCAB_SIZE - 1}"),
        ((1, -1), "prompt 1: prompt_token_ids holds -1"),
        ((1, 10**5000), "prompt 1: prompt_token_ids holds int of too many digits to show; the model's ids are 0"),
        (tuple(range(100)) * 11, "prompt 1: .*max_model_len"),
    ],
)
def test_one_prompt_that_cannot_be_served_keeps_all_out_and_is_named(bad, message):
    play = Play()
    with pytest.raises(RequestError, match=message):
        play.submit(MATE, bad, LONG, max_tokens=4)
    play.check_idle()
    (submission,) = play.submit(MATE, max_tokens=4)
    play.client.run([submission])
    assert result(submission.output()) == expected(MATE, 4)


@pytest.mark.parametrize(("num_prompts", "n"), [(3, 1), (1, 3)])
def test_full_queue_keeps_all_out(num_prompts, n):
    play = Play(scheduler={"max_waiting": 2})
    with pytest.raises(CapacityError, match="queue is full"):
        play.submit(*[MATE] * num_prompts, n=n, max_tokens=4)
    play.check_idle()
    assert play.submit(MATE, MATE, max_tokens=4)


def test_max_tokens_left_out_is_the_rest_of_the_context():
    play = Play(scheduler={"max_model_len": 40})
    (submission,) = play.submit(LONG)
    play.client.run([submission])
    output = submission.output()
    assert output.sampling_params.max_tokens == 10
    assert result(output) == expected(LONG, 10)
    with pytest.raises(RequestError, match=r"leaves no room to generate.*shorten the prompt"):
        play.submit(LONG + LONG[:10])


def test_stop_ids_beyond_what_can_be_watched_are_refused():
    play = Play(eos_token_ids=(100,))
    with pytest.raises(RequestError, match=f"{MAX_STOP_IDS + 1} stop ids"):
        play.submit(MATE, stop_token_ids=range(MAX_STOP_IDS))
    assert play.submit(MATE, stop_token_ids=range(MAX_STOP_IDS), ignore_eos=True)
    assert play.submit(MATE, stop_token_ids=range(MAX_STOP_IDS - 1))
    with pytest.raises(RequestError, match=f"stop_token_ids holds {VOCAB_SIZE}"):
        play.submit(MATE, stop_token_ids=[VOCAB_SIZE])


def test_explicit_value_beats_the_checkpoints_default_which_beats_the_neutral_one():
    defaults = {"temperature": 0.6, "top_p": 0.9, "top_k": None, "max_new_tokens": 3, "do_sample": True}
    play = Play(sampling_defaults=defaults)
    (submission,) = play.submit(MATE, top_p=0.5, max_tokens=4)
    params = submission.output().sampling_params
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.max_tokens) == (0.6, 0.5, 0, 0.0, 4)
    (submission,) = play.submit(MATE, temperature=0.0, max_tokens=4)
    assert submission.output().sampling_params.temperature == 0.0


# ends


def test_stop_id_of_the_user_is_the_stop_reason_and_one_of_the_model_is_not():
    (first, second, third), _ = expected(MATE, 3)
    play = Play(eos_token_ids=(second,))
    cases = [
        ({}, ((first, second), "stop"), None),
        ({"stop_token_ids": [first]}, ((first,), "stop"), first),
        ({"ignore_eos": True}, ((first, second, third), "length"), None),
        ({"ignore_eos": True, "stop_token_ids": [second]}, ((first, second), "stop"), second),
        ({"min_tokens": 2}, ((first, second, third), "length"), None),
    ]
    for params, outcome, reason in cases:
        (submission,) = play.submit(MATE, max_tokens=3, **params)
        play.client.run([submission])
        output = submission.output()
        assert (result(output), output.outputs[0].stop_reason) == (outcome, reason), params
    play.check_idle()


def test_stop_string_ends_ids_logprobs_and_text_at_one_token():
    tokens, _ = expected(MATE, 12)
    stop = bytes(tokens[5:8]).decode()
    play = Play(ByteTokenizer())
    mates = play.submit(LONG, max_tokens=12)
    (submission,) = play.submit(MATE, max_tokens=12, stop=[stop], logprobs=0)
    play.client.run([*mates, submission])
    completion = submission.output().outputs[0]
    assert completion.token_ids == tokens[:8]
    assert completion.text == bytes(tokens[:5]).decode()
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    rows = expected_logprobs(Request(request_id="", prompt_token_ids=MATE, params=SamplingParams()), 8)
    np.testing.assert_array_equal(completion.logprobs.raw, rows[:, 0])
    np.testing.assert_array_equal(completion.logprobs.tempered, rows[:, 1])
    np.testing.assert_array_equal(completion.logprobs.sampling, rows[:, 2])
    assert completion.cumulative_logprob == rows[:, 0].sum(dtype=np.float64)
    assert result(mates[0].output()) == expected(LONG, 12)
    play.check_idle()


class BurstEngine:
    """An engine whose steps give several tokens at once, as multi-step decoding and speculation do."""

    def __init__(self, text, burst):
        self.scheduler = make_scheduler()
        self.last_plan, self.weights_version = StepPlan(()), 0
        self._tokens, self._burst = text.encode(), burst

    def step(self):
        new, self._tokens = self._tokens[: self._burst], self._tokens[self._burst :]
        reason = None if self._tokens else FinishReason.LENGTH
        logprobs = -np.array([[token] * 3 for token in new], np.float32)
        tops = {"top_ids": np.array(list(new), np.int32)[:, None], "top_logprobs": logprobs[:, :1]}
        return [TokenDelta("request-0-0", tuple(new), logprobs, reason, **tops)]


@pytest.mark.parametrize("burst", [1, 2, 3, 5, 20])
def test_tokens_after_a_stop_string_are_cut_however_many_come_in_one_step(burst):
    client = LocalClient(BurstEngine("one STOP two", burst), ByteTokenizer(), vocab_size=258)
    params = SamplingParams(stop="STOP", logprobs=1, max_tokens=50)
    (submission,) = client.submit_all([Prompt(token_ids=(1,))], [params], score=False)
    client.run([submission])
    completion = submission.output().outputs[0]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("one ", "stop", "STOP")
    assert completion.token_ids == tuple(b"one STOP")
    np.testing.assert_array_equal(completion.logprobs.raw, -np.array(list(b"one STOP"), np.float32))
    np.testing.assert_array_equal(completion.logprobs.top_ids[:, 0], list(b"one STOP"))
    np.testing.assert_array_equal(completion.logprobs.top_logprobs[:, 0], completion.logprobs.raw)


def test_steps_run_while_prompts_are_still_prepared_and_change_no_result():
    play, prepared = Play(scheduler={"max_num_seqs": 8}), []
    prepare = play.client.prepare

    def counted(*arguments, **fields):
        prepared.append(play.scheduler.counters.num_steps)
        return prepare(*arguments, **fields)

    play.client.prepare = counted
    prompts = [Prompt(token_ids=LONG[: 3 + index]) for index in range(6)]  # a step takes eight tokens
    submissions = play.client.submit_all(prompts, [SamplingParams(max_tokens=4)] * 6, score=False, starts=True)
    assert prepared == [0, 0, 0, 1, 1, 2]
    assert not submissions[-1].is_finished
    play.client.run(submissions)
    for prompt, submission in zip(prompts, submissions, strict=True):
        assert result(submission.output()) == expected(prompt.token_ids, 4)
    play.check_idle()


def test_a_bad_prompt_after_steps_have_run_ends_what_began():
    play = Play()
    prompts = [Prompt(token_ids=LONG[:9]), Prompt(token_ids=LONG[:3]), Prompt(token_ids=(VOCAB_SIZE,))]
    submissions = []
    with pytest.raises(RequestError, match=f"holds {VOCAB_SIZE}"):
        play.client.submit_all(prompts, [SamplingParams(max_tokens=4)] * 3, score=False, into=submissions, starts=True)
    assert play.scheduler.counters.num_steps == 1
    assert [submission.is_finished for submission in submissions] == [True, True]
    play.check_idle()


def test_times_and_preemptions_are_counted():
    play = Play(scheduler={"num_blocks": 9, "max_num_batched_tokens": 32})
    submissions = play.submit(LONG[:14], LONG[:13], max_tokens=18)
    play.client.run(submissions)
    metrics = [submission.output().metrics for submission in submissions]
    assert [m.num_preemptions > 0 for m in metrics] == [False, True]
    for m in metrics:
        assert 0 <= m.queue_s <= m.time_to_first_token_s <= m.total_s
    ends = [submission.samples[0].end.ended_at for submission in submissions]
    assert ends[0] < ends[1]  # the preempted one
    assert submissions[0].output().metrics == metrics[0]  # the clock stopped


# streams


def test_stream_yields_growing_outputs_and_last_the_finished_one():
    play = Play()
    outputs = list(play.stream(LONG, max_tokens=6))
    tokens, reason = expected(LONG, 6)
    assert [output.outputs[0].token_ids for output in outputs] == [tokens[: i + 1] for i in range(6)]
    assert [output.outputs[0].finish_reason for output in outputs] == [None] * 5 + [reason]


@pytest.mark.parametrize("order", ["ab" * 12, "aab" * 12, "a" * 12 + "b" * 12, "bba" * 12])
def test_interleaved_streams_each_show_all_of_their_own_and_end_finished(order):
    play = Play()
    streams = {"a": play.stream(LONG, max_tokens=6), "b": play.stream(MATE, max_tokens=4)}
    seen = {"a": [], "b": []}
    for name in order:
        seen[name] += [result(output) for output in [next(streams[name], None)] if output is not None]
    for name, prompt, max_tokens in (("a", LONG, 6), ("b", MATE, 4)):
        assert seen[name][-1] == expected(prompt, max_tokens)
        lengths = [len(tokens) for tokens, _ in seen[name]]
        assert lengths == sorted(set(lengths))
        assert next(streams[name], None) is None
    play.check_idle()


def test_stream_that_another_caller_ran_to_its_end_still_yields_its_output():
    play = Play()
    stream = play.stream(MATE, max_tokens=4)
    play.client.run(play.submit(LONG, max_tokens=20))
    assert [result(output) for output in stream] == [expected(MATE, 4)]


# leaving


def _waiting(play):
    for _ in range(2):
        play.submit(LONG, max_tokens=3)
    return play.stream(LONG, max_tokens=12)


def _never_asked(play):
    return play.stream(LONG, max_tokens=12)


def _between_chunks(play):
    stream = play.stream(LONG, max_tokens=12)
    play.client.step()
    assert 0 < next(iter(play.scheduler._running.values())).num_computed_tokens < len(LONG)
    return stream


def _decoding(play):
    stream = play.stream(LONG, max_tokens=12)
    next(stream)
    assert len(next(stream).outputs[0].token_ids) == 2
    return stream


def _preempted(play):
    stream = _decoding(play)
    play.scheduler._preempt(play.scheduler.get("request-0-0" if play.scheduler.get("request-0-0") else "request-1-0"))
    return stream


def _finished(play):
    stream = play.stream(LONG, max_tokens=3)
    assert [result(output) for output in stream][-1] == expected(LONG, 3)
    return stream


STATES = [_waiting, _never_asked, _between_chunks, _decoding, _preempted, _finished]


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("leave", ["close", "drop"])
def test_leaving_a_stream_gives_its_blocks_back_and_nobody_else_notices(state, leave):
    play = Play(scheduler={"max_num_seqs": 3})
    stream = state(play)
    mate = play.submit(MATE, max_tokens=12)
    held = {r for r, (s, _) in play.client._live.items() if s is not mate[0]}
    gone = held if state is not _waiting else {max(held)}
    if leave == "close":
        stream.close()
        stream.close()
    del stream
    play.scheduler.check_integrity()
    assert not any(play.scheduler.get(request_id) for request_id in gone)
    play.client.run([*mate, *(submission for submission, _ in play.client._live.values())])
    assert result(mate[0].output()) == expected(MATE, 12)
    play.check_idle()


@pytest.mark.parametrize("num_steps", range(1, 9))
def test_interrupt_between_steps_aborts_the_callers_requests_alone(num_steps):
    play = Play()
    stream = play.stream(MATE, max_tokens=12)
    submissions = play.submit(LONG, LONG[3:], max_tokens=12)
    left = iter(range(num_steps))

    def interrupt():
        if next(left, None) is None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        play.client.run(submissions, interrupt)
    assert [result(s.output())[1] for s in submissions] == ["abort", "abort"]
    assert submissions[0].output().metrics == submissions[0].output().metrics
    play.scheduler.check_integrity()
    assert [result(output) for output in stream][-1] == expected(MATE, 12)
    play.check_idle()


@pytest.mark.parametrize("fault", [KeyboardInterrupt(), RuntimeError("out of memory")])
def test_failure_while_the_device_works_ends_the_callers_requests_and_the_others_go_on(fault):
    play = Play()
    stream = play.stream(MATE, max_tokens=12)
    next(stream)
    play.runner.fault = fault
    with pytest.raises(type(fault)):
        play.client.run(play.submit(LONG, max_tokens=12))
    play.runner.fault = None
    submissions = play.submit(LONG, max_tokens=12)
    play.client.run(submissions)
    assert result(submissions[0].output()) == expected(LONG, 12)
    assert result(list(stream)[-1]) == expected(MATE, 12)  # computed again from its start, to the same tokens
    play.check_idle()


def test_a_client_that_is_closed_beside_a_running_step_ends_what_runs_and_takes_no_more():
    play, outputs = Play(steps_ahead=1), []
    play.runner.hold()
    runs = threading.Thread(target=lambda: outputs.extend(play.stream(MATE, max_tokens=50)))
    runs.start()
    play.runner.wait_for_a_step()
    closes = threading.Thread(target=play.client.close)
    closes.start()
    closes.join(0.05)
    assert closes.is_alive(), "it waits for the step"
    play.runner.release()
    closes.join()
    runs.join()
    assert outputs[-1].outputs[0].finish_reason == "abort"
    for door in (lambda: play.submit(MATE), lambda: play.client.update_params(None)):
        with pytest.raises(EngineDeadError, match="closed; make a new one"):
            door()
    play.check_idle()


def test_closed_client_ends_open_streams_with_what_they_had():
    play = Play()
    decoding, fresh = play.stream(MATE, max_tokens=12), play.stream(LONG, max_tokens=12)
    next(decoding)
    play.client.close()
    play.check_idle()
    assert [result(output) for output in decoding] == [(expected(MATE, 1)[0], "abort")]
    assert [result(output) for output in fresh] == [((), "abort")]


# seeds


def test_requests_without_a_seed_draw_different_ones_that_depend_on_the_clients_words():
    def seeds(words, **params):
        play = Play(seed_words=words)
        return [s.samples[0].request.seed for s in play.submit(MATE, MATE, LONG, max_tokens=1, **params)]

    assert len(set(seeds((0, 0)))) == 3
    assert seeds((0, 0)) == seeds((0, 0))
    assert not set(seeds((0, 0))) & set(seeds((1, 0)))
    assert seeds((0, 0), seed=7) == [(7, 0)] * 3
    assert seeds((0, 0), seed=-1) == [(0xFFFFFFFF, 0xFFFFFFFF)] * 3
    assert seeds((0, 0), seed=5 << 32) == [(0, 5)] * 3


def test_samples_of_one_prompt_share_its_seed_and_differ_by_their_index():
    play = Play()
    (submission,) = play.submit(MATE, n=3, max_tokens=2)
    requests = [sample.request for sample in submission.samples]
    assert len({request.seed for request in requests}) == 1
    assert [request.sample_index for request in requests] == [0, 1, 2]
    play.client.run([submission])
    output = submission.output()
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    assert [result(output, index) for index in range(3)] == [expected(MATE, 2)] * 3


def test_tokenless_client_has_empty_text_and_refuses_stop_strings():
    play = Play()
    (submission,) = play.submit(MATE, max_tokens=3)
    play.client.run([submission])
    assert submission.output().outputs[0].text == ""
    with pytest.raises(RequestError, match="need a tokenizer"):
        play.submit(MATE, stop="x")
    play.check_idle()
