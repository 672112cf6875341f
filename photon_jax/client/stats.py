"""Stats: what an engine does at the moment and has done so far, as plain numbers."""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from photon_jax.client.local_client import LocalClient


class SlotStats(NamedTuple):
    """One running sequence.

    Attributes:
      request_id: of the sequence: its request's id, a dash and the index of the sample.
      num_tokens: of prompt and output, tokens on their way included.
      num_output_tokens: of the output so far.
    """

    request_id: str
    num_tokens: int
    num_output_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EngineStats:
    """What an engine does at the moment, and its totals since it started.

    Attributes:
      is_ready: whether new requests are taken.
      max_num_seqs: sequences that may run at once.
      num_running: sequences that hold blocks.
      num_waiting: sequences that wait for their turn, preempted ones included.
      num_blocks: of the cache, the null block not counted.
      num_free_blocks: that a sequence can get, those that only the prefix cache holds among them.
      num_cached_blocks: that only the prefix cache holds.
      num_steps: of the model.
      num_prompt_tokens: of the prompts whose computation began.
      num_output_tokens: that were given out.
      num_finished: sequences that ended, by finish reason; scored prompts end by "length".
      num_preemptions: times that a running sequence lost its blocks.
      num_prefix_query_tokens: tokens of the sequences that began or resumed.
      num_prefix_hit_tokens: of those, found in the prefix cache.
      slots: the running sequences in the order of their arrival.
    """

    is_ready: bool
    max_num_seqs: int
    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_steps: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_finished: Mapping[str, int]
    num_preemptions: int
    num_prefix_query_tokens: int
    num_prefix_hit_tokens: int
    slots: tuple[SlotStats, ...]


def read_stats(client: LocalClient, *, is_ready: bool, num_coming: int) -> EngineStats:
    """Returns the numbers of this moment; it waits for nothing, so a step that runs may change some while it reads.

    Args:
      num_coming: sequences that wait outside of the engine's queue.
    """
    scheduler = client.engine.scheduler
    counters, running = scheduler.counters, scheduler.running
    return EngineStats(
        is_ready=is_ready,
        max_num_seqs=scheduler.max_num_seqs,
        num_running=len(running),
        num_waiting=scheduler.num_waiting + num_coming,
        num_blocks=scheduler.limits.layout.num_usable_blocks,
        num_free_blocks=scheduler.num_free_blocks,
        num_cached_blocks=scheduler.num_idle_blocks,
        num_steps=counters.num_steps,
        num_prompt_tokens=client.num_prompt_tokens,
        num_output_tokens=client.num_output_tokens,
        num_finished={
            "stop": counters.num_stopped,
            "length": counters.num_length_stopped,
            "abort": counters.num_aborted,
        },
        num_preemptions=counters.num_preemptions,
        num_prefix_query_tokens=counters.num_prefix_query_tokens,
        num_prefix_hit_tokens=counters.num_prefix_hit_tokens,
        slots=tuple([SlotStats(seq.request_id, seq.num_tokens, seq.num_output_tokens) for seq in running]),
    )
