"""WeightNorm that can be differentiated twice: PyTorch's own operation has a wrong second derivative."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.nn.utils.weight_norm  # the module, which the function of the same name hides
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_normtheory.autodiff.composed import replaced
from lightning_normtheory.measuring.workspace import empty, give_back

__all__ = ["ComposedWeightNorm", "EffectiveWeights", "WeightNormMap"]

T = TypeVar("T")
_fused_weight_norm = torch._weight_norm
_PIECE = 2**18
_DIFFERENTIATE = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)


class _DifferentiatedInside(Exception):
    """Leaves a user's function that differentiates with respect to a g or v, which is not in the graph."""


class ComposedWeightNorm(TorchFunctionMode):
    """Inside, ``torch._weight_norm`` is the composition v·(g/‖v‖), which every transform of torch differentiates.

    The fused operation treats its saved norms as constants in the second derivative, which makes the v–v block of every
    Hessian wrong, and has no forward-mode derivative and no batching rule. Both of PyTorch's WeightNorms call it.

    Example:
        ∂²/∂v² of g·v₁/‖v‖ at v = (1, 1), g = 1, in the direction (1, 1), along which w does not move: −∇_v w₁

        >>> v, g = torch.ones(1, 2, requires_grad=True), torch.ones(1, 1)
        >>> with ComposedWeightNorm():
        ...     w = torch._weight_norm(v, g, 0)
        >>> (gradient,) = torch.autograd.grad(w[0, 0], v, create_graph=True)
        >>> gradient.detach(), torch.autograd.grad(gradient.sum(), v)[0]
        (tensor([[ 0.3536, -0.3536]]), tensor([[-0.3536,  0.3536]]))
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _fused_weight_norm:
            return self.weight_norm(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def weight_norm(self, v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
        if dim == -1:  # how torch writes dim=None: one norm for all
            return v * (g / torch.linalg.vector_norm(v))
        axes = [axis for axis in range(v.dim()) if axis != dim % v.dim()]
        return v * (g / (torch.linalg.vector_norm(v, dim=axes, keepdim=True) if axes else v.abs()))


class EffectiveWeights(ComposedWeightNorm):
    """Inside, every weight under WeightNorm is a leaf of the graph; `maps` records its g and v.

    Second derivatives with respect to w cost nothing extra that way; `WeightNormMap` takes them back to g and v. The
    same g and v always give the same leaf: in every batch, in layers that share them, and when checkpointing runs a
    forward pass again.

    Args:
        light: whether leaves take no memory, see `WeightNormMap`.

    Attributes:
        maps: one for each leaf so far.
        composed: whether g and v are in the graph instead of leaves, as in `ComposedWeightNorm`.
    """

    def __init__(self, *, light: bool = False) -> None:
        super().__init__()
        self._light = light
        self.maps: dict[tuple[int, int, int], WeightNormMap] = {}
        self.composed = False

    def compose(self) -> None:
        """Use g and v in the graph from now on, instead of leaves."""
        self.composed = True
        self.maps.clear()

    def run(self, action: Callable[[], T]) -> T:
        """Run ``action`` with leaves; if it differentiates with respect to a g or v itself, run it again composed."""
        try:
            return action()
        except _DifferentiatedInside:
            self.compose()
        # Not in the except clause: there the traceback still holds the graph.
        return action()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _DIFFERENTIATE and not self.composed and self._reaches_a_parameter(func, args, kwargs or {}):
            raise _DifferentiatedInside
        return super().__torch_function__(func, types, args, kwargs)

    def _reaches_a_parameter(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        inputs = kwargs.get("inputs", args[1] if func is torch.autograd.grad and len(args) > 1 else None)
        if inputs is None:  # backward() without a choice: everything
            return bool(self.maps)
        inputs = [inputs] if isinstance(inputs, Tensor) else inputs
        return any(x is p for x in inputs for each in self.maps.values() for p in (each.g, each.v))

    def weight_norm(self, v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
        if not torch.is_grad_enabled():
            return _fused_weight_norm(v, g, dim)
        # If g or v is computed from something else, or inside a transform, all operations stay in the graph. (A tensor
        # inside a transform does not say that it requires a gradient.)
        if self.composed or not (isinstance(v, nn.Parameter) and isinstance(g, nn.Parameter)):
            return super().weight_norm(v, g, dim)
        if not (v.requires_grad or g.requires_grad):
            return _fused_weight_norm(v, g, dim)
        key = (id(v), id(g), dim)
        if key not in self.maps:
            self.maps[key] = WeightNormMap(v, g, dim, light=self._light)
        return self.maps[key].effective_weight()

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """Inside, also replace the operation in forward passes that checkpointing repeats within a backward pass."""
        with replaced({"_weight_norm": self.weight_norm}, torch, sys.modules["torch.nn.utils.weight_norm"]):
            yield


class WeightNormMap:
    """w = g v/‖v‖ unit by unit, with its first two derivatives in closed form.

    Notation, for each unit: v̂ = v/‖v‖, s = g/‖v‖, and a = ∂L/∂w. Tensors of the shape of v are handled as
    (units, entries).

    Args:
        light: whether ``w`` has the shape of the effective weight only, not its values and memory.

    Attributes:
        w: the effective weight, a leaf that requires a gradient.
        dim: the axis of the units; -1, as torch writes None, for one unit.
    """

    def __init__(self, v: Tensor, g: Tensor, dim: int, *, light: bool = False) -> None:
        self.v, self.g, self.dim, self._light = v, g, dim, light
        with torch.no_grad():
            # Adding −0.0 changes no number, not even the sign of a zero.
            w = v.new_full([1] * v.dim(), -0.0).expand(v.shape) if light else _fused_weight_norm(v, g, dim)
            self.w = w.requires_grad_()
            wide = torch.promote_types(v.dtype, torch.float32)
            self._directions = self._units(v.to(wide))  # v itself where possible: a copy would be as large as the layer
            self._norm = torch.linalg.vector_norm(self._directions, dim=1, keepdim=True)
            self._scale = g.to(wide).reshape(-1, 1) / self._norm
        # Reused: allocating memory each time would cost as much as filling it.
        self._pushed: Tensor | None = None
        self._pulled_from: tuple[Tensor | None, Tensor] = None, self._norm  # the last a, and v̂·a

    def effective_weight(self) -> Tensor:
        """A new tensor with the values of w and a graph to the leaf: the user may change it in place."""
        if not self._light:
            return self.w.clone()
        with torch.no_grad():
            values = _fused_weight_norm(self.v, self.g, self.dim)
        return values.add_(self.w)

    @property
    def direction(self) -> Tensor:
        """v̂, in the shape of v."""
        return self._unflatten(self._directions / self._norm)

    @property
    def scale(self) -> Tensor:
        """s = g/‖v‖ (units,)."""
        return self._scale.flatten()

    def _units(self, x: Tensor) -> Tensor:
        x = x.detach()
        # dim = -1 is how torch writes dim=None: one norm for all.
        return x.reshape(1, -1) if self.dim == -1 else x.movedim(self.dim, 0).reshape(x.shape[self.dim], -1)

    def _unflatten(self, x: Tensor) -> Tensor:
        if self.dim == -1:
            return x.reshape(self.v.shape)
        return x.reshape(self.v.movedim(self.dim, 0).shape).movedim(0, self.dim)

    def pull(self, a: Tensor, *, lent: bool = False) -> tuple[Tensor, Tensor]:
        """The gradient in (g, v) of a loss whose gradient in w is a: c = v̂·a and s(a − c v̂).

        Args:
            lent: whether the second is in memory that can be given back; not under vmap.
        """
        a = self._units(a)
        c = self._along(a) if lent else (self._directions * a).sum(1, keepdim=True) / self._norm
        dtype = torch.promote_types(a.dtype, self._norm.dtype)
        out = empty(*a.shape, dtype=dtype, device=a.device) if lent else None
        pulled = torch.addcmul(a, self._directions, c / self._norm, value=-1, out=out).mul_(self._scale)
        return c.reshape(self.g.shape), self._unflatten(pulled)

    def pulled_norms(self, a: Tensor) -> tuple[float, float]:
        """‖∂L/∂g‖² and ‖∂L/∂v‖² without computing `pull`: c² and s²(‖a‖² − c²), summed over units."""
        a = self._units(a).to(self._norm.dtype)
        along = self._along(a).flatten().square()
        across = _row_dots(a, a).flatten() - along
        return float(along.sum()), float((self.scale.square() * across).sum())

    def push(self, g_dot: Tensor, v_dot: Tensor) -> Tensor:
        """The derivative of w along (ġ, v̇): ẇ = ġ v̂ + s(v̇ − (v̂·v̇)v̂). Valid until the next call."""
        self._g_dot, self._v_dot = g_dot.reshape(-1, 1), self._units(v_dot)
        self._v_along = self._along(self._v_dot)
        turn = (self._g_dot - self._scale * self._v_along) / self._norm
        if self._pushed is None:
            self._pushed = torch.empty_like(self._v_dot)
        return self._unflatten(torch.mul(self._v_dot, self._scale, out=self._pushed).addcmul_(self._directions, turn))

    def pull_tangent(
        self, a: Tensor, a_dot: Tensor | None, *, weight: float = 1.0, into: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The derivative of `pull` along the (ġ, v̇) that was pushed last, while a changes by ȧ = H_w ẇ, ``None``: zero.

        It is this weight's part of (Jᵀ H_w J + Σ_i a_i ∇²w_i)(ġ, v̇).

        Args:
            a: the same tensor as in the last call, or another one.
            weight: what the result is multiplied with.
            into: the memory for the second, in the shape of v; else it is in memory that can be given back.
        """
        wide = self._norm.dtype
        if a is not self._pulled_from[0]:
            self._pulled_from = a, self._along(self._units(a).to(wide))
        c, along, norm, scale = self._pulled_from[1], self._v_along, self._norm, self._scale
        a = self._units(a).to(wide)
        a_dot = torch.zeros_like(a) if a_dot is None else self._units(a_dot).to(wide)
        # d/dt of c = v̂·a and of s(a − c v̂), with dv̂/dt = (v̇ − (v̂·v̇)v̂)/‖v‖
        c_dot = self._along(a_dot) + (_row_dots(a, self._v_dot) - c * along) / norm
        s_dot = (self._g_dot - scale * along) / norm
        fits = into is not None and (into.dtype, into.device) == (wide, a.device) and into.is_contiguous()
        direct = self.dim == 0 and fits
        out = into.view(a.shape) if direct and into is not None else empty(*a.shape, dtype=wide, device=a.device)
        torch.mul(a_dot, weight * scale, out=out)
        out.addcmul_(a, weight * s_dot).addcmul_(self._v_dot, weight * scale * c / norm, value=-1)
        out.addcmul_(self._directions, weight * (scale * (c * along / norm - c_dot) - s_dot * c) / norm)
        v_part = self._unflatten(out)
        if into is not None and not direct:
            into.copy_(v_part)
            give_back(out)
            v_part = into
        return weight * c_dot.reshape(self.g.shape), v_part

    def _along(self, x: Tensor) -> Tensor:
        """v̂·x of each unit (units, 1)."""
        return _row_dots(self._directions, x) / self._norm


def _row_dots(x: Tensor, y: Tensor) -> Tensor:
    """The inner products of the rows (units, 1), a few rows at a time: the products take no memory to speak of."""
    rows = min(len(x), max(1, _PIECE // max(1, x.shape[1])))
    dtype = torch.promote_types(x.dtype, y.dtype)
    products, found = x.new_empty(rows, x.shape[1], dtype=dtype), x.new_empty(len(x), 1, dtype=dtype)
    for a, b, into in zip(x.split(rows), y.split(rows), found.split(rows)):
        torch.sum(torch.mul(a, b, out=products[: len(a)]), 1, keepdim=True, out=into)
    return found
