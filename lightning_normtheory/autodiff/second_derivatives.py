"""Which losses can be differentiated twice, and what stands in the way of the others."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize

from lightning_normtheory.autodiff.graph import nodes, refuse_reentrant_checkpoints
from lightning_normtheory.measuring.memory import is_out_of_memory

__all__ = [
    "SecondDerivativeError",
    "explain_second_derivative",
    "refuse_wrong_second_derivatives",
    "twice_differentiable",
]


class SecondDerivativeError(RuntimeError):
    """An operation in the loss has no second derivative."""


@contextmanager
def twice_differentiable() -> Iterator[None]:
    """Inside, attention uses the implementation that can be differentiated twice, which the fused ones cannot, and
    parametrized weights are computed anew, even in a ``parametrize.cached()`` block."""
    caching = parametrize._cache_enabled
    parametrize._cache_enabled = 0
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        parametrize._cache_enabled = caching


def refuse_wrong_second_derivatives(loss: Tensor) -> None:
    """Look for operations whose author has ruled out a second derivative, and those whose own is known to be wrong.

    Not left to autograd: it complains only where the operation's incoming gradient varies, and otherwise takes the
    gradient for a constant, which gives a wrong Hessian without a word.

    Raises:
        SecondDerivativeError: that names the first such operation.
    """
    refuse_reentrant_checkpoints(loss)
    for node in nodes(loss):
        if node.name().startswith("WeightNormInterfaceBackward"):
            raise SecondDerivativeError(
                "Expected WeightNorm as torch.nn.utils applies it, but the loss holds a fused one that cannot be"
                " replaced (a module traced by torch.jit, or torch.ops.aten called by hand), and whose second"
                " derivative is wrong. Use the module as it was before tracing."
            )
        function = getattr(node, "_forward_cls", None)
        if function is not None and _is_once_differentiable(function.backward):
            raise SecondDerivativeError(
                f"Expected a loss that can be differentiated twice, but the backward pass of {function.__qualname__} is"
                " marked once_differentiable. Write it with differentiable operations and drop the mark, or pass a loss"
                " that does without it."
            )


def explain_second_derivative(loss: Tensor, error: RuntimeError) -> RuntimeError:
    """The error that autograd raised, with what is known about its origin."""
    if is_out_of_memory(error) or "inplace operation" in str(error):
        return error
    own = sorted({node.name() for node in nodes(loss) if hasattr(node, "_forward_cls")})
    suspects = f" Functions of your own in its graph: {', '.join(own)}." if own else ""
    reason = str(error).rstrip(".")
    return SecondDerivativeError(
        f"Expected a loss that can be differentiated twice, but autograd says: {reason}.{suspects} Replace the"
        " operation by differentiable ones, or pass a loss that does without it."
    )


# `once_differentiable` leaves no mark on what it wraps, but all its wrappers share one piece of code.
_WRAPPER = once_differentiable(lambda ctx: None).__code__


def _is_once_differentiable(backward: Any) -> bool:
    return getattr(backward, "__code__", None) is _WRAPPER
