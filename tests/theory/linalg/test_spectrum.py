"""Compare extreme eigenvalues of large matrices with a full decomposition."""

import pytest
import torch

from lightning_normtheory.linalg import spectrum
from lightning_normtheory.linalg.spectrum import largest_eigenvalue, smallest_eigenvalue

N = 120


def matrix(values) -> torch.Tensor:
    """A symmetric matrix with these eigenvalues."""
    Q, _ = torch.linalg.qr(torch.randn(N, N, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    return (Q * values) @ Q.t()


SPECTRA = {
    "spread": torch.logspace(-8, 0, N),
    "close at the bottom": torch.cat([torch.tensor([1.0, 1.001, 1.002]), torch.linspace(1.01, 50, N - 3)]),
    "double at the bottom": torch.cat([torch.tensor([1e-3, 1e-3]), torch.linspace(0.1, 5, N - 2)]),
    "one large": torch.cat([torch.linspace(0.5, 1.0, N - 1), torch.tensor([1e6])]),
    "all equal": torch.full((N,), 3.0),
}


@pytest.fixture(autouse=True)
def _large(monkeypatch):
    monkeypatch.setattr(spectrum, "_DENSE", 10)


@pytest.mark.parametrize("values", SPECTRA.values(), ids=SPECTRA.keys())
def test_without_a_decomposition(values):
    values = values.double()
    K = matrix(values)
    K = (K + K.t()) / 2
    top = float(values.max())
    assert largest_eigenvalue(K) == pytest.approx(top, rel=1e-9)
    # As accurate as a decomposition: the rounding of the matrix itself, or 1e-6 of the value.
    assert smallest_eigenvalue(K, top) == pytest.approx(float(values.min()), rel=1e-6, abs=N * 2.3e-16 * top)


@pytest.mark.parametrize("least", [0.0, -1e-12, -1e-9])
def test_singular_and_slightly_indefinite_matrices(least):
    """Rounding makes a kernel of low rank slightly indefinite."""
    values = torch.cat([torch.full((5,), least), torch.linspace(1.0, 10.0, N - 5)]).double()
    K = matrix(values)
    K = (K + K.t()) / 2
    exact = float(torch.linalg.eigvalsh(K)[0])
    assert smallest_eigenvalue(K, 10.0) == pytest.approx(exact, abs=1e-10 + abs(least))


def test_small_matrices_are_decomposed(monkeypatch):
    monkeypatch.setattr(spectrum, "_DENSE", 1000)
    K = matrix(SPECTRA["spread"].double())
    values = torch.linalg.eigvalsh(K)
    assert smallest_eigenvalue(K, 1.0) == float(values[0])
    assert largest_eigenvalue(K) == float(values[-1])


def test_what_is_not_finite_has_no_eigenvalues():
    K = torch.full((20, 20), float("inf"), dtype=torch.float64)
    assert largest_eigenvalue(K) != largest_eigenvalue(K)
    assert smallest_eigenvalue(K, 1.0) != smallest_eigenvalue(K, 1.0)


def test_one_row():
    K = torch.tensor([[2.0]], dtype=torch.float64)
    assert smallest_eigenvalue(K, 2.0) == largest_eigenvalue(K) == 2.0


def test_zero():
    K = torch.zeros(N, N, dtype=torch.float64)
    assert largest_eigenvalue(K) == 0.0
    assert smallest_eigenvalue(K, 0.0) == 0.0
