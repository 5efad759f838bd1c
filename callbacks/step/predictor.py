"""Find the predictor f in the loss: the call of the model whose output the loss is computed from."""

import copy
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torchmetrics import Metric

from lightning_normtheory.autodiff.graph import leaves, nodes_from
from lightning_normtheory.callbacks.samples.batch_contents import Keys, get_item, key_path, tensors_in
from lightning_normtheory.callbacks.step.manual_step import StopStep, replaced

__all__ = [
    "Call",
    "CallOutput",
    "RecordedCalls",
    "captured_inputs",
    "captured_output",
    "depends_on",
    "find_call",
    "output_in_passing",
    "run_with_output",
]


class Part(NamedTuple):
    """A tensor in the output of a call.

    Attributes:
        keys: where it is.
        axis: its axis of samples.
    """

    keys: Keys
    axis: int


class CallOutput(NamedTuple):
    """The output of one call of a module, as a matrix (samples, outputs).

    Attributes:
        path: the module's name; empty for the LightningModule.
        number: which of its calls, from 0.
        parts: the tensors of the output that count; several are flattened and concatenated.
    """

    path: str
    number: int
    parts: tuple[Part, ...]

    def select(self, output: Any) -> Tensor:
        """Return the part of a call's output that counts, with the samples in front."""
        tensors = [(get_item(output, part.keys), part.axis) for part in self.parts]
        found = [x.movedim(axis, 0) if axis else x for x, axis in tensors]  # a bound does not see through a movement
        return found[0] if len(found) == 1 else torch.cat([each.reshape(len(each), -1) for each in found], 1)

    @property
    def is_whole(self) -> bool:
        """Whether the call returns nothing but a tensor with the samples in front."""
        return self.parts == (Part((), 0),)

    def describe(self, calls: int) -> str:
        """Describe the choice in a few words; ``calls`` is the number of calls of the module."""
        what = "" if self.is_whole else " " + ", ".join(key_path(part.keys) for part in self.parts)
        several = f", call {self.number + 1} of {calls}" if calls > 1 else ""
        return f"the output{what.rstrip()} of {self.path or 'forward'}{several}"


@dataclasses.dataclass(eq=False)
class Call:
    """A call of a module's forward pass."""

    module: nn.Module
    path: str
    number: int
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    parent: "Call | None"
    outputs: list[tuple[Keys, Tensor, Any]] = dataclasses.field(default_factory=list)  # each with its node in the graph


class _Watched:
    """A forward pass that is watched. A copy of its module, such as a teacher that the step makes, gets the plain one.

    Args:
        forward: the plain one.
        call: runs instead of it.
    """

    def __init__(self, forward: Callable[..., Any], call: Callable[..., Any]) -> None:
        functools.update_wrapper(self, forward)
        self._forward, self._call = forward, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        return copy.deepcopy(self._forward, memo)


class RecordedCalls:
    """Records every call of a forward pass of a module and its submodules.

    Args:
        stop_at: path and number of the call at which to stop the step, and whether before or after it; ``None``: record
            all calls.
        go_on: capture the output of that call without stopping the step.
        output: what that call returns instead of running; ``None``: it runs.
    """

    def __init__(
        self,
        stop_at: tuple[str, int] | None = None,
        *,
        before: bool = False,
        go_on: bool = False,
        output: Tensor | None = None,
    ) -> None:
        self.calls: list[Call] = []
        self.captured: Any = None
        self._versions: dict[int, int] = {}
        self._stop_at, self._before, self._go_on, self._output = stop_at, before, go_on, output
        self._open: list[Call] = []
        self._numbers: dict[str, int] = {}

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Record the calls inside the block, also those of ``module.forward`` by name, which has no hooks."""
        with ExitStack() as stack:
            for path, module in model.named_modules():
                if self._stop_at is not None and path != self._stop_at[0]:
                    continue
                if not isinstance(module, torch.jit.ScriptModule):  # has no python code
                    stack.enter_context(replaced(vars(module), "forward", self._wrap(path, module, module.forward)))
            yield

    def _wrap(self, path: str, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            number = self._numbers.get(path, 0)
            self._numbers[path] = number + 1
            if self._stop_at is not None:
                return self._run_until(number, forward, args, kwargs)
            found = Call(module, path, number, (args, kwargs), self._open[-1] if self._open else None)
            self.calls.append(found)
            self._open.append(found)
            try:
                output = forward(*args, **kwargs)
            finally:
                self._open.pop()
            found.outputs = [(keys, value, value.grad_fn) for keys, value in tensors_in(output)]
            return output

        return _Watched(forward, call)

    def _run_until(self, number: int, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        assert self._stop_at is not None
        if number != self._stop_at[1]:
            return forward(*args, **kwargs)
        if self._output is not None:
            self.captured = self._output
        else:
            self.captured = (args, kwargs) if self._before else forward(*args, **kwargs)
        if not self._go_on:
            raise StopStep
        self._versions = {id(x): x._version for _, x in tensors_in(self.captured) if not x.is_inference()}
        return self.captured

    def unchanged(self, call: CallOutput) -> bool:
        """Whether the output that counts was captured, and nothing was written into it since."""
        found = [] if self.captured is None else [get_item(self.captured, part.keys) for part in call.parts]
        return bool(found) and all(not x.is_inference() and self._versions[id(x)] == x._version for x in found)


def captured_inputs(model: nn.Module, call: CallOutput, step: Callable[[], Any]) -> tuple[tuple, dict[str, Any]]:
    """Run a step up to a call, and return the arguments of the call."""
    return _captured(model, call, step, before=True)


def captured_output(model: nn.Module, call: CallOutput, step: Callable[[], Any]) -> Tensor:
    """Run a step up to the end of a call, and return the output that counts."""
    return call.select(_captured(model, call, step, before=False))


def output_in_passing(model: nn.Module, call: CallOutput, step: Callable[[], Tensor]) -> tuple[Tensor, Tensor | None]:
    """Run a whole step; return its result, and the output of the call that counts, in the same graph.

    ``None`` if the call did not come, has an output of another form, or if the step has changed its output in place.
    """
    calls = RecordedCalls((call.path, call.number), go_on=True)
    with calls.watching(model):
        result = step()
    try:
        output = call.select(calls.captured) if calls.unchanged(call) else None
    except Exception:  # noqa: BLE001  # of another form in this batch; the result does not depend on it
        return result, None
    usable = isinstance(output, Tensor) and output.is_floating_point() and output.dim() > 0
    return result, output if usable else None


def run_with_output(model: nn.Module, call: CallOutput, output: Tensor, step: Callable[[], Tensor]) -> Tensor | None:
    """Run a whole step in which the call returns this output instead of running; ``None`` if the call did not come."""
    calls = RecordedCalls((call.path, call.number), go_on=True, output=output)
    with calls.watching(model):
        result = step()
    return None if calls.captured is None else result


def _captured(model: nn.Module, call: CallOutput, step: Callable[[], Any], *, before: bool) -> Any:
    calls = RecordedCalls((call.path, call.number), before=before)
    with suppress(StopStep), calls.watching(model):
        step()
    if calls.captured is not None:  # also if the user's code has caught the signal to stop
        return calls.captured
    raise RuntimeError(
        f"Expected training_step to call {call.path or 'forward'} {call.number + 1} times, as on the first batch, but"
        " it did not. Pass predict=, a function of the module and a batch that returns the outputs."
    )


def find_call(calls: Sequence[Call], loss: Tensor, theta: Collection[Tensor], samples: int) -> CallOutput | None:
    """Find the call whose output is the predictor.

    It is the first call of the module's own `forward` that the loss depends on. If there is none, it is the outermost
    call of a submodule that the loss depends on and that feeds no other such call; the first of several. A call that
    gives only scalars, a criterion, a parametrization, and a module whose parameters are all outside of θ do not count,
    nor do terms of the loss that a call returns with the loss itself. If the loss depends on no output, but on
    derivatives of one, any output that depends on θ does.

    Args:
        theta: the parameters that are trained.
        samples: the number of samples in the batch.
    """
    ids = {id(p) for p in theta}
    return _find(calls, loss, ids, samples) or _find(calls, None, ids, samples)


def _find(calls: Sequence[Call], loss: Tensor | None, ids: set[int], samples: int) -> CallOutput | None:
    below = None if loss is None else set(nodes_from(loss.grad_fn))

    def usable(call: Call) -> list[tuple[Keys, Tensor, Any]]:
        graph = [each for each in call.outputs if each[2] is not None and (below is None or each[2] in below)]
        found = [each for each in graph if _is_output(each[1], samples)]
        if loss is None or len(found) == len(graph):
            return found
        # A call that returns the loss may return its terms, one for each sample, as well.
        return [each for each in found if not _is_averaged(each[1], loss)] or found

    def of(chosen: Call) -> CallOutput:
        found = _last_of(usable(chosen))
        inputs = [x for x in tree_leaves(chosen.arguments) if isinstance(x, Tensor)]
        parts = [(keys, x, _sample_axis(x, inputs, samples)) for keys, x, _ in found]
        rows = parts[0][1].shape[parts[0][2]]
        same = tuple(Part(keys, axis) for keys, x, axis in parts if x.shape[axis] == rows)
        return CallOutput(chosen.path, chosen.number, same)

    for call in calls:
        if call.path == "" and usable(call) and not _inside_own(call):
            return of(call)
    for criteria in (False, True):  # a criterion may contain the model
        candidates = _outermost(calls, usable, ids, samples, criteria)
        first: Call | None = None
        feeding: set[Any] = set()  # the nodes that later candidates are computed from
        for call in reversed(candidates):
            ends = {each[2] for each in usable(call)}
            if not ends & feeding:
                first = call
            _add_nodes_before(ends, feeding)
        if first is not None:
            return of(first)
    return None


def _add_nodes_before(ends: set[Any], found: set[Any]) -> None:
    """Add the nodes that some nodes depend on, without going below those that are there already."""
    stack = [node for end in ends for node, _ in end.next_functions]
    while stack:
        node = stack.pop()
        if node is not None and node not in found:
            found.add(node)
            stack.extend(before for before, _ in node.next_functions)


def _inside_own(call: Call) -> bool:
    parent = call.parent
    while parent is not None and parent.path != "":
        parent = parent.parent
    return parent is not None


def _outermost(
    calls: Sequence[Call], usable: Callable[[Call], list[Any]], theta: set[int], samples: int, criteria: bool
) -> list[Call]:
    """Return the calls that may predict and have usable outputs.

    Not the calls inside one that has outputs, usable or not, or is a module without θ, or a criterion unless wanted.
    """
    found: list[Call] = []
    closed: set[int] = set()  # calls, by id, of which the inner ones do not count
    for call in calls:  # an outer call comes before the inner ones
        inside = call.parent is not None and id(call.parent) in closed
        if not inside and usable(call) and _may_predict(call, theta):
            found.append(call)
        has_outputs = any(node is not None and _is_output(x, samples) for _, x, node in call.outputs)
        criterion = _is_criterion(call)
        if inside or not _has_theta(call, theta) or (not criteria if criterion else has_outputs):
            closed.add(id(call))
    return found


def _may_predict(call: Call, theta: Collection[int]) -> bool:
    # What has no input but parameters computes a weight, as a parametrization does.
    if all(isinstance(x, nn.Parameter) for _, x in tensors_in(call.arguments)):
        return False
    return not _is_criterion(call) and _has_theta(call, theta)


def _has_theta(call: Call, theta: Collection[int]) -> bool:
    """Return whether a module has a parameter in θ, or no parameters at all."""
    parameters = list(call.module.parameters())
    return not parameters or any(id(p) in theta for p in parameters)


def _is_criterion(call: Call) -> bool:
    """Return whether a module compares: a loss, a metric, or a module without parameters and with several inputs."""
    if isinstance(call.module, (nn.modules.loss._Loss, Metric)):
        return True
    if type(call.module).__name__.lower().endswith(("loss", "criterion")):
        return True
    tensors = [x for x in tree_leaves(call.arguments) if isinstance(x, Tensor)]
    return len(tensors) > 1 and next(call.module.parameters(), None) is None and call.path != ""


def _is_output(x: Tensor, samples: int) -> bool:
    return x.is_floating_point() and x.dim() > 0 and (x.numel() > 1 or samples == 1)


def _is_averaged(x: Tensor, loss: Tensor) -> bool:
    """Return whether the loss is the mean of x, which has an entry for each sample, or has that mean as a term."""
    if x.dim() != 1:
        return False
    (gradient,) = torch.autograd.grad(loss, x, retain_graph=True, allow_unused=True)
    return gradient is not None and bool((gradient == gradient[0]).all())


def _last_of(outputs: list[tuple[Keys, Tensor, Any]]) -> list[tuple[Keys, Tensor, Any]]:
    """Drop the tensors from which other ones are computed, and repetitions."""
    last: list[tuple[Keys, Tensor, Any]] = []
    for i, (keys, x, node) in enumerate(outputs):
        others = [other for j, other in enumerate(outputs) if j != i and other[2] is not node]
        if any(node in set(nodes_from(other[2])) for other in others) or any(node is kept[2] for kept in last):
            continue
        last.append((keys, x, node))
    return last


def _sample_axis(x: Tensor, inputs: Sequence[Tensor], samples: int) -> int:
    """Return the axis of an output that counts the samples of the batch."""
    if x.shape[0] == samples:
        return 0
    for axis in range(1, x.dim()):  # the sequence in front: (positions, samples, features)
        if x.shape[axis] == samples and any(i.dim() > axis and i.shape[axis] == samples for i in inputs):
            return axis
    # Several views of the samples, or nodes of graphs, one below the other.
    return 0


def depends_on(arguments: Any, theta: Collection[Tensor]) -> bool:
    """Return whether an argument of a call depends on a parameter."""
    ids = {id(p) for p in theta}
    found = (x for _, x in tensors_in(arguments) if x.requires_grad)
    return any(id(leaf) in ids for x in found for leaf in leaves(x))
