"""The trace of the loss's Hessian, estimated from Hessian-vector products, with its standard error."""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_normtheory.hessian.operator import LossHessian, Memory, hessian_operator
from lightning_normtheory.linalg.arithmetic import product_eps
from lightning_normtheory.linalg.inner_products import dot, norms
from lightning_normtheory.measuring.progress import tick
from lightning_normtheory.model.layers import layer_of_parameter

__all__ = ["TraceEstimate", "check_products", "estimate_trace", "hessian_trace"]

# Random vectors for what the sketch has not captured. Their spread gives the standard error, so there are never fewer:
# with nine degrees of freedom, Student's t is within 3 in 98.5 % of draws.
_LEAST_VECTORS = 10
LEAST_PRODUCTS = _LEAST_VECTORS + 2


class TraceEstimate(NamedTuple):
    """An unbiased estimate of a trace.

    Attributes:
        value: the estimate of tr(∇²L).
        standard_error: of ``value``, over draws of the random vectors. The trace lies within three standard errors
            in about 98 % of draws. Rounding only, if the trace was computed exactly.
        hvps: the number of Hessian-vector products.
        layers: by layer, the estimated trace of its diagonal block and the standard error of that; empty unless asked
            for. The traces add up to ``value``.
    """

    value: float
    standard_error: float
    hvps: int
    layers: dict[str, tuple[float, float]]


def hessian_trace(
    model: nn.Module,
    loss: Callable[[Tensor, Any], Tensor],
    batches: Iterable[tuple[Any, Any]],
    *,
    hvps: int = 30,
    layers: bool = False,
    batch_stats: bool | None = None,
    memory: Memory = "high",
    seed: int = 0,
) -> TraceEstimate:
    """Estimate tr(∇²L(θ)), L = (1/n) Σ_i ℓ(f(x_i), y_i), by Hutch++ (Meyer, Musco, Musco, Woodruff, 2021).

    With an orthonormal basis Q of the range of HS, S of random signs, and z_i = (I − QQᵀ)g_i with g_i of random signs,

        tr(H) = tr(QᵀHQ) + E[z_iᵀ H z_i]:

    the first term is computed, the second is estimated by a mean. From 30 products on, HS, HQ and the z_i take a third
    of them each; with fewer, there are ten z_i. A model with at most ``hvps`` parameters gets the exact trace, from the
    products with all unit vectors.

    Args:
        model: f; its outputs have the samples in front.
        loss: ``loss(output, target)``, a mean over the samples of a batch.
        batches: pairs ``(x, y)``. Batches of different sizes are weighted by their size.
        hvps: the number of Hessian-vector products, at least 12.
        layers: whether to split the trace by layer; this takes no further products.
        batch_stats: whether BatchNorm uses the statistics of each batch; ``None``: as the model is set.
        memory: ``"high"`` keeps the graph of the gradient for all products; ``"low"`` builds it again for each.
        seed: of the random vectors; the global generators are not used.

    Example:
        L = ½(w₁² + 3w₂²): the Hessian is diag(1, 3)

        >>> model = nn.Linear(2, 1, bias=False)
        >>> x, y = torch.tensor([[1.0, 0.0], [0.0, 3.0**0.5]]), torch.zeros(2, 1)
        >>> trace = hessian_trace(model, nn.functional.mse_loss, [(x, y)])
        >>> round(trace.value, 4), trace.hvps
        (4.0, 2)
    """
    check_products(hvps)
    with hessian_operator(model, loss, batches, batch_stats=batch_stats, memory=memory) as hessian:
        return estimate_trace(hessian, hvps, layers=layers, seed=seed)


def check_products(hvps: int) -> None:
    """
    Raises:
        ValueError: if a trace cannot be estimated from so few products.
    """
    if type(hvps) is not int or hvps < LEAST_PRODUCTS:
        raise ValueError(
            f"Expected the number of products for the trace to be an integer of at least {LEAST_PRODUCTS}, "
            f"but got {hvps!r}: with fewer, its standard error means nothing."
        )


def estimate_trace(hessian: LossHessian, hvps: int, *, layers: bool = False, seed: int = 0) -> TraceEstimate:
    """Estimate the trace of a Hessian that keeps its graph, as `hessian_trace` does."""
    blocks = _Blocks(hessian, layers)
    if hessian.space.size <= hvps:
        return _exact(hessian, blocks)
    generator = torch.Generator().manual_seed(seed)  # on the CPU: the same numbers on every device and process
    sketch = min(hvps // 3, (hvps - _LEAST_VECTORS) // 2, hessian.vectors)
    basis = _orthonormal((_product(hessian, _signs(hessian, generator)) for _ in range(sketch)), sketch)
    captured, norm = _captured(hessian, basis, blocks)
    samples = []
    for _ in range(hvps - 2 * sketch):
        z = _project_out(basis, _signs(hessian, generator))
        image = _product(hessian, z)
        # Of the whole, zᵀ(I − P)Hz = zᵀHz already.
        samples.append(blocks.dots(z, _project_out(basis, image) if blocks.by_layer else image))
    rest = torch.stack(samples)
    products = sketch + len(basis) + len(rest)
    return blocks.estimate(captured + rest.mean(0), rest, products, _rounding(hessian, norm))


class _Blocks:
    """The diagonal blocks whose traces are estimated: those of the layers, or the whole matrix as one."""

    def __init__(self, hessian: LossHessian, layers: bool) -> None:
        names = hessian.space.parameters
        owners = [layer_of_parameter(name) if layers else "" for name in names]
        self.names = list(dict.fromkeys(owners))
        self.by_layer = layers
        self._rows = [self.names.index(owner) for owner in owners]
        self._sizes = [parameter.numel() for parameter in names.values()] if layers else [hessian.space.size]

    def dots(self, x: Tensor, y: Tensor) -> Tensor:
        """⟨x, y⟩ over the entries of each block, float64 (blocks,)."""
        sums = torch.zeros(len(self.names), dtype=torch.float64, device="cpu")
        for row, a, b in zip(self._rows, x.split(self._sizes), y.split(self._sizes)):
            sums[row] += dot(a, b)
        return sums

    def estimate(self, traces: Tensor, samples: Tensor, products: int, rounding: float) -> TraceEstimate:
        errors = _standard_error(samples).clamp_min(rounding)
        layers = {name: (float(t), float(e)) for name, t, e in zip(self.names, traces, errors)} if self.by_layer else {}
        total = max(float(_standard_error(samples.sum(1))), rounding)
        return TraceEstimate(float(traces.sum()), total, products, layers)


def _standard_error(samples: Tensor) -> Tensor:
    return samples.std(0) / math.sqrt(len(samples))


def _rounding(hessian: LossHessian, norm: float) -> float:
    """eps‖H‖ in each of the √p directions of a product with random signs; eps of the model, not of the sums."""
    eps = max(product_eps(p.device, p.dtype) for p in hessian.space.parameters.values())
    return eps * norm * math.sqrt(hessian.space.size)


def _exact(hessian: LossHessian, blocks: _Blocks) -> TraceEstimate:
    traces = torch.zeros(len(blocks.names), dtype=torch.float64, device="cpu")
    norm = 0.0
    for unit in torch.eye(hessian.space.size, dtype=hessian.space.dtype, device=hessian.space.device):
        image = _product(hessian, unit)
        traces += blocks.dots(unit, image)
        norm = max(norm, float(norms(image)))
    nothing = torch.zeros(2, len(traces), dtype=torch.float64, device="cpu")
    return blocks.estimate(traces, nothing, hessian.space.size, _rounding(hessian, norm))


def _captured(hessian: LossHessian, basis: Tensor, blocks: _Blocks) -> tuple[Tensor, float]:
    """The traces of the blocks of PH + HP − PHP with P = QQᵀ, and the largest ‖Hq‖.

    What is left of H is (I − P)H(I − P). The total of the traces is that of QᵀHQ.
    """
    traces = torch.zeros(len(blocks.names), dtype=torch.float64, device="cpu")
    norm = 0.0
    for q in basis:
        image = _product(hessian, q)
        norm = max(norm, float(norms(image)))
        traces += blocks.dots(q, image)
        if blocks.by_layer:
            traces += blocks.dots(q, _project_out(basis, image))  # HP − PHP
    return traces, norm


def _product(hessian: LossHessian, vector: Tensor) -> Tensor:
    tick("product")
    return hessian @ vector


def _signs(hessian: LossHessian, generator: torch.Generator) -> Tensor:
    signs = torch.randint(2, (hessian.space.size,), generator=generator, device="cpu")
    return (2.0 * signs - 1).to(hessian.space.device, hessian.space.dtype)


def _project_out(basis: Tensor, vector: Tensor) -> Tensor:
    """(I − QQᵀ)v, the rows of ``basis`` being the columns of Q."""
    return vector - basis.t() @ (basis @ vector)


def _orthonormal(vectors: Iterable[Tensor], count: int) -> Tensor:
    """An orthonormal basis (k, p) of the span; a vector that depends on those before it adds none."""
    basis, found = torch.empty(0, device="cpu"), 0
    for vector in vectors:
        if len(basis) == 0:
            basis = vector.new_empty(count, len(vector))
        # Twice: after one pass rounding may leave a nearly dependent vector far from orthogonal.
        rest = _project_out(basis[:found], _project_out(basis[:found], vector))
        size = float(norms(rest))
        if size > math.sqrt(torch.finfo(rest.dtype).eps) * float(norms(vector)):
            basis[found] = rest / size
            found += 1
    return basis[:found]
