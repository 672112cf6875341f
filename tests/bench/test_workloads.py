"""Workloads: the lengths that are asked for, the same in each run, and token ids that no run shares with another."""

import dataclasses

import pytest

from photon_jax.bench.workloads import WorkloadSpec, make_workload
from photon_jax.errors import ConfigError

CHATS = WorkloadSpec(num_requests=2000, lengths="lognormal", prompt_len=220, output_len=180)


def lengths(workload):
    return [len(prompt) for prompt in workload.prompts], list(workload.output_lens)


def test_chats_are_lognormal_around_their_means_and_clipped():
    workload = make_workload(CHATS, vocab_size=50, seed=0)
    prompts, outputs = lengths(workload)
    for drawn, mean in ((prompts, 220), (outputs, 180)):
        assert len(drawn) == 2000 and min(drawn) >= 4 and max(drawn) == 1024
        assert abs(sum(drawn) / 2000 / mean - 1) < 0.05
    assert (workload.num_prompt_tokens, workload.num_output_tokens) == (sum(prompts), sum(outputs))
    assert workload.max_len == max(p + o for p, o in zip(prompts, outputs, strict=True))
    assert all(0 <= token < 50 for token in workload.prompts[0])


def test_seeds_change_the_tokens_and_not_the_lengths():
    first, second = (make_workload(CHATS, vocab_size=50, seed=seed) for seed in (1, 2))
    assert lengths(first) == lengths(second)
    assert not set(first.prompts) & set(second.prompts)
    assert first == make_workload(CHATS, vocab_size=50, seed=1)


def test_fixed_lengths_are_all_the_mean_and_uniform_ones_are_around_it():
    spec = WorkloadSpec(num_requests=500, prompt_len=20, output_len=6)
    assert lengths(make_workload(spec, vocab_size=9, seed=0)) == ([20] * 500, [6] * 500)
    prompts, outputs = lengths(make_workload(dataclasses.replace(spec, lengths="uniform"), vocab_size=9, seed=0))
    assert (min(prompts), max(prompts)) == (1, 39) and (min(outputs), max(outputs)) == (1, 11)


def test_mixes_put_a_shared_prefix_before_all_or_a_long_one_of_its_own_before_every_eighth():
    spec = WorkloadSpec(num_requests=16, prompt_len=5, output_len=2, prefix_len=100, mix="shared_prefix")
    shared = make_workload(spec, vocab_size=1000, seed=0)
    assert {prompt[:100] for prompt in shared.prompts} == {shared.prompts[0][:100]}
    assert len({prompt[100:] for prompt in shared.prompts}) == 16
    assert make_workload(spec, vocab_size=1000, seed=1).prompts[0][:100] != shared.prompts[0][:100]
    second = make_workload(spec, vocab_size=1000, seed=0, wave=1)
    assert second.prompts[0][:100] == shared.prompts[0][:100] and not set(second.prompts) & set(shared.prompts)
    long = make_workload(dataclasses.replace(spec, mix="long_context"), vocab_size=1000, seed=0)
    assert [len(prompt) for prompt in long.prompts] == [105, *[5] * 7] * 2
    assert long.prompts[0][:100] != long.prompts[8][:100]


@pytest.mark.parametrize("field", ["num_requests", "prompt_len", "output_len", "prefix_len"])
def test_sizes_are_positive(field):
    with pytest.raises(ConfigError, match=f"{field} must be at least 1, got 0"):
        WorkloadSpec(**({"num_requests": 1} | {field: 0}))


@pytest.mark.parametrize("field", ["lengths", "mix"])
def test_unknown_kinds_are_named(field):
    with pytest.raises(ConfigError, match=f"{field} must be one of .*, got 'odd'"):
        WorkloadSpec(num_requests=1, **{field: "odd"})
