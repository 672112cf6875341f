"""The steps that an engine will take for a workload, planned without a device."""

import collections
from collections.abc import Iterator

import numpy as np

from photon_jax.bench.workloads import Workload
from photon_jax.engine.input_builder import InputBuilder
from photon_jax.engine.start import StartedEngine
from photon_jax.request import Request, SamplingParams
from photon_jax.scheduler.plan import StepPlan, StepResult
from photon_jax.step_io import StepLayout


def sampling_params(workload: Workload) -> list[SamplingParams]:
    """Returns greedy parameters by which each request gets as many tokens as the workload says."""
    return [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in workload.output_lens]


def dry_run(started: StartedEngine, workload: Workload) -> Iterator[tuple[StepLayout, np.ndarray]]:
    """Yields layout and packed inputs of each dispatch that the engine will make, all requests coming at once.

    The plans depend on lengths alone, so they are those of the real run; a token that the host would know by then is 0.
    """
    scheduler = started.new_scheduler()
    builder = InputBuilder(block_size=started.layout.block_size, max_num_seqs=scheduler.max_num_seqs)
    for index, (prompt, params) in enumerate(zip(workload.prompts, sampling_params(workload), strict=True)):
        scheduler.add(Request(request_id=str(index), prompt_token_ids=prompt, params=params.resolve({})))
    in_flight: collections.deque[StepPlan] = collections.deque()
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        if plan.scheduled:
            layout = started.runner.buckets.choose(plan)
            yield layout, builder.build(plan, layout)
            in_flight.append(plan)
        if in_flight and (len(in_flight) > started.engine.steps_ahead or not plan.scheduled):
            plan = in_flight.popleft()
            count = len(plan.scheduled) * plan.num_steps
            scheduler.apply(plan, StepResult(np.zeros(count, np.int32), np.zeros((count, 3), np.float32)))
