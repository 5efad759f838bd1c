"""Measure the curvature of the predictor: max_h ‖∇²f_h(θ; x_i)‖₂ for every sample."""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_normtheory.autodiff.second_derivatives import twice_differentiable
from lightning_normtheory.autodiff.weight_norm import ComposedWeightNorm
from lightning_normtheory.hessian.eigenvalues import check_options
from lightning_normtheory.hessian.operator import LossHessian
from lightning_normtheory.linalg.eigensolvers import batched_lanczos, lanczos
from lightning_normtheory.measuring.preserve import preserve_state
from lightning_normtheory.model.checks import count_output_samples, has_samples, some_samples, trainable_parameters
from lightning_normtheory.model.layers import with_batch_statistics
from lightning_normtheory.model.parameters import FlatParameters

__all__ = ["PredictorHessian", "predictor_hessian", "predictor_hessian_norm"]

# Memory per (sample, output) pair in vectors of the size of θ and of all outputs: the Lanczos basis, and what autograd
# holds. As many pairs are handled at once as fit into _BYTES.
_BASIS, _BETWEEN, _BYTES = 16, 8, 2**27


class PredictorHessian(NamedTuple):
    """The result of `predictor_hessian`.

    Attributes:
        norms: ‖∇²f(θ; x_i)‖₂ (n,), the largest over the outputs that are measured.
        residuals: ‖Hv − λv‖ of each (n,): some eigenvalue of that output's Hessian is at most this far away.
        hvps: the number of products with the Hessian of one sample, over all samples and outputs.
        by_output: ‖∇²f_h(θ; x_i)‖₂ (n, k) of each output, 0 where it is not measured.
    """

    norms: Tensor
    residuals: Tensor
    hvps: int
    by_output: Tensor


def predictor_hessian_norm(
    model: nn.Module, x: Any, *, tol: float = 1e-2, max_hvps: int = 200, batch_stats: bool | None = None
) -> Tensor:
    """Compute ‖∇²f(θ; x_i)‖₂ = max_h max |λ(∇²_θ f_h(θ; x_i))|, over eigenvalues λ and outputs h, as (n,).

    WN, Theorem 4.1, and RSC, Theorem 4.1, bound this quantity. Warns if a sample does not reach ``tol``.

    Args:
        model: f; outputs of shape (n, …), where all axes after the first count as outputs.
        x: the input (n, …), or a list or dict of tensors whose first axis holds the samples.
        tol: the relative residual at which to stop. The norm is then the size of an eigenvalue, within the residual,
            and never too large but for rounding. It can be too small, since the residual does not say that no
            eigenvalue is larger: there may be one at the other end of the spectrum, which often is nearly symmetric.
            Of 300 samples of random networks, 2 % are off by more than 1e-2 and at most 10 % by more than 1e-3, with
            the default; with ``tol=1e-3``, at most 3 % by more than 1e-4.
        max_hvps: the largest number of products per sample and output.
        batch_stats: whether BatchNorm uses the statistics of the batch, which couples the samples and makes this slow;
            ``None`` follows ``model.training``.

    Example:
        f = a·b·x has the Hessian [[0, x], [x, 0]] in (a, b)

        >>> model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
        >>> predictor_hessian_norm(model, torch.tensor([[1.0], [-3.0]]))
        tensor([1., 3.])
    """
    result = predictor_hessian(model, x, tol=tol, max_hvps=max_hvps, batch_stats=batch_stats)
    late = int((result.residuals > tol * result.norms).sum())
    if late:
        warnings.warn(
            f"{late} of {len(result.norms)} norms did not reach tol={tol} within {max_hvps} products each: they are "
            "lower bounds. Raise max_hvps.",
            stacklevel=2,
        )
    return result.norms


def predictor_hessian(
    model: nn.Module,
    x: Any,
    *,
    tol: float = 1e-2,
    max_hvps: int = 200,
    batch_stats: bool | None = None,
    first: int | None = None,
    one_output: bool = False,
    functional: bool = True,
) -> PredictorHessian:
    """Compute `predictor_hessian_norm` with residuals and cost instead of a warning.

    Args:
        first: measure only this many samples; the rest still enter the statistics of the batch.
        one_output: measure only output i mod k of sample i.
        functional: whether the model may be called with substituted parameters; False for one that writes to its own
            parameters, which then are reset before each call.
    """
    check_options(method="lanczos", which="magnitude", tol=tol, max_hvps=max_hvps, memory="high")
    parameters = trainable_parameters(model)
    with preserve_state(model, batch_stats=batch_stats) as reset_state, torch.enable_grad():
        together = model(x)
        n = count_output_samples(together)
        if n == 0:
            raise ValueError("Expected at least one sample, but the input holds none.")
        k, asked = together[0].numel(), n if first is None else min(first, n)
        pairs = [(i, h) for i in range(asked) for h in ([i % k] if one_output else range(k))]
        coupled = not functional or with_batch_statistics(model)
        coupled = coupled or not _alone_as_together(model, parameters, x, together)
        del together
        reset_state()
        if not coupled:
            try:
                with warnings.catch_warnings():  # torch itself uses what it has deprecated
                    warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", FutureWarning)
                    own = some_samples(x, n, slice(asked))
                    return _independent(model, parameters, own, (asked, k), pairs, tol, max_hvps)
            except (RuntimeError, NotImplementedError, MemoryError):
                pass  # out of memory, or an operation without vmap or forward mode: continue one by one below

        def output(i: int, h: int) -> tuple[Tensor, int]:
            reset_state()
            if coupled:
                return model(x).reshape(n, k)[i, h], 1
            return model(some_samples(x, n, slice(i, i + 1))).reshape(k)[h], 1

        return _one_by_one(parameters, output, (asked, k), pairs, tol, max_hvps)


def _alone_as_together(model: nn.Module, parameters: dict[str, nn.Parameter], x: Any, together: Tensor) -> bool:
    """Check that the first sample has the same gradient alone, with substituted parameters, as in the batch.

    If not, samples interact, or the model reaches parameters in a way that substitution does not cover.
    """
    weights = torch.linspace(1, 2, together[0].numel(), dtype=together.dtype, device=together.device)
    theta = {name: p.detach() for name, p in parameters.items()}

    def weighted(theta: dict[str, Tensor]) -> Tensor:
        alone = functional_call(model, theta, (some_samples(x, len(together), slice(1)),))
        return (alone.reshape(-1) * weights).sum()

    try:
        with ComposedWeightNorm(), twice_differentiable():
            alone = FlatParameters(theta).join({theta[name]: g for name, g in grad(weighted)(theta).items()})
    except (RuntimeError, NotImplementedError):
        return True  # the same error occurs in the measurement, which then continues one by one
    value = (together[0].reshape(-1) * weights).sum()
    gradients = torch.autograd.grad(value, list(parameters.values()), allow_unused=True)
    found: dict[Tensor, Tensor] = {p: g for p, g in zip(parameters.values(), gradients) if g is not None}
    expected = FlatParameters(parameters).join(found)
    return float((alone - expected).norm()) <= 1e-3 * float(expected.norm())


def _independent(
    model: nn.Module,
    parameters: dict[str, nn.Parameter],
    x: Any,
    shape: tuple[int, int],
    asked: Sequence[tuple[int, int]],
    tol: float,
    max_hvps: int,
) -> PredictorHessian:
    """Measure many pairs of a sample and an output at once, each with its own Lanczos iteration."""
    n, k = shape
    space = FlatParameters({name: p.detach() for name, p in parameters.items()})
    theta = space.unflatten(space.join({p: p for p in space.parameters.values()}))

    leaves, form = tree_flatten(x)
    per_sample = [index for index, leaf in enumerate(leaves) if has_samples(leaf, n)]

    def output(theta: dict[str, Tensor], sample: list[Tensor], one_hot: Tensor) -> Tensor:
        parts = list(leaves)
        for index, part in zip(per_sample, sample):
            parts[index] = part.unsqueeze(0)
        batch_of_one = tree_unflatten(parts, form)
        return (functional_call(model, theta, (batch_of_one,)).reshape(-1) * one_hot).sum()

    def product(sample: list[Tensor], one_hot: Tensor, v: Tensor) -> Tensor:
        slope: Callable[[Any], Any] = lambda theta: grad(output)(theta, sample, one_hot)  # noqa: E731
        tangent = jvp(slope, (theta,), (space.unflatten(v),))[1]
        return torch.cat([part.reshape(-1) for part in tangent.values()])

    norms = torch.zeros(n, k, dtype=space.dtype, device=space.device)
    residuals, products = torch.zeros_like(norms), 0
    at_once = max(1, _BYTES // (((_BASIS + _BETWEEN) * space.size + _BETWEEN * k) * space.dtype.itemsize))
    for chunk in torch.tensor(asked, device="cpu").split(at_once):
        samples, which = chunk.unbind(1)
        xs = [leaves[index].detach()[samples] for index in per_sample]
        one_hots = nn.functional.one_hot(which, k).to(space.device, space.dtype)
        with ComposedWeightNorm(), twice_differentiable():
            pairs = batched_lanczos(
                partial(vmap(product), xs, one_hots),
                _starts(len(chunk), space),
                which="magnitude",
                tol=tol,
                max_products=max_hvps,
                basis=_BASIS,
            )
        norms[samples, which] = norms.new_tensor([abs(pair.value) for pair in pairs])
        residuals[samples, which] = norms.new_tensor([pair.residual for pair in pairs])
        products += sum(pair.products for pair in pairs)
    return _largest(norms, residuals, products)


def _starts(count: int, space: FlatParameters) -> Tensor:
    """Return one random unit vector for every sample (count, p), so that chunking does not change the result."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(space.size, generator=generator, device="cpu").to(space.device, space.dtype)
    return (start / start.norm()).expand(count, -1)


def _one_by_one(
    parameters: dict[str, nn.Parameter],
    output: Callable[[int, int], tuple[Tensor, int]],
    shape: tuple[int, int],
    asked: Sequence[tuple[int, int]],
    tol: float,
    max_hvps: int,
) -> PredictorHessian:
    """Measure samples that interact, or operations without batching rules; ``output(i, h)`` is f_h(x_i)."""
    norms = torch.zeros(shape, dtype=torch.float64, device="cpu")
    residuals, products = torch.zeros_like(norms), 0
    for i, h in asked:
        with LossHessian(parameters, [partial(output, i, h)]) as hessian:
            start = _starts(1, hessian.space)[0]
            pair = lanczos(hessian.__matmul__, start, which="magnitude", tol=tol, max_products=max_hvps, basis=_BASIS)
        norms[i, h], residuals[i, h] = abs(pair.value), pair.residual
        products += pair.products
    dtype, device = hessian.space.dtype, hessian.space.device
    return _largest(norms.to(device, dtype), residuals.to(device, dtype), products)


def _largest(norms: Tensor, residuals: Tensor, products: int) -> PredictorHessian:
    largest, outputs = norms.max(1)
    return PredictorHessian(largest, residuals.gather(1, outputs[:, None]).squeeze(1), products, norms)
