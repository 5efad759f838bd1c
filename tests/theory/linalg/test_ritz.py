"""Ritz pairs in the span of a few vectors, against dense algebra."""

import pytest
import torch

from lightning_normtheory.linalg.ritz import RitzBasis


def symmetric(size, seed=0):
    A = torch.randn(size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return A + A.t()


def filled(H, vectors):
    basis = RitzBasis()
    for vector in vectors.clone():
        basis.normalize(vector)
        basis.add(vector, H @ vector)
    return basis


@pytest.mark.parametrize("count", [1, 2, 5, 9])
def test_pairs_are_those_of_the_projected_matrix(count):
    H, vectors = symmetric(9), torch.randn(count, 9, dtype=torch.float64)
    basis, Q = filled(H, vectors), torch.linalg.qr(vectors.t())[0]
    values, coefficients = basis.pairs()
    expected = torch.linalg.eigvalsh(Q.t() @ H @ Q).flip(0)
    torch.testing.assert_close(torch.tensor(values, dtype=torch.float64), expected)
    for i in range(count):
        v = basis.vector(coefficients[:, i])
        assert float(v.norm()) == pytest.approx(1)
        torch.testing.assert_close(basis.residual(values[i], coefficients[:, i]), H @ v - values[i] * v)
    steps = basis.steps(values, coefficients)
    for i, step in enumerate(steps):
        v = basis.vector(coefficients[:, i])
        torch.testing.assert_close(step, v + (H @ v - values[i] * v) / basis.scale)


def test_a_vector_with_a_known_image_needs_no_product():
    H, vectors = symmetric(12), torch.randn(3, 12, dtype=torch.float64)
    expected, _ = filled(H, vectors).pairs()
    basis = filled(H, vectors[:2])
    unit = vectors[2] / vectors[2].norm()
    basis.add_with_image(unit.clone(), H @ unit)
    assert basis.pairs()[0] == pytest.approx(expected)
    unit = vectors[1] + vectors[2]
    unit /= unit.norm()
    basis.add_with_image(unit, H @ unit)
    assert len(basis) == 3  # nothing new


def test_a_restart_keeps_the_leading_pairs():
    H = symmetric(12)
    basis = filled(H, torch.randn(5, 12, dtype=torch.float64))
    values, _ = basis.pairs()
    basis.restart(2)
    kept, coefficients = basis.pairs()
    assert kept == pytest.approx(values[:2])
    v = basis.vector(coefficients[:, 0])
    assert float(v @ H @ v) == pytest.approx(values[0])
    torch.testing.assert_close(basis.last_image(), H @ basis._vectors[-1])


def test_asymmetry_is_seen():
    H = symmetric(6)
    H[2, 0] += 0.5
    basis = filled(H, torch.eye(6, dtype=torch.float64))
    assert basis.asymmetry == pytest.approx(0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_vector_in_the_span_is_refused(dtype):
    generator = torch.Generator().manual_seed(0)
    vectors = torch.linalg.qr(torch.randn(6, 3, generator=generator, dtype=dtype))[0].t().contiguous()
    basis = filled(symmetric(6).to(dtype), vectors)
    for _ in range(100):
        assert not basis.normalize(torch.randn(3, generator=generator, dtype=dtype) @ vectors)
    assert not basis.normalize(torch.zeros(6, dtype=dtype))
    assert basis.normalize(torch.randn(6, generator=generator, dtype=dtype))


def test_an_image_that_is_not_finite_is_refused():
    basis = RitzBasis()
    with pytest.raises(FloatingPointError, match="finite"):
        basis.add(torch.ones(1), torch.tensor([torch.nan]))
