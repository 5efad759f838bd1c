"""Compute the empirical tangent kernel of a model, exactly, with the parts of lengths and directions."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor, nn

from lightning_normtheory.linalg.arithmetic import operand_eps, without_autocast, without_tf32
from lightning_normtheory.linalg.precision import converted, device_for_float64
from lightning_normtheory.measuring.preserve import preserve_state
from lightning_normtheory.measuring.processes import SINGLE_PROCESS, Processes
from lightning_normtheory.model.batches import SampleBatch
from lightning_normtheory.model.checks import trainable_parameters
from lightning_normtheory.model.layers import refuse_uninitialized, with_batch_statistics
from lightning_normtheory.ntk.assembly import PARTS, Assembled
from lightning_normtheory.ntk.factors import Part
from lightning_normtheory.ntk.gradients import CoupledSamples, GradientSource, IndependentSamples
from lightning_normtheory.ntk.memory import retry_with_less
from lightning_normtheory.ntk.network import Converted, Network
from lightning_normtheory.ntk.rank import count_distinct, gradient_dimensions
from lightning_normtheory.ntk.result import KernelParts, Outputs, TangentKernel
from lightning_normtheory.ntk.strategies import Effort, KernelTask, choose_effort, compute_kernel
from lightning_normtheory.scaling.split import BatchNormSplit, batch_norm_split

__all__ = ["effort_for_batches", "empirical_ntk", "tangent_kernel_of_batches"]

# Relative difference of two kernels that rounding in float32 does not explain.
_OTHER_KERNEL = 1e-2
_SAMPLES_INTERACT = (
    "Some samples do not have the same outputs alone and in the batch: samples interact, the forward pass is random, or"
    " the batch cannot be divided into samples. The kernel is that of the whole batch, with one draw of all random"
    " numbers, and takes a backward pass for each sample and output."
)


def empirical_ntk(
    model: nn.Module,
    x: Any,
    *,
    outputs: Outputs = "trace",
    batch_stats: bool | None = None,
    dtype: torch.dtype | None = None,
    layers: bool = False,
    directions: int | None = None,
    seed: int = 0,
) -> TangentKernel:
    """K[(i,h), (j,h')] = ⟨∇_θ f_h(x_i), ∇_θ f_h'(x_j)⟩ over the trainable parameters, exact, without a Jacobian.

    For a weight matrix, the kernel is a product of the Gram matrices of what enters the layer and of the gradients at
    its output; with WeightNorm w = g v/‖v‖ it splits into the part of the directions v and that of the lengths g (DGM,
    Section 3). Only gradients at the outputs of layers are computed, one backward pass for each output h.

    BatchNorm after a layer w is γ w·(x − μ)/‖w‖_S plus a shift, a WeightNorm in the norm of the inputs' covariance S
    (DGM, eq. 2.2): the weights w of the layers that feed a BatchNorm are directions, its scales γ are lengths. A
    symbolic trace finds these layers. The parts are the exact blocks of these parameters, whatever the statistics are.
    But the gradient in w is orthogonal to w only with batch statistics, for ε → 0, if the outputs depend on w through
    BatchNorms alone; with running statistics, which are constants, BatchNorm undoes no scale. Under WeightNorm, a layer
    that feeds a BatchNorm keeps v as direction and g as length.

    With many outputs, ``directions=m`` estimates the trace kernel from m random directions z_r, vectors of k signs:
    K̂ = (1/(mk)) Σ_r K(z_r), where K(z)_ij = ⟨∇(z·f)(x_i), ∇(z·f)(x_j)⟩. It is unbiased, takes m backward passes, and
    the result has standard errors.

    Args:
        model: f; outputs of shape (n, …), where all axes but the first count as the k outputs. Dropout is off.
        x: the argument of ``model(x)``: a tensor (n, …), or a list or dict of tensors that have the samples in front;
            tensors of another length belong to all samples.
        outputs: ``"full"``: K (nk, nk); ``"trace"``: (1/k) Σ_h K_hh (n, n); ``"sum"``: the kernel of Σ_h f_h (n, n).
            λ_min of the last two can be positive where that of K is not.
        batch_stats: whether BatchNorm uses the statistics of the batch, which is the whole of x. Then samples interact,
            the derivative goes through the batch, and it takes nk backward passes. ``None``: as each BatchNorm is set.
        dtype: of the products. ``None``: that of the model, repeated in float64 if λ_min comes near its floor.
        layers: also keep the parts of every layer, each as large as the kernel.
        directions: m, for ``"trace"`` only; ``None``, or k and more: exact. The m kernels (n, n) are kept as well.
        seed: of the directions, which are the same in every call with as many outputs.

    Example:
        f = w·x has the kernel x xᵀ; with w = g v/‖v‖ in one dimension only the length g can change f

        >>> x = torch.tensor([[1.0], [2.0]])
        >>> empirical_ntk(nn.Linear(1, 1, bias=False), x[:1]).kernel
        tensor([[1.]], dtype=torch.float64)
        >>> layer = nn.utils.parametrizations.weight_norm(nn.Linear(1, 1, bias=False))
        >>> found = empirical_ntk(layer, x[1:])
        >>> found.length, found.direction
        (tensor([[4.]], dtype=torch.float64), tensor([[0.]], dtype=torch.float64))

        with batch statistics, so can only the length γ of BatchNorm, and its shift

        >>> net = nn.Sequential(nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1, eps=1e-30))
        >>> found = empirical_ntk(net, torch.tensor([[-1.0], [1.0]]), batch_stats=True, dtype=torch.float64)
        >>> found.length.round(decimals=9), bool(found.direction.abs().max() < 1e-12)
        (tensor([[ 1., -1.],
                [-1.,  1.]], dtype=torch.float64), True)
    """
    found = tangent_kernel_of_batches(
        model,
        [SampleBatch.whole(x)],
        outputs=outputs,
        batch_stats=batch_stats,
        dtype=dtype,
        layers=layers,
        directions=directions,
        seed=seed,
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
    directions: int | None = None,
    seed: int = 0,
    refine: bool = True,
    seen: Sequence[SampleBatch] | None = None,
    split: BatchNormSplit | None = None,
    reset_state: Callable[[], object] | None = None,
    full: int = 0,
    processes: Processes = SINGLE_PROCESS,
) -> TangentKernel:
    """Compute `empirical_ntk` for the samples of several batches; remarks are in the result, without warnings.

    Args:
        batches: batch statistics are those of each whole batch.
        refine: whether to repeat it in float64 if λ_min comes near its floor.
        seen: the part of each batch that the model uses, if it is known; samples that are equal in it are duplicates.
        split: the result of `batch_norm_split`, if it is known; ``None``: the model is traced.
        reset_state: inside `preserve_state`, what it yields; ``None``: the model is preserved here.
        full: the number of first samples of which the kernel of all outputs is to come along, where that takes no other
            passes.
        processes: have the same model and batches, and share the work; all of them get the whole kernel.
    """
    if outputs not in get_args(Outputs):
        raise ValueError(f"Expected outputs to be 'full', 'trace' or 'sum', but got {outputs!r}.")
    if dtype not in (None, torch.float32, torch.float64):
        raise ValueError(f"Expected dtype to be torch.float32, torch.float64 or None, but got {dtype!r}.")
    if directions is not None and (outputs != "trace" or type(directions) is not int or directions < 1):
        raise ValueError(
            "Expected directions to be a positive integer, for outputs='trace', but got "
            f"{directions!r} and outputs={outputs!r}."
        )
    refuse_uninitialized(model)
    trainable_parameters(model)
    known = processes.run_on_all(lambda: batch_norm_split(model)) if split is None else split

    def measure(dtype: torch.dtype | None) -> TangentKernel:
        with _measuring(model, batch_stats, reset_state) as reset:
            network = _network(model, reset, dtype, known)
            mine = batches if dtype is None else [batch.map(partial(converted, dtype=dtype)) for batch in batches]
            task = KernelTask(network, mine, outputs, layers, processes, directions, seed, full)
            source, found = retry_with_less(lambda divisor: compute_kernel(replace(task, divisor=divisor)), processes)
            return _result(task, source, found, seen or mine)

    lowest = min((p.dtype for p in model.parameters() if p.requires_grad), key=lambda d: d.itemsize)
    found = processes.run_on_all(lambda: measure(torch.float32 if dtype is None and lowest.itemsize < 4 else dtype))
    enough = not refine or dtype is not None or found.dtype == torch.float64 or bool(found.deficiency)
    # If it is near in one process, all repeat it: rounding may differ between processes.
    near = 0.0 if enough else float(found.near_floor)
    if float(processes.sum(torch.tensor([near], device="cpu"))) == 0:
        return found
    device = next(iter(model.parameters())).device
    where = "float64"
    if device_for_float64(device) != device:
        where = f"float64 on the CPU, since {device.type} has none"
        warnings.warn(f"λ_min is near its floor. The kernel is repeated in {where}; this takes longer.", stacklevel=3)
    try:
        again = processes.run_on_all(lambda: measure(torch.float64))
    except Exception as error:  # noqa: BLE001  # for example of a constant in the forward pass that stays float32
        warnings.warn(
            f"λ_min is near its floor, and the kernel could not be repeated in {where}:"
            f" {type(error).__name__}: {error}",
            stacklevel=3,
        )
        return found
    # Random numbers that are drawn in float64 are other numbers, and make another function.
    other = float((again.kernel - found.kernel).norm()) > _OTHER_KERNEL * float(found.kernel.norm())
    return found if other else again


def effort_for_batches(
    model: nn.Module,
    batches: Sequence[SampleBatch],
    *,
    outputs: Outputs,
    probe: int,
    most: float,
    processes: Processes = SINGLE_PROCESS,
) -> Effort:
    """Choose what `tangent_kernel_of_batches` computes, see `choose_effort`; takes a few passes of a few samples."""
    with _measuring(model, None) as reset_state:
        task = KernelTask(_network(model, reset_state, None, BatchNormSplit()), batches, outputs, False, processes, 1)
        return retry_with_less(lambda divisor: choose_effort(replace(task, divisor=divisor), probe, most), processes)


@contextmanager
def _measuring(
    model: nn.Module, batch_stats: bool | None, reset_state: Callable[[], object] | None = None
) -> Iterator[Callable[[], object]]:
    device = next(iter(model.parameters())).device
    with (
        preserve_state(model, batch_stats=batch_stats) if reset_state is None else _then_reset(reset_state) as reset,
        torch.enable_grad(),
        without_autocast(device),
        without_tf32(),  # hardly any λ_min is far from the floor of TF32, and float64 is slower by far
    ):
        yield reset


@contextmanager
def _then_reset(reset_state: Callable[[], object]) -> Iterator[Callable[[], object]]:
    """Reset in the end, too: what is converted next must be the model's own parameters."""
    try:
        yield reset_state
    finally:
        reset_state()


def _network(
    model: nn.Module, reset_state: Callable[[], object], dtype: torch.dtype | None, split: BatchNormSplit
) -> Network:
    other = dtype is not None and any(p.dtype != dtype for p in model.parameters())
    return Network(model, reset_state, Converted(model, dtype) if other and dtype is not None else None, split)


def _result(task: KernelTask, source: GradientSource, found: Assembled, seen: Sequence[SampleBatch]) -> TangentKernel:
    blocks, singles, k = found.blocks, found.by_direction, source.outputs
    if task.outputs == "trace":
        for matrix in (matrix for parts in blocks.values() for matrix in parts.values()):
            matrix /= k if singles is None else k * len(singles)
    kernel = _kernel(task, source, {part: _sum([parts[part] for parts in blocks.values()]) for part in PARTS}, seen)
    full = None
    if found.full is not None:
        first = list(_first(seen, task.full))
        full = _kernel(replace(task, outputs="full", batches=first), source, found.full, first)
    return replace(
        kernel,
        layers={name: KernelParts(**parts) for name, parts in blocks.items() if name is not None},
        by_direction=None if singles is None else singles / k,
        full=full,
    )


def _kernel(
    task: KernelTask, source: GradientSource, parts: dict[Part, Tensor], seen: Sequence[SampleBatch]
) -> TangentKernel:
    network = task.network
    samples = sum(batch.asked for batch in task.batches)
    distinct = count_distinct(seen)
    if distinct is None:  # unknown is not equal
        distinct = samples
    coupled = isinstance(source, CoupledSamples)
    lowest = min((leaf.tensor for leaf in source.leaves), key=lambda tensor: tensor.dtype.itemsize)
    return TangentKernel(
        parts["direction"] + parts["length"] + parts["rest"],
        parts["direction"],
        parts["length"],
        parts["rest"],
        outputs=task.outputs,
        number_of_outputs=source.outputs,
        dtype=lowest.dtype,
        operand_eps=operand_eps(lowest.device, lowest.dtype),
        subtracted=any(w.v.requires_grad and not w.g.requires_grad for w in network.weights.maps.values()),
        parameters=sum(leaf.tensor.numel() for leaf in network.parameters),
        lengths=sum(
            leaf.tensor.numel()
            for leaf in network.parameters
            if leaf.part == "length" and leaf.name not in network.split.lengths
        ),
        part_of={leaf.name: leaf.part for leaf in network.parameters},
        untraced=network.split.unknown,
        rank_limit=_rank_limit(task, source, distinct),
        duplicates=samples - distinct,
        one_by_one=tuple(leaf.name for leaf in source.one_by_one),
        coupled=coupled,
        remark=_SAMPLES_INTERACT if coupled and not with_batch_statistics(network.model) else "",
    )


def _first(batches: Sequence[SampleBatch], samples: int) -> Iterator[SampleBatch]:
    """The batches that hold the first samples."""
    for batch in batches:
        if samples > 0:
            yield batch._replace(asked=min(batch.asked, samples))
        samples -= batch.asked


def _sum(matrices: Sequence[Tensor]) -> Tensor:
    total = matrices[0] if len(matrices) == 1 else matrices[0].clone()
    for matrix in matrices[1:]:
        total += matrix
    return total


def _rank_limit(task: KernelTask, source: GradientSource, distinct: int) -> int:
    # If a direction v is also used outside its WeightNorm, its gradient has all dimensions.
    apart = isinstance(source, IndependentSamples) and not task.network.weights.composed
    dimensions = gradient_dimensions(task.network.model, across_directions=apart)
    if task.outputs == "full":
        return min(distinct * source.outputs, dimensions)
    return min(distinct, dimensions * len(task.cotangents(source.outputs)))
