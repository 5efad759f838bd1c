"""A forward pass as a graph of operations: what torch is asked to do, watched on a few samples."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_normtheory.architecture.calls import TorchCall, opaque_result, tracked_tensors
from lightning_normtheory.architecture.entrywise import entrywise_step
from lightning_normtheory.architecture.linear import affine_step, linear_step
from lightning_normtheory.architecture.operations import Input, Opaque, Operation, Origin, evaluate, opaque, walk

__all__ = ["record_forward"]

# What may be asked of a tensor without looking at its entries.
# fmt: off
_METADATA = frozenset({
    "__get__", "__len__", "dim", "size", "stride", "numel", "ndimension", "nelement", "element_size", "is_contiguous",
    "is_floating_point", "is_complex", "is_signed", "get_device", "data_ptr", "storage_offset", "untyped_storage",
    "__hash__", "is_pinned", "is_inference", "_is_view", "type", "has_names", "is_shared", "__format__", "__repr__",
})
# fmt: on


def record_forward(model: nn.Module, x: Tensor, forward: Callable[[Tensor], Tensor] | None = None) -> Operation:
    """The operations that lead from samples x to the output, as the last of them.

    Functions of torch are watched while the model runs, so it does not matter whether a step is a module, a function or
    a method. The graph that comes out is run on other samples, the given ones in another order, and must give what the
    model gives: a step that was missed, or that depends on the samples in python, shows there.

    Args:
        x: samples (n, …), at least two.
        forward: how the model is applied, where that is not ``model(x)``.

    Returns:
        The last operation. A step of which nothing is known is an `Opaque` with the reason.

    Example:
        >>> from lightning_normtheory.architecture.operations import walk
        >>> net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Flatten(), nn.Linear(4, 1))
        >>> [type(step).__name__ for step in walk(record_forward(net, torch.randn(2, 3)))]
        ['Input', 'Affine', 'Activation', 'FixedMap', 'Affine']
    """
    call = forward or model
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() == 0:
        return opaque("its input is no tensor of numbers")
    recorder = _watch(model, call, x)
    last = recorder.last
    if last is None:
        return opaque("its output does not come from its input by functions of torch on all samples")
    if not bool(torch.isfinite(recorder.trail[-1][1]).all()):
        return opaque("a weight or an input is not finite", (last,), last.shape)
    if recorder.looked:
        return opaque("its forward pass looks at the values of the samples", (last,), last.shape)
    if any(isinstance(step, Opaque) for step in walk(last)):
        return last
    for others in (0.75 * x.flip(0), -0.5 * x):
        if not _agree(model, call, last, others, len(recorder.trail)):
            return opaque("its forward pass is another one for other samples", (last,), last.shape)
    return last


def _watch(model: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor) -> "_Recorder":
    recorder = _Recorder(model, x)
    with torch.enable_grad(), recorder:
        output = call(x)
    recorder.last = recorder.operations.get(id(output)) if isinstance(output, Tensor) else None
    return recorder


def _agree(model: nn.Module, call: Callable[[Tensor], Tensor], last: Operation, x: Tensor, steps: int) -> bool:
    """Whether the steps, repeated for x, have the values that they have in the model, each of them."""
    try:
        again = _watch(model, call, x)
        with torch.no_grad():
            values = evaluate(last, x)
    except Exception:  # noqa: BLE001  # it refuses these samples
        return False
    if again.last is None or len(again.trail) != steps:
        return False
    pairs = zip(walk(last), walk(again.last))
    seen = {id(step): value for step, value in again.trail}
    return all(
        type(ours) is type(theirs) and (isinstance(ours, Input) or _same(values[ours], seen[id(theirs)]))
        for ours, theirs in pairs
    )


def _same(ours: Tensor, theirs: Tensor) -> bool:
    # The same functions of the same numbers: only the order of a sum may differ.
    tol = 100 * torch.finfo(theirs.dtype).eps
    return ours.shape == theirs.shape and bool(
        (ours - theirs).abs().max() <= tol * theirs.abs().max() + torch.finfo(theirs.dtype).tiny
    )


class _Recorder(TorchFunctionMode):
    """Notes what happens to everything that comes from x."""

    def __init__(self, model: nn.Module, x: Tensor) -> None:
        super().__init__()
        self.samples = len(x)
        self.operations: dict[int, Operation] = {id(x): Input((), tuple(x.shape[1:]), torch.clone)}
        self.trail: list[tuple[Operation, Tensor]] = []  # every step with its value, before anything is written into it
        self.looked = False
        self.last: Operation | None = None
        self._alive: list[Any] = [x]  # an id is only good for as long as the tensor lives
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._weight_norms: dict[int, Origin] = {}

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        sources = tracked_tensors((args, kwargs), self.operations)
        call = TorchCall(func, args, kwargs, sources)
        name = call.name
        result = func(*args, **kwargs)
        if name == "_weight_norm" and not sources:
            self._note_weight_norm(result, *args, **kwargs)
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
                    self.operations[id(piece)] = opaque_result(sources, piece, f"{name} gives several values")
        elif sources and name not in _METADATA:
            self.looked = True  # at a number: what follows may depend on it
        return result

    def _note_weight_norm(self, weight: Tensor, v: Tensor, g: Tensor, dim: int = 0) -> None:
        if not all(id(part) in self._names or not part.requires_grad for part in (v, g)):
            return  # lengths or directions that are computed themselves
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
        return found or opaque_result(call.sources, result, f"nothing is known of {call.name}")
