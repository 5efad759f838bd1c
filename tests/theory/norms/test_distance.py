"""‖θ − θ₀‖: exact for small models, an unbiased estimate with its standard error for large ones."""

import pytest
import torch

from lightning_normtheory.norms.distance import displacement, kept_entries


def parameters(*shapes, seed=0, scale=1.0):
    torch.manual_seed(seed)
    return {f"p{i}": scale * torch.randn(shape) for i, shape in enumerate(shapes)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_small_model_is_exact(dtype):
    start = {name: p.to(dtype) for name, p in parameters((3, 4), (5,), ()).items()}
    kept = kept_entries(start)
    now = {name: p + 1 for name, p in start.items()}
    expected = sum(float((now[n].double() - start[n].double()).square().sum()) for n in now) ** 0.5
    assert displacement(now, kept) == (pytest.approx(expected, rel=1e-12), 0.0)
    assert all(len(kept[name]) == p.numel() and kept[name].dtype == dtype for name, p in start.items())


def test_the_start_is_a_copy():
    theta = parameters((4,))
    kept = kept_entries(theta)
    theta["p0"].add_(1)
    assert displacement(theta, kept).distance == pytest.approx(2.0, rel=1e-6)


def test_a_large_model_is_estimated_within_its_error():
    """In about 95 % of the directions within two standard errors, and the mean of the squares is right."""
    shapes, within, relative = ((300, 300), (200, 100), (300,)), 0, []
    for seed in range(100):
        start, step = parameters(*shapes, seed=seed), parameters(*shapes, seed=1000 + seed, scale=0.1)
        step["p0"][seed % 300] *= 5  # rows that move more
        kept = kept_entries(start, most=5000)
        assert sum(map(len, kept.values())) < 8000
        found = displacement({name: start[name] + step[name] for name in start}, kept)
        exact = sum(float(p.double().square().sum()) for p in step.values()) ** 0.5
        within += abs(found.distance - exact) <= 2 * found.error
        relative.append((found.distance / exact) ** 2)
    assert within >= 90  # the chance of fewer is below 2 % for 95 %
    mean, deviation = torch.tensor(relative).mean(), torch.tensor(relative).std()
    assert abs(float(mean) - 1) <= 4 * float(deviation) / 10
    assert float(deviation) < 0.1


def test_nothing_moved_and_nothing_there():
    theta = parameters((2000,), (0,))
    assert displacement(theta, kept_entries(theta)) == (0.0, 0.0)
    assert displacement(theta, kept_entries(theta, most=10)) == (0.0, 0.0)
