"""Try the loss on the first batch of the probe: find the loss and the predictor, or say what is missing."""

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_normtheory.autodiff.graph import leaves, leaves_from
from lightning_normtheory.callbacks.measurement.function import RETURNS, MeasuredFunction
from lightning_normtheory.callbacks.samples.batch_contents import describe, key_path, tensors_in
from lightning_normtheory.callbacks.samples.probe import ProbeBatch
from lightning_normtheory.callbacks.step.findings import Findings
from lightning_normtheory.callbacks.step.manual_step import ManualStep
from lightning_normtheory.callbacks.step.predictor import Call, CallOutput, RecordedCalls, depends_on, find_call
from lightning_normtheory.callbacks.step.training_step import call_training_step
from lightning_normtheory.linalg.arithmetic import operand_eps
from lightning_normtheory.measuring.memory import is_out_of_memory
from lightning_normtheory.model.checks import require_graph
from lightning_normtheory.record.wording import join_names
from lightning_normtheory.rsc import gradients_of

__all__ = ["example_of", "explore"]

# How many values of batch_idx to try: a manual step may train one player in every n-th batch only.
_BATCH_INDICES = 10
# Seconds: a gradient that takes longer is timed once. A shorter one is repeated, since the first call may initialize.
_LONG = 0.1
# Outputs that are compared at once.
_PIECE = 2**20


def explore(function: MeasuredFunction, *, loss: bool) -> Findings:
    """Run the loss of the first batch, and find out what later measurements need to know.

    The first process decides for all.

    Args:
        loss: whether a diagnostic needs the loss.

    Raises:
        ValueError: if a function that the user passed fails, or ``parameters=`` chooses nothing.
    """
    function.theta  # noqa: B018  # raises if the choice is wrong
    findings = Findings()
    with function.measuring():
        for batch in function.batches[:1]:
            trial = _Trial(function, batch)
            findings = trial.run(loss=loss)
            trial.time_gradient(loss=loss)
    return function.trainer.strategy.broadcast(findings) if function.processes.count > 1 else findings


class _Trial:
    def __init__(self, function: MeasuredFunction, batch: ProbeBatch) -> None:
        self._function, self._batch = function, batch
        self._theta = list(function.theta.values())
        self._outputs = 0

    def run(self, *, loss: bool) -> Findings:
        function = self._function
        if function.user_predict is not None:
            self._try("predict", self._count_outputs)
        if not loss and function.user_predict is not None:
            function.findings.outputs = self._outputs
            return function.findings
        if not self._theta:
            frozen = "it has no trainable parameter"
            function.findings = Findings(loss_problem=frozen, outputs_problem=frozen)
            return function.findings
        failure: Exception | None = None
        try:
            chosen = self._choose()
        except Exception as error:
            if function.user_loss is not None and not is_out_of_memory(error):
                raise self._refusal("loss", error) from error
            failure = error.with_traceback(None)  # the traceback would keep the memory in use
        if failure is not None and is_out_of_memory(failure):
            return self._with_half(loss=loss)
        if failure is not None:
            problem = f"its training_step could not be tried ({type(failure).__name__}: {failure})"
            function.findings = Findings(loss_problem=problem, outputs_problem=problem)
        elif function.user_predict is None and not function.findings.loss_problem:
            self._try_predictor(chosen)
        if function.user_predict is not None:
            function.findings.outputs_problem, function.findings.outputs = "", self._outputs
        return function.findings

    def time_gradient(self, *, loss: bool) -> None:
        """Time a gradient of the loss, or of the outputs where no loss is needed or known."""
        function = self._function
        findings, batch = function.findings, self._batch
        known = loss and not findings.loss_problem
        # Several processes evaluate equally often: a step may wait for the other ones.
        alone = function.processes.count == 1 and function.model.device.type == "cpu"
        times: list[float] = []
        with suppress(Exception):  # what fails is left to the measurement, which reports it
            while len(times) < 2 and not (alone and sum(times) > _LONG):
                begin = time.perf_counter()
                value = function.loss_of(batch) if known else function.outputs_of(batch).sum()
                found = [gradient for gradient in gradients_of(value, function.theta) if gradient is not None]
                found[-1].flatten()[:1].tolist()  # waits for the device
                times.append(time.perf_counter() - begin)
                del value, found
        findings.seconds, findings.samples = min(times, default=0.0), batch.samples

    def _with_half(self, *, loss: bool) -> Findings:
        """Try fewer samples. What a single one has no memory for is reported by the measurements."""
        halves = self._batch.halves()
        if len(halves) == 1:
            self._function.findings = Findings(outputs_problem="there is not enough memory to try its training_step")
            return self._function.findings
        self._batch = halves[0]
        return self.run(loss=loss)

    def _refusal(self, argument: str, error: Exception) -> ValueError:
        return ValueError(
            f"The function passed as {argument}= failed on a probe batch ({describe(self._batch.data)}): "
            f"{type(error).__name__}: {error}\nExpected a function of the module and a batch that returns "
            f"{RETURNS[argument]}."
        )

    def _try(self, argument: str, trial: Any) -> None:
        try:
            trial()
        except Exception as error:
            if not is_out_of_memory(error):
                raise self._refusal(argument, error) from error

    def _count_outputs(self) -> None:
        """Run the user's ``predict``, and note how many outputs a row of it has."""
        self._outputs = self._function.outputs_of(self._batch).shape[1:].numel()

    def _choose(self) -> "_Choice | str":
        """Compute the loss, and choose the call whose output is the predictor; or say why there is none."""
        function = self._function
        if function.user_loss is None and not function.model.automatic_optimization:
            self._find_losses()
            if function.findings.loss_problem:
                return function.findings.loss_problem
        calls = RecordedCalls()
        watching = calls.watching(function.model) if function.user_predict is None else nullcontext()
        data = function.on_device(self._batch)
        with function.fresh(self._batch), watching:
            loss = function.loss_on(data, self._batch.index)
        require_graph(loss, "a loss")
        value = loss.detach()
        try:
            found = _choice(calls.calls, loss, function.theta, self._batch.samples)
        except Exception as error:  # noqa: BLE001  # of strange outputs: the loss is measured without them
            found = f"the predictor could not be found in training_step ({type(error).__name__}: {error})"
        del calls, loss  # and with them the graph
        self._check_state(value)
        return found

    def _check_state(self, first: Tensor) -> None:
        """Evaluate the loss again, and warn if it depends on what cannot be reset, or changes trained parameters."""
        function = self._function
        step = "loss=" if function.user_loss else "training_step"
        moved = {id(tensor) for tensor in function.reset_state()}
        names = [name for name, p in function.theta.items() if id(p) in moved]
        if names:
            rank_zero_warn(
                f"{step} itself changes trained parameters ({join_names(names, most=1)}). Loss, gradient and Hessian"
                " are measured at the values that it sets, starting from those at the end of the epoch."
            )
        # Memory that is aligned differently, and kernels of other devices, may change the order of a sum.
        coarse = operand_eps(first.device, first.dtype)
        rounding = max(16 * torch.finfo(first.dtype).eps, coarse, 0.0 if first.device.type == "cpu" else 1e-4)

        def differs(second: Tensor) -> bool:
            return abs(float(first) - float(second)) > rounding * abs(float(first))

        try:
            with torch.no_grad():
                second = function.loss_of(self._batch)
        except Exception:  # noqa: BLE001  # a loss that contains derivatives
            second = None
        if second is None or differs(second):
            try:
                again = function.loss_of(self._batch).detach()
            except Exception:  # noqa: BLE001  # what fails again is left to the measurement, which reports it
                return
            function.findings.needs_graph = second is None or not differs(again)
            second = again
        if differs(second):
            rank_zero_warn(
                f"{step} gave {float(first):.6g}, and then {float(second):.6g} for the same batch, weights and random"
                " numbers: it depends on state outside the module, which cannot be restored. Metrics of the loss"
                f" mix such states. Keep the state in the module, or pass{' another' if function.user_loss else ''}"
                " loss=."
            )

    def _find_losses(self) -> None:
        """Find the losses of θ among those that a manual step hands to backward."""
        function = self._function
        problem: str | None = None
        for batch_idx in range(_BATCH_INDICES):
            step = ManualStep()
            data = function.on_device(self._batch)
            with function.fresh(self._batch), step.watching(function.trainer, function.model):
                call_training_step(function.model, data, batch_idx)
            found = step.losses_for(self._theta)
            if not isinstance(found, str):
                names = tuple(step.losses[i].name for i in found)
                function.findings = Findings(losses=found, loss_names=names, batch_idx=batch_idx)
                return
            problem = problem or found
            if step.losses and len(step.used_by) > 1:  # every player was seen: another batch has nothing new
                break
        function.findings = Findings(loss_problem=problem or "", outputs_problem=problem or "")
        if len(function.trainer.optimizers) > 1 and not function.chosen:
            function.findings.remedy = (
                "Add a callback for each optimizer: parameters=0, prefix='first' and parameters=1, prefix='second'"
            )

    # -- the predictor -------------------------------------------------------------------------------------------------

    def _try_predictor(self, choice: "_Choice | str") -> None:
        """Run the chosen call by itself."""
        function = self._function
        if isinstance(choice, str):
            function.findings.outputs_problem = choice
            return
        known = function.findings
        function.findings = replace(known, call=choice.call, predictor=choice.description, beside=choice.beside)
        try:
            with function.without_graph():
                expected = function.outputs_of(self._batch).detach()
                repeatable = not choice.depends and self._repeats(expected)
        except Exception as error:  # noqa: BLE001  # reported with the diagnostics that need the outputs
            function.findings = replace(known, outputs_problem=f"{choice.description} failed ({error})")
            return
        rows = choice.lengths.index(len(expected)) if repeatable and len(expected) in choice.lengths else None
        function.findings = replace(
            function.findings,
            repeatable=repeatable,
            rows_from=rows,
            as_samples=len(expected) == self._batch.samples,
            outputs=expected[0].numel(),
        )

    def _repeats(self, expected: Tensor) -> bool:
        """Return whether the chosen call gives the same output outside of the step."""
        function = self._function
        function.findings.repeatable = True
        try:
            again = function.outputs_of(self._batch).detach()
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return False
        # The same operations on the same numbers; a device may add in another order. In pieces: the comparison would
        # need four times the memory of the outputs.
        pieces = zip(again.flatten().split(_PIECE), expected.flatten().split(_PIECE))
        return again.shape == expected.shape and all(
            torch.allclose(new, old, rtol=1e-4, atol=1e-6, equal_nan=True) for new, old in pieces
        )


class _Choice(NamedTuple):
    """The call that is chosen, with all that is known without its graph.

    Attributes:
        depends: whether an argument of it depends on θ.
        lengths: of the first axes of its tensor arguments; 0 for scalars.
        description: in words.
        beside: the names of the parameters that the loss depends on and its output does not.
    """

    call: CallOutput
    depends: bool
    lengths: list[int]
    description: str
    beside: tuple[str, ...]


def _choice(calls: Sequence[Call], loss: Tensor, theta: Mapping[str, Tensor], samples: int) -> _Choice | str:
    call = find_call(calls, loss, theta.values(), samples)
    if call is None:
        return "no call of forward or of a submodule was seen whose output the loss is computed from"
    alike = [each for each in calls if each.path == call.path]
    chosen = next(each for each in alike if each.number == call.number)
    arguments = chosen.arguments
    used = {id(leaf) for _, _, node in chosen.outputs if node is not None for leaf in leaves_from(node)}
    reached = {id(leaf) for leaf in leaves(loss)} - used
    beside = tuple(name for name, p in theta.items() if id(p) in reached)
    tensors = [x for x in tree_leaves(arguments) if isinstance(x, Tensor)]
    lengths = [len(x) if x.dim() > 0 else 0 for x in tensors]
    return _Choice(call, depends_on(arguments, theta.values()), lengths, call.describe(len(alike)), beside)


def example_of(module: nn.Module, data: Any, *, loss: bool, predict: bool) -> str:
    """Return arguments that would name what is missing, in the form of this batch.

    Example:
        >>> batch = {"image": torch.zeros(2, 3), "label": torch.ones(2)}
        >>> example_of(nn.Linear(3, 1), batch, loss=False, predict=True)
        "predict=lambda module, batch: module(batch['image'])"
        >>> example_of(nn.Module(), batch, loss=False, predict=True)
        "predict=lambda module, batch: outputs(module, batch['image'])"
    """
    names = [f"batch{key_path(keys)}" for keys, _ in tensors_in(data)][:2] or ["batch"]
    has_forward = getattr(type(module).forward, "__name__", "") != "_forward_unimplemented"
    output = f"module({names[0]})" if has_forward else f"outputs(module, {names[0]})"
    texts = []
    if loss:
        texts.append(f"loss=lambda module, batch: criterion({output}, {names[-1]})")
    if predict:
        texts.append(f"predict=lambda module, batch: {output}")
    return ", ".join(texts)
