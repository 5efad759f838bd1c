"""Choose how per-sample gradients are computed for each parameter: from its layer's structure, or in a loop."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from lightning_normtheory.linalg.precision import device_for_float64
from lightning_normtheory.measuring.memory import is_out_of_memory
from lightning_normtheory.measuring.processes import Refusal
from lightning_normtheory.measuring.progress import tick
from lightning_normtheory.ntk.directions import Cotangents
from lightning_normtheory.ntk.factors import (
    GramCost,
    LeafFactors,
    Part,
    add_parts,
    gram_cost,
    join,
    site_factors,
)
from lightning_normtheory.ntk.network import Leaf, Network, RecordingWeights
from lightning_normtheory.ntk.parameter_uses import Outer, Use, parameter_uses, passes_on
from lightning_normtheory.ntk.sample_axis import SampleAxis, find_sample_axis
from lightning_normtheory.ntk.verification import SAMPLES_INTERACT, STRUCTURE_DIFFERS, Evidence, at_use

__all__ = ["Plan", "backward", "leaf_factors", "make_plan"]


@dataclass
class Plan:
    """How the gradients of each parameter are computed, from a look at a few samples.

    Attributes:
        outputs: k.
        evidence: the outputs and gradients of these samples.
        saved_entries: the number of entries that autograd saves in the forward pass, per sample.
        cotangents: the number of cotangents that were mixed into the one that was tried.
        graph: a description of the uses of the parameters, to recognize them.
        axes: the axis of the samples, for each use.
        structured: leaves with the indices of their uses.
        one_by_one: parameters whose gradients are computed sample by sample.
        entries: the number of entries of the gradients at all uses, per sample and output.
        scratch_entries: the largest number of entries of the factors of one leaf, per sample.
        multiplications: in the structured leaves, in a forward pass of one sample.
        gram: the cost of the Gram matrix of each structured leaf for one output, see `gram_cost`.
    """

    outputs: int
    evidence: Evidence
    saved_entries: int
    cotangents: int = 0
    graph: list[str] = field(default_factory=list)
    axes: list[SampleAxis | None] = field(default_factory=list)
    structured: dict[Leaf, list[int]] = field(default_factory=dict)
    one_by_one: list[Leaf] = field(default_factory=list)
    entries: int = 0
    scratch_entries: int = 0
    multiplications: int = 0
    gram: list[GramCost] = field(default_factory=list)

    def uses(self, network: Network, output: Tensor) -> list[Use] | None:
        """The uses of the parameters in the graph of ``output``; ``None`` if they are not those of the plan."""
        found = all_uses(network, output)
        return found if _describe(found) == self.graph else None


def all_uses(network: Network, output: Tensor) -> list[Use]:
    with network.weights.in_backward():  # reading what was saved makes a checkpoint run its forward pass again
        return list(parameter_uses(output, [leaf.tensor for leaf in network.leaves()]))


def _describe(uses: Iterable[Use]) -> list[str]:
    return [f"{use.edge.node.name()} {id(use.leaf)} {type(use.site).__name__}" for use in uses]


def make_plan(
    network: Network, x: Any, which: Tensor, cotangents_of: Callable[[int], Cotangents], *, structured: bool = True
) -> Plan | Refusal:
    """Run a few samples, find their axes, and compare the gradients that the structure gives with autograd's.

    Every leaf for which they differ, for any reason, is left to the sample loop.

    Args:
        x: the samples with the indices ``which``, in a batch by themselves.
        cotangents_of: makes the cotangents for k outputs.
        structured: whether to use the structure at all; otherwise every leaf is left to the sample loop.
    """
    samples = len(which)
    try:
        with _counting_saved() as saved:
            output = network.with_leaves(x, samples)
    except Exception as error:  # if the whole batch fails as well, that error is raised
        if is_out_of_memory(error):
            raise
        return SAMPLES_INTERACT
    k = output.shape[1]
    plan = Plan(k, Evidence(which, output.detach(), []), saved.total // output.element_size() // samples)
    if not structured:
        plan.one_by_one = list(network.parameters)
        return plan
    uses = all_uses(network, output)
    if _has_other_uses(network, uses):
        network.weights.compose()
        return make_plan(network, x, which, cotangents_of)
    cotangents = cotangents_of(k)
    mixed, plan.cotangents = cotangents.mixed().to(output), len(cotangents)
    gradients = _examine_uses(plan, network, output, uses, mixed)
    if gradients is None:
        return STRUCTURE_DIFFERS
    _sort_leaves(plan, network, output, uses, gradients, mixed)
    return plan


def _examine_uses(
    plan: Plan, network: Network, output: Tensor, uses: Sequence[Use], mixed: Tensor
) -> list[Tensor] | None:
    """Record the sample axis and the evidence of each use in the plan; return the gradients at the uses."""
    samples = len(output)
    factors = 2.0 ** torch.arange(samples, dtype=output.dtype, device=output.device)  # products without rounding
    gradients = backward(network, output, uses, mixed.expand(samples, -1))
    scaled = backward(network, output, uses, torch.outer(factors, mixed))
    if gradients is None or scaled is None:
        return None
    plan.graph = _describe(uses)
    plan.entries = sum({use.edge: b.numel() for use, b in zip(uses, gradients)}.values()) // samples
    found: dict[tuple[GradientEdge, tuple[int, ...]], SampleAxis | None] = {}
    for use, gradient, multiple in zip(uses, gradients, scaled):
        axes = tuple(use.site.axes(gradient.dim())) if use.site is not None else ()
        if (use.edge, axes) not in found:  # a scale and a shift, for example, have the same
            found[use.edge, axes] = find_sample_axis(gradient, multiple, factors, axes)
        axis = found[use.edge, axes]
        with network.weights.in_backward():
            seen = at_use(use, axis, [gradient], factors[:1], samples, None)
        plan.axes.append(axis)
        plan.evidence.at_uses.append(seen)
    return gradients


def _sort_leaves(
    plan: Plan, network: Network, output: Tensor, uses: Sequence[Use], gradients: Sequence[Tensor], mixed: Tensor
) -> None:
    """Divide the leaves into those whose structure gives autograd's gradients, and those for the sample loop."""
    leaves = network.leaves()
    with network.weights.in_backward():
        exact = _exact_norms(output, mixed, leaves)
    for leaf, norms in zip(leaves, exact):
        mine = [index for index, use in enumerate(uses) if use.leaf is leaf.tensor]
        agrees, factors = False, None
        with suppress(RuntimeError):  # of dtypes that do not mix, for example
            triples = [(uses[i], plan.axes[i], [gradients[i]]) for i in mine]
            factors = leaf_factors(network.weights, leaf, triples, len(output), folded=True)
            agrees = factors is not None and _agrees(leaf, factors, len(output), norms)
        if mine and agrees and factors is not None:
            plan.structured[leaf] = mine
            _count_work(plan, factors, len(output))
        elif mine:
            plan.one_by_one += network.parameters_of([leaf])


def _count_work(plan: Plan, factors: LeafFactors, samples: int) -> None:
    cost, entries = gram_cost(factors), factors.numel // samples
    plan.gram.append(cost)
    plan.scratch_entries = max(plan.scratch_entries, entries)
    plan.multiplications += int(cost.formed)


class _Saved:
    """Count the bytes that autograd saves of the samples, not of the weights."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self.total = 0

    def pack(self, tensor: Tensor) -> Tensor:
        weight = tensor.grad_fn is None or passes_on(tensor.grad_fn)
        if not weight and tensor.data_ptr() not in self._seen:
            self._seen.add(tensor.data_ptr())
            self.total += tensor.numel() * tensor.element_size()
        return tensor.detach()  # an operation that saves its own output would never be freed


@contextmanager
def _counting_saved() -> Iterator[_Saved]:
    saved = _Saved()
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
        yield saved


def _has_other_uses(network: Network, uses: Sequence[Use]) -> bool:
    """Whether a g or v is used outside its WeightNorm, or in several: then its gradient is a sum over these uses."""
    inside = Counter(id(p) for each in network.weights.maps.values() for p in (each.g, each.v))
    return any(count > 1 for count in inside.values()) or any(id(use.leaf) in inside for use in uses)


def backward(network: Network, output: Tensor, uses: Sequence[Use], cotangent: Tensor) -> list[Tensor] | None:
    """The gradient of Σ cotangent·output at each use; ``None`` if an operation has none.

    Gradients of parameters are not computed.
    """
    edges = list(dict.fromkeys(use.edge for use in uses))
    if not edges:
        return []
    tick("pass")
    with network.weights.in_backward():
        gradients = torch.autograd.grad(output, edges, cotangent, retain_graph=True, allow_unused=True)
    found = dict(zip(edges, gradients))
    if any(gradient is None for gradient in gradients):
        return None
    return [found[use.edge] for use in uses]


@torch.no_grad()  # tensors saved in the graph have a graph
def leaf_factors(
    weights: RecordingWeights,
    leaf: Leaf,
    uses: Sequence[tuple[Use, SampleAxis | None, Sequence[Tensor]]],
    samples: int,
    *,
    folded: bool,
) -> LeafFactors | None:
    """Join the gradients of all uses, one for each output; ``None`` if the structure does not give them."""
    collected = []
    for use, axis, gradients in uses:
        if use.site is None or axis is None or (leaf.weight_norm is not None and not isinstance(use.site, Outer)):
            return None
        result = weights.result(use.edge.node) if leaf.weight_norm is not None else None
        with weights.in_backward():  # reading what was saved makes a checkpoint run its forward pass again
            collected.append(site_factors(use.site, axis, samples, gradients, folded=folded, result=result))
    return join(collected) if collected else None


def _coefficients(samples: int, like: Tensor) -> Tensor:
    """Weights of the samples in the comparison: all different, none zero."""
    return torch.linspace(1, 2, samples, dtype=like.dtype, device=like.device)


def _exact_norms(output: Tensor, weights: Tensor, leaves: Sequence[Leaf]) -> list[dict[Part, float]]:
    """‖∇ Σ_i a_i Σ_h b_h f_h(x_i)‖² for each leaf, by part, from autograd's gradients."""
    cotangent = torch.outer(_coefficients(len(output), weights), weights)
    tensors = [leaf.tensor for leaf in leaves]
    gradients = torch.autograd.grad(output, tensors, cotangent, retain_graph=True, allow_unused=True)
    found: list[dict[Part, float]] = []
    for leaf, gradient in zip(leaves, gradients):
        each = leaf.weight_norm
        if gradient is None:
            found.append({})
        elif each is None:
            found.append({leaf.part: float(gradient.to_dense().norm()) ** 2})
        else:
            length, direction = each.pulled_norms(gradient)
            found.append({"length": length * each.g.requires_grad, "direction": direction * each.v.requires_grad})
    return found


@torch.no_grad()
def _agrees(leaf: Leaf, factors: LeafFactors, samples: int, exact: dict[Part, float]) -> bool:
    device = device_for_float64(leaf.tensor.device)
    out: dict[Part, Tensor] = {
        part: torch.zeros(samples, samples, dtype=torch.float64, device=device) for part in exact
    }
    add_parts(out, leaf.part, factors, factors, weight_norm=leaf.weight_norm)
    a = _coefficients(samples, next(iter(out.values())))
    found = {part: float(a @ (kernel.triu() + kernel.triu(1).t()) @ a) for part, kernel in out.items()}
    scale = sum(float(kernel.diagonal().abs().sum()) for kernel in out.values()) * 4 * samples
    if leaf.weight_norm is not None:  # the part of the directions is a difference of numbers of this size
        scale *= 1 + float(leaf.weight_norm.scale.abs().max()) ** 2
    tol = torch.finfo(leaf.tensor.dtype).eps ** 0.5
    return all(abs(found[part] - norm) <= tol * (scale + norm) for part, norm in exact.items())
