"""Behind the last nonlinearity the k outputs need one product, not k; a network that is not linear there needs all."""

import pytest
import torch
from torch import nn

from lightning_normtheory import empirical_ntk
from lightning_normtheory.measuring.processes import Processes
from lightning_normtheory.ntk import gram, memory
from lightning_normtheory.ntk.empirical import tangent_kernel_of_batches
from lightning_normtheory.ntk.factors import Factors, Gradients, Weight, add_parts

from support.oracles import contract, dense_kernel, jacobian
from support.theory.kernel_cases import assert_equal, whole

weight_norm = nn.utils.parametrizations.weight_norm
OUTPUTS = 5


def multi_layer(activation=nn.Tanh, last=nn.Identity, dim=0):
    first, second = weight_norm(nn.Linear(4, 6)), weight_norm(nn.Linear(6, 7), dim=dim)
    for each in (first, second):  # lengths that are not the norms
        each.parametrizations.weight.original0.data.uniform_(0.5, 2)
    return nn.Sequential(first, activation(), second, activation(), last(), nn.Linear(7, OUTPUTS)).double()


def pooled():
    body = nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), weight_norm(nn.Conv2d(6, 4, 2)), nn.ReLU()
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, OUTPUTS)).double()


def products(monkeypatch, model, x):
    """The number of products of matrices that the kernel takes, and the kernel."""
    count, product = [], gram._add_product
    with monkeypatch.context() as patch:
        patch.setattr(gram, "_add_product", lambda *factors: (count.append(1), product(*factors))[1])
        return empirical_ntk(model, x), len(count)


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (multi_layer, (4,)),
        (lambda: multi_layer(dim=1), (4,)),
        (lambda: multi_layer(dim=None), (4,)),
        (lambda: multi_layer(nn.ReLU), (4,)),
        (pooled, (2, 4, 4)),
    ],
    ids=["tanh", "units are columns", "one unit", "relu", "convolutions"],
)
@pytest.mark.parametrize("limit", [None, 1500])
def test_the_kernel_is_that_of_the_jacobian(make, shape, limit, monkeypatch):
    if limit is not None:  # in several portions
        monkeypatch.setattr(memory, "MEMORY_LIMIT", 8 * limit)
        monkeypatch.setattr(memory, "_SMALL", 8 * limit)
    torch.manual_seed(0)
    model, x = make().eval(), torch.randn(11, *shape, dtype=torch.float64)
    assert_equal(empirical_ntk(model, x), dense_kernel(model, x, "trace"))


def test_products_are_saved_only_where_it_is_linear(monkeypatch):
    torch.manual_seed(0)
    x = torch.randn(9, 4, dtype=torch.float64)
    found = {}
    for last in (nn.Identity, lambda: nn.Softmax(1)):
        model = multi_layer(last=last)
        kernel, found[last] = products(monkeypatch, model, x)
        assert_equal(kernel, dense_kernel(model, x, "trace"))
    linear, other = found.values()
    # Of the weight, of its units' projections and of the bias.
    assert other - linear == 3 * (OUTPUTS - 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_difference_beyond_rounding_is_kept(dtype):
    """One entry of 3000 is moved by 1e-5 or 1e-12 of itself: the sum over the outputs has it."""
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(30, 1, 100, generator=generator, dtype=dtype)
    values = [multiple * base for multiple in torch.randn(4, 100, generator=generator, dtype=dtype)]
    values[2][17, 0, 5] *= 1 + 1e3 * torch.finfo(dtype).eps
    gradients = Gradients(values)
    out = torch.zeros(30, 30, dtype=torch.float64)
    add_parts({"rest": out}, "rest", gradients, gradients, weight_norm=None)
    expected = torch.zeros(30, 30, dtype=dtype)
    for x in values:
        expected.addmm_(x[:, 0], x[:, 0].t())
    assert torch.equal(out.triu(), expected.double().triu())


@pytest.mark.parametrize("moving", ["rows", "cols"])
def test_dead_units_and_other_samples(moving):
    """A unit without gradients in all samples, or only in those of one side."""
    generator = torch.Generator().manual_seed(0)
    multiples = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    sides = []
    for dead in ([0], [0, 1]):
        base = torch.randn(5, 1, 3, 1, 6, generator=generator, dtype=torch.float64)
        base[..., dead] = 0
        other = [torch.randn(5, 1, 3, 1, 2, generator=generator, dtype=torch.float64)]
        listed = [multiple * base for multiple in multiples]
        sides.append(Weight(Factors(listed, other) if moving == "rows" else Factors(other, listed)))
    first, second = sides
    out = torch.zeros(5, 5, dtype=torch.float64)
    add_parts({"rest": out}, "rest", first, second, weight_norm=None)
    mine, theirs = (torch.stack(each.gradients().values).flatten(2) for each in (first, second))
    torch.testing.assert_close(out, torch.einsum("hip,hjp->ij", mine, theirs), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("zero", [True, False], ids=["zero head", "random head"])
@pytest.mark.parametrize("norm", [weight_norm, lambda layer: layer], ids=["WeightNorm", "plain"])
def test_images_of_two_sizes(norm, zero):
    """The gradients of the large images are formed, those of the small ones are not."""
    torch.manual_seed(0)
    pool = nn.AdaptiveAvgPool2d(1), nn.Flatten()
    model = nn.Sequential(norm(nn.Conv2d(8, 8, 3, groups=2)), nn.Tanh(), *pool, nn.Linear(8, 3)).double()
    if zero:
        nn.init.zeros_(model[-1].weight)
    sizes = [torch.randn(3, 8, size, size, dtype=torch.float64) for size in (4, 9)]
    expected = contract(torch.cat([jacobian(model, x)[1] for x in sizes]), "trace")
    found = tangent_kernel_of_batches(model, whole(sizes), outputs="trace")
    assert (found.kernel - expected).norm() <= 1e-12 * expected.norm()


class Share(Processes):
    """One of several processes, which does not hear of the others' sums."""

    def __init__(self, rank, count):
        self.rank, self.count = rank, count


@pytest.mark.parametrize("norm", [weight_norm, lambda layer: layer], ids=["WeightNorm", "plain"])
@pytest.mark.parametrize("samples", [1, 2, 3])
def test_more_processes_than_rows(norm, samples):
    torch.manual_seed(0)
    model = nn.Sequential(norm(nn.Linear(5, 7)), nn.Tanh(), nn.Linear(7, 3)).double()
    x = torch.randn(samples, 5, dtype=torch.float64)
    shares = [
        tangent_kernel_of_batches(model, whole([x]), full=2, processes=Share(r, 4), refine=False) for r in range(4)
    ]
    alone = tangent_kernel_of_batches(model, whole([x]), full=2, refine=False)
    torch.testing.assert_close(sum(share.kernel for share in shares), alone.kernel, rtol=1e-12, atol=1e-14)
    found = [share.full.kernel for share in shares if share.full is not None]
    if samples > 1:  # of no more samples than there are
        torch.testing.assert_close(sum(found), alone.full.kernel, rtol=1e-12, atol=1e-14)
