"""DGM: kernels of an infinitely wide two-layer ReLU network with WeightNorm, and the constants of its theorems."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_normtheory.linalg.precision import to_float64
from lightning_normtheory.linalg.spectrum import largest_eigenvalue, smallest_eigenvalue
from lightning_normtheory.model.layers import weight_norm_parameters
from lightning_normtheory.theorems.initialization import why_not_gaussian

__all__ = ["DGMForm", "InfiniteWidthKernels", "dgm_form", "infinite_width_kernels"]


class InfiniteWidthKernels(NamedTuple):
    """V (directions, for α = 1), G (lengths) and H = V + G, the kernel without WeightNorm; each (n, n), float64."""

    V: Tensor
    G: Tensor
    H: Tensor


def infinite_width_kernels(x: Tensor) -> InfiniteWidthKernels:
    """Compute the infinite-width kernels V∞, G∞ and H∞ for samples x (n, d) (DGM, Section 3).

    They are the limits for m → ∞ of f = (1/√m) Σ_k c_k σ(g_k v_kᵀx/‖v_k‖), σ = ReLU, c_k = ±1, v_k ~ N(0, α²I),
    g_k = ‖v_k‖/α. With θ the angle between x_i and x_j,

        H∞ = x_i·x_j (π − θ)/(2π),   G∞ = ‖x_i‖‖x_j‖ (sin θ + (π − θ) cos θ)/(2πd),   V∞ = H∞ − G∞

    The tangent kernel at initialization is V∞/α² + G∞; λ₀ = λ_min(V∞), μ₀ = λ_min(G∞).

    Example:
        Two orthogonal unit vectors in the plane: H = I/2 + 0, G = (π/(2π·2), 1/(2π·2))

        >>> V, G, H = infinite_width_kernels(torch.eye(2))
        >>> H.diagonal(), round(float(G[0, 0]), 4), round(float(G[0, 1]), 4)
        (tensor([0.5000, 0.5000], dtype=torch.float64), 0.25, 0.0796)
    """
    if x.dim() != 2 or len(x) == 0:
        raise ValueError(f"Expected samples of shape (n, d), but got {tuple(x.shape)}. Flatten them first.")
    x = to_float64(x.detach())
    d = x.shape[1]
    norms = x.norm(dim=1, keepdim=True)
    unit = x / norms.clamp_min(torch.finfo(torch.float64).tiny)
    # Use half-angles: the arc cosine of an inner product loses half of the digits near 0 and π.
    exact = "donot_use_mm_for_euclid_dist"
    theta = 2 * torch.atan2(torch.cdist(unit, unit, compute_mode=exact), torch.cdist(unit, -unit, compute_mode=exact))
    products = norms * norms.t()
    H = products * theta.cos() * (math.pi - theta) / (2 * math.pi)
    G = products * (theta.sin() + (math.pi - theta) * theta.cos()) / (2 * math.pi * d)
    return InfiniteWidthKernels(H - G, G, H)


class DGMForm(NamedTuple):
    """The constants of DGM's theorems for a network of its form on some samples.

    Attributes:
        alpha: α = ‖v_k‖/g_k.
        lambda_0: λ_min(V∞).
        mu_0: λ_min(G∞).
        floor: error bound of both eigenvalues.
        width: m.
        samples: n, on which λ₀ and μ₀ are computed.
        inputs: d.
        x_norm: max ‖x_i‖.
        parallel: which samples are parallel or zero; empty if none are.
        start: why the directions are not a start v ~ N(0, α²I); empty if no reason is known.
        enough: whether there are enough weights to tell.
    """

    alpha: float
    lambda_0: float
    mu_0: float
    floor: float
    width: int = 0
    samples: int = 0
    inputs: int = 0
    x_norm: float = math.nan
    parallel: str = ""
    start: str = ""
    enough: bool = True

    @property
    def directions_dominate(self) -> bool:
        """Whether α ≤ 1, so that Theorem 4.1 is the one of the regime; for α > 1 it is Theorem 4.2.

        α is measured, so a network with α = 1 has it up to rounding.
        """
        return self.alpha <= 1 + 1e-6

    @property
    def threshold(self) -> float:
        """Lower bound of λ_min of the tangent kernel during training of a wide enough network: λ₀/(2α²) for α ≤ 1 (DGM,
        Theorem 4.1), μ₀/2 for α > 1 (Theorem 4.2)."""
        return self._halved(self.lambda_0, self.mu_0)

    @property
    def threshold_error(self) -> float:
        """Error bound of the threshold."""
        return self._halved(self.floor, self.floor)

    def _halved(self, of_directions: float, of_lengths: float) -> float:
        return of_directions / (2 * self.alpha**2) if self.directions_dominate else of_lengths / 2


def dgm_form(model: nn.Module, x: Tensor, outputs: Tensor) -> DGMForm | str:
    """Compute the constants of DGM's theorems, or return the reason why the model does not have their form.

    The form, at initialization, is a Linear under WeightNorm without bias, the only trained layer, ReLU, and a Linear
    with weights ±1/√m.

    Args:
        x: the samples (n, d), as they enter the first layer.
        outputs: the model's outputs (n, 1) for x. They must agree with a ReLU between the layers, however the model
            implements it.
    """
    found = [(module, triple) for module in model.modules() for triple in weight_norm_parameters(module)]
    if len(found) != 1:
        return f"the model has {len(found)} weights under WeightNorm, not one"
    layer, (_, g, v) = found[0]
    if not isinstance(layer, nn.Linear) or layer.bias is not None or g.numel() != len(v):
        return "the layer under WeightNorm is not a Linear without bias with one length per unit"
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    if trained != {id(g), id(v)}:
        return "not all lengths and directions of the layer under WeightNorm are trained, or other parameters are"
    head = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not layer and m.in_features == len(v)]
    if len(head) != 1 or head[0].bias is not None or head[0].out_features != 1:
        return "the layer under WeightNorm is not followed by one output layer without bias"
    width = len(v)
    c = head[0].weight.detach()[0]
    if not torch.allclose(c.abs(), torch.full_like(c, width**-0.5), rtol=1e-3):
        return "the output weights are not ±1/√m"
    if x.dim() != 2 or x.shape[1] != v.shape[1]:
        return f"the input has shape {tuple(x.shape[1:])}, not ({v.shape[1]},)"
    norms = v.detach().norm(dim=1)
    alphas = norms / g.detach().flatten()
    if not bool((alphas > 0).all()) or float(alphas.max()) > 1.001 * float(alphas.min()):
        return "the lengths are not ‖v‖/α with one α for all units"
    hidden = torch.relu(x.to(v) @ v.detach().t() * (g.detach().flatten() / norms))
    if not torch.allclose(hidden @ c, outputs.detach().reshape(-1).to(c), rtol=1e-3, atol=1e-4):
        return "the outputs are not those of a two-layer ReLU network"
    V, G, H = infinite_width_kernels(x)
    scale = largest_eigenvalue(H)
    floor = len(x) * torch.finfo(torch.float64).eps * scale
    alpha = float(alphas.mean())
    return DGMForm(
        alpha,
        smallest_eigenvalue(V, scale),
        smallest_eigenvalue(G, scale),
        floor,
        *v.shape[:1],
        *x.shape,
        float(to_float64(x).norm(dim=1).max()),
        _parallel_samples(x),
        *why_not_gaussian(v, alpha),
    )


def _parallel_samples(x: Tensor) -> str:
    """Return a pair of samples that are multiples of each other, or a sample that is zero; empty if there are none."""
    x = to_float64(x.detach())
    norms = x.norm(dim=1)
    if not bool((norms > 0).all()):
        return f"sample {int(norms.argmin())} is zero"
    unit = x / norms[:, None]
    # The sine of the angle: the cosine loses half of the digits near ±1.
    exact = "donot_use_mm_for_euclid_dist"
    apart = torch.minimum(
        torch.cdist(unit, unit, compute_mode=exact), torch.cdist(unit, -unit, compute_mode=exact)
    ).fill_diagonal_(math.inf)
    i, j = divmod(int(apart.argmin()), len(x))
    # Samples in float32 are multiples up to its rounding.
    return f"samples {i} and {j} are parallel" if float(apart[i, j]) < 1e-6 else ""
