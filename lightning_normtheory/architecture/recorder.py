"""Record a forward pass on a few samples as a graph of operations."""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_normtheory.architecture.calls import TorchCall, opaque_result, tracked_tensors
from lightning_normtheory.architecture.entrywise import entrywise_step
from lightning_normtheory.architecture.linear import affine_step, linear_step
from lightning_normtheory.architecture.operations import (
    Affine,
    Input,
    Opaque,
    Operation,
    Origin,
    evaluate,
    form,
    opaque,
    walk,
)
from lightning_normtheory.linalg.arithmetic import operand_eps
from lightning_normtheory.measuring.memory import is_out_of_memory

__all__ = ["record_forward"]

# Functions that do not read the entries of a tensor.
# fmt: off
_METADATA = frozenset({
    "__get__", "__len__", "dim", "size", "stride", "numel", "ndimension", "nelement", "element_size", "is_contiguous",
    "is_floating_point", "is_complex", "is_signed", "get_device", "data_ptr", "storage_offset", "untyped_storage",
    "__hash__", "is_pinned", "is_inference", "_is_view", "type", "has_names", "is_shared", "__format__", "__repr__",
})
# fmt: on


def record_forward(
    model: nn.Module, x: Tensor, forward: Callable[[Tensor], Tensor] | None = None, *, known: Hashable | None = None
) -> Operation:
    """Record the operations from samples x to the output of a model, and return the last one.

    Torch calls are intercepted while the model runs, so a step may be a module, a function or a method. The graph is
    then replayed on other samples (the given ones, permuted and scaled) and compared with the model. This detects
    steps that were missed and python code that depends on the samples.

    Args:
        x: samples (n, …), at least two. Integers are tokens, of which an embedding is known.
        forward: how to apply the model, if not ``model(x)``.
        known: the `form` of an earlier recording of this model; one that has the same is not replayed.

    Returns:
        The last operation. A step without a rule is an `Opaque` with the reason.

    Example:
        >>> from lightning_normtheory.architecture.operations import walk
        >>> net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Flatten(), nn.Linear(4, 1))
        >>> [type(step).__name__ for step in walk(record_forward(net, torch.randn(2, 3)))]
        ['Input', 'Affine', 'Activation', 'FixedMap', 'Affine']
    """
    call = forward or model
    if not isinstance(x, Tensor) or x.is_complex() or x.dtype == torch.bool or x.dim() == 0:
        return opaque("the input is not a tensor of numbers or tokens")
    recorder = _record(model, call, x)
    last = recorder.last
    if last is None:
        return opaque("the output was not computed from the input by torch functions on all samples")
    if not bool(torch.isfinite(recorder.trail[-1][1]).all()):
        return opaque("a weight or an input is not finite", (last,), last.shape)
    if recorder.reads_values:
        return opaque("the forward pass reads the values of the samples", (last,), last.shape)
    if any(isinstance(step, Opaque) for step in walk(last)):
        return last
    if not x.is_floating_point() and any(
        isinstance(source, Input) and not isinstance(step, Affine) for step in walk(last) for source in step.sources
    ):
        return opaque("the input is of integers that are no tokens of an embedding", (last,), last.shape)
    if known is not None and form(last) == known:
        return last
    others_of = (0.75 * x.flip(0), -0.5 * x) if x.is_floating_point() else (x.flip(0), x.flip(tuple(range(x.dim()))))
    for others in others_of:
        if not _replays(model, call, last, others, len(recorder.trail)):
            return opaque("the forward pass differs between samples", (last,), last.shape)
    return last


def _record(model: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor) -> "_Recorder":
    recorder = _Recorder(model, x)
    with torch.enable_grad(), recorder:
        output = call(x)
    recorder.last = recorder.operations.get(id(output)) if isinstance(output, Tensor) else None
    return recorder


def _replays(model: nn.Module, call: Callable[[Tensor], Tensor], last: Operation, x: Tensor, steps: int) -> bool:
    """Whether every step, replayed for x, has the value that it has in the model."""
    try:
        again = _record(model, call, x)
        with torch.no_grad():
            values = evaluate(last, x)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return False  # the model rejects these samples
    if again.last is None or len(again.trail) != steps:
        return False
    pairs = zip(walk(last), walk(again.last))
    seen = {id(step): value for step, value in again.trail}
    return all(
        type(ours) is type(theirs) and (isinstance(ours, Input) or _same(values[ours], seen[id(theirs)]))
        for ours, theirs in pairs
    )


def _same(ours: Tensor, theirs: Tensor) -> bool:
    # The same functions of the same numbers: only the order of summation may differ, and the rounding of operands.
    tol = max(100 * torch.finfo(theirs.dtype).eps, operand_eps(theirs.device, theirs.dtype))
    return ours.shape == theirs.shape and bool(
        (ours - theirs).abs().max() <= tol * theirs.abs().max() + torch.finfo(theirs.dtype).tiny
    )


class _Recorder(TorchFunctionMode):
    """Record every torch call on values that depend on x."""

    def __init__(self, model: nn.Module, x: Tensor) -> None:
        super().__init__()
        self.samples = len(x)
        self.operations: dict[int, Operation] = {id(x): Input((), tuple(x.shape[1:]), torch.clone)}
        self.trail: list[tuple[Operation, Tensor]] = []  # every step with its value before any write in place
        self.reads_values = False
        self.last: Operation | None = None
        self._alive: list[Any] = [x]  # an id is valid only while the tensor is alive
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._weight_norms: dict[int, Origin] = {}

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        sources = tracked_tensors((args, kwargs), self.operations)
        call = TorchCall(func, args, kwargs, sources)
        name = call.name
        result = func(*args, **kwargs)
        if name == "_weight_norm" and not sources:
            self._record_weight_norm(result, *args, **kwargs)
        elif sources and isinstance(result, Tensor):
            self._alive.append(result)
            step = self._operation(call, result)
            self.operations[id(result)] = step
            self.trail.append((step, result.detach().clone()))
        elif name == "__setitem__" and sources:
            for tensor, _ in sources:
                self.operations[id(tensor)] = opaque_result(sources, tensor, "entries are written one by one")
        elif sources and isinstance(result, (tuple, list)):
            for piece in result:
                if isinstance(piece, Tensor):
                    self._alive.append(piece)
                    self.operations[id(piece)] = opaque_result(sources, piece, f"{name} returns several values")
        elif sources and name not in _METADATA:
            self.reads_values = True  # as a python number, on which the next steps may depend
        return result

    def _record_weight_norm(self, weight: Tensor, v: Tensor, g: Tensor, dim: int = 0) -> None:
        if not all(id(part) in self._names or not part.requires_grad for part in (v, g)):
            return  # g or v is itself computed
        self._alive.append(weight)
        name = self._names.get(id(v), "weight")
        for ending in (".original1", "_v"):
            name = name.removesuffix(ending)
        self._weight_norms[id(weight)] = Origin(name.replace("parametrizations.", ""), "weight_norm", (g, v), dim)

    def _origin(self, tensor: Tensor) -> Origin:
        if id(tensor) in self._weight_norms:
            return self._weight_norms[id(tensor)]
        name = self._names.get(id(tensor))
        if name is not None:
            return Origin(name, "parameter", (tensor,))
        return Origin("a weight", "computed" if tensor.requires_grad else "constant", (tensor,))

    def _operation(self, call: TorchCall, result: Tensor) -> Operation:
        if result.dim() == 0 or len(result) != self.samples:
            return opaque_result(call.sources, result, f"{call.name} mixes the samples")
        found = affine_step(call, result, self._origin) or entrywise_step(call, result) or linear_step(call, result)
        return found or opaque_result(call.sources, result, f"there is no rule for {call.name}")
