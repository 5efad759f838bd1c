"""Compute the RSC ratio ‖∇L‖²/L and the mean gradient of the predictor."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_normtheory.autodiff.graph import refuse_reentrant_checkpoints
from lightning_normtheory.linalg.inner_products import add_in_float64, exact_dot
from lightning_normtheory.linalg.precision import device_for_float64
from lightning_normtheory.measuring.preserve import preserve_state
from lightning_normtheory.measuring.rng import isolated_rng
from lightning_normtheory.model.checks import count_output_samples, list_batches, require_graph, trainable_parameters

__all__ = [
    "RSC",
    "add_gradients",
    "flat_gradients",
    "gradients_of",
    "rsc_from_sums",
    "rsc_of_one_batch",
    "rsc_ratio",
    "why_no_ratio",
    "zero_gradient",
]


class RSC(NamedTuple):
    """The result of `rsc_ratio`.

    Attributes:
        loss: L, the mean over all samples.
        grad_norm_sq: ‖∇L‖² over the trainable parameters.
        ratio: R = ‖∇L‖²/L (WN); NaN unless L > 0.
        mean_predictor_grad_norm_sq: ‖ḡ‖², ḡ = (1/(nk)) Σ_i Σ_h ∇f_h(x_i) (RSC).
    """

    loss: float
    grad_norm_sq: float
    ratio: float
    mean_predictor_grad_norm_sq: float


def rsc_ratio(
    model: nn.Module,
    loss: Callable[[Tensor, Any], Tensor],
    batches: Iterable[tuple[Any, Any]],
    *,
    batch_stats: bool | None = None,
) -> RSC:
    """Compute R(θ) = ‖∇L(θ)‖²/L(θ) for L = (1/n) Σ_i ℓ(f(x_i), y_i), and ‖ḡ‖² of the predictor, over all batches.

    WN, Lemma 5.1 uses R for restricted strong convexity; RSC, Theorem 5.1 uses ‖ḡ‖². R scales with the loss: the
    papers' L sums over outputs, while `torch.nn.MSELoss` averages over them and is L/k. The papers assume L ≥ 0, with
    infimum 0: for a loss that can be negative (SI-SDR, an ELBO, a cosine), R depends on the constant that one adds to
    it, and for L ≤ 0 it is undefined.

    Args:
        model: f; outputs of shape (n, …), where all axes after the first count as the k outputs.
        loss: ``loss(output, target)``, a mean over the samples of a batch.
        batches: pairs ``(x, y)``. Batches of different sizes are weighted by their size.
        batch_stats: whether BatchNorm uses the statistics of each batch; ``None`` follows ``model.training``.

    Example:
        One weight w = 1, f = wx, L = ½Σ(x_i − y_i)² = ½(1 + 4), ∇L = ½Σ 2(x_i − y_i)x_i = ½(2 + 12)

        >>> model = nn.Linear(1, 1, bias=False)
        >>> _ = nn.init.ones_(model.weight)
        >>> x, y = torch.tensor([[1.0], [3.0]]), torch.tensor([[0.0], [1.0]])
        >>> rsc_ratio(model, nn.functional.mse_loss, [(x, y)])
        RSC(loss=2.5, grad_norm_sq=49.0, ratio=19.6, mean_predictor_grad_norm_sq=4.0)
    """
    parameters = trainable_parameters(model)
    sizes = [p.numel() for p in parameters.values()]
    loss_sum, loss_gradient, predictor_gradient = 0.0, zero_gradient(parameters), zero_gradient(parameters)
    samples = outputs = 0
    with preserve_state(model, batch_stats=batch_stats) as reset_state, torch.enable_grad():
        for index, (x, y) in enumerate(list_batches(batches)):
            reset_state()
            with isolated_rng(index):  # the same random numbers as in the products with the Hessian
                output = model(x)
                value = loss(output, y)
            n = count_output_samples(output)
            add_gradients(loss_gradient, gradients_of(value, parameters, retain_graph=True), n, sizes)
            add_gradients(predictor_gradient, gradients_of(output.sum(), parameters), 1, sizes)
            loss_sum += n * float(value.detach())
            samples, outputs = samples + n, outputs + output.numel()
    if samples == 0:
        raise ValueError("Expected at least one sample, but the batches hold none.")
    return rsc_from_sums(samples, loss_sum, loss_gradient, outputs, predictor_gradient)


def rsc_from_sums(
    samples: float, loss_sum: float, loss_gradient_sum: Tensor, outputs: float, predictor_gradient_sum: Tensor
) -> RSC:
    """Compute the result from sums over samples and outputs, which batches and processes can add up first."""
    return rsc_of(
        loss_sum / samples,
        float(loss_gradient_sum @ loss_gradient_sum) / samples**2,
        float(predictor_gradient_sum @ predictor_gradient_sum) / outputs**2,
    )


def rsc_of(loss: float, grad_norm_sq: float, mean_predictor_grad_norm_sq: float) -> RSC:
    """Return the result with its ratio, which is NaN unless the loss is positive."""
    ratio = grad_norm_sq / loss if loss > 0 else float("nan")
    return RSC(loss, grad_norm_sq, ratio, mean_predictor_grad_norm_sq)


def gradients_of(
    value: Tensor, parameters: dict[str, nn.Parameter], *, retain_graph: bool = False
) -> list[Tensor | None]:
    """Compute ∇value by parameter, ``None`` for unused parameters; ``.grad`` is not touched."""
    if value.numel() != 1:
        raise ValueError(f"Expected a scalar to differentiate, but got a tensor of shape {tuple(value.shape)}.")
    require_graph(value, "a value")
    refuse_reentrant_checkpoints(value)
    return list(
        torch.autograd.grad(value.sum(), list(parameters.values()), allow_unused=True, retain_graph=retain_graph)
    )


def add_gradients(total: Tensor, gradients: Sequence[Tensor | None], weight: float, sizes: Sequence[int]) -> Tensor:
    """Add weight·∇ in place to a flat vector (p,) of all parameters with these sizes, and return ‖∇‖².

    The total is float64 for every dtype of the model, so that the sum does not depend on the split into batches.

    Example:
        >>> total = torch.zeros(3, dtype=torch.float64)
        >>> add_gradients(total, [torch.ones(2), None], 2.0, [2, 1])
        tensor(2., dtype=torch.float64)
        >>> total
        tensor([2., 2., 0.], dtype=torch.float64)
    """
    square = total.new_zeros(())
    for part, gradient in zip(total.split(list(sizes)), flat_gradients(gradients, total.device)):
        if gradient is not None:
            square += add_in_float64(part, gradient, weight)
    return square


def flat_gradients(gradients: Sequence[Tensor | None], device: torch.device) -> list[Tensor | None]:
    """Flatten gradients and move them to a device, in one copy if all are on another: the host waits for each copy."""
    found = [gradient.detach().reshape(-1) for gradient in gradients if gradient is not None]
    if len({each.device for each in found}) == 1 and found[0].device != device:
        found = list(torch.cat(found).to(device).split([len(each) for each in found]))
    left = iter(found)
    return [None if gradient is None else next(left).to(device) for gradient in gradients]


def rsc_of_one_batch(
    loss: float, loss_gradients: Sequence[Tensor | None], outputs: float, predictor_gradients: Sequence[Tensor | None]
) -> tuple[RSC, float]:
    """Compute the result of a single batch, and the cosine of the two gradients.

    They are not copied, unless their device has no float64.

    Example:
        >>> rsc_of_one_batch(2.0, [torch.tensor([3.0, 4.0])], 2, [torch.tensor([0.0, 2.0])])
        (RSC(loss=2.0, grad_norm_sq=25.0, ratio=12.5, mean_predictor_grad_norm_sq=1.0), 0.8)
    """
    loss_gradients, predictor_gradients = (_with_float64(each) for each in (loss_gradients, predictor_gradients))
    squares = [_sum_of_products(each, each) for each in (loss_gradients, predictor_gradients)]
    norms = (squares[0] * squares[1]) ** 0.5
    cosine = _sum_of_products(loss_gradients, predictor_gradients) / norms if norms > 0 else float("nan")
    return rsc_of(loss, squares[0], squares[1] / outputs**2), cosine


def _with_float64(gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    device = next((gradient.device for gradient in gradients if gradient is not None), torch.device("cpu"))
    place = device_for_float64(device)
    return gradients if place == device else flat_gradients(gradients, place)


def why_no_ratio(*losses: float) -> str:
    """Return why losses cannot be divided by, or have no rate; empty if they can, or are not finite.

    Example:
        >>> why_no_ratio(0.5, -2.0)
        'the loss is below zero, and ratios and rates are defined for positive losses only'
        >>> why_no_ratio(0.5)
        ''
    """
    lowest = min(losses)
    if not lowest <= 0:
        return ""
    return (
        f"the loss is {'below ' if lowest < 0 else ''}zero, and ratios and rates are defined for positive losses only"
    )


def _sum_of_products(first: Sequence[Tensor | None], second: Sequence[Tensor | None]) -> float:
    pairs = [(a, b) for a, b in zip(first, second) if a is not None and b is not None]
    return sum(exact_dot(a.detach().reshape(-1), b.detach().reshape(-1)) for a, b in pairs)


def zero_gradient(parameters: dict[str, nn.Parameter]) -> Tensor:
    """Return a zero vector (p,) in float64 to add gradients to, on the CPU if their device has no float64."""
    first = next(iter(parameters.values()))
    device = device_for_float64(first.device)
    return torch.zeros(sum(p.numel() for p in parameters.values()), dtype=torch.float64, device=device)
