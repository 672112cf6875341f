"""Engine: scheduler and runner joined in a loop; it takes requests of token ids and gives token deltas."""

import collections
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

from photon_jax.controls import LogitsProcessor, ProcessorFailure
from photon_jax.engine.faults import StepFault, find_fault, find_nan
from photon_jax.engine.metrics import HostClock
from photon_jax.engine.runner import StepHandle
from photon_jax.errors import EngineDeadError, PhotonError
from photon_jax.models.params import Params
from photon_jax.outputs import TokenDelta
from photon_jax.request import Request
from photon_jax.scheduler.plan import StepPlan, StepResult
from photon_jax.scheduler.scheduler import Scheduler
from photon_jax.step_io import StepLayout

Argument = TypeVar("Argument")
Value = TypeVar("Value")


class Runner(Protocol):
    """What the engine needs of a model: to start a step, and later to read it."""

    def launch(self, plan: StepPlan) -> StepHandle:
        """Starts a step."""

    def collect(self, handle: StepHandle) -> StepResult:
        """Waits for a step."""

    def reset(self) -> None:
        """Makes the cache anew, empty."""

    def set_params(self, params: Params) -> None:
        """Makes the steps launched from now on use other weights."""

    def deleted_leaf(self) -> str | None:
        """Returns a leaf of the weights that somebody deleted, if there is one."""

    def calls_out(self, processor: LogitsProcessor) -> bool:
        """Returns whether a processor calls what can fail while it runs."""

    def missing(self, requests: Sequence[Request], num_prompt_tokens: int) -> list[StepLayout]:
        """Returns what a batch of these requests may need and is not compiled, in the order to compile it."""

    def announce(self, layouts: Sequence[StepLayout]) -> bool:
        """Makes steps do without programs that others compile from now on; returns whether they can."""

    @property
    def allows_several(self) -> bool:
        """Whether a plan may have several steps."""

    def compile_late(self, layout: StepLayout) -> None:
        """Compiles a program while others run."""


class Engine:
    """The loop: it plans and launches a step while the one before it runs, and then takes that one's results.

    Sampled tokens stay on the device, so a step needs none of the results before it. That a sequence ended at a stop
    id is noticed when the next step is on its way; what this one computes for it is dropped.

    Attributes:
      scheduler: queue, blocks and counters.
      last_plan: of the last step that was launched.
      weights_version: how often the weights were replaced.
      clock: how long the host worked and waited.
      steps_ahead: steps that may be on their way when another one is launched.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner, *, steps_ahead: int = 0) -> None:
        """Joins the two.

        Args:
          steps_ahead: steps that may be on their way when another one is launched; 0 takes turns.
        """
        self.scheduler = scheduler
        self.last_plan = StepPlan(())
        self.clock = HostClock()
        self.weights_version = 0
        self._runner = runner
        self.steps_ahead = steps_ahead
        self._in_flight: collections.deque[tuple[StepPlan, StepHandle]] = collections.deque()
        self._num_restarts = 0
        self._is_planning = False

    def step(self) -> list[TokenDelta]:
        """Launches a step if there is one, and takes the results of the oldest one if enough are on their way.

        Returns what each request got: nothing while the first steps are on their way, or when there is nothing to do.
        When the device fails, or an interrupt comes while it works, its cache is lost: the running requests wait to
        be computed again, to the same tokens, and the next call goes on.

        Raises:
          StepFault: the step failed through a logits_processor, or the weights were deleted or gave NaN; likewise.
          EngineDeadError: an earlier step broke off while the host planned, so its books can't be trusted.
        """
        with self._planning():
            plan = self.scheduler.schedule(several=self._runner.allows_several)
            if plan.scheduled:
                self.last_plan = plan
                with self.clock.launching():
                    self._in_flight.append((plan, self._on_device(self._runner.launch, plan, self._on_their_way())))
            is_due = len(self._in_flight) > self.steps_ahead or not plan.scheduled
            return self._take_oldest() if self._in_flight and is_due else []

    def set_params(self, params: Params) -> None:
        """Replaces the weights; no sequence may have begun. What the prefix cache holds of the old ones is forgotten.

        Args:
          params: of the structure, shapes and dtypes of those before.
        """
        assert not self.scheduler.has_begun, "weights were replaced under sequences that have begun"
        self._runner.set_params(params)
        self.weights_version += 1
        self.scheduler.set_namespace(b"weights %d" % self.weights_version)

    def missing_programs(self, requests: Sequence[Request], num_prompt_tokens: int) -> list[StepLayout]:
        """Returns the programs that a batch of these requests may need and that would be compiled in the middle of it.

        Any thread may ask, and compile them with `compile_program`, while steps run. They are in the order for that.

        Args:
          num_prompt_tokens: of their prompts that are not computed yet.
        """
        return self._runner.missing(requests, num_prompt_tokens)

    def announce_programs(self, layouts: Sequence[StepLayout]) -> bool:
        """Makes steps do without programs that others compile from now on, those of the last call alone.

        Returns whether they can: larger programs are there that take their place.
        """
        return self._runner.announce(layouts)

    def compile_program(self, layout: StepLayout) -> None:
        """Compiles a program, unless it is there by now."""
        self._runner.compile_late(layout)

    def drain(self) -> list[TokenDelta]:
        """Takes the results of all steps on their way, and launches none."""
        with self._planning():
            return [delta for _ in range(len(self._in_flight)) for delta in self._take_oldest()]

    def _take_oldest(self) -> list[TokenDelta]:
        plan, handle = self._in_flight[0]
        with self.clock.waiting():
            result = self._on_device(self._collect, (plan, handle), [plan])
        self._in_flight.popleft()
        return self.scheduler.apply(plan, result)

    def _collect(self, launched: tuple[StepPlan, StepHandle]) -> StepResult:
        """Returns a step's results; NaN is a fault, as it stays in the cache and would spread from there."""
        plan, handle = launched
        result = self._runner.collect(handle)
        if fault := find_nan(plan, result):
            raise fault
        return result

    @contextlib.contextmanager
    def _planning(self) -> Iterator[None]:
        if self._is_planning:
            raise EngineDeadError("an earlier step of this engine broke off while it planned; make a new engine")
        self._is_planning = True
        with self.clock.working():
            yield
        self._is_planning = False

    def _on_their_way(self) -> list[StepPlan]:
        """Returns the plans of the steps on their way, the one that is being launched included."""
        return [self.last_plan, *(plan for plan, _ in self._in_flight if plan is not self.last_plan)]

    def _on_device(self, call: Callable[[Argument], Value], argument: Argument, suspects: Sequence[StepPlan]) -> Value:
        """Returns what the runner returns; if it doesn't, all that is on its way is forgotten.

        Args:
          suspects: plans of the steps of which one, most likely, has failed if it doesn't.
        """
        is_done = False
        try:
            value = call(argument)
            is_done = True
            return value
        except PhotonError:
            raise
        except (RuntimeError, ValueError, ProcessorFailure) as error:  # JAX raises the first two for its device
            fault = self._find_fault(error, suspects) or self._find_fault(error, self._on_their_way())
            if fault is None:
                raise
            raise fault from (error.__cause__ if isinstance(error, ProcessorFailure) else error)
        finally:
            if not is_done:
                self._in_flight.clear()
                self._num_restarts += 1
                self._runner.reset()
                self.scheduler.restart(b"restart %d" % self._num_restarts)
                self._is_planning = False

    def _find_fault(self, error: Exception, plans: Sequence[StepPlan]) -> StepFault | None:
        return find_fault(error, plans, self._runner.deleted_leaf(), self._runner.calls_out)
