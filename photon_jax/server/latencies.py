"""Latencies: how long requests took, for /metrics."""

from photon_jax.histogram import SECONDS, Histogram
from photon_jax.outputs import RequestOutput


class Latencies:
    """How long finished requests took, seconds; aborted ones don't count."""

    def __init__(self) -> None:
        self.by_name = {
            name: (Histogram(SECONDS), text)
            for name, text in (
                ("time_to_first_token_seconds", "From submission to the first token."),
                ("request_time_per_output_token_seconds", "Mean time of a request's tokens after the first."),
                ("e2e_request_latency_seconds", "From submission to the end."),
                ("request_queue_time_seconds", "From submission to the first step that computed it."),
                ("request_inference_time_seconds", "From the first step to the end."),
                ("request_prefill_time_seconds", "From the first step to the first token."),
                ("request_decode_time_seconds", "From the first token to the end."),
            )
        }

    def observe(self, output: RequestOutput) -> None:
        """Takes a request that has ended."""
        times = output.metrics
        first = times.time_to_first_token_s
        if first is None or any(each.finish_reason == "abort" for each in output.outputs):
            return
        self._add("time_to_first_token_seconds", first)
        self._add("e2e_request_latency_seconds", times.total_s)
        self._add("request_queue_time_seconds", times.queue_s)
        self._add("request_inference_time_seconds", times.total_s - times.queue_s)
        self._add("request_prefill_time_seconds", first - times.queue_s)
        self._add("request_decode_time_seconds", times.total_s - first)
        longest = max(len(each.token_ids) for each in output.outputs)
        if longest > 1:
            self._add("request_time_per_output_token_seconds", (times.total_s - first) / (longest - 1))

    def _add(self, name: str, seconds: float) -> None:
        self.by_name[name][0].add(max(seconds, 0.0))
