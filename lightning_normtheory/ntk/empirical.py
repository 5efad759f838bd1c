"""The empirical tangent kernel of a model, exact and split into the parts of length and direction."""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar, get_args

import torch
from torch import Tensor, nn

from lightning_normtheory.measuring.memory import is_out_of_memory
from lightning_normtheory.measuring.preserve import preserve_state
from lightning_normtheory.measuring.processes import SINGLE_PROCESS, Processes
from lightning_normtheory.model.batches import SampleBatch, joined
from lightning_normtheory.model.checks import trainable_parameters
from lightning_normtheory.model.layers import refuse_uninitialized, with_batch_statistics
from lightning_normtheory.ntk.assembly import PARTS, Blocks, assemble
from lightning_normtheory.ntk.gradients import Coupled, Independent, Source
from lightning_normtheory.ntk.network import Network
from lightning_normtheory.ntk.precision import Converted
from lightning_normtheory.ntk.rank import count_distinct, gradient_dimensions
from lightning_normtheory.ntk.result import KernelParts, Outputs, TangentKernel
from lightning_normtheory.ntk.sample_axis import StructureChanged
from lightning_normtheory.ntk.verification import SIGNALS, SamplesCoupled

__all__ = ["empirical_ntk", "tangent_kernel_of_batches"]

T = TypeVar("T")
# How many times less than usual is handled at once, when memory runs out; n samples in m portions are run m(m + 1)/2
# portions long.
_DIVISORS = (1, 2, 4, 8, 16)
_SEE_EACH_OTHER = (
    "Some samples have other outputs by themselves than among the others: samples see each other, or the forward pass"
    " is random. The kernel is that of the whole batch, with one draw of whatever is random, and takes a backward pass"
    " for each sample and output."
)


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
    found = tangent_kernel_of_batches(
        model, [SampleBatch.whole(x)], outputs=outputs, batch_stats=batch_stats, dtype=dtype, layers=layers
    )
    if found.remark:
        warnings.warn(found.remark, stacklevel=2)
    if found.deficiency:
        warnings.warn(f"{found.deficiency}. λ_min is zero, up to rounding.", stacklevel=2)
    return found


def tangent_kernel_of_batches(
    model: nn.Module,
    batches: Sequence[SampleBatch],
    *,
    outputs: Outputs = "trace",
    batch_stats: bool | None = None,
    dtype: torch.dtype | None = None,
    layers: bool = False,
    seen: Sequence[SampleBatch] | None = None,
    processes: Processes = SINGLE_PROCESS,
) -> TangentKernel:
    """As `empirical_ntk`, of the samples of several batches; what there is to say is in the result, not in a warning.

    Args:
        batches: statistics are those of each whole batch.
        seen: the part of the batches that the model looks at, if it is known: what is equal in it is one sample.
        processes: that have the same model and batches, and share the work; all of them get the whole kernel.
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
        with preserve_state(model, batch_stats=batch_stats) as reset_buffers, torch.enable_grad(), without_autocast:
            return _measure(model, reset_buffers, batches, outputs, dtype, layers, seen, processes)

    lowest = min((p.dtype for p in model.parameters() if p.requires_grad), key=lambda d: d.itemsize)
    found = processes.run_on_all(lambda: measure(torch.float32 if dtype is None and lowest.itemsize < 4 else dtype))
    enough = dtype is not None or found.dtype == torch.float64 or bool(found.deficiency)
    # If it is near in one process, whose rounding may be another, it is repeated in all.
    near = 0.0 if enough else float(found.near_floor)
    if float(processes.sum(torch.tensor([near]))) == 0:
        return found
    try:
        return processes.run_on_all(lambda: measure(torch.float64))
    except Exception as error:  # noqa: BLE001  # a constant in the forward pass, say, that is float32 in any model
        warnings.warn(
            "λ_min is near its floor, and the kernel could not be repeated in float64: "
            f"{type(error).__name__}: {error}",
            stacklevel=3,
        )
        return found


def _measure(
    model: nn.Module,
    reset_buffers: Callable[[], None],
    batches: Sequence[SampleBatch],
    outputs: Outputs,
    dtype: torch.dtype | None,
    layers: bool,
    seen: Sequence[SampleBatch] | None,
    processes: Processes,
) -> TangentKernel:
    converted = None
    if dtype is not None and any(p.dtype != dtype for p in model.parameters()):
        converted = Converted(model, dtype)
    if dtype is not None:
        batches = [batch.to(dtype) for batch in batches]
    network = Network(model, reset_buffers, converted)

    def cotangents_of(k: int) -> Tensor:
        return (torch.ones(1, k) if outputs == "sum" else torch.eye(k)).to(network.parameters[0].tensor)

    def kernel_of(source: Source, divisor: int) -> Blocks:
        options: dict[str, Any] = {"folded": outputs != "full", "layers": layers, "processes": processes}
        return assemble(source, cotangents_of(source.outputs), divisor=divisor, **options)

    def attempt(divisor: int) -> tuple[Source, Blocks]:
        return _gradients_and_kernel(network, batches, cotangents_of, kernel_of, processes, divisor)

    source, blocks = _within_memory(attempt, processes)
    return _result(network, source, blocks, outputs, seen or batches)


def _within_memory(attempt: Callable[[int], T], processes: Processes) -> T:
    """With as much at once as usual; where that does not fit into the memory of some process, with less and less."""
    for divisor in _DIVISORS:
        try:
            return processes.run_on_all(partial(attempt, divisor))
        except Exception as error:
            if divisor == _DIVISORS[-1] or not is_out_of_memory(error):
                raise
        # Not in the except clause: there the traceback still holds what has to go.
    raise AssertionError("unreachable: the last one returns or raises")


def _gradients_and_kernel(
    network: Network,
    batches: Sequence[SampleBatch],
    cotangents_of: Callable[[int], Tensor],
    kernel_of: Callable[[Source, int], Blocks],
    processes: Processes,
    divisor: int,
) -> tuple[Source, Blocks]:
    """By the structure of the layers; without it, if it does not hold; through the batch, if samples see each other."""
    source: Source
    options: dict[str, Any] = {"processes": processes, "divisor": divisor}
    for structured in () if with_batch_statistics(network.model) else (True, False):
        make = partial(Independent, network, joined(batches), cotangents_of, structured=structured, **options)
        try:
            source = processes.run_on_all(make, SIGNALS)
            return source, kernel_of(source, divisor)
        except StructureChanged:
            pass
        except SamplesCoupled:
            break
    source = processes.run_on_all(lambda: Coupled(network, batches, processes))
    return source, kernel_of(source, divisor)


def _result(
    network: Network, source: Source, blocks: Blocks, outputs: Outputs, seen: Sequence[SampleBatch]
) -> TangentKernel:
    if outputs == "trace":
        for matrix in (matrix for parts in blocks.values() for matrix in parts.values()):
            matrix /= source.outputs
    direction, length, rest = (_sum([parts[part] for parts in blocks.values()]) for part in PARTS)
    distinct = count_distinct((batch.first, batch.asked) for batch in seen)
    coupled = isinstance(source, Coupled)
    return TangentKernel(
        direction + length + rest,
        direction,
        length,
        rest,
        outputs=outputs,
        number_of_outputs=source.outputs,
        dtype=min((leaf.tensor.dtype for leaf in source.leaves), key=lambda dtype: dtype.itemsize),
        parameters=sum(leaf.tensor.numel() for leaf in network.parameters),
        lengths=sum(leaf.tensor.numel() for leaf in network.parameters if leaf.part == "length"),
        rank_limit=_rank_limit(network, source, distinct, outputs),
        duplicates=sum(source.sizes) - distinct,
        one_by_one=tuple(leaf.name for leaf in source.one_by_one),
        coupled=coupled,
        remark=_SEE_EACH_OTHER if coupled and not with_batch_statistics(network.model) else "",
        layers={name: KernelParts(**parts) for name, parts in blocks.items() if name is not None},
    )


def _sum(matrices: Sequence[Tensor]) -> Tensor:
    total = matrices[0] if len(matrices) == 1 else matrices[0].clone()
    for matrix in matrices[1:]:
        total += matrix
    return total


def _rank_limit(network: Network, source: Source, distinct: int, outputs: Outputs) -> int:
    # Where a direction v has another use beside its WeightNorm, its gradient has all dimensions.
    apart = isinstance(source, Independent) and not network.weights.composed
    dimensions, k = gradient_dimensions(network.model, across_directions=apart), source.outputs
    if outputs == "full":
        return min(distinct * k, dimensions)
    return min(distinct, dimensions * k if outputs == "trace" else dimensions)
