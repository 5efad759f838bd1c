"""Test whether weights are a Gaussian start, as the papers assume."""

import math

import torch
from torch import Tensor

from lightning_normtheory.linalg.precision import to_float64

__all__ = ["why_not_gaussian"]

# The probability that a Gaussian start is called none, in each of the tests.
_LEVEL = 1e-7
# With fewer entries, none of the tests can tell a uniform start from a Gaussian one.
_FEWEST = 200
# More entries than this tell nothing new.
_MOST = 2**20


def why_not_gaussian(weights: Tensor, std: float | None = None) -> tuple[str, bool]:
    """Test whether the entries of a tensor are independent draws of N(0, σ²).

    Four tests, each of which a Gaussian fails with probability at most 1e-7 (with σ estimated, about that): the
    variance, χ² with Laurent and Massart's tails (if σ is given); the mean; the largest |entry|/σ, which is too small
    for a uniform or truncated start and too large for heavy tails; and the distance of the distribution functions,
    with the Dvoretzky–Kiefer–Wolfowitz inequality.

    Args:
        std: σ; ``None``: any.

    Returns:
        The reason why not, empty if there is none, and whether there are enough entries to tell.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> why_not_gaussian(torch.randn(40, 40, generator=generator), 1.0)
        ('', True)
        >>> why_not_gaussian(torch.rand(40, 40, generator=generator) - 0.5)
        ('the largest entry is 1.78 standard deviations, as in no Gaussian start', True)
    """
    values = to_float64(weights.detach().flatten()[:_MOST]).cpu()
    n, t = values.numel(), math.log(2 / _LEVEL)
    scale = float(values.square().mean().sqrt()) if n else math.nan
    if not math.isfinite(scale) or scale == 0:
        return "all weights are zero, or one is not finite", True
    if std is not None and not abs((scale / std) ** 2 - 1) <= 2 * math.sqrt(t / n) + 2 * t / n:
        return f"the standard deviation is {scale:.3g}, not {std:.3g}", True
    if n < _FEWEST:
        return "", False
    z = (values / scale).sort().values
    mean = float(z.mean())
    if abs(mean) > math.sqrt(2 * t / n):
        return f"the mean is {mean:.2g} standard deviations, not 0", True
    largest = float(z.abs().max())
    inside = math.erf(largest / math.sqrt(2))  # P(|z| ≤ largest) of one entry
    if n * math.log(inside) < math.log(_LEVEL) or n * math.erfc(largest / math.sqrt(2)) < _LEVEL:
        return f"the largest entry is {largest:.3g} standard deviations, as in no Gaussian start", True
    steps = torch.arange(n + 1, dtype=torch.float64, device="cpu") / n
    normal = torch.special.ndtr(z)
    distance = float(torch.maximum(steps[1:] - normal, normal - steps[:-1]).max())
    if distance > math.sqrt(t / (2 * n)):
        return f"the distribution of the weights is {distance:.2g} from a Gaussian", True
    return "", True
