"""λ_min of fewer samples: principal blocks of the kernel, against kernels of these samples."""

import itertools
import math

import pytest
import torch
from torch import nn

from lightning_normtheory import empirical_ntk


def network(outputs=2):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, outputs)).double()


@pytest.mark.parametrize("outputs", ["full", "trace", "sum"])
def test_a_block_is_the_kernel_of_its_samples(outputs):
    model, x = network(), torch.randn(16, 6, dtype=torch.float64)
    whole = empirical_ntk(model, x, outputs=outputs)
    for n in (4, 8, 16):
        alone = empirical_ntk(model, x[:n], outputs=outputs)
        assert whole.lambda_min_of(n) == pytest.approx(alone.lambda_min, rel=1e-9, abs=2 * whole.floor)
    assert whole.lambda_min_of(16) == whole.lambda_min
    quarter = empirical_ntk(model, x[:4], outputs=outputs).lambda_min
    assert whole.lambda_min_decay == pytest.approx(math.log(quarter / whole.lambda_min) / math.log(4), rel=1e-6)


@pytest.mark.parametrize("seed", range(20))
def test_it_never_grows_with_the_samples(seed):
    """Interlacing, up to the error bound of λ_min."""
    torch.manual_seed(seed)
    found = empirical_ntk(network(), torch.randn(24, 6, dtype=torch.float64))
    values = [found.lambda_min_of(n) for n in range(1, 25)]
    assert all(later <= before + found.floor for before, later in itertools.pairwise(values))


def test_no_decay_where_it_is_not_known():
    x = torch.randn(16, 6, dtype=torch.float64)
    assert math.isnan(empirical_ntk(network(), x[:7]).lambda_min_decay)
    assert math.isnan(empirical_ntk(network(), torch.cat([x[:8], x[:8]])).lambda_min_decay)  # singular
    coupled = nn.Sequential(nn.Linear(6, 20), nn.BatchNorm1d(20), nn.Tanh(), nn.Linear(20, 1)).double()
    assert math.isnan(empirical_ntk(coupled, x, batch_stats=True).lambda_min_decay)
