"""Refuse losses that cannot be differentiated twice, and explain why."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize

from lightning_normtheory.autodiff.composed import composed_operations
from lightning_normtheory.autodiff.graph import nodes, refuse_reentrant_checkpoints
from lightning_normtheory.measuring.memory import is_out_of_memory
from lightning_normtheory.record.wording import join_names

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
    """Make attention, recurrent layers, max pooling and parametrized weights twice differentiable inside the block.

    Attention uses the one implementation with a second derivative, not a fused one, and so do recurrent layers and max
    pooling (`composed_operations`). Parametrized weights are computed again, even in a ``parametrize.cached()`` block.
    """
    caching = parametrize._cache_enabled
    parametrize._cache_enabled = 0
    try:
        with sdpa_kernel(SDPBackend.MATH), composed_operations():
            yield
    finally:
        parametrize._cache_enabled = caching


def refuse_wrong_second_derivatives(loss: Tensor) -> None:
    """Refuse operations that are marked once differentiable, and those with a wrong second derivative.

    Autograd is not enough: it raises only if the operation's incoming gradient varies. Otherwise it treats the gradient
    as a constant, which silently gives a wrong Hessian.

    Raises:
        SecondDerivativeError: if there is such an operation; names the first.
    """
    refuse_reentrant_checkpoints(loss)
    for node in nodes(loss):
        if node.name().startswith("WeightNormInterfaceBackward"):
            raise SecondDerivativeError(
                "Expected WeightNorm as torch.nn.utils applies it, but the loss has a fused one that cannot be"
                " replaced (a module traced by torch.jit, or a direct call of torch.ops.aten), and whose second"
                " derivative is wrong. Use the module as it was before tracing."
            )
        function = getattr(node, "_forward_cls", None)
        if function is not None and _is_once_differentiable(function.backward):
            raise SecondDerivativeError(
                f"Expected a loss that can be differentiated twice, but the backward pass of {function.__qualname__} is"
                " marked once_differentiable. Write it with differentiable operations and remove the mark, or pass a"
                " loss without it."
            )


def explain_second_derivative(loss: Tensor, error: RuntimeError) -> RuntimeError:
    """Turn an error of autograd into one that names likely causes and the remedy."""
    if is_out_of_memory(error) or "inplace operation" in str(error):
        return error
    own = sorted({node.name() for node in nodes(loss) if hasattr(node, "_forward_cls")})
    suspects = f" Custom functions in its graph: {join_names(own)}." if own else ""
    reason = str(error).rstrip(".")
    return SecondDerivativeError(
        f"Expected a loss that can be differentiated twice, but autograd says: {reason}.{suspects} Replace the"
        " operation by differentiable ones, or pass a loss without it."
    )


# `once_differentiable` does not mark the function that it wraps, but all its wrappers share one code object.
_WRAPPER = once_differentiable(lambda ctx: None).__code__


def _is_once_differentiable(backward: Any) -> bool:
    return getattr(backward, "__code__", None) is _WRAPPER
