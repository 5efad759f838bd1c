"""Measure how nearly linear a network is in its parameters: the quantities of LIN (Liu, Zhu and Belkin, 2020)."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_normtheory.architecture.operations import Opaque, Operation, evaluate, walk
from lightning_normtheory.linalg.precision import to_float64
from lightning_normtheory.theorems.papers.lin_form import hidden_values

__all__ = ["KernelSize", "OutputGradients", "curvature_ratio", "kernel_change_bound", "output_gradients"]


def curvature_ratio(hessian_norms: Tensor, squared_gradients: Tensor, residuals: Tensor | None = None) -> float:
    """Compute B = max ‖∇²f‖/‖∇f‖² over samples and outputs, or with residuals κ_f = max |f − y|·‖∇²f‖/‖∇f‖².

    LIN, eq. (16), of each output of each sample as a scalar f. B is small where f is nearly linear in its parameters
    along a change of f of order one. LIN's networks have B = Õ(1/√m).

    Args:
        hessian_norms: ‖∇²f_h(x_i)‖₂ (n, k).
        squared_gradients: ‖∇f_h(x_i)‖² (n, k), the diagonal of the kernel of all outputs.
        residuals: f_h(x_i) − y_ih (n, k).

    Returns:
        The largest ratio; infinite if a gradient is zero where the Hessian is not.

    Example:
        f = a·b·x at a = b = 1: ‖∇²f‖ = |x| and ‖∇f‖² = 2x²

        >>> x = torch.tensor([[1.0], [-2.0]])
        >>> curvature_ratio(x.abs(), 2 * x**2), curvature_ratio(x.abs(), 2 * x**2, x - 5)
        (0.5, 2.0)
    """
    factors = (
        to_float64(hessian_norms) if residuals is None else to_float64(hessian_norms) * to_float64(residuals).abs()
    )
    squares = to_float64(squared_gradients)
    ratios = torch.where(factors == 0, torch.zeros_like(factors), factors / squares)
    return float(ratios.max())


class KernelSize(NamedTuple):
    """Two norms of a tangent kernel K.

    Attributes:
        squared: bound of ‖J‖₂², for the Jacobian J with K = J Jᵀ; for a kernel that is averaged over outputs or
            directions, bound of the mean of their ‖J_h‖₂²: λ_max(K) of one output, otherwise tr K.
        frobenius: ‖K‖_F.
    """

    squared: float
    frobenius: float

    @classmethod
    def of(cls, kernel: Tensor, *, averaged: bool) -> "KernelSize":
        """Measure a kernel; ``averaged``: whether it is a mean over several outputs or directions."""
        kernel = to_float64(kernel)
        largest = kernel.trace() if averaged else torch.linalg.eigvalsh(kernel)[-1]
        return cls(max(float(largest), 0.0), float(kernel.norm()))


def kernel_change_bound(hessian: float, distance: float, rows: int, now: KernelSize, start: KernelSize) -> float:
    """Bound ‖K − K₀‖_F/‖K₀‖_F ≤ √n·H̄·R·(‖J‖ + ‖J₀‖)/‖K₀‖_F, from the distance R = ‖θ − θ₀‖.

    LIN, Proposition 2.2, for the whole matrix, with its constants: ‖∇f(θ; x) − ∇f(θ₀; x)‖ ≤ H̄R, eq. (40), and
    K − K₀ = (J − J₀)Jᵀ + J₀(J − J₀)ᵀ. The bound holds for k outputs and for random directions over them: H̄ bounds every
    combination c·f with ‖c‖ = 1.

    Args:
        hessian: H̄ ≥ ‖∇²(c·f)(θ'; x_i)‖₂ for all θ' between θ₀ and θ, such as `network_constants` with ``radius=R`` at
            θ. The value at a single θ' is no bound.
        distance: R.
        rows: n; for the kernel of all outputs or of their sum, nk.
        now: K.
        start: K₀.

    Example:
        f = a·b·x with x = 1, from (1, 1) to (2, 1): ∇f = (b, a), K₀ = 2, K = 5, H̄ = 1, R = 1

        >>> bound = kernel_change_bound(1.0, 1.0, 1, KernelSize(5.0, 5.0), KernelSize(2.0, 2.0))
        >>> round(bound, 4), abs(5 - 2) / 2 <= bound
        (1.8251, True)
    """
    if start.frobenius == 0:
        return math.inf
    return math.sqrt(rows) * hessian * distance * (math.sqrt(now.squared) + math.sqrt(start.squared)) / start.frobenius


class OutputGradients(NamedTuple):
    """First derivatives of the outputs on some samples.

    Attributes:
        inputs: ‖∂f/∂x‖₂ (n,), the norm of the (k, d) Jacobian; empty for tokens, which have no derivative.
        hidden: max |∂f_h/∂α_j| (n,) over the outputs h and the entries j of all hidden values α_l; empty without any.
    """

    inputs: Tensor
    hidden: Tensor


def output_gradients(output: Operation, x: Tensor) -> OutputGradients:
    """Differentiate every output in the input and in the hidden values α_l, the inputs of the later layers.

    ‖∂f/∂α_l‖_∞ = Õ(1/√m) is condition (b) of LIN, Theorem 3.1; ‖∂f/∂x‖ is what a Lipschitz bound is about. Takes one
    backward pass for each output.

    Args:
        output: the result of `record_forward`, without an operation that has no rule.
        x: samples (n, …).

    Example:
        f = v·(Wx) with v = (1, −2), W = (3, 4)ᵀ: ∂f/∂α = v, and ∂f/∂x = 3 − 8

        >>> from torch import nn
        >>> from lightning_normtheory.architecture.recorder import record_forward
        >>> net = nn.Sequential(nn.Linear(1, 2, bias=False), nn.Linear(2, 1, bias=False))
        >>> net[0].weight.data, net[1].weight.data = torch.tensor([[3.0], [4.0]]), torch.tensor([[1.0, -2.0]])
        >>> x = torch.ones(2, 1)
        >>> found = output_gradients(record_forward(net, x), x)
        >>> found.inputs.tolist(), found.hidden.tolist()
        ([5.0, 5.0], [2.0, 2.0])
    """
    unknown = [step.reason for step in walk(output) if isinstance(step, Opaque)]
    if unknown:
        raise ValueError(f"Expected operations that all have a rule, but got one without: {unknown[0]}.")
    smooth = x.is_floating_point()
    x = x.detach().requires_grad_() if smooth else x
    with torch.enable_grad():
        values = evaluate(output, x)
    wanted = [values[step] for step in hidden_values(output)]
    n, points = len(x), [*([x] if smooth else []), *wanted]
    f = values[output].reshape(n, -1)
    by_output = [
        [torch.zeros_like(point) if g is None else g for point, g in zip(points, _gradients(f[:, h], points))]
        for h in range(f.shape[1])
    ]
    empty = torch.empty(0, dtype=torch.float64, device="cpu")
    jacobian = [to_float64(gradients[0]).reshape(n, -1).cpu() for gradients in by_output] if smooth else []
    inputs = torch.linalg.matrix_norm(torch.stack(jacobian, 1), 2) if jacobian else empty
    largest = [to_float64(g).abs().reshape(n, -1).amax(1).cpu() for found in by_output for g in found[int(smooth) :]]
    return OutputGradients(inputs, torch.stack(largest).amax(0) if largest else empty)


def _gradients(f: Tensor, points: list[Tensor]) -> tuple[Tensor | None, ...]:
    return (
        torch.autograd.grad(f.sum(), points, retain_graph=True, allow_unused=True)
        if f.requires_grad
        else ((None,) * len(points))
    )
