"""The empirical tangent kernel, exact and split into the parts of length and direction."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from lightning_normtheory.inputs import has_samples, map_leaves, some_samples, trainable_parameters
from lightning_normtheory.kernel_assembly import PARTS, Blocks, Coupled, Independent, Source, assemble, few_samples
from lightning_normtheory.kernel_factors import Part
from lightning_normtheory.kernel_network import Network
from lightning_normtheory.kernel_plan import SamplesCoupled, StructureChanged
from lightning_normtheory.kernel_rank import count_distinct, gradient_dimensions
from lightning_normtheory.layers import refuse_uninitialized, with_batch_statistics
from lightning_normtheory.precision import Converted
from lightning_normtheory.spectrum import largest_eigenvalue, smallest_eigenvalue
from lightning_normtheory.untouched import untouched

__all__ = ["KernelParts", "Outputs", "TangentKernel", "empirical_ntk", "tangent_kernel_of_batches"]

Outputs = Literal["full", "trace", "sum"]
_SEE_EACH_OTHER = (
    "Some samples have other outputs by themselves than among the others: samples see each other, or the forward pass"
    " is random. The kernel is that of the whole batch, with one draw of whatever is random, and takes a backward pass"
    " for each sample and output."
)
# λ_min is accurate to 1 % where it is so many times its floor.
_NEAR = 100


@dataclass(frozen=True)
class KernelParts:
    """A kernel by the parameters it comes from: the directions v and the lengths g of WeightNorm, and all others."""

    direction: Tensor
    length: Tensor
    rest: Tensor


@dataclass(frozen=True)
class TangentKernel:
    """The result of `empirical_ntk`.

    Attributes:
        kernel: K, float64, (n, n), or (nk, nk) for all outputs: row i·k + h is output h of sample i.
        direction: the part of the directions v of WeightNorm; zero without one.
        length: the part of their lengths g.
        rest: the part of all other parameters. The three add up to ``kernel``.
        outputs: which kernel it is.
        number_of_outputs: k.
        dtype: that of the products; sums are in float64.
        parameters: p, the number of trainable entries.
        lengths: how many of them are lengths g of WeightNorm.
        rank_limit: what the rank cannot exceed, by the number of parameters and by samples that occur twice.
        duplicates: how many samples have occurred before.
        one_by_one: names of the parameters whose gradients were taken sample by sample.
        coupled: whether samples see each other, so that the derivative goes through the batch.
        remark: what must be said of that, if they do for another reason than the statistics of a BatchNorm.
        layers: the parts of each layer, by module name, if asked for.
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
    duplicates: int = 0
    one_by_one: tuple[str, ...] = ()
    coupled: bool = False
    remark: str = ""
    layers: Mapping[str, KernelParts] = field(default_factory=dict, repr=False)

    @cached_property
    def lambda_min(self) -> float:
        """The least eigenvalue. Below `floor` it is rounding; the theory's condition is λ_min(K_full) > 0."""
        return smallest_eigenvalue(self.kernel, self.lambda_max)

    @cached_property
    def lambda_max(self) -> float:
        return largest_eigenvalue(self.kernel)

    @property
    def floor(self) -> float:
        """What λ_min can be off by: ε of the products, and n ε of float64 for sums and decomposition, times λ_max."""
        return relative_floor(len(self.kernel), self.dtype) * self.lambda_max

    @property
    def condition_number(self) -> float:
        """λ_max/λ_min; infinite where λ_min is at or below its floor."""
        return self.lambda_max / self.lambda_min if self.lambda_min > self.floor else float("inf")

    @property
    def effective_rank(self) -> float:
        """(tr K)²/‖K‖_F², between 1 and n; 0 for a kernel that is zero."""
        square = float(self.kernel.square().sum())
        return float(self.kernel.trace()) ** 2 / square if square != 0 else 0.0

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

        In DGM's network K_direction falls like 1/α² while K_length stays: this is α*/α, where α* is the α at which the
        two are equal. An eigenvalue below its floor counts as zero; NaN if both are."""
        # The part of the directions is a difference of numbers of the size of K, that of the lengths stands for itself.
        length_floor = relative_floor(len(self.length), self.dtype) * largest_eigenvalue(self.length)
        direction = self.direction_lambda_min if self.direction_lambda_min > self.floor else 0.0
        length = self.length_lambda_min if self.length_lambda_min > length_floor else 0.0
        if length == 0.0:
            return float("inf") if direction > 0 else float("nan")
        return float((direction / length) ** 0.5)

    @property
    def shares(self) -> dict[Part, float]:
        """What each part contributes to the trace of the kernel."""
        total = float(self.kernel.trace()) or 1.0  # of a kernel that is zero they are zero
        parts: dict[Part, Tensor] = {"direction": self.direction, "length": self.length, "rest": self.rest}
        return {name: float(part.trace()) / total for name, part in parts.items()}

    @property
    def over_samples(self) -> Tensor:
        """The kernel as (n, n): that of all outputs, averaged over them."""
        if self.outputs != "full":
            return self.kernel
        k = self.number_of_outputs
        n = len(self.kernel) // k
        return self.kernel.view(n, k, n, k).diagonal(dim1=1, dim2=3).mean(-1)

    @property
    def deficiency(self) -> str:
        """Why λ_min is zero whatever the parameters are, if it is; else empty."""
        size = len(self.kernel)
        if self.rank_limit >= size:
            return ""
        reason = (
            f"{self.duplicates} samples occur again" if self.duplicates else "its gradients have no more dimensions"
        )
        return f"The kernel has {size} rows, but its rank is at most {self.rank_limit}: {reason}"


def relative_floor(size: int, products: torch.dtype) -> float:
    return torch.finfo(products).eps + size * torch.finfo(torch.float64).eps


def empirical_ntk(
    model: nn.Module,
    x: Any,
    *,
    outputs: Outputs = "trace",
    batch_stats: bool | None = None,
    dtype: torch.dtype | None = None,
    layers: bool = False,
) -> TangentKernel:
    """K[(i,h), (j,h')] = ⟨∇_θ f_h(x_i), ∇_θ f_h'(x_j)⟩ over the trainable parameters, exact, without a Jacobian.

    For a weight matrix, the kernel is a product of the Gram matrices of what enters the layer and of the gradients at
    its output; with WeightNorm w = g v/‖v‖ it splits into the part of the directions v and that of the lengths g (DGM,
    Section 3). Only gradients at the outputs of layers are computed, one backward pass for each output h.

    Args:
        model: f; outputs of shape (n, …), where everything behind the samples counts as the k outputs. Dropout is off.
        x: the argument of ``model(x)``: a tensor (n, …), or a list or dict with tensors that have the samples in front;
            tensors of another length belong to all samples.
        outputs: ``"full"``: K (nk, nk); ``"trace"``: (1/k) Σ_h K_hh (n, n); ``"sum"``: the kernel of Σ_h f_h (n, n).
            λ_min of the last two can be positive where that of K is not.
        batch_stats: whether BatchNorm uses the statistics of the batch, which is then x as a whole. Samples see each
            other, the derivative goes through the batch, and it takes nk backward passes. ``None``: as it is set.
        dtype: of the products. ``None``: that of the model, and once more in float64 if λ_min comes near its floor.
        layers: also keep the parts of every layer, each as large as the kernel.

    Example:
        f = w·x has the kernel x xᵀ; with w = g v/‖v‖ in one dimension only the length g can change it

        >>> x = torch.tensor([[1.0], [2.0]])
        >>> empirical_ntk(nn.Linear(1, 1, bias=False), x[:1]).kernel
        tensor([[1.]], dtype=torch.float64)
        >>> layer = nn.utils.parametrizations.weight_norm(nn.Linear(1, 1, bias=False))
        >>> found = empirical_ntk(layer, x[1:])
        >>> found.length, found.direction
        (tensor([[4.]], dtype=torch.float64), tensor([[0.]], dtype=torch.float64))
    """
    n = _count(x)
    found = tangent_kernel_of_batches(
        model, [(x, n, n)], outputs=outputs, batch_stats=batch_stats, dtype=dtype, layers=layers
    )
    if found.remark:
        warnings.warn(found.remark, stacklevel=2)
    if found.deficiency:
        warnings.warn(f"{found.deficiency}. λ_min is zero, up to rounding.", stacklevel=2)
    return found


def tangent_kernel_of_batches(
    model: nn.Module,
    batches: Sequence[tuple[Any, int, int]],
    *,
    outputs: Outputs = "trace",
    batch_stats: bool | None = None,
    dtype: torch.dtype | None = None,
    layers: bool = False,
    seen: Sequence[tuple[Any, int, int]] | None = None,
) -> TangentKernel:
    """As `empirical_ntk`, of the samples of several batches; what there is to say is in the result, not in a warning.

    Args:
        batches: inputs, each with the number of samples in it and of those, from the first on, that are asked for.
            Statistics are those of each whole batch.
        seen: the part of the batches that the model looks at, if it is known: what is equal in it is one sample.
    """
    if outputs not in get_args(Outputs):
        raise ValueError(f"Expected outputs to be 'full', 'trace' or 'sum', but got {outputs!r}.")
    if dtype not in (None, torch.float32, torch.float64):
        raise ValueError(f"Expected dtype to be torch.float32, torch.float64 or None, but got {dtype!r}.")
    refuse_uninitialized(model)
    trainable_parameters(model)

    def measure(dtype: torch.dtype | None) -> TangentKernel:
        device = next(iter(model.parameters())).device.type
        without_autocast = torch.autocast(device, enabled=False)
        with untouched(model, batch_stats=batch_stats) as afresh, torch.enable_grad(), without_autocast:
            return _measure(model, afresh, batches, outputs, dtype, layers, seen)

    lowest = min((p.dtype for p in model.parameters() if p.requires_grad), key=lambda d: d.itemsize)
    found = measure(torch.float32 if dtype is None and lowest.itemsize < 4 else dtype)
    if dtype is not None or found.deficiency or not _near_floor(found):
        return found
    try:
        return measure(torch.float64)
    except Exception as error:  # noqa: BLE001  # a constant in the forward pass, say, that is float32 in any model
        warnings.warn(
            "λ_min is near its floor, and the kernel could not be repeated in float64: "
            f"{type(error).__name__}: {error}",
            stacklevel=3,
        )
        return found


_Batch = tuple[Any, int, int]  # input, samples in it, samples asked for


def _count(x: Any) -> int:
    tensors = [leaf for leaf in tree_leaves(x) if isinstance(leaf, Tensor) and leaf.dim() > 0]
    if not tensors:
        raise TypeError(
            "Expected an input tensor with the samples in front, or a list or dict of such, but got "
            f"{type(x).__name__}."
        )
    n = len(tensors[0])
    if n == 0:
        raise ValueError("Expected at least one sample, but the input holds none.")
    return n


def _measure(
    model: nn.Module,
    afresh: Callable[[], None],
    batches: Sequence[_Batch],
    outputs: Outputs,
    dtype: torch.dtype | None,
    layers: bool,
    seen: Sequence[_Batch] | None,
) -> TangentKernel:
    already = all(p.dtype == dtype for p in model.parameters())
    converted = None if dtype is None or already else Converted(model, dtype)

    def begin() -> None:
        afresh()
        if converted is not None:
            converted.apply()

    begin()
    if dtype is not None:
        batches = [(_in_dtype(x, dtype), n, asked) for x, n, asked in batches]
    network = Network(model, trainable_parameters(model), begin)
    if converted is not None:
        x, which = few_samples(*batches[0][:2])
        converted.check(network(x, len(which)))

    def cotangents_of(k: int) -> Tensor:
        return (torch.ones(1, k) if outputs == "sum" else torch.eye(k)).to(network.parameters[0].tensor)

    def kernel_of(source: Source) -> Blocks:
        return assemble(source, cotangents_of(source.outputs), folded=outputs != "full", layers=layers)

    one_by_one: tuple[str, ...] = ()
    source: Source
    if with_batch_statistics(model):
        source = Coupled(network, batches)
        blocks = kernel_of(source)
    else:
        source, blocks = _of_independent(network, batches, cotangents_of, kernel_of)
    if isinstance(source, Independent):
        one_by_one = tuple(leaf.name for leaf in source.one_by_one)
    return _result(model, seen or batches, source, blocks, outputs, one_by_one)


def _of_independent(
    network: Network,
    batches: Sequence[_Batch],
    cotangents_of: Callable[[int], Tensor],
    kernel_of: Callable[[Source], Blocks],
) -> tuple[Source, Blocks]:
    """By the structure of the layers; without it, if it does not hold; through the batch, if samples see each other."""
    source: Source
    for structured in (True, False):
        try:
            source = Independent(network, _merged(batches), cotangents_of, structured=structured)
            return source, kernel_of(source)
        except StructureChanged:
            pass
        except SamplesCoupled:
            break
    source = Coupled(network, batches)
    return source, kernel_of(source)


def _merged(batches: Sequence[_Batch]) -> list[tuple[Any, int]]:
    """The samples that are asked for, joined wherever they have the same form."""
    groups: list[list[_Batch]] = []
    for batch in batches:
        if groups and _form(groups[-1][0]) == _form(batch):
            groups[-1].append(batch)
        else:
            groups.append([batch])
    return [(_joined(group), sum(asked for _, _, asked in group)) for group in groups]


def _form(batch: _Batch) -> list[Any]:
    """What must be equal for samples to be joined: whatever does not belong to single samples, and all shapes."""
    x, n, _ = batch
    leaves, structure = tree_flatten(x)
    per_sample = ((leaf.shape[1:], leaf.dtype) if has_samples(leaf, n) else _constant(leaf) for leaf in leaves)
    return [structure, *per_sample]


def _constant(leaf: Any) -> Any:
    return leaf if isinstance(leaf, (int, float, str, bytes, type(None))) else id(leaf)


def _joined(group: Sequence[_Batch]) -> Any:
    x, n, asked = group[0]
    if len(group) == 1:
        return x if asked == n else some_samples(x, n, slice(asked))
    first, structure = tree_flatten(x)
    columns = zip(*(tree_leaves(x) for x, _, _ in group))
    joined = [
        torch.cat([leaf[:asked] for leaf, (_, _, asked) in zip(column, group)]) if has_samples(leaf, n) else leaf
        for leaf, column in zip(first, columns)
    ]
    return tree_unflatten(joined, structure)


def _in_dtype(x: Any, dtype: torch.dtype) -> Any:
    return map_leaves(lambda leaf: leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf, x)


def _result(
    model: nn.Module,
    batches: Sequence[_Batch],
    source: Source,
    blocks: Blocks,
    outputs: Outputs,
    one_by_one: tuple[str, ...],
) -> TangentKernel:
    if outputs == "trace":
        for matrices in blocks.values():
            for matrix in matrices.values():
                matrix /= source.outputs
    direction, length, rest = (_sum([matrices[part] for matrices in blocks.values()]) for part in PARTS)
    dtypes = [leaf.tensor.dtype for leaf in source.leaves]
    distinct = count_distinct((some_samples(x, n, slice(asked)), asked) for x, n, asked in batches)
    return TangentKernel(
        direction + length + rest,
        direction,
        length,
        rest,
        outputs=outputs,
        number_of_outputs=source.outputs,
        dtype=min(dtypes, key=lambda dtype: dtype.itemsize),
        parameters=sum(p.numel() for p in trainable_parameters(model).values()),
        lengths=sum(leaf.tensor.numel() for leaf in source.network.parameters if leaf.part == "length"),
        rank_limit=_rank_limit(model, source, distinct, outputs),
        duplicates=sum(source.sizes) - distinct,
        one_by_one=one_by_one,
        coupled=isinstance(source, Coupled),
        remark=_SEE_EACH_OTHER if isinstance(source, Coupled) and not with_batch_statistics(model) else "",
        layers={name: KernelParts(**matrices) for name, matrices in blocks.items() if name is not None},
    )


def _sum(matrices: Sequence[Tensor]) -> Tensor:
    total = matrices[0] if len(matrices) == 1 else matrices[0].clone()
    for matrix in matrices[1:]:
        total += matrix
    return total


def _rank_limit(model: nn.Module, source: Source, distinct: int, outputs: Outputs) -> int:
    # Where a direction v has another use beside its WeightNorm, its gradient has all dimensions.
    apart = isinstance(source, Independent) and not source.network.weights.composed
    dimensions, k = gradient_dimensions(model, across_directions=apart), source.outputs
    if outputs == "full":
        return min(distinct * k, dimensions)
    return min(distinct, dimensions * k if outputs == "trace" else dimensions)


def _near_floor(found: TangentKernel) -> bool:
    """Whether λ_min of the kernel, or of one of WeightNorm's parts, may be too near to its floor to be told from it.
    What is not finite has overflown."""
    if found.dtype == torch.float64:
        return False
    if not bool(torch.isfinite(found.kernel).all()):
        return True
    parts = [found.kernel]
    if bool(found.length.any()) and bool(found.direction.any()) and found.lengths >= len(found.kernel):
        parts += [found.length, found.direction]
    return any(_least_is_below(part, _NEAR * relative_floor(len(part), found.dtype)) for part in parts)


def _least_is_below(matrix: Tensor, relative: float) -> bool:
    """Whether K − cI has no Cholesky factor."""
    shifted = matrix.clone()
    shifted.diagonal().sub_(relative * float(shifted.norm()))  # ‖K‖_F ≥ λ_max
    return bool(torch.linalg.cholesky_ex(shifted).info)
