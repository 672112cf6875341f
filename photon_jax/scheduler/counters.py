"""Counters: what a scheduler has done, as plain numbers. Host only."""

import dataclasses


@dataclasses.dataclass(kw_only=True, slots=True)
class SchedulerCounters:
    """What a scheduler has done since it was made."""

    num_added: int = 0
    num_stopped: int = 0  # ended by a stop id or a stop string
    num_length_stopped: int = 0  # ended by a limit; score requests end so
    num_aborted: int = 0
    num_steps: int = 0
    num_scheduled_tokens: int = 0
    num_chunks: int = 0  # rows that left tokens of their sequence uncomputed
    num_preemptions: int = 0
    num_prefix_query_tokens: int = 0  # tokens of the sequences that were admitted, at first admissions and later ones
    num_prefix_hit_tokens: int = 0  # of those, found in the prefix cache

    @property
    def num_finished(self) -> int:
        """Requests that ended, aborted ones included."""
        return self.num_stopped + self.num_length_stopped + self.num_aborted
