"""Power iteration and Lanczos on matrices with known spectra."""

import gc

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lightning_normtheory.hessian.eigenvalues import COLD_PRODUCTS
from lightning_normtheory.linalg.eigensolvers import lanczos, power_iteration

SOLVERS = {"power": power_iteration, "lanczos": lanczos}
METHODS = pytest.mark.parametrize("method", SOLVERS)

SPECTRA = {
    "dominant": [10.0, 8.0] + [1.0] * 50,
    "negative dominates": [-10.0, 5.0, 4.0] + [0.1] * 50,
    "two negative ones dominate": [-10.0, -9.0, 5.0, 4.0] + [0.1] * 50,
    "all negative": [-float(i) for i in range(1, 41)],
    "negative, rank one": [-3.0] + [0.0] * 30,
    "symmetric about zero": [7.0, -7.0, 3.0, -3.0] + [0.0] * 40,
    "nearly symmetric": [7.0, -7.01, 3.0, -3.0] + [0.0] * 40,
    "zero": [0.0] * 20,
    "one": [4.0],
    "one, negative": [-4.0],
    "double": [5.0, 5.0, 1.0] + [0.0] * 20,
    "bulk and outlier": [3.0, *torch.linspace(-1, 1, 200).tolist()],
}


def matrix(spectrum, seed=0, dtype=torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    q, _ = torch.linalg.qr(torch.randn(len(spectrum), len(spectrum), generator=generator, dtype=torch.float64))
    return (q * torch.tensor(spectrum, dtype=torch.float64) @ q.t()).to(dtype)


def solve(method, spectrum, which="algebraic", tol=1e-6, max_products=2000, seed=0, dtype=torch.float64, **options):
    """Return the result after checking what holds for every result, converged or not."""
    a = matrix(spectrum, seed, dtype)
    calls = []

    def product(v):
        calls.append(None)
        return a @ v

    start = torch.randn(len(spectrum), generator=torch.Generator().manual_seed(seed + 1), dtype=dtype)
    pair = SOLVERS[method](product, start, which=which, tol=tol, max_products=max_products, **options)
    rounding = 100 * torch.finfo(dtype).eps * max(1.0, max(map(abs, spectrum)))
    assert len(calls) == pair.products <= max_products
    assert abs(float(pair.vector.norm()) - 1) < rounding
    assert abs(float((a @ pair.vector - pair.value * pair.vector).norm()) - pair.residual) < rounding
    assert not pair.converged or pair.residual <= max(tol * abs(pair.value), rounding)
    # Theorem: some eigenvalue lies within the residual.
    assert min(abs(pair.value - value) for value in spectrum) <= pair.residual + rounding
    assert pair.asymmetry <= rounding
    return pair


@METHODS
@pytest.mark.parametrize("name", SPECTRA)
def test_both_ends_of_known_spectra(method, name):
    spectrum = SPECTRA[name]
    top = solve(method, spectrum)
    assert top.converged
    assert top.value == pytest.approx(max(spectrum), rel=1e-6, abs=1e-8)
    largest = solve(method, spectrum, "magnitude")
    assert largest.converged
    assert abs(largest.value) == pytest.approx(max(map(abs, spectrum)), rel=1e-6, abs=1e-8)
    if name != "bulk and outlier":  # its lower eigenvalues are too close for a residual of 1e-6
        bottom = solve(method, spectrum, "smallest")
        assert bottom.converged
        assert bottom.value == pytest.approx(min(spectrum), rel=1e-6, abs=1e-8)


@METHODS
@pytest.mark.parametrize("name", SPECTRA)
def test_float32(method, name):
    top = solve(method, SPECTRA[name], tol=1e-3, dtype=torch.float32)
    assert top.converged
    assert top.value == pytest.approx(max(SPECTRA[name]), rel=1e-4, abs=1e-4)


@METHODS
def test_a_budget_that_is_too_small_is_admitted(method):
    spectrum = torch.linspace(-1, 1, 200).tolist()
    for budget in (1, 2, 3, 7):
        pair = solve(method, spectrum, tol=1e-6, max_products=budget)
        assert (pair.converged, pair.products) == (False, budget)
        assert pair.value < 1
        assert pair.residual > 1e-3


@pytest.mark.parametrize("basis", [3, 4, 8])
@pytest.mark.parametrize("which", ["algebraic", "magnitude", "smallest"])
def test_restarts(basis, which):
    """A small basis is filled repeatedly: the result stays the same, the number of products grows."""
    spectrum = [3.0, -2.5, *torch.linspace(-1, 1, 100).tolist()]
    a = matrix(spectrum)
    start = torch.ones(len(spectrum), dtype=torch.float64)
    pair = lanczos(lambda v: a @ v, start, which=which, tol=1e-6, max_products=500, basis=basis)
    assert pair.converged
    assert pair.products > basis
    assert pair.value == pytest.approx(-2.5 if which == "smallest" else 3.0, rel=1e-9)
    assert float((a @ pair.vector - pair.value * pair.vector).norm()) == pytest.approx(pair.residual, abs=1e-12)


CLUSTER = st.tuples(st.integers(-10, 10), st.integers(1, 6), st.sampled_from([0.0, 1e-9, 1e-4, 0.01]))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    clusters=st.lists(CLUSTER, min_size=1, max_size=8),
    basis=st.sampled_from([3, 4, 5, 6, 8, 12, 24]),
    which=st.sampled_from(["algebraic", "magnitude", "smallest"]),
    tol=st.sampled_from([1e-2, 1e-3]),
    seed=st.integers(0, 1000),
)
def test_restarts_on_clustered_multiple_and_negative_spectra(clusters, basis, which, tol, seed):
    """Value, vector and residual are those of the dense matrix for every basis, and it is the wanted cluster."""
    spectrum = [value + i * width for value, count, width in clusters for i in range(count)]
    pair = solve("lanczos", spectrum, which, tol, max_products=300, seed=seed, basis=basis)
    found, wanted = {
        "algebraic": (pair.value, max(spectrum)),
        "magnitude": (abs(pair.value), max(map(abs, spectrum))),
        "smallest": (-pair.value, -min(spectrum)),
    }[which]
    assert found <= wanted + 1e-9
    if basis >= 6:
        assert pair.converged
        assert found == pytest.approx(wanted, abs=0.06)  # the width of a cluster


def test_lanczos_keeps_as_many_vectors_as_its_basis_has():
    """Tensors of the size of the start that are alive when a product is asked for: the basis alone."""
    size, alive, count = 4099, [], 0
    diagonal = torch.linspace(0, 1, size) ** 8

    def product(v):
        nonlocal count
        count += 1
        if not basis <= count <= basis + 2:  # around the restart: to look at all objects takes long
            return diagonal * v
        gc.collect()
        storages = {
            each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
            for each in gc.get_objects()
            if issubclass(type(each), torch.Tensor) and each.numel() % size == 0 and each.numel() > 0
        }
        alive.append(sum(storages.values()) / diagonal.nbytes)
        return diagonal * v

    for basis in (4, 6, 24):
        alive.clear()
        count = 0
        lanczos(product, lambda: torch.ones(size), which="algebraic", tol=1e-9, max_products=30, basis=basis)
        assert max(alive) - 1 == basis  # and the diagonal


@METHODS
def test_a_map_that_is_not_symmetric_is_noticed(method):
    a = matrix(SPECTRA["dominant"])
    a[0] *= 1.5
    start = torch.ones(len(a), dtype=torch.float64)
    pair = SOLVERS[method](lambda v: a @ v, start, which="algebraic", tol=1e-6, max_products=100)
    assert pair.asymmetry > 0.01


def test_lanczos_needs_fewer_products_than_power_iteration():
    spectrum = [3.0, 2.7, *torch.linspace(-2.5, 2.5, 200).tolist()]
    assert solve("lanczos", spectrum).products < solve("power", spectrum).products / 2


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    top=st.floats(-5, 5),
    gap=st.floats(0.3, 5),
    bulk=st.lists(st.floats(0, 10), min_size=1, max_size=30),
    method=st.sampled_from(list(SOLVERS)),
    seed=st.integers(0, 1000),
)
def test_the_largest_eigenvalue_of_any_spectrum_with_a_gap(top, gap, bulk, method, seed):
    spectrum = [top, *(top - gap - below for below in bulk)]
    assume(abs(top) > 1e-3)
    pair = solve(method, spectrum, tol=1e-4, seed=seed)
    assert pair.converged
    # Kato-Temple: the eigenvalue errs by at most residual²/gap.
    assert abs(pair.value - top) <= pair.residual**2 / (gap - pair.residual) + 1e-10


def test_a_cold_start_along_the_second_eigenvector_finds_the_first():
    """On this spectrum three products of Lanczos fail with nearly every noise; the five of a cold start do not."""
    spectrum = torch.tensor([4.9425, 4.7194, 0.55, 0.426, 0.284, *[0.1] * 7], dtype=torch.float64)
    gradient = torch.tensor([-0.0063, 0.926, 0.216, -0.143, -0.111, *[0.1] * 7], dtype=torch.float64)
    failures = {3: 0, COLD_PRODUCTS: 0}
    for seed in range(50):
        noise = torch.randn(12, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        start = gradient / gradient.norm() + 0.3 * noise / noise.norm()
        for products in failures:
            options = {"which": "algebraic", "tol": 1e-2, "max_products": 100, "at_least": products}
            pair = lanczos(lambda v: spectrum * v, start, **options)
            failures[products] += pair.converged and pair.value < 0.97 * 4.9425
    assert failures[3] > 40
    assert failures[COLD_PRODUCTS] == 0
