"""Compare Gram matrices with sums over samples, outputs, groups and positions, entry by entry."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_normtheory.ntk import gram
from lightning_normtheory.ntk.gram import Factors, Target, add_gram, add_lookup_gram, add_outer_gram
from lightning_normtheory.ntk.sample_axis import SampleAxis, find_sample_axis

sizes = st.integers(1, 4)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(n=sizes, m=sizes, d=sizes, outputs=sizes, rows=st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_several_metrics_at_once(n, m, d, outputs, rows):
    xs, ys = [random(n, d, seed=h) for h in range(outputs)], [random(m, d, seed=10 + h) for h in range(outputs)]
    metric = random(d, seed=99).abs()
    plain, weighted = torch.ones(2, n, m, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gram, "_TILE_ROWS", rows)
        add_gram([Target(plain), Target(weighted, metric, -1)], xs, ys, upper=False)
    torch.testing.assert_close(plain, 1 + sum(x @ y.t() for x, y in zip(xs, ys)))
    torch.testing.assert_close(weighted, 1 - sum((x * metric) @ y.t() for x, y in zip(xs, ys)))


@given(
    n=sizes,
    m=sizes,
    positions=sizes,
    other_positions=sizes,
    groups=st.integers(1, 2),
    d=sizes,
    e=sizes,
    which=st.sampled_from(["neither", "rows", "cols", "both"]),
    axis=st.booleans(),
    by_positions=st.booleans(),
    symmetric=st.booleans(),
    budget=st.sampled_from([1, 200, 2**20]),
)
@settings(max_examples=300, deadline=None)
def test_outer_products(n, m, positions, other_positions, groups, d, e, which, axis, by_positions, symmetric, budget):
    """Outputs on either factor or none, in a list or along an axis, scaled, computed both ways, with any tile size."""
    k = 1 if which == "neither" else 3

    def side(samples, T, features, has_outputs, seed):
        q, listed = (k if axis and has_outputs else 1), (k if not axis and has_outputs else 1)
        return [random(samples, q, T, groups, features, seed=seed + h) for h in range(listed)]

    def factors(samples, T, seed):
        rows = side(samples, T, d, which in ("rows", "both"), seed)
        return Factors(rows, side(samples, T, e, which in ("cols", "both"), seed + 50))

    first = factors(n, positions, 0)
    second = first if symmetric else factors(m, other_positions, 200)
    row_scale, col_scale = random(groups, d, seed=7), random(e, seed=8)

    def gradients(each):
        """(samples, outputs, entries)"""
        found = []
        for h in range(k):
            r, c = (x[h if len(x) > 1 else 0][:, h if x[0].shape[1] > 1 else 0] for x in each)
            found.append(torch.einsum("ntgd,ntge->ngde", r * row_scale, c * col_scale).flatten(1))
        return torch.stack(found, 1)

    x, y = gradients(first), gradients(second)
    expected = x.flatten(0, 1) @ y.flatten(0, 1).t() if axis else torch.einsum("ihp,jhp->ij", x, y)
    out = torch.zeros_like(expected)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gram, "_cost_of_positions", lambda *_: 0 if by_positions else 2)
        patch.setattr(gram, "_cost_of_gradients", lambda *_: 1)
        patch.setattr(gram, "_TILE_BYTES", budget)
        add_outer_gram(out, first, second, upper=symmetric, row_scale=row_scale, col_scale=col_scale)
    difference = out - expected
    assert (difference.triu() if symmetric else difference).abs().max() < 1e-11


@given(n=sizes, m=sizes, positions=sizes, d=sizes, outputs=sizes, axis=st.booleans(), symmetric=st.booleans())
@settings(max_examples=60, deadline=None)
def test_lookups(n, m, positions, d, outputs, axis, symmetric):
    def table(samples, seed):
        shape = (samples, outputs if axis else 1, positions, d)
        rows = [random(*shape, seed=seed + h) for h in range(1 if axis else outputs)]
        generator = torch.Generator().manual_seed(seed)
        return rows, torch.randint(0, 3, (samples, positions), generator=generator)

    def gradients(rows, indices):
        found = []
        for each in rows:
            full = torch.zeros(len(indices), each.shape[1], 3, d, dtype=torch.float64)
            for i in range(len(indices)):
                for p in range(positions):
                    full[i, :, indices[i, p]] += each[i, :, p]
            found.append(full)
        return torch.cat(found, 1).flatten(2)

    first, second = table(n, 0), table(m, 100)
    second = first if symmetric else second
    x, y = gradients(*first), gradients(*second)
    expected = x.flatten(0, 1) @ y.flatten(0, 1).t() if axis else torch.einsum("ihp,jhp->ij", x, y)
    out = torch.zeros_like(expected)
    add_lookup_gram(out, (first[0], second[0]), (first[1], second[1]), upper=symmetric)
    difference = out - expected
    assert (difference.triu() if symmetric else difference).abs().max() < 1e-12


def test_the_cheaper_way_is_taken():
    """Many positions and few entries, or few positions and many entries (T·O·D + n·O·D against n·T²(D + O))."""
    calls = []
    for T, d, expected in ((64, 4, "gradients"), (1, 64, "positions"), (2, 256, "positions"), (256, 16, "gradients")):
        factors = Factors([random(16, 1, T, 1, d)], [random(16, 1, T, 1, d)])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gram, "_add_by_positions", lambda *_: calls.append("positions"))
            patch.setattr(gram, "_add_by_gradients", lambda *_: calls.append("gradients"))
            add_outer_gram(torch.zeros(16, 16), factors, factors, upper=True)
        assert calls.pop() == expected, (T, d)


@given(
    samples=st.integers(2, 3),
    entries=sizes,
    others=st.lists(st.integers(1, 6), max_size=2),
    position=st.integers(0, 2),
    major=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_the_axis_of_the_samples_is_found(samples, entries, others, position, major):
    """Found from gradients that are multiplied by one factor for each sample."""
    position = min(position, len(others))
    truth = SampleAxis(position, entries, major or entries == 1)
    shape = [*others[:position], samples * entries, *others[position:]]
    gradient = random(*shape)
    factors = 2.0 ** torch.arange(samples).double()
    scaled = gradient.clone()
    for i in range(samples):
        truth.in_front(scaled, samples)[i] *= factors[i]
    assert find_sample_axis(gradient, scaled, factors, range(len(shape))) == truth


def test_an_axis_that_cannot_be_told_is_not_guessed():
    factors = torch.tensor([1.0, 2.0, 4.0])
    dead = torch.zeros(3, 3)  # no gradient at all, and two axes of the right length
    assert find_sample_axis(dead, dead, factors, (0, 1)) is None
    assert find_sample_axis(dead, dead, factors, (0,)) == SampleAxis(0, 1, True)
    mixed = torch.ones(6)
    assert find_sample_axis(mixed, 3 * mixed, factors, (0,)) is None
    assert find_sample_axis(torch.ones(4), torch.ones(4), factors, (0,)) is None
    assert find_sample_axis(torch.ones(4), torch.ones(4), factors, ()) is None


def test_another_number_of_samples_is_refused():
    with pytest.raises(ValueError, match="Expected 3 samples of 2 entries, but got 5"):
        SampleAxis(0, 2, True).in_front(torch.zeros(5), 3)
