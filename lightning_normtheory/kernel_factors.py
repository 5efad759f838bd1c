"""The gradients of one parameter for some samples, in the form in which their Gram matrix is cheapest."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_normtheory.effective_weights import WeightNormMap
from lightning_normtheory.gram import Factors, add_gram, add_lookup_gram, add_outer_gram
from lightning_normtheory.parameter_uses import Elementwise, Lookup, Outer, Site
from lightning_normtheory.sample_axis import SampleAxis

__all__ = ["Gradients", "LeafFactors", "Part", "SiteFactors", "Table", "Weight", "add_parts", "join"]

Part = Literal["direction", "length", "rest"]


@dataclass
class Weight:
    """∇ = Σ_p r_p c_pᵀ: rows (n, k, T, G, d) and cols (n, k, T, G, d') of n samples, k outputs, T positions, G groups;
    k is 1 where a factor is the same for all outputs."""

    rows: Tensor
    cols: Tensor

    def gradients(self, size: int) -> "Gradients":
        formed = torch.einsum("nktgd,nktge->nkgde", *_same_outputs(self.rows, self.cols))
        return Gradients(formed.flatten(2))

    def folded(self) -> Factors | None:
        """As if the outputs were features: their Gram matrices are added up. None where both factors depend on them."""
        outputs = self.rows.shape[1], self.cols.shape[1]
        return Factors(_fold(self.rows), _fold(self.cols)) if 1 in outputs else None


@dataclass
class Table:
    """A table of which the rows ``indices`` (n, T) have the gradients ``rows`` (n, k, T, d)."""

    rows: Tensor
    indices: Tensor

    def gradients(self, size: int) -> "Gradients":
        n, k, T, d = self.rows.shape
        formed = self.rows.new_zeros(n, k, size // d, d)
        index = self.indices[:, None, :, None].expand(n, k, T, d)
        return Gradients(formed.scatter_add_(2, index, self.rows).flatten(2))


@dataclass
class Gradients:
    """The gradients (n, k, entries) themselves."""

    values: Tensor

    def gradients(self, size: int) -> "Gradients":
        return self


LeafFactors = Weight | Table | Gradients


class SiteFactors:
    """Collects, output by output, what one use of a parameter contributes to its gradients."""

    def __init__(self, site: Site, axis: SampleAxis, samples: int) -> None:
        self._site, self._axis, self._samples = site, axis, samples
        self._pieces: list[Tensor] = []

    def add(self, b: Tensor) -> None:
        """The gradient B of the next output at the operation's result."""
        site = self._site
        if isinstance(site, Elementwise):  # small: nothing else of B is needed
            self._pieces.append(site.gradient(self._axis, self._samples, b))
        elif isinstance(site, (Outer, Lookup)):
            self._pieces.append(site.moving(self._axis, self._samples, b))

    def factors(self, *, folded: bool) -> LeafFactors:
        """Of all outputs so far, with the memory laid out for their being folded, or not."""
        site = self._site
        if isinstance(site, Elementwise):
            return Gradients(torch.stack(self._pieces, 1))
        behind = self._pieces[0].dim() - 1
        moving = torch.stack(self._pieces, behind).movedim(behind, 1) if folded else torch.stack(self._pieces, 1)
        if isinstance(site, Lookup):
            return Table(moving, site.rows(self._axis, self._samples))
        assert isinstance(site, Outer)
        fixed = site.fixed(self._axis, self._samples)[:, None]
        return Weight(moving, fixed) if site.moving_rows else Weight(fixed, moving)


def join(uses: Sequence[LeafFactors], size: int) -> LeafFactors:
    """All uses of one parameter, which has ``size`` entries: their gradients are added up."""
    first = uses[0]
    if len(uses) == 1:
        return first
    if all(isinstance(use, Table) for use in uses):
        tables = [use for use in uses if isinstance(use, Table)]
        return Table(torch.cat([t.rows for t in tables], 2), torch.cat([t.indices for t in tables], 1))
    weights = [use for use in uses if isinstance(use, Weight)]
    if len(weights) == len(uses) and len({(w.rows.shape[3:], w.cols.shape[3:]) for w in weights}) == 1:
        # More positions.
        return Weight(_along_positions([w.rows for w in weights]), _along_positions([w.cols for w in weights]))
    return Gradients(torch.stack([use.gradients(size).values for use in uses]).sum(0))


def _along_positions(factors: Sequence[Tensor]) -> Tensor:
    outputs = max(factor.shape[1] for factor in factors)
    return torch.cat([factor.expand(-1, outputs, -1, -1, -1) for factor in factors], 2)


def add_parts(
    out: dict[Part, Tensor],
    part: Part,
    first: LeafFactors,
    second: LeafFactors,
    *,
    weight_norm: WeightNormMap | None,
    folded: bool,
    upper: bool,
) -> None:
    """Add ⟨∇_i, ∇_j⟩ to ``out[part]``, or for a weight w = g v/‖v‖ its two parts to direction and length.

    Args:
        folded: add up over the outputs; otherwise each sample has a row for every output.
        upper: the samples of both are the same, see `lightning_normtheory.gram`.
    """
    if weight_norm is not None:
        assert isinstance(first, Weight)
        assert isinstance(second, Weight)
        _add_weight_norm(out, first, second, weight_norm, folded, upper)
    else:
        _add_gram(out[part], first, second, folded, upper)


def _add_gram(out: Tensor, first: LeafFactors, second: LeafFactors, folded: bool, upper: bool) -> None:
    if isinstance(first, Weight) and isinstance(second, Weight):
        if not folded:
            add_outer_gram(out, Factors(first.rows, first.cols), Factors(second.rows, second.cols), upper=upper)
            return
        f = first.folded()
        s = f if second is first else second.folded()
        if f is not None and s is not None:
            add_outer_gram(out, f, s, upper=upper)
            return
    if isinstance(first, Table) and isinstance(second, Table):
        rows = (_fold_table(first.rows), _fold_table(second.rows)) if folded else (first.rows, second.rows)
        add_lookup_gram(out, rows, (first.indices, second.indices), upper=upper)
        return
    x, y = (_features(factors.gradients(0).values, folded) for factors in (first, second))
    add_gram(out, x, y, upper=upper)


def _add_weight_norm(
    out: dict[Part, Tensor], first: Weight, second: Weight, each: WeightNormMap, folded: bool, upper: bool
) -> None:
    """With c = v̂·∂f/∂w and s = g/‖v‖ for each unit: the gradient in g is c, that in v is s(∂f/∂w − c v̂), so

    length     Σ_u c_iu c_ju
    direction  Σ_u s_u²(⟨∂f_i/∂w_u, ∂f_j/∂w_u⟩ − c_iu c_ju)
    """
    units = _Units(each, first)
    along = [units.along(first)]
    along.append(along[0] if second is first else units.along(second))
    if each.g.requires_grad:
        add_gram(out["length"], *(_features(c, folded) for c in along), upper=upper)
    if each.v.requires_grad:
        scaled = units.scaled(first)
        _add_gram(out["direction"], scaled, scaled if second is first else units.scaled(second), folded, upper)
        x = _features(along[0] * units.scale, folded)
        y = x if second is first else _features(along[1] * units.scale, folded)
        add_gram(out["direction"], x, y, upper=upper, sign=-1)


class _Units:
    """The units of a WeightNorm among the entries (G, d, d') of a weight: its rows, an axis of its columns, or all."""

    def __init__(self, each: WeightNormMap, factors: Weight) -> None:
        (groups, rows), cols = factors.rows.shape[3:], factors.cols.shape[4]
        self._shape = each.v.shape
        self._dim = None if each.dim == -1 else each.dim % each.v.dim()
        self._direction = each.direction.reshape(groups, rows, cols).to(factors.rows.dtype)
        self._groups = groups
        self.scale = each.scale.to(factors.rows.dtype)  # (units,)

    def along(self, factors: Weight) -> Tensor:
        """c (n, k, units)."""
        if self._dim == 0:
            along = torch.einsum("nktge,gde->nktgd", factors.cols, self._direction)
            return (factors.rows * along).sum(2).flatten(2)
        along = torch.einsum("nktgd,gde->nktge", factors.rows, self._direction)
        entries = (factors.cols * along).sum((2, 3)).unflatten(2, self._shape[1:])
        others = [axis + 1 for axis in range(1, len(self._shape)) if axis != self._dim]
        summed = entries.sum(others) if others else entries
        return summed if self._dim is not None else summed[..., None]

    def scaled(self, factors: Weight) -> Weight:
        """The factors of s ∂f/∂w."""
        if self._dim is None:
            return Weight(factors.rows * self.scale, factors.cols)
        if self._dim == 0:
            return Weight(factors.rows * self.scale.view(self._groups, -1), factors.cols)
        sizes = [size if axis == self._dim else 1 for axis, size in enumerate(self._shape)][1:]
        return Weight(factors.rows, factors.cols * self.scale.view(sizes).expand(self._shape[1:]).flatten())


def _features(values: Tensor, folded: bool) -> Tensor:
    """(n, k, d) as (n, k·d), or with a row for each output."""
    return values.flatten(1) if folded else values.flatten(0, 1)


def _fold(factor: Tensor) -> Tensor:
    n, k, T, G, d = factor.shape
    return factor.permute(0, 2, 3, 1, 4).reshape(n, 1, T, G, k * d)


def _fold_table(rows: Tensor) -> Tensor:
    n, k, T, d = rows.shape
    return rows.permute(0, 2, 1, 3).reshape(n, 1, T, k * d)


def _same_outputs(rows: Tensor, cols: Tensor) -> tuple[Tensor, Tensor]:
    outputs = max(rows.shape[1], cols.shape[1])
    return rows.expand(-1, outputs, -1, -1, -1), cols.expand(-1, outputs, -1, -1, -1)
