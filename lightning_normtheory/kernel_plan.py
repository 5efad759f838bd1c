"""How the gradients of each parameter will be had: from the structure of its layer, or one sample after the other."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_normtheory.kernel_factors import LeafFactors, Part, Weight, add_parts, join, site_factors
from lightning_normtheory.kernel_network import Leaf, Network, RecordingWeights
from lightning_normtheory.parameter_uses import Use, parameter_uses
from lightning_normtheory.sample_axis import SampleAxis, find_sample_axis

__all__ = ["Plan", "SamplesCoupled", "StructureChanged", "backward", "leaf_factors", "make_plan"]


class StructureChanged(Exception):  # no error: a request to do without
    """The structure of the layers does not give the gradients of some samples."""


class SamplesCoupled(Exception):  # no error: a request to go through the whole batch
    """Samples have other outputs together than by themselves."""


@dataclass
class Plan:
    """What is known of a network's parameters.

    Attributes:
        graph: what the uses of the parameters look like, to recognise them.
        axes: where the samples are, for each use.
        structured: leaves with the uses that they have.
        one_by_one: parameters whose gradients are taken sample by sample.
        entries: the size of the gradients at all uses, per sample and output.
        outputs: of the few samples that were looked at, by themselves.
    """

    graph: list[str] = field(default_factory=list)
    axes: list[SampleAxis | None] = field(default_factory=list)
    structured: dict[Leaf, list[int]] = field(default_factory=dict)
    one_by_one: list[Leaf] = field(default_factory=list)
    entries: int = 0
    outputs: Tensor = field(default_factory=lambda: torch.empty(0))

    def uses(self, network: Network, output: Tensor) -> list[Use]:
        """
        Raises:
            StructureChanged: if these are other uses than those of the plan.
        """
        found = list(parameter_uses(output, [leaf.tensor for leaf in network.leaves()]))
        if _describe(found) != self.graph:
            raise StructureChanged
        return found


def _describe(uses: Iterable[Use]) -> list[str]:
    return [f"{use.edge.node.name()} {id(use.leaf)} {type(use.site).__name__}" for use in uses]


def make_plan(network: Network, x: Any, samples: int, *, structured: bool = True) -> Plan:
    """Look at a few samples: find their axes, and compare what the structure gives with gradients of autograd's.

    Every leaf for which they differ, whatever the reason, is left to the gradients; all of them, if the plan shall not
    be ``structured``.
    """
    output = network.with_leaves(x, samples)
    if not structured:
        return Plan(one_by_one=list(network.parameters), outputs=output.detach())
    leaves = {id(leaf.tensor): leaf for leaf in network.leaves()}
    uses = list(parameter_uses(output, [leaf.tensor for leaf in leaves.values()]))
    if _entangled(network, uses):
        network.compose()
        return make_plan(network, x, samples)
    weights = torch.linspace(1, 2, output.shape[1], dtype=output.dtype, device=output.device)
    one_after_the_other = [
        backward(network, output, uses, torch.outer(row, weights)) for row in torch.eye(samples).to(weights)
    ]
    plan = Plan(graph=_describe(uses), outputs=output.detach())
    for index, use in enumerate(uses):
        gradients = torch.stack([each[index] for each in one_after_the_other])
        axes = use.site.axes(gradients.dim() - 1) if use.site is not None else ()
        plan.axes.append(find_sample_axis(gradients, axes))
        plan.entries += gradients[0].numel() // samples
    with network.weights.in_backward():
        exact = _exact_norms(output, weights, list(leaves.values()))
    together = [torch.stack(gradients).sum(0) for gradients in zip(*one_after_the_other)]
    for leaf, norms in zip(leaves.values(), exact):
        mine = [index for index, use in enumerate(uses) if use.leaf is leaf.tensor]
        factors = leaf_factors(
            network.weights, leaf, [(uses[i], plan.axes[i], [together[i]]) for i in mine], samples, folded=True
        )
        if mine and factors is not None and _agrees(leaf, factors, samples, norms):
            plan.structured[leaf] = mine
        elif mine:
            plan.one_by_one += network.raw([leaf])
    return plan


def _entangled(network: Network, uses: Sequence[Use]) -> bool:
    """Whether a g or v has another role than in its one WeightNorm: then its gradients are sums over several."""
    inside = Counter(id(p) for each in network.weights.maps.values() for p in (each.g, each.v))
    return any(count > 1 for count in inside.values()) or any(id(use.leaf) in inside for use in uses)


def backward(network: Network, output: Tensor, uses: Sequence[Use], cotangent: Tensor) -> list[Tensor]:
    """The gradient of Σ cotangent·output at each use; gradients of parameters are not computed.

    Raises:
        StructureChanged: if an operation has none.
    """
    edges = list(dict.fromkeys(use.edge for use in uses))
    if not edges:
        return []
    with network.weights.in_backward():
        gradients = torch.autograd.grad(output, edges, cotangent, retain_graph=True, allow_unused=True)
    found = dict(zip(edges, gradients))
    if any(gradient is None for gradient in gradients):
        raise StructureChanged
    return [found[use.edge] for use in uses]


@torch.no_grad()  # what the graph has saved is part of it
def leaf_factors(
    weights: RecordingWeights,
    leaf: Leaf,
    uses: Sequence[tuple[Use, SampleAxis | None, Sequence[Tensor]]],
    samples: int,
    *,
    folded: bool,
) -> LeafFactors | None:
    """From the gradients of each use, one for each output; None if the structure does not carry them."""
    collected = []
    for use, axis, gradients in uses:
        if use.site is None or axis is None:
            return None
        result = weights.result(use.edge.node) if leaf.weight_norm is not None else None
        with weights.in_backward():  # asking for what was saved lets a checkpoint run its forward pass again
            collected.append(site_factors(use.site, axis, samples, gradients, folded=folded, result=result))
    if not collected:
        return None
    factors = join(collected, leaf.tensor.numel())
    return factors if leaf.weight_norm is None or isinstance(factors, Weight) else None


def _coefficients(samples: int, like: Tensor) -> Tensor:
    """Of the samples in the comparison: all different, none zero."""
    return torch.linspace(1, 2, samples, dtype=like.dtype, device=like.device)


def _exact_norms(output: Tensor, weights: Tensor, leaves: Sequence[Leaf]) -> list[dict[Part, float]]:
    """‖∇ Σ_i a_i Σ_h b_h f_h(x_i)‖² in each leaf, by its parts, from autograd's gradients."""
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
    out: dict[Part, Tensor] = {
        part: torch.zeros(samples, samples, dtype=torch.float64, device=leaf.tensor.device) for part in exact
    }
    add_parts(out, leaf.part, factors, factors, weight_norm=leaf.weight_norm)
    a = _coefficients(samples, next(iter(out.values())))
    found = {part: float(a @ (kernel.triu() + kernel.triu(1).t()) @ a) for part, kernel in out.items()}
    scale = sum(float(kernel.diagonal().abs().sum()) for kernel in out.values()) * 4 * samples
    if leaf.weight_norm is not None:  # the direction's part is a difference of numbers of this size
        scale *= 1 + float(leaf.weight_norm.scale.abs().max()) ** 2
    tol = torch.finfo(leaf.tensor.dtype).eps ** 0.5
    return all(abs(found[part] - norm) <= tol * (scale + norm) for part, norm in exact.items())
