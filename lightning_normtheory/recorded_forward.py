"""A forward pass as a graph of operations: what torch is asked to do, watched on a few samples."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_normtheory.activations import ELEMENTWISE, ActivationConstants, known_activation, measure_activation
from lightning_normtheory.architecture import (
    Activation,
    Affine,
    FixedMap,
    Input,
    MaxPooling,
    Opaque,
    Operation,
    Origin,
    Scaling,
    Sum,
    evaluate,
    opaque,
    walk,
)

__all__ = ["record_forward"]

# What does not change a value, or only its form. Whether samples stay apart is tried out.
# fmt: off
_RESHAPES = frozenset({
    "flatten", "view", "reshape", "view_as", "reshape_as", "permute", "transpose", "movedim", "moveaxis", "swapaxes",
    "squeeze", "unsqueeze", "unflatten", "contiguous", "clone", "dropout", "dropout1d", "dropout2d", "dropout3d",
    "feature_dropout", "alpha_dropout", "__getitem__", "narrow", "chunk", "split", "to", "float", "double", "half",
    "type", "identity", "channel_shuffle", "pixel_shuffle", "pixel_unshuffle",
})
# fmt: on
_CONVOLUTIONS = {"conv1d": 1, "conv2d": 2, "conv3d": 3}
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
        >>> from lightning_normtheory.architecture import walk
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
        name = getattr(func, "__name__", str(func))
        sources = _tracked((args, kwargs), self.operations)
        values = [tensor.detach().clone() for tensor, _ in sources] if name in _RESHAPES else []
        result = func(*args, **kwargs)
        if name == "_weight_norm" and not sources:
            self._note_weight_norm(result, *args, **kwargs)
        elif sources and isinstance(result, Tensor):
            self._alive.append(result)
            step = self._operation(_Call(func, name, args, kwargs, sources, values), result)
            self.operations[id(result)] = step
            self.trail.append((step, result.detach().clone()))
        elif name == "__setitem__" and sources:
            for tensor, _ in sources:
                self.operations[id(tensor)] = _opaque(sources, tensor, "entries are written one by one")
        elif sources and isinstance(result, (tuple, list)):
            for piece in result:
                if isinstance(piece, Tensor):
                    self._alive.append(piece)
                    self.operations[id(piece)] = _opaque(sources, piece, f"{name} gives several values")
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

    def _operation(self, call: "_Call", result: Tensor) -> Operation:
        if result.dim() == 0 or len(result) != self.samples:
            return _opaque(call.sources, result, f"{call.name} mixes the samples")
        found = self._affine(call, result) or _elementwise(call, result) or _arithmetic(call, result)
        found = found or _linear(call, result) or _pooling(call, result)
        return found or _opaque(call.sources, result, f"nothing is known of {call.name}")

    def _affine(self, call: "_Call", result: Tensor) -> Operation | None:
        """A Linear or a convolution, in any of torch's forms."""
        reach = 1
        if call.name == "linear":
            x, weight, bias = call.arguments(("input", "weight", "bias"))
        elif call.name in ("matmul", "mm", "__matmul__"):
            (x, transposed), bias = call.arguments(("input", "other")), None
            if not isinstance(transposed, Tensor) or transposed.dim() != 2 or id(transposed) in self.operations:
                return None
            weight = transposed.mT
        elif call.name in _CONVOLUTIONS:
            x, weight, bias = call.arguments(("input", "weight", "bias"))
            reach = _reach(call, result, weight)
        else:
            return None
        if call.tracked(weight) or call.tracked(bias) or not call.tracked(x):
            return None
        matrix = weight.detach().flatten(1)
        return Affine(
            call.nodes,
            tuple(result.shape[1:]),
            call.replay,
            matrix,
            None if bias is None else bias.detach(),
            self._origin(transposed if call.name not in ("linear", *_CONVOLUTIONS) else weight),
            None if bias is None else self._origin(bias),
            positions=math.prod(result.shape[1:]) // len(matrix),
            reach=reach,
            units_first=call.name in _CONVOLUTIONS,
        )


class _Call:
    """One call of a function of torch, and how to make it again with other values."""

    def __init__(self, func: Any, name: str, args: tuple, kwargs: dict, sources: list, values: list[Tensor]) -> None:
        self.func, self.name, self.args, self.kwargs = func, name, args, kwargs
        self.sources = sources
        self.values = values
        self.nodes = tuple(node for _, node in sources)
        self._ids = [id(tensor) for tensor, _ in sources]

    def tracked(self, value: Any) -> bool:
        return isinstance(value, Tensor) and id(value) in self._ids

    def arguments(self, names: tuple[str, ...]) -> list[Any]:
        """The first arguments, by position or name."""
        return [self.args[i] if i < len(self.args) else self.kwargs.get(name) for i, name in enumerate(names)]

    def option(self, position: int, name: str, default: Any) -> Any:
        return self.args[position] if position < len(self.args) else self.kwargs.get(name, default)

    def replay(self, *values: Tensor) -> Tensor:
        fresh = {key: value.clone() for key, value in zip(self._ids, values)}  # a step may work in place

        def put(item: Any) -> Any:
            if isinstance(item, (tuple, list)):
                return type(item)(put(part) for part in item) if type(item) in (tuple, list) else item
            return fresh.get(id(item), item) if isinstance(item, Tensor) else item

        return self.func(*put(self.args), **{key: put(value) for key, value in self.kwargs.items()})


def _tracked(arguments: Any, operations: dict[int, Operation]) -> list[tuple[Tensor, Operation]]:
    """The tensors among some arguments that come from x, each once."""
    found: dict[int, tuple[Tensor, Operation]] = {}
    stack = [arguments]
    while stack:
        item = stack.pop(0)
        if isinstance(item, Tensor):
            if id(item) in operations:
                found[id(item)] = (item, operations[id(item)])
        elif isinstance(item, (tuple, list)):
            stack = [*item, *stack]
        elif isinstance(item, dict):
            stack = [*item.values(), *stack]
    return list(found.values())


def _opaque(sources: list[tuple[Tensor, Operation]], result: Tensor, reason: str) -> Opaque:
    return opaque(reason, tuple(node for _, node in sources), tuple(result.shape[1:]))


def _reach(call: _Call, result: Tensor, weight: Tensor) -> int:
    """In how many patches an entry of the input can be."""
    axes = _CONVOLUTIONS[call.name]
    stride, dilation = (_per_axis(call.option(i, name, 1), axes) for i, name in ((3, "stride"), (5, "dilation")))
    per_axis = [
        # The taps of a dilated kernel may all fall on one stride.
        min(k if d > 1 and s > 1 else math.ceil(k / s), out)
        for k, s, d, out in zip(weight.shape[2:], stride, dilation, result.shape[2:])
    ]
    return math.prod(per_axis)


def _per_axis(value: Any, axes: int) -> list[int]:
    values = list(value) if isinstance(value, (tuple, list)) else [value]
    return [int(v) for v in (values * axes if len(values) == 1 else values)]


# -- entry by entry ----------------------------------------------------------------------------------------------------


def _elementwise(call: _Call, result: Tensor) -> Operation | None:
    name = call.name.rstrip("_")
    constants_only = not any(isinstance(item, Tensor) and not call.tracked(item) for item in _flat(call))
    if name == "prelu":
        return _prelu(call, result)
    if len(call.nodes) != 1 or name not in ELEMENTWISE or not constants_only or not call.tracked(call.args[0]):
        return None
    named = known_activation(name, _options(call, name))
    inner = call.nodes[0]
    shape = tuple(result.shape[1:])
    if isinstance(inner, Activation) and not inner.trained:
        return _composed(
            inner.source, lambda z: call.replay(inner.function(z)), shape, f"{inner.constants.name}·{name}"
        )
    if named is not None:
        return Activation(call.nodes, shape, call.replay, named, call.replay)
    return _composed(inner, call.replay, shape, name)


_POSITIONS = {
    "leaky_relu": ["negative_slope"],
    "elu": ["alpha"],
    "softplus": ["beta", "threshold"],
    "hardtanh": ["min_val", "max_val"],
}


def _options(call: _Call, name: str) -> dict[str, Any]:
    positions = {
        "leaky_relu": ["negative_slope"],
        "elu": ["alpha"],
        "softplus": ["beta", "threshold"],
        "hardtanh": ["min_val", "max_val"],
    }
    return {**call.kwargs, **dict(zip(positions.get(name, []), call.args[1:]))}


def _prelu(call: _Call, result: Tensor) -> Operation | None:
    x, slope = call.arguments(("input", "weight"))
    if not call.tracked(x) or call.tracked(slope):
        return None
    constants = ActivationConstants("PReLU", max(1.0, float(slope.detach().abs().max())), math.inf, 0.0, True)
    return Activation(
        call.nodes, tuple(result.shape[1:]), call.replay, constants, call.replay, trained=slope.requires_grad
    )


def _composed(
    root: Operation, function: Callable[[Tensor], Tensor], shape: tuple[int, ...], name: str
) -> Operation | None:
    """An activation of which no formula is known, from the value that it is a function of."""
    try:
        with torch.enable_grad():
            constants = measure_activation(function, name)
    except Exception:  # noqa: BLE001  # it is no function of single numbers
        return None
    return Activation((root,), shape, function, constants, function)


def _pointwise(node: Operation) -> tuple[Operation, Callable[[Tensor], Tensor]]:
    """The value that this one is an elementwise function of, as far back as possible, and that function."""
    fixed_number = isinstance(node, Scaling) and node.is_number and not node.trained
    if fixed_number or (isinstance(node, Activation) and not node.trained):
        root, inner = _pointwise(node.source)
        outer: Callable[[Tensor], Tensor] = node.function if isinstance(node, Activation) else node.replay
        return root, lambda z: outer(inner(z))
    return node, lambda z: z


def _arithmetic(call: _Call, result: Tensor) -> Operation | None:
    name = call.name.strip("_")
    name = name.removeprefix("i") if call.name.startswith("__i") else name
    name = {"radd": "add", "rmul": "mul", "truediv": "div", "true_divide": "div", "multiply": "mul",
            "subtract": "sub", "divide": "div", "rtruediv": "rdiv"}.get(name, name)  # fmt: skip
    if name in ("cat", "concat", "concatenate"):
        return _concatenation(call, result)
    if name not in ("add", "sub", "rsub", "mul", "div") or set(call.kwargs) - {"other", "input"}:
        return None
    first, second = (*call.args, call.kwargs.get("other"))[:2]
    if call.tracked(first) and call.tracked(second):
        return _combination(call, name, first, second, result)
    if name == "div" and not call.tracked(first):
        return None
    constant = second if call.tracked(first) else first
    return _scaling(call, name, constant, result, from_right=call.tracked(first))


def _scaling(call: _Call, name: str, constant: Any, result: Tensor, *, from_right: bool) -> Operation | None:
    if tuple(result.shape[1:]) != call.nodes[0].shape:
        return None  # it repeats the value
    tensor = torch.as_tensor(constant, dtype=result.dtype, device=result.device).detach()
    if tensor.dim() >= result.dim() and tensor.numel() != 1:
        if len(tensor) != 1:
            return None  # a constant of its own for every sample
        tensor = tensor[0]
    one = torch.ones(1, dtype=result.dtype, device=result.device)
    tensor = tensor.reshape(1) if tensor.numel() == 1 else tensor
    if name in ("mul", "div"):
        scale, shift = (tensor if name == "mul" else 1 / tensor), None
    elif name == "add":
        scale, shift = one, tensor
    else:
        negated = (name == "sub") != from_right  # c − x
        scale, shift = (-one, tensor) if negated else (one, -tensor)
    trained = isinstance(constant, Tensor) and constant.requires_grad
    return Scaling(call.nodes, tuple(result.shape[1:]), call.replay, scale, shift, trained)


def _combination(call: _Call, name: str, first: Tensor, second: Tensor, result: Tensor) -> Operation | None:
    shape = tuple(result.shape[1:])
    by_id = {id(tensor): node for tensor, node in call.sources}
    left, right = by_id[id(first)], by_id[id(second)]
    (root, f), (other, g) = _pointwise(left), _pointwise(right)
    if (
        root is other
        and left.shape == right.shape == shape
        and (left is not root or right is not root or name == "mul")
    ):
        operate: Callable[[Tensor, Tensor], Tensor] = getattr(torch, name)
        labels = [node.constants.name for node in (left, right) if isinstance(node, Activation)]
        return _composed(root, lambda z: operate(f(z), g(z)), shape, f"{name} of {' and '.join(labels) or 'z'}")
    if name in ("add", "sub") and left.shape == right.shape == shape:
        return Sum((left, right), shape, lambda a, b: a + b if name == "add" else a - b)
    return None


def _concatenation(call: _Call, result: Tensor) -> Operation | None:
    parts = call.args[0] if call.args else call.kwargs.get("tensors", ())
    axis = call.option(1, "dim", call.kwargs.get("axis", 0))
    if not all(call.tracked(part) for part in parts) or axis % result.dim() == 0 or len(parts) != len(call.nodes):
        return None
    return Sum(call.nodes, tuple(result.shape[1:]), lambda *values: torch.cat(values, axis), concatenated=True)


# -- fixed linear maps and poolings ------------------------------------------------------------------------------------


def _linear(call: _Call, result: Tensor) -> Operation | None:
    shape = tuple(result.shape[1:])
    if call.name == "batch_norm":
        return _batch_norm(call, result)
    if len(call.nodes) != 1 or not call.tracked(call.args[0] if call.args else None):
        return None
    if call.name in _RESHAPES:
        return FixedMap(call.nodes, shape, call.replay) if _keeps_samples_apart(call, result) else None
    if call.name == "pad":
        mode, value = call.option(2, "mode", "constant"), call.option(3, "value", None)
        zero = mode == "constant" and not value
        return FixedMap(call.nodes, shape, call.replay) if zero else None
    if call.name == "mean":
        axes = call.option(1, "dim", None)
        axes = [axes] if isinstance(axes, int) else axes
        if not axes or any(axis % (len(call.nodes[0].shape) + 1) == 0 for axis in axes):
            return None
        averaged = math.prod(call.nodes[0].shape) / max(math.prod(shape), 1)
        return FixedMap(call.nodes, shape, call.replay, averaged**-0.5)
    return None


def _keeps_samples_apart(call: _Call, result: Tensor) -> bool:
    """Whether the samples in another order give the same values in that order, each of them once."""
    (value,) = call.values
    if (call.option(2, "training", False) is True and "dropout" in call.name) or not result.is_floating_point():
        return False
    marks = torch.arange(value.numel(), dtype=torch.float64).reshape(value.shape)
    try:
        moved, straight = call.replay(marks.flip(0)), call.replay(marks)
    except Exception:  # noqa: BLE001  # say, another dtype
        return False
    entries = straight.reshape(len(straight), -1)
    distinct = all(len(row.unique()) == len(row) for row in entries)
    return distinct and torch.equal(moved.flip(0), straight) and entries.shape == (len(value), result[0].numel())


def _batch_norm(call: _Call, result: Tensor) -> Operation | None:
    names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
    _, mean, var, weight, bias, training, _, eps = call.arguments(names)
    if training or mean is None:
        return _opaque(call.sources, result, "a BatchNorm with the statistics of the batch couples the samples")
    scale = (1 if weight is None else weight.detach()) / torch.sqrt(var + (1e-5 if eps is None else eps))
    shift = (0 if bias is None else bias.detach()) - mean * scale
    form = (-1,) + (1,) * (result.dim() - 2)
    trained = any(p is not None and p.requires_grad for p in (weight, bias))
    return Scaling(call.nodes, tuple(result.shape[1:]), call.replay, scale.reshape(form), shift.reshape(form), trained)


def _pooling(call: _Call, result: Tensor) -> Operation | None:
    name, _, dimensions = call.name.partition("_pool")
    if len(call.nodes) != 1 or not dimensions.endswith("d"):
        return None
    axes = int(dimensions[0])
    before, after = call.nodes[0].shape[-axes:], result.shape[-axes:]
    if name.startswith("adaptive"):
        if any(b < a for b, a in zip(before, after)):
            return None
        # Windows of ⌊b/a⌋ to ⌈b/a⌉ + 1 entries; they overlap unless a divides b.
        sizes = [b // a for b, a in zip(before, after)]
        largest = [b // a if b % a == 0 else b // a + 2 for b, a in zip(before, after)]
        reaches = [1 if b % a == 0 else 2 for b, a in zip(before, after)]
    else:
        kernel = _per_axis(call.option(1, "kernel_size", 1), axes)
        stride = _per_axis(call.option(2, "stride", None) or kernel, axes)
        dilation = _per_axis(call.option(4, "dilation", 1), axes) if name == "max" else [1] * axes
        sizes = largest = kernel
        reaches = [k if d > 1 else math.ceil(k / s) for k, s, d in zip(kernel, stride, dilation)]
    shape, reach = tuple(result.shape[1:]), math.prod(reaches)
    if name in ("max", "adaptive_max"):
        return MaxPooling(call.nodes, shape, call.replay, math.prod(largest), reach)
    if name not in ("avg", "adaptive_avg") or call.option(6, "divisor_override", None) is not None:
        return None
    # Windows that are cut at the border may divide by what is left of them.
    smallest = 1 if name == "avg" and _is_cut(call) else math.prod(sizes)
    return FixedMap(call.nodes, shape, call.replay, math.sqrt(reach / smallest))


def _is_cut(call: _Call) -> bool:
    return bool(call.option(4, "ceil_mode", False)) or call.option(5, "count_include_pad", True) is False


def _flat(call: _Call) -> list[Any]:
    return [*call.args, *call.kwargs.values()]
