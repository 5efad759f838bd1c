"""The tangent kernel as a result: its parts, its spectrum, and its error bound."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from lightning_normtheory.linalg.spectrum import exceeds, largest_eigenvalue, smallest_eigenvalue
from lightning_normtheory.ntk.factors import Part

__all__ = ["KernelParts", "Outputs", "TangentKernel", "kernel_change", "label_alignment"]

Outputs = Literal["full", "trace", "sum"]
# λ_min is accurate to 1 % if it is at least this many times its floor.
_NEAR = 100


@dataclass(frozen=True)
class KernelParts:
    """A kernel split by parameters: the directions and the lengths of WeightNorm and BatchNorm, and the rest."""

    direction: Tensor
    length: Tensor
    rest: Tensor


@dataclass(frozen=True)
class TangentKernel:
    """The result of `empirical_ntk`.

    Attributes:
        kernel: K, float64, (n, n), or (nk, nk) for all outputs: row i·k + h is output h of sample i.
        direction: the part of the directions: v of WeightNorm, and the weights of layers that feed a BatchNorm; zero
            without such layers.
        length: the part of the lengths: g of WeightNorm, and the scale γ of a BatchNorm that a layer feeds.
        rest: the part of all other parameters. The three add up to ``kernel``.
        outputs: ``"full"``, ``"trace"`` or ``"sum"``, as in `empirical_ntk`.
        number_of_outputs: k.
        dtype: of the products; sums are in float64.
        operand_eps: ε of their operands, if the device rounds these to fewer digits (TF32); otherwise 0.
        subtracted: whether the kernel is a difference: some directions are trained without their lengths.
        parameters: p, the number of trainable entries.
        lengths: the number of lengths g of WeightNorm among them.
        part_of: ``"direction"``, ``"length"`` or ``"rest"`` for each trainable parameter, by name.
        untraced: the reason, for every BatchNorm with input channels that could not be traced to a layer. If none of
            its channels could, its scale is in ``rest``.
        rank_limit: an upper bound of the rank, from the number of parameters and from duplicate samples.
        duplicates: the number of samples that are known to repeat an earlier one.
        one_by_one: names of the parameters whose gradients were computed sample by sample.
        coupled: whether samples interact, so that the derivative goes through the batch.
        remark: a warning if they interact for another reason than BatchNorm's batch statistics.
        layers: the parts of each layer, by module name, if asked for.
        by_direction: for an estimate, K(z_r)/k of the random directions (m, n, n), whose mean is ``kernel``.
        full: the kernel of all outputs of the first samples, if it was asked for and came along.
    """

    kernel: Tensor = field(repr=False)
    direction: Tensor = field(repr=False)
    length: Tensor = field(repr=False)
    rest: Tensor = field(repr=False)
    outputs: Outputs
    number_of_outputs: int
    dtype: torch.dtype
    parameters: int
    lengths: int
    rank_limit: int
    operand_eps: float = 0.0
    subtracted: bool = False
    duplicates: int = 0
    one_by_one: tuple[str, ...] = ()
    coupled: bool = False
    remark: str = ""
    layers: Mapping[str, KernelParts] = field(default_factory=dict, repr=False)
    by_direction: Tensor | None = field(default=None, repr=False)
    full: "TangentKernel | None" = field(default=None, repr=False)
    part_of: Mapping[str, Part] = field(default_factory=dict, repr=False)
    untraced: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def directions(self) -> int | None:
        """m, the number of random directions of an estimate; ``None`` if the kernel is exact."""
        return None if self.by_direction is None else len(self.by_direction)

    @property
    def kernel_error(self) -> Tensor:
        """The standard error of each entry (n, n): zero if the kernel is exact, NaN for a single direction."""
        return torch.zeros_like(self.kernel) if self.by_direction is None else _standard_error(self.by_direction)

    @property
    def trace_error(self) -> float:
        """The standard error of the trace."""
        if self.by_direction is None:
            return 0.0
        return float(_standard_error(self.by_direction.diagonal(dim1=1, dim2=2).sum(1)))

    @property
    def lambda_max_error(self) -> float:
        """The standard error of λ_max, to first order: that of uᵀKu for the eigenvector u of this kernel."""
        return self._eigenvalue_errors[1]

    @property
    def lambda_min_error(self) -> float:
        """The standard error of λ_min, to first order. It does not contain the bias: λ_min of an unbiased estimate is
        too small on average, λ_max too large, since λ_min is concave and λ_max convex."""
        return self._eigenvalue_errors[0]

    @cached_property
    def _eigenvalue_errors(self) -> tuple[float, float]:
        if self.by_direction is None:
            return 0.0, 0.0
        if not bool(torch.isfinite(self.kernel).all()):
            return float("nan"), float("nan")
        u = torch.linalg.eigh(self.kernel)[1][:, [0, -1]]
        low, high = _standard_error(((self.by_direction @ u) * u).sum(1)).tolist()
        return low, high

    @cached_property
    def lambda_min(self) -> float:
        """The least eigenvalue. Below `floor` it is rounding; the theory's condition is λ_min(K_full) > 0."""
        return smallest_eigenvalue(self.kernel, self.lambda_max)

    @cached_property
    def lambda_max(self) -> float:
        return largest_eigenvalue(self.kernel)

    def lambda_min_of(self, samples: int) -> float:
        """λ_min of the kernel of the first samples, a principal block of K.

        By Cauchy's interlacing theorem it does not increase with their number. So λ_min of any samples is an upper
        bound of λ_min of a larger set that contains them, such as the training set.
        """
        rows = samples * len(self.kernel) // len(self.over_samples)
        return smallest_eigenvalue(self.kernel[:rows, :rows], self.lambda_max)

    @property
    def lambda_min_decay(self) -> float:
        """The exponent p ≥ 0 of λ_min ∝ n^−p between a quarter of the samples and all; NaN if λ_min is not above its
        floor, for fewer than 8 samples, and if samples interact."""
        n = len(self.over_samples)
        if n < 8 or self.coupled or not self.lambda_min > self.floor:
            return float("nan")
        return math.log(self.lambda_min_of(n // 4) / self.lambda_min) / math.log(n / (n // 4))

    @property
    def floor(self) -> float:
        """Error bound of λ_min: (ε of the products + n ε of float64, for sums and decomposition) times λ_max.

        If the device rounds the operands of products to ε' (TF32), the kernel is that of a Jacobian J with such errors.
        λ_min = σ² then errs by at most 2σ‖ΔJ‖ + ‖ΔJ‖², by Weyl's inequality: plus ε'√(λ_min λ_max)/2 + ε'² λ_max. The
        first of these is an estimate, a quarter of the bound: it is an inner product with errors of either sign."""
        return self._floor(self.lambda_min, self.lambda_max, self.subtracted)

    def _floor(self, low: float, high: float, subtracted: bool) -> float:
        """The error bound of the eigenvalue ``low`` of a part, whose largest one is ``high``."""
        eps = self.operand_eps
        own = torch.finfo(self.dtype).eps + len(self.kernel) * torch.finfo(torch.float64).eps
        if subtracted:  # errors of numbers of the size of K, which no smaller factor multiplies
            return (own + eps) * high
        return (own + eps**2) * high + eps / 2 * (max(low, 0.0) * high) ** 0.5

    @property
    def condition_number(self) -> float:
        """λ_max/λ_min; infinite if λ_min is at or below its floor."""
        return self.lambda_max / self.lambda_min if self.lambda_min > self.floor else float("inf")

    @property
    def effective_rank(self) -> float:
        """(tr K)²/‖K‖_F², between 1 and n; 0 for a kernel that is zero."""
        square = float(self.kernel.square().sum())
        return float(self.kernel.trace()) ** 2 / square if square != 0 else 0.0

    @property
    def largest_gradient(self) -> float:
        """max_i √((1/k) Σ_h ‖∇f_h(x_i)‖²), the root of the largest diagonal entry: for one output, max_i ‖∇f(x_i)‖.

        For the kernel of the sum of the outputs, max_i ‖Σ_h ∇f_h(x_i)‖/√k. No more than max_i ‖∂f(x_i)/∂θ‖₂, the norm
        of the (k, p) Jacobian, in all cases.
        """
        outputs = self.number_of_outputs if self.outputs == "sum" else 1
        return float((self.over_samples.diagonal() / outputs).max().clamp_min(0).sqrt())

    @cached_property
    def direction_lambda_min(self) -> float:
        """λ_min of the part of the directions."""
        return smallest_eigenvalue(self.direction, self.lambda_max)

    @cached_property
    def length_lambda_min(self) -> float:
        """λ_min of the part of the lengths."""
        return smallest_eigenvalue(self.length, self.lambda_max)

    @property
    def crossover(self) -> float:
        """√(λ_min(K_direction)/λ_min(K_length)): above 1 the directions dominate, below 1 the lengths.

        In DGM's network K_direction falls like 1/α² while K_length stays: this is α_×/α, where the crossing α_× is the
        α at which the two are equal; the α* of DGM, Proposition 2, is another one. An eigenvalue below its floor counts
        as zero; NaN if both are."""
        # The part of the directions is a difference of numbers of the size of K; that of the lengths is not.
        length_floor = self._floor(self.length_lambda_min, largest_eigenvalue(self.length), False)
        direction_floor = self._floor(self.direction_lambda_min, self.lambda_max, True)
        direction = self.direction_lambda_min if self.direction_lambda_min > direction_floor else 0.0
        length = self.length_lambda_min if self.length_lambda_min > length_floor else 0.0
        if length == 0.0:
            return float("inf") if direction > 0 else float("nan")
        return float((direction / length) ** 0.5)

    @property
    def shares(self) -> dict[Part, float]:
        """The share of each part in the trace of the kernel."""
        total = float(self.kernel.trace()) or 1.0  # a zero kernel has zero shares
        parts: dict[Part, Tensor] = {"direction": self.direction, "length": self.length, "rest": self.rest}
        return {name: float(part.trace()) / total for name, part in parts.items()}

    @property
    def over_samples(self) -> Tensor:
        """The kernel as (n, n), averaged over the outputs."""
        if self.outputs != "full":
            return self.kernel
        k = self.number_of_outputs
        n = len(self.kernel) // k
        return self.kernel.view(n, k, n, k).diagonal(dim1=1, dim2=3).mean(-1)

    @property
    def deficiency(self) -> str:
        """Why λ_min is zero for all parameters; empty if it need not be."""
        size = len(self.kernel)
        if self.rank_limit >= size:
            return ""
        reason = (
            f"{self.duplicates} samples are duplicates" if self.duplicates else "its gradients have no more dimensions"
        )
        return f"The kernel has {size} rows, but its rank is at most {self.rank_limit}: {reason}"

    @property
    def near_floor(self) -> bool:
        """Whether λ_min of the kernel, or of one of WeightNorm's parts, may be too near its floor to be accurate.

        Also if an entry is not finite: it has overflowed. Not if the kernel is an estimate whose standard error is
        larger than the floor: a smaller rounding error would not make it better.
        """
        if not bool(torch.isfinite(self.kernel).all()):
            return True
        if self.by_direction is not None and self.lambda_min_error > self.floor:
            return False
        parts = [(self.kernel, self.subtracted)]
        if bool(self.length.any()) and bool(self.direction.any()) and self.lengths >= len(self.kernel):
            parts += [(self.length, False), (self.direction, True)]
        # ‖K‖_F ≥ λ_max
        return any(not exceeds(part, self._accurate_from(float(part.norm()), minus)) for part, minus in parts)

    def _accurate_from(self, high: float, subtracted: bool) -> float:
        """The eigenvalue that is `_NEAR` times its floor: the root of λ = a + b√λ."""
        a = _NEAR * self._floor(0.0, high, subtracted)
        b = 0.0 if subtracted else _NEAR * self.operand_eps / 2 * high**0.5
        return (b / 2 + (b * b / 4 + a) ** 0.5) ** 2


def _standard_error(values: Tensor) -> Tensor:
    """The standard error of the mean over the first axis; NaN for one value."""
    if len(values) == 1:
        return torch.full_like(values[0], torch.nan)
    return values.std(0) / len(values) ** 0.5


def kernel_change(kernel: Tensor, reference: Tensor) -> float:
    """‖K − K₀‖_F/‖K₀‖_F, the relative change of the kernel.

    Its maximum over the training is ΔK of LIN, Section C, which is small if the model trains like a linear one.

    Example:
        >>> kernel_change(torch.tensor([[3.0]]), torch.tensor([[2.0]]))
        0.5
    """
    if kernel.shape != reference.shape:
        raise ValueError(
            f"Expected two kernels of the same samples and outputs, but got {tuple(kernel.shape)} and "
            f"{tuple(reference.shape)}."
        )
    return float((kernel - reference).norm() / reference.norm())


def label_alignment(kernel: Tensor, targets: Tensor) -> float:
    """⟨K_c, (YYᵀ)_c⟩/(‖K_c‖‖(YYᵀ)_c‖), the cosine between the kernel and that of the labels.

    Both are centered: A_c = CAC with C = I − 11ᵀ/n. It is 1 if the kernel depends on the classes alone, near 0 if it is
    unrelated to them; NaN if all labels are the same.

    Args:
        kernel: (n, n).
        targets: classes (n,), as integers, or values (n, …).

    Example:
        >>> classes = torch.tensor([0, 0, 1])
        >>> round(label_alignment((classes[:, None] == classes).double(), classes), 6)
        1.0
    """
    if kernel.shape != (len(targets), len(targets)):
        raise ValueError(
            f"Expected a kernel (n, n) for n = {len(targets)} targets, but got {tuple(kernel.shape)}. For a "
            "TangentKernel of all outputs, pass its `over_samples`."
        )
    y = targets.to(kernel.device)
    if y.dim() == 1 and not y.is_floating_point():
        y = (y[:, None] == y.unique()).to(kernel.dtype)
    y = y.reshape(len(y), -1).to(kernel.dtype)
    y = y - y.mean(0)
    centered = kernel - kernel.mean(0) - kernel.mean(1, keepdim=True) + kernel.mean()
    aligned = float((y * (centered @ y)).sum())
    scale = float(centered.norm()) * float((y.t() @ y).norm())
    return aligned / scale if scale > 0 else math.nan
