"""Know what measurements take before they are made: say so, and keep within ``max_overhead``."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from pytorch_lightning import Trainer

from lightning_normtheory.callbacks.engine.budget import TimeBudget
from lightning_normtheory.callbacks.engine.cost import (
    SHARED,
    Sizes,
    compared,
    rough_duration,
)
from lightning_normtheory.callbacks.engine.diagnostic import Diagnostic
from lightning_normtheory.callbacks.engine.guarded import GuardedCallback
from lightning_normtheory.callbacks.engine.schedule import Schedule, steps_of_epoch, steps_of_run
from lightning_normtheory.callbacks.measurement.measurement import Measurement
from lightning_normtheory.callbacks.output.messages import say
from lightning_normtheory.callbacks.samples.validation_probe import ValidationProbe

__all__ = ["Plan", "PlanningCallback"]

# Seconds: a shorter wait needs no announcement, and the fixed costs of a measurement, which are not predicted, count
# there. Whoever measures so often that it adds up gets the hint.
_NOTEWORTHY = 1.0
# Hint when measuring has taken this part of the training time, and at least so many seconds.
_MUCH, _LONG = 0.5, 5.0


class Plan(NamedTuple):
    """What the trial says about the time of measurements.

    Attributes:
        sizes: the counts that they depend on.
        gradient: the seconds of a gradient on the probe, G.
        step: the seconds of an optimizer step.
    """

    sizes: Sizes
    gradient: float
    step: float

    def measurement(self, diagnostics: Sequence[Diagnostic]) -> dict[str, float]:
        """Return the expected seconds of one measurement by diagnostic. A shared quantity counts for the first one that
        asks for it."""
        found: dict[str, float] = {}
        known: set[str] = set()
        for each in diagnostics:
            shared = sum(SHARED[name](self.sizes) for name in each.shared if name not in known)
            known.update(each.shared)
            found[each.key] = self.gradient * (each.cost(self.sizes) + shared)
        return found

    def start(self, diagnostics: Sequence[Diagnostic]) -> dict[str, float]:
        """Return the expected seconds of what the diagnostics measure before the first step."""
        return {each.key: self.gradient * each.start_cost(self.sizes) for each in diagnostics}


class PlanningCallback(GuardedCallback):
    """A callback that plans its measurements.

    Attributes:
        max_overhead: the largest fraction of the training time that measuring may take; ``None``: no limit.
    """

    max_overhead: float | None
    _budget: TimeBudget
    _schedule: Schedule
    _validation_probe: ValidationProbe | None
    _plan: Plan | None = None

    # -- after the trial -----------------------------------------------------------------------------------------------

    def _forecast(self, measurement: Measurement, samples: int) -> None:
        """Say what measuring takes, before any of it, and leave out those starts that the limit does not pay for.

        Args:
            samples: the number of samples in a training batch.
        """
        trainer = measurement.trainer
        self._plan = plan = self._make_plan(measurement, samples)
        if plan is None:
            return
        self._budget.predicted = sum(plan.measurement(self._active).values())
        starts = {} if self._fit.start_measured else plan.start(self._active)
        if starts and self.max_overhead is not None:
            # The first process decides: the clocks of the processes differ.
            late = trainer.strategy.broadcast(self._too_late(plan, starts, steps_of_run(trainer) - trainer.global_step))
            why = f"max_overhead={self.max_overhead:g} does not pay for its value at fit start; it begins later"
            self._fit.unstarted = dict.fromkeys(late, why)
        start = sum(seconds for key, seconds in starts.items() if key not in self._fit.unstarted)
        schedule = self._schedule
        steps = schedule.every * (1 if schedule.axis == "step" else steps_of_epoch(trainer))
        if text := _announcement(self._budget.expected, start, steps, plan.step):
            say(trainer, f"{self.prefix}: {text}.")

    def _make_plan(self, measurement: Measurement, samples: int) -> Plan | None:
        """Return what the trial says; ``None`` if it could not time a gradient."""
        function, found = measurement.function, measurement.function.findings
        if not found.seconds:
            return None
        share = math.ceil(self.probe.samples / measurement.processes.count)
        own = sum(batch.samples for batch in function.batches if batch.counts)
        validated = self._validation_probe is not None and measurement.trainer.enable_validation
        sizes = Sizes(
            probe=max(own, share if self.probe.collecting else 1),  # a process may have no samples of its own
            batch=function.batches[0].samples,
            outputs=0 if found.outputs_problem else max(found.outputs, 1),
            parameters=sum(p.numel() for p in function.theta.values()),
            validation=share if validated else 0,
        )
        of_sample = found.seconds / found.samples
        batches = measurement.trainer.accumulate_grad_batches if function.model.automatic_optimization else 1
        return Plan(sizes, gradient=of_sample * sizes.probe, step=of_sample * samples * batches)

    def _too_late(self, plan: Plan, starts: Mapping[str, float], steps: float) -> list[str]:
        """Return the diagnostics whose start the limit does not pay for beside one measurement, in so many steps."""
        allowance = self._budget.allowance(self._budget.training + plan.step * steps)
        never = self._too_expensive(plan, allowance)
        kept = [each for each in self._active if each.key not in never]
        allowance -= sum(plan.measurement(kept).values())
        return never + _least(lambda keys: sum(starts[key] for key in keys), plan.start(kept), allowance)

    # -- when a measurement is due -------------------------------------------------------------------------------------

    def _affordable(self, trainer: Trainer) -> bool:
        """Return whether a measurement is within the limit now; leave out the diagnostics that never will be."""
        if self.max_overhead is None:
            return True
        # The clocks of the processes differ, and all must do the same: the first process decides.
        never, reason = trainer.strategy.broadcast(self._never_affordable(trainer))
        if never:
            self._leave_out([each for each in self._active if each.key in never], reason)
            self._fit.too_expensive.update(dict.fromkeys(never, reason))
            self._budget.predicted = sum(self._plan.measurement(self._active).values()) if self._plan else 0.0
        return trainer.strategy.broadcast(bool(self._active) and self._budget.allows_another())

    def _never_affordable(self, trainer: Trainer) -> tuple[list[str], str]:
        """Return the diagnostics that the limit does not pay for even once, up to the end of the run, and the reason.

        Known from the first measurement that is due on: by then, the steps so far tell how long the training takes.
        """
        plan, budget, steps = self._plan, self._budget, steps_of_run(trainer)
        if plan is None or budget.measured or budget.allows_another() or math.isinf(steps) or not trainer.global_step:
            return [], ""
        allowance = budget.allowance(budget.training * steps / trainer.global_step)
        never = self._too_expensive(plan, allowance)
        rest = [each for each in self._active if each.key not in never]
        rest_cost = sum(plan.measurement(rest).values())
        needed = budget.predicted - rest_cost
        return never, (
            f"Beside the rest, one measurement of {'it' if len(never) == 1 else 'them'} takes about"
            f" {rough_duration(needed)}, and max_overhead={self.max_overhead:g} leaves"
            f" {rough_duration(max(allowance - rest_cost, 0.0))} in this run. Raise max_overhead, or use a smaller"
            f" probe= than {self.probe.samples}."
        )

    def _too_expensive(self, plan: Plan, allowance: float) -> list[str]:
        def cost(keys: Sequence[str]) -> float:
            return sum(plan.measurement([each for each in self._active if each.key in keys]).values())

        return _least(cost, plan.measurement(self._active), allowance)

    # -- after a measurement -------------------------------------------------------------------------------------------

    def _hint_of_cost(self, trainer: Trainer) -> None:
        """Hint once at the cost of measuring, if it has no limit."""
        spent, training, taken = self._budget.spent, self._budget.training, self._fit.seconds
        if self.max_overhead is not None or spent < max(_LONG, _MUCH * training) or not taken:
            return
        longest = max(self._diagnostics, key=lambda each: taken.get(each.key, 0.0))
        self._warn_once(
            "cost",
            f"{self.prefix}: measuring has taken {rough_duration(spent)}, training {rough_duration(training)}; the"
            f" longest part is {longest.title}, {rough_duration(taken[longest.key])}. Measure less often"
            f" (every_n_{self._schedule.axis}s=), set a limit (max_overhead=0.1), or use fewer samples (probe=).",
            partial(say, trainer),
        )


def _announcement(each: float, start: float, steps: float, step: float) -> str:
    """Return what a measurement and the start take, if that is long.

    Args:
        each: the seconds of a measurement.
        start: the seconds of what is measured before the first step.
        steps: the optimizer steps from one measurement to the next; infinite if unknown.
        step: the seconds of a step.

    Example:
        >>> _announcement(4.1, 0.5, steps=300, step=0.5)
        'each measurement takes about 4 s, 3 % of 300 steps'
        >>> _announcement(4.1, 12.0, steps=math.inf, step=0.5)
        'each measurement takes about 4 s; the one at the start 12 s'
        >>> _announcement(90.0, 0.5, steps=4, step=0.5)
        'each measurement takes about 90 s, 45 times as long as 4 steps (reduce it with probe= or max_overhead=)'
        >>> _announcement(0.4, 0.5, steps=3, step=0.5)
        ''
    """
    if max(each, start) < _NOTEWORTHY:
        return ""
    of = "" if math.isinf(steps) else f", {compared(each / (steps * step))} {steps} step{'s' * (steps > 1)}"
    if not math.isinf(steps) and each > steps * step:
        of += " (reduce it with probe= or max_overhead=)"
    before = f"; the one at the start {rough_duration(start)}" if start >= _NOTEWORTHY else ""
    return f"each measurement takes about {rough_duration(each)}{of}{before}"


def _least(cost: Callable[[Sequence[str]], float], costs: Mapping[str, float], allowance: float) -> list[str]:
    """Return what to leave out, the most expensive first, until the cost of the rest is within the allowance.

    Example:
        >>> costs = {"a": 1.0, "b": 5.0, "c": 3.0, "d": 0.0}
        >>> _least(lambda keys: sum(costs[key] for key in keys), costs, 2.0)
        ['b', 'c']
    """
    left_out: list[str] = []
    for key in sorted(costs, key=lambda key: -cost([key])):
        if cost([each for each in costs if each not in left_out]) <= max(allowance, 0.0):
            break
        left_out.append(key)
    return left_out
