"""Represent the gradients of one parameter in the form in which their Gram matrix is cheapest.

The gradients of several outputs are a list whose Gram matrices are added up (*folded*), or an axis q of one tensor.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lightning_normtheory.autodiff.weight_norm import WeightNormMap
from lightning_normtheory.ntk.gram import Factors, Target, add_gram, add_lookup_gram, add_outer_gram, outer_costs
from lightning_normtheory.ntk.parameter_uses import Convolution, Elementwise, Lookup, Outer, Site
from lightning_normtheory.ntk.sample_axis import SampleAxis

__all__ = [
    "Gradients",
    "GramCost",
    "LeafFactors",
    "Part",
    "Result",
    "Table",
    "Weight",
    "add_parts",
    "gram_cost",
    "join",
    "site_factors",
]

Part = Literal["direction", "length", "rest"]
# Two products of the same few numbers differ by no more roundings.
_ROUNDINGS = 8


class Result(NamedTuple):
    """The result of a layer without its bias, and the bias."""

    values: Tensor
    bias: Tensor


@dataclass
class Weight:
    """∇ = Σ_p r_p c_pᵀ, with the result of the layer if it was recorded, whose values are (n, 1, T, G, d)."""

    factors: Factors
    result: Result | None = None

    def some(self, which: slice) -> "Weight":
        rows, cols = ([x[which] for x in side] for side in self.factors)
        result = None if self.result is None else self.result._replace(values=self.result.values[which])
        return Weight(Factors(rows, cols), result)

    @property
    def numel(self) -> int:
        return sum(x.numel() for side in self.factors for x in side)

    def only(self, output: int) -> "Weight":
        return Weight(Factors(*(_only(side, output) for side in self.factors)), self.result)

    def unfolded(self) -> "Weight":
        return Weight(Factors(*(_joined(side) for side in self.factors)), self.result)

    def gradients(self) -> "Gradients":
        values = []
        for r, c in _paired(*self.factors):
            q = max(r.shape[1], c.shape[1])
            r, c = (x.expand(-1, q, -1, -1, -1) for x in (r, c))
            values.append(torch.einsum("nqtgd,nqtge->nqgde", r, c).flatten(2))
        return Gradients(values)


@dataclass
class Table:
    """The gradients ``rows``, a list of (n, q, T, d), of the rows ``indices`` (n, T) of a table of ``entries``."""

    rows: list[Tensor]
    indices: Tensor
    entries: int

    def some(self, which: slice) -> "Table":
        return Table([rows[which] for rows in self.rows], self.indices[which], self.entries)

    @property
    def numel(self) -> int:
        return sum(rows.numel() for rows in self.rows)

    def only(self, output: int) -> "Table":
        return Table(_only(self.rows, output), self.indices, self.entries)

    def unfolded(self) -> "Table":
        return Table(_joined(self.rows), self.indices, self.entries)

    def gradients(self) -> "Gradients":
        values = []
        for rows in self.rows:
            n, q, T, d = rows.shape
            index = self.indices[:, None, :, None].expand(n, q, T, d)
            values.append(rows.new_zeros(n, q, self.entries // d, d).scatter_add_(2, index, rows).flatten(2))
        return Gradients(values)


@dataclass
class Gradients:
    """The gradients themselves, a list of (n, q, entries), each formed with ``formed`` multiplications per sample."""

    values: list[Tensor]
    formed: int = 0

    @classmethod
    def of(cls, values: Tensor, *, folded: bool) -> "Gradients":
        """Make it from the gradients of several outputs (n, k, entries)."""
        return cls(list(values.split(1, dim=1)) if folded else [values])

    def some(self, which: slice) -> "Gradients":
        return Gradients([values[which] for values in self.values], self.formed)

    @property
    def numel(self) -> int:
        return sum(values.numel() for values in self.values)

    def only(self, output: int) -> "Gradients":
        return Gradients(_only(self.values, output), self.formed)

    def unfolded(self) -> "Gradients":
        return Gradients(_joined(self.values), self.formed)

    def gradients(self) -> "Gradients":
        return self


# Each has `some`, which selects samples, `only`, which selects an output of a list, `unfolded`, which makes the list an
# axis, `gradients`, which forms the gradients, and `numel`, the number of entries.
LeafFactors = Weight | Table | Gradients


class GramCost(NamedTuple):
    """Multiplications for the Gram matrix of n samples: the smaller of pairs·n² and formed·n + products·n².

    ``formed`` is also what the layer takes in a forward pass, per sample.
    """

    pairs: float
    formed: float
    products: float

    def of(self, samples: int, formed: float) -> float:
        """The cost for some samples, of which ``formed`` gradients are formed, some repeatedly."""
        pairs, products = (each * samples * samples for each in (self.pairs, self.products))
        return min(pairs, self.formed * formed + products)


def gram_cost(factors: LeafFactors) -> GramCost:
    """The cost of the Gram matrix of one leaf and one output."""
    if isinstance(factors, Weight):
        return GramCost(*outer_costs(factors.factors))
    if isinstance(factors, Table):
        T, d = factors.rows[0].shape[2:]
        return GramCost(T * T * d, 0.0, float("inf"))
    return GramCost(float("inf"), factors.formed, factors.values[0].shape[2])


def _joined(values: Sequence[Tensor]) -> list[Tensor]:
    """Make the outputs of a list (n, 1, …) an axis (n, k, …)."""
    return [torch.cat(list(values), 1)] if len(values) > 1 else list(values)


def _only(values: Sequence[Tensor], output: int) -> list[Tensor]:
    """Select an output; a list of one stands for all outputs."""
    return [values[output if len(values) > 1 else 0]]


def site_factors(
    site: Site, axis: SampleAxis, samples: int, gradients: Sequence[Tensor], *, folded: bool, result: Result | None
) -> LeafFactors:
    """The contribution of one use of a parameter, from the gradients B of each output at the operation's result."""
    if isinstance(site, Elementwise):
        factor = None if site.factor is None else site.factor()
        return Gradients(_listed([site.gradient(axis, samples, b, factor) for b in gradients], folded))
    if isinstance(site, Convolution) and site.forms_gradients(axis, gradients[0]):
        formed = _listed(site.gradients(axis, samples, gradients), folded)
        return Gradients(formed, site.multiplications(axis, gradients[0]))
    assert isinstance(site, (Outer, Lookup))
    moving = _listed([site.moving(axis, samples, b) for b in gradients], folded)
    if isinstance(site, Lookup):
        return Table(moving, site.rows(axis, samples), site.entries)
    fixed = [site.fixed(axis, samples)[:, None]]
    if not site.moving_rows:
        return Weight(Factors(fixed, moving))
    if result is not None:
        result = Result(site.moving(axis, samples, result.values)[:, None], result.bias)
    return Weight(Factors(moving, fixed), result)


def _listed(pieces: Sequence[Tensor], folded: bool) -> list[Tensor]:
    return [piece[:, None] for piece in pieces] if folded else [torch.stack(list(pieces), 1)]


def join(uses: Sequence[LeafFactors]) -> LeafFactors:
    """Add up the gradients of all uses of one parameter."""
    if len(uses) == 1:
        return uses[0]
    tables = [use for use in uses if isinstance(use, Table)]
    if len(tables) == len(uses):
        rows = [torch.cat(each, 2) for each in zip(*(table.rows for table in tables))]
        return Table(rows, torch.cat([table.indices for table in tables], 1), tables[0].entries)
    weights = [use.factors for use in uses if isinstance(use, Weight)]
    if len(weights) == len(uses) and len({(w.rows[0].shape[3:], w.cols[0].shape[3:]) for w in weights}) == 1:
        # Another use is the same as more positions.
        return Weight(Factors(_cat([w.rows for w in weights]), _cat([w.cols for w in weights])))
    values = zip(*(use.gradients().values for use in uses))
    return Gradients([torch.stack(each).sum(0) for each in values])


def _paired(rows: Sequence[Tensor], cols: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Pair rows and columns output by output; a list of one stands for all outputs."""
    outputs = max(len(rows), len(cols))
    return zip(*(list(side) * (outputs // len(side)) for side in (rows, cols)))


def _cat(sides: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Concatenate along the positions."""
    outputs, q = max(map(len, sides)), max(side[0].shape[1] for side in sides)
    listed = [list(side) * (outputs // len(side)) for side in sides]
    return [torch.cat([x.expand(-1, q, -1, -1, -1) for x in each], 2) for each in zip(*listed)]


def add_parts(
    out: dict[Part, Tensor], part: Part, first: LeafFactors, second: LeafFactors, *, weight_norm: WeightNormMap | None
) -> None:
    """Add ⟨∇_i, ∇_j⟩ to ``out[part]``, or for a weight w = g v/‖v‖ its two parts to direction and length.

    If both are the same object, only entries on and above the diagonal are valid (see `lightning_normtheory.ntk.gram`).
    """
    if weight_norm is None or (weight_norm.dim == 0 and _rows_from_b(first) and _rows_from_b(second)):
        first, second = _with_one_output(first, second)  # no sum over its units comes before that over the outputs
    upper = second is first
    if isinstance(first, Weight) and isinstance(second, Weight):
        if weight_norm is None:
            add_outer_gram(out[part], first.factors, second.factors, upper=upper)
        else:
            _add_weight_norm(out, first, second, weight_norm)
    elif isinstance(first, Table) and isinstance(second, Table):
        add_lookup_gram(out[part], (first.rows, second.rows), (first.indices, second.indices), upper=upper)
    else:
        mine = _by_part(part, first, weight_norm)
        theirs = mine if upper else _by_part(part, second, weight_norm)
        for name, values in mine.items():
            add_gram([Target(out[name])], values, theirs[name], upper=upper)


def _rows_from_b(factors: LeafFactors) -> bool:
    return isinstance(factors, Weight) and len(factors.factors.cols) == 1


def _with_one_output(first: LeafFactors, second: LeafFactors) -> tuple[LeafFactors, LeafFactors]:
    """Replace k outputs by one, where the factors from B differ by a number for each unit: x_h = m_h ∘ x_1.

    They do where the layer's result reaches the outputs through one entrywise nonlinearity, perhaps a mean over
    positions, and a linear layer, as that of the last hidden layer. Then
    Σ_h ⟨x_ih, x_jh⟩ = Σ_u (Σ_h m_hu m'_hu) x_i1u x_j1u, one product instead of k.
    """
    mine = _multiples(first)
    theirs = mine if second is first else _multiples(second)
    # Images of another size may have formed gradients instead of factors.
    if mine is None or theirs is None or type(first) is not type(second) or mine.shape != theirs.shape:
        return first, second
    squares = (mine * theirs).sum(0)
    if second is first:
        return (replaced := _first_output(first, squares.sqrt())), replaced
    return _first_output(first, squares), _first_output(second, torch.ones_like(squares))


def _lists(factors: LeafFactors) -> Sequence[Sequence[Tensor]]:
    if isinstance(factors, Weight):
        return factors.factors
    return [factors.values] if isinstance(factors, Gradients) else []


def _multiples(factors: LeafFactors) -> Tensor | None:
    """m (k, ·) with x_h = m_h ∘ x_1 for x (n, …, ·), up to rounding of every entry; ``None`` if there is none."""
    listed = [values for values in _lists(factors) if len(values) > 1]
    if len(listed) != 1:
        return None
    (outputs,) = listed
    sums = tuple(range(outputs[0].dim() - 1))
    for some in (slice(2), slice(None)):  # a look at two samples is enough for most layers
        base = outputs[0][some]
        squares = base.square().sum(sums)
        found = [torch.ones_like(squares)]
        for x in (x[some] for x in outputs[1:]):
            multiple = torch.where(squares > 0, (x * base).sum(sums) / squares, 0)
            rest = (x - multiple * base).abs_().amax(sums)
            # Each entry is a product of a few numbers, each rounded once.
            if not bool((rest <= _ROUNDINGS * torch.finfo(x.dtype).eps * x.abs().amax(sums)).all()):
                return None
            found.append(multiple)
    return torch.stack(found)


def _first_output(factors: LeafFactors, scale: Tensor) -> LeafFactors:
    """Keep the first output, times a scale."""
    lists = [[values[0] * scale] if len(values) > 1 else list(values) for values in _lists(factors)]
    return Weight(Factors(*lists), factors.result) if isinstance(factors, Weight) else Gradients(lists[0])


def _by_part(part: Part, factors: LeafFactors, weight_norm: WeightNormMap | None) -> dict[Part, list[Tensor]]:
    """The gradients (n·q, entries), output by output; for a weight w = g v/‖v‖ those in g and v, as far as trained."""
    values = [x.flatten(0, 1) for x in factors.gradients().values]
    if weight_norm is None:
        return {part: values}
    g, v = weight_norm.g, weight_norm.v
    pulled = [torch.vmap(weight_norm.pull)(x.unflatten(1, v.shape)) for x in values]
    trained: list[tuple[Part, Tensor]] = [("length", g), ("direction", v)]
    return {
        name: [x[i].reshape(len(x[i]), -1) for x in pulled] for i, (name, p) in enumerate(trained) if p.requires_grad
    }


def _add_weight_norm(out: dict[Part, Tensor], first: Weight, second: Weight, each: WeightNormMap) -> None:
    """For each unit let c = v̂·∂f/∂w and s = g/‖v‖: the gradient in g is c, that in v is s(∂f/∂w − c v̂), so

    length     Σ_u c_iu c_ju
    direction  Σ_u s_u²(⟨∂f_i/∂w_u, ∂f_j/∂w_u⟩ − c_iu c_ju)
    """
    upper = second is first
    units = _Units(each, first.factors)
    along = list(units.along(first))
    targets = [Target(out["length"])] if each.g.requires_grad else []
    if each.v.requires_grad:
        targets.append(Target(out["direction"], units.scale.square(), -1))
    if out["length"] is out["direction"] and len(targets) == 2:  # only the sum is wanted: one product
        targets = [Target(out["length"], 1 - units.scale.square())]
    add_gram(targets, along, along if upper else list(units.along(second)), upper=upper)
    if each.v.requires_grad:
        scales = {"row_scale": units.row_scale, "col_scale": units.col_scale}
        add_outer_gram(out["direction"], first.factors, second.factors, upper=upper, **scales)


class _Units:
    """The units of a WeightNorm among the entries (G, d, d') of a weight: its rows, an axis of its columns, or all.

    Attributes:
        scale: s (units,).
        row_scale, col_scale: s as a factor of the rows or of the columns; the other is ``None``.
    """

    def __init__(self, each: WeightNormMap, factors: Factors) -> None:
        (groups, rows), cols = factors.rows[0].shape[3:], factors.cols[0].shape[4]
        dtype = factors.rows[0].dtype
        self._shape = each.v.shape
        self._dim = None if each.dim == -1 else each.dim % each.v.dim()
        self._each, self._entries = each, (groups, rows, cols)
        self._g = each.g.detach().to(dtype)
        if self._dim == 0:
            self._g = self._g.reshape(groups, rows)
        self.scale = each.scale.to(dtype)
        self.row_scale: Tensor | None = None
        self.col_scale: Tensor | None = None
        if self._dim is None or self._dim == 0:
            self.row_scale = self.scale.view(-1) if self._dim is None else self.scale.view(groups, rows)
        else:
            sizes = [size if axis == self._dim else 1 for axis, size in enumerate(self._shape)][1:]
            self.col_scale = self.scale.view(sizes).expand(self._shape[1:]).flatten()

    @cached_property
    def _direction(self) -> Tensor:
        """v̂ (G, d, d'), as large as the weight: only if it is needed."""
        return self._each.direction.reshape(self._entries).to(self.scale.dtype)

    def along(self, weight: Weight) -> Iterator[Tensor]:
        """c (n·q, units), output by output."""
        rows, cols = weight.factors
        if self._dim == 0:
            for r, projected in _paired(rows, self._projected(weight)):
                c = r * projected
                yield (c[:, :, 0] if c.shape[2] == 1 else c.sum(2)).flatten(2).flatten(0, 1)
            return
        others = [axis + 1 for axis in range(1, len(self._shape)) if axis != self._dim]
        for r, c in _paired(rows, cols):
            entries = c * torch.einsum("nqtgd,gde->nqtge", r, self._direction)
            units = entries.sum((2, 3)).unflatten(2, self._shape[1:])
            units = units.sum(others) if others else units
            yield (units[..., None] if self._dim is None else units).flatten(0, 1)

    def _projected(self, weight: Weight) -> list[Tensor]:
        """v̂·c of each row (n, q, T, G, d).

        The layer has computed g times this; it is used unless a large bias has rounded it away.
        """
        cols = weight.factors.cols
        if weight.result is not None and len(cols) == 1:
            found = weight.result.values / self._g
            low, high = (float(each) for each in found.aminmax())
            if float((weight.result.bias.flatten() / self._g.flatten()).abs().max()) <= 8 * max(-low, high):
                return [found]  # never if some g is zero
        return [torch.einsum("nqtge,gde->nqtgd", c, self._direction) for c in cols]
