"""Inner products of the gradients of samples, from the backward pass that computes the gradient of their sum."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from lightning_normtheory.linalg.precision import device_for_float64
from lightning_normtheory.ntk.factors import LeafFactors, Part, add_parts, gram_cost, join, site_factors
from lightning_normtheory.ntk.network import RecordingWeights
from lightning_normtheory.ntk.parameter_uses import Outer, Use, parameter_uses
from lightning_normtheory.ntk.sample_axis import SampleAxis

__all__ = ["BatchGram"]

# The Gram matrices may take so many times the multiplications of the layers in a forward pass.
_MOST_COST = 2.0


class BatchGram:
    """⟨∇_i a, ∇_j b⟩ of the samples of all batches, for quantities a, b that one forward pass computes for each sample.

    A backward pass from the sum of a quantity also has its gradients at the uses of the parameters. With the inputs of
    the layers, they give the gradient of each sample (`parameter_uses`). It takes no pass of its own, and no gradient
    is formed.

    This assumes that samples do not interact, and that the first axis at every use holds them, one after the other.
    Nothing here tells whether it is so, but for the sizes: compare the result with gradients of parts of the batch.

    Args:
        weights: those in whose context the forward passes run.
        parameters: θ.
        quantities: their number.
    """

    def __init__(self, weights: RecordingWeights, parameters: Sequence[Tensor], quantities: int = 1) -> None:
        self._weights, self._parameters, self._quantities = weights, parameters, quantities
        self._uses: list[Use] = []
        self._batches: list[dict[int, LeafFactors]] = []
        self._leaves: dict[int, Tensor] = {}
        self._sizes: list[int] = []
        self.refused = False

    def edges(self, value: Tensor) -> list[GradientEdge]:
        """Return the places in the graph of a value at which `add` needs its gradients, and those of the other
        quantities; empty if it cannot use them."""
        self._uses = []
        maps = self._weights.maps.values()
        chosen, inside = {id(p) for p in self._parameters}, [id(p) for each in maps for p in (each.g, each.v)]
        trained = {id(p) for each in maps for p in (each.g, each.v) if p.requires_grad}
        # A g or v in two WeightNorms, or one that is trained and not among θ, has another gradient.
        if self._weights.composed or len(set(inside)) < len(inside) or not trained <= chosen:
            self.refused = True
        if not self.refused:
            effective = [each.w for each in maps]
            leaves = [*self._parameters, *effective]
            with self._weights.in_backward():
                uses = list(parameter_uses(value, leaves, light=effective))
            # A g or v that is used outside of its WeightNorm has the gradient of both uses.
            self.refused = not uses or any(use.site is None or id(use.leaf) in inside for use in uses)
            self._uses = uses
        return self.last_edges

    @property
    def last_edges(self) -> list[GradientEdge]:
        """The result of the last call of `edges`, until `add`."""
        return [] if self.refused else list(dict.fromkeys(use.edge for use in self._uses))

    @torch.no_grad()
    def add(self, gradients: Sequence[Sequence[Tensor | None]], samples: int, weights: Sequence[float]) -> None:
        """Add a batch: for each quantity the gradients at the last `edges`, and a weight of all its gradients."""
        edges = dict.fromkeys(use.edge for use in self._uses)
        found = dict(zip(edges, zip(*gradients)))
        by_leaf: dict[int, list[LeafFactors]] = {}
        for use in self._uses:
            factors = self._factors(use, found.get(use.edge, ()), samples, weights)
            if factors is None:
                self.refused = True
                return
            self._leaves[id(use.leaf)] = use.leaf
            by_leaf.setdefault(id(use.leaf), []).append(factors)
        self._batches.append({leaf: join(each) for leaf, each in by_leaf.items()})
        self._sizes.append(samples)
        self._uses = []

    def _factors(
        self, use: Use, gradients: Sequence[Tensor | None], samples: int, weights: Sequence[float]
    ) -> LeafFactors | None:
        effective = any(use.leaf is each.w for each in self._weights.maps.values())
        known = [gradient.detach() * weight for gradient, weight in zip(gradients, weights) if gradient is not None]
        if len(known) < self._quantities or use.site is None or (effective and not isinstance(use.site, Outer)):
            return None
        shape = known[0].shape
        entries, rest = divmod(shape[0], samples) if shape else (0, 1)
        if rest or entries == 0 or 0 not in use.site.axes(len(shape)):
            return None
        result = self._weights.result(use.edge.node) if effective else None
        with self._weights.in_backward():
            axis = SampleAxis(0, entries, major=True)
            return site_factors(use.site, axis, samples, known, folded=False, result=result)

    def is_cheap(self) -> bool:
        """Whether the Gram matrices take about as many multiplications as a forward pass, or fewer."""
        n = sum(self._sizes)
        costs = [gram_cost(factors) for factors in self._batches[0].values()]
        formed = sum(cost.formed for cost in costs if cost.formed > 0)
        return sum(cost.of(n, n) for cost in costs) <= _MOST_COST * n * max(formed, 1.0)

    @torch.no_grad()
    def gram(self) -> Tensor | None:
        """Return the inner products (q, q, n, n) in float64, on the CPU; ``None`` if the structure of a batch does not
        give them."""
        if self.refused or not self._batches or any(each.keys() != self._leaves.keys() for each in self._batches):
            return None
        if not self.is_cheap():
            return None
        maps, q = {id(each.w): each for each in self._weights.maps.values()}, self._quantities
        ends = torch.tensor([0, *self._sizes], device="cpu").cumsum(0).mul(q).tolist()
        device = device_for_float64(next(iter(self._leaves.values())).device)
        total = torch.zeros(ends[-1], ends[-1], dtype=torch.float64, device=device)
        for leaf in self._leaves:
            for i, first in enumerate(self._batches):
                for j in range(i, len(self._batches)):
                    block = total[ends[i] : ends[i + 1], ends[j] : ends[j + 1]]
                    out: Mapping[Part, Tensor] = dict.fromkeys(("direction", "length", "rest"), block)
                    add_parts(dict(out), "rest", first[leaf], self._batches[j][leaf], weight_norm=maps.get(leaf))
        total = total.triu()
        total = (total + total.triu(1).t()).cpu()
        return total.unflatten(0, (-1, q)).unflatten(2, (-1, q)).permute(1, 3, 0, 2)
