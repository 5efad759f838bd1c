"""The tangent kernel's directions and lengths by BatchNorm (DGM, eq. 2.2), against blocks of the full Jacobian."""

from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from lightning_normtheory import empirical_ntk
from lightning_normtheory.measuring.processes import Processes
from lightning_normtheory.ntk.empirical import tangent_kernel_of_batches
from lightning_normtheory.scaling import BatchNormSplit

from support.models import Graph, tie
from support.oracles import contract, jacobian, scale_invariant_pairs, unit_indices
from support.passes import backward_passes
from support.theory.kernel_cases import PARTS, SINGULAR, assert_equal, whole

pytestmark = SINGULAR


class Case(NamedTuple):
    """A network, the shape of a sample, and by hand the parameters that are directions and lengths."""

    make: object
    shape: tuple
    directions: str
    lengths: str

    def build(self, *, seed=0, n=7, train=True, eps=None):
        """The model in float64 with arbitrary affine parameters and statistics, and n samples."""
        torch.manual_seed(seed)
        model = self.make().double().train(train)
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2.0)
                module.eps = module.eps if eps is None else eps
                if module.affine:
                    nn.init.normal_(module.weight)
                    nn.init.normal_(module.bias)
        return model, torch.randn(n, *self.shape, dtype=torch.float64)


def paper_bn(*, affine=True):
    """The network of paper BN: f = a·relu(c∘BN(Vx)), where γ is c."""
    return nn.Sequential(
        nn.Linear(4, 5, bias=False), nn.BatchNorm1d(5, affine=affine), nn.ReLU(), nn.Linear(5, 1, bias=False)
    )


def residual():
    """Two convolutions with BatchNorm, and a third on the shortcut, as in a ResNet."""
    return Graph(
        lambda m, x: m.out((m.bn2(m.conv2(m.bn1(m.conv1(x)).relu())) + m.bn3(m.short(x))).relu().mean((2, 3))),
        conv1=nn.Conv2d(2, 3, 3, padding=1, bias=False),
        bn1=nn.BatchNorm2d(3),
        conv2=nn.Conv2d(3, 3, 3, padding=1, bias=False),
        bn2=nn.BatchNorm2d(3),
        short=nn.Conv2d(2, 3, 1, bias=False),
        bn3=nn.BatchNorm2d(3),
        out=nn.Linear(3, 2),
    )


def mobile():
    """Expand, depthwise, project: each with BatchNorm."""
    return nn.Sequential(
        *(nn.Conv2d(2, 4, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU6()),
        *(nn.Conv2d(4, 4, 3, groups=4, bias=False), nn.BatchNorm2d(4), nn.ReLU6()),
        *(nn.Conv2d(4, 2, 1), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 2)),
    )


def grouped():
    return nn.Sequential(
        *(nn.Conv1d(4, 4, 2, groups=2), nn.BatchNorm1d(4), nn.Tanh()),
        *(nn.ConvTranspose1d(4, 2, 2, groups=2), nn.BatchNorm1d(2), nn.Flatten(), nn.Linear(8, 2)),
    )


def mixed():
    """The first WeightNorm feeds a BatchNorm, the second does not, and the last BatchNorm is fed by a plain layer."""
    return nn.Sequential(
        *(weight_norm(nn.Linear(4, 5)), nn.BatchNorm1d(5), nn.Tanh(), weight_norm(nn.Linear(5, 4)), nn.Tanh()),
        *(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 2)),
    )


def two_normalizations():
    """One layer feeds two BatchNorms."""
    return Graph(
        lambda m, x: m.out((m.a(h := m.first(x)) * m.b(h).tanh()).tanh()),
        first=nn.Linear(4, 3),
        a=nn.BatchNorm1d(3),
        b=nn.BatchNorm1d(3),
        out=nn.Linear(3, 2),
    )


def tied():
    """Two layers of one weight, a BatchNorm each."""
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    tie(first, second)
    return Graph(
        lambda m, x: m.out(torch.cat([m.a(m.first(x)).tanh(), m.b(m.second(x + 1)).tanh()], 1)),
        first=first,
        second=second,
        a=nn.BatchNorm1d(4),
        b=nn.BatchNorm1d(4),
        out=nn.Linear(8, 2),
    )


def concatenated():
    """Two layers feed one BatchNorm."""
    return Graph(
        lambda m, x: m.out(m.bn(torch.cat([m.a(x), m.b(x)], 1)).tanh()),
        a=nn.Linear(4, 2),
        b=nn.Linear(4, 3, bias=False),
        bn=nn.BatchNorm1d(5),
        out=nn.Linear(5, 2),
    )


def unfed():
    """BatchNorms of the input, after another BatchNorm and after a sum: no layer's scale is undone."""
    return Graph(
        lambda m, x: m.out(m.third(m.a(h := m.second(m.first(x))) + h).tanh()),
        first=nn.BatchNorm1d(4),
        second=nn.BatchNorm1d(4),
        a=nn.Linear(4, 4),
        third=nn.BatchNorm1d(4),
        out=nn.Linear(4, 2),
    )


def partly():
    """A BatchNorm of a layer's output beside the input."""
    return Graph(
        lambda m, x: m.out(m.bn(torch.cat([m.a(x), x], 1)).tanh()),
        a=nn.Linear(4, 2),
        bn=nn.BatchNorm1d(6),
        out=nn.Linear(6, 2),
    )


def frozen():
    model = nn.Sequential(
        *(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()),
        nn.Linear(4, 2),
    )
    model[0].weight.requires_grad_(False)
    model[4].weight.requires_grad_(False)
    return model


CASES = {
    "paper BN": Case(paper_bn, (4,), "0.weight", "1.weight"),
    "without γ": Case(lambda: paper_bn(affine=False), (4,), "0.weight", ""),
    "residual": Case(residual, (2, 3, 3), "conv1.weight conv2.weight short.weight", "bn1.weight bn2.weight bn3.weight"),
    "mobile": Case(mobile, (2, 4, 4), "0.weight 3.weight 6.weight", "1.weight 4.weight 7.weight"),
    "grouped": Case(grouped, (4, 4), "0.weight 3.weight", "1.weight 4.weight"),
    "sequence": Case(
        lambda: nn.Sequential(nn.Conv1d(3, 4, 2), nn.BatchNorm1d(4), nn.Tanh(), nn.Flatten(), nn.Linear(16, 2)),
        (3, 5),
        "0.weight",
        "1.weight",
    ),
    "mixed": Case(
        mixed,
        (4,),
        "0.parametrizations.weight.original1 3.parametrizations.weight.original1 5.weight",
        "0.parametrizations.weight.original0 1.weight 3.parametrizations.weight.original0 6.weight",
    ),
    "two normalizations": Case(two_normalizations, (4,), "first.weight", "a.weight b.weight"),
    "tied": Case(tied, (4,), "first.weight", "a.weight b.weight"),
    "concatenated": Case(concatenated, (4,), "a.weight b.weight", "bn.weight"),
    "unfed": Case(unfed, (4,), "", ""),
    "partly": Case(partly, (4,), "a.weight", "bn.weight"),
    "frozen": Case(frozen, (4,), "3.weight", "1.weight"),
}
ALL = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def blocks(model, x, case, outputs):
    """The kernel and its parts from the columns of the full Jacobian that the case names by hand."""
    _, jacobians = jacobian(model, x)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    parts = {part: [] for part in PARTS[1:]}
    columns = torch.arange(jacobians.shape[2])
    for name, mine in zip(parameters, columns.split([p.numel() for p in parameters.values()]), strict=True):
        part = "direction" if name in case.directions.split() else "length" if name in case.lengths.split() else "rest"
        parts[part] += mine.tolist()
    return {
        "kernel": contract(jacobians, outputs),
        **{part: contract(jacobians[:, :, chosen], outputs) for part, chosen in parts.items()},
    }


@pytest.mark.parametrize("outputs", ["full", "trace", "sum"])
@pytest.mark.parametrize("batch_stats", [True, False])
@ALL
def test_parts_are_the_blocks_of_weights_and_scales(case, batch_stats, outputs):
    model, x = case.build(train=batch_stats)
    expected = blocks(model, x, case, outputs)
    found = empirical_ntk(model.train(not batch_stats), x, outputs=outputs, batch_stats=batch_stats, layers=True)
    assert_equal(found, expected)
    total = found.direction + found.length + found.rest
    assert (total - found.kernel).norm() <= 1e-10 * found.kernel.norm()
    for part, named in (("direction", case.directions), ("length", case.lengths)):
        assert {name for name, each in found.part_of.items() if each == part} == set(named.split())
        assert bool(getattr(found, part).any()) == bool(named)
    for part in PARTS[1:]:
        summed = sum(getattr(layer, part) for layer in found.layers.values())
        torch.testing.assert_close(summed, getattr(found, part), rtol=1e-12, atol=1e-14)


@ALL
def test_the_table_agrees_with_the_definition(case):
    """What scaling a unit changes tells the same layers and BatchNorms as the names in the table."""
    model, x = case.build(n=12)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    pairs = scale_invariant_pairs(model, (x,))
    for position, named in enumerate((case.directions, case.lengths)):
        expected = {name for name in named.split() if "parametrizations" not in name}
        assert {f"{pair[position]}.weight" for pair in pairs} & trained == expected


def test_reasons_are_kept():
    model, x = CASES["unfed"].build()
    found = empirical_ntk(model, x)
    assert dict(found.untraced) == {
        "first": "it is fed by the argument 'x'",
        "second": "it follows the BatchNorm 'first'",
        "third": "add mixes it with another value",
    }
    model, x = CASES["partly"].build()
    assert set(empirical_ntk(model, x).untraced) == {"bn"}
    model, x = CASES["mixed"].build()
    assert dict(empirical_ntk(model, x).untraced) == {}


class Branching(nn.Module):
    """A forward pass that cannot be traced, around BatchNorms of which one can be."""

    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        self.second, self.bn = nn.Linear(3, 3), nn.BatchNorm1d(3)

    def forward(self, x):
        h = self.block(x)
        return self.bn(self.second(h.tanh() if float(h.detach().sum()) > -1e9 else h))


@pytest.mark.parametrize("batch_stats", [True, False])
def test_what_cannot_be_traced_is_rest(batch_stats):
    case = Case(Branching, (4,), "block.0.weight", "block.1.weight")
    model, x = case.build(train=batch_stats)
    found = empirical_ntk(model, x, batch_stats=batch_stats)
    assert_equal(found, blocks(model, x, case, "trace"))
    assert dict(found.untraced) == {"bn": "no traceable forward pass reaches it"}


# Networks whose outputs depend on the directions through a BatchNorm alone. In "mixed" WeightNorm does it for one.
SCALE_FREE = [name for name, case in CASES.items() if case.directions and name not in ("frozen", "tied")]


@pytest.mark.parametrize("name", [name for name in SCALE_FREE if name != "mixed"])
def test_gradients_in_directions_are_orthogonal_to_them_with_batch_statistics(name):
    """⟨w_j, ∂f/∂w_j⟩ = 0 for each unit j: f does not depend on the scale of w_j. With running statistics it does."""
    case = CASES[name]
    largest = {}
    for train in (True, False):
        model, x = case.build(train=train, eps=1e-200)
        output = model(x).flatten()
        weights = {name: dict(model.named_parameters())[name] for name in case.directions.split()}
        cosines = []
        for value in output:
            for name, gradient in zip(weights, torch.autograd.grad(value, weights.values(), retain_graph=True)):
                for unit in unit_indices(model.get_submodule(name.removesuffix(".weight"))):
                    w, slope = weights[name].detach()[unit], gradient[unit]
                    cosines.append(float((w * slope).sum().abs() / (w.norm() * gradient.norm()).clamp_min(1e-30)))
        largest[train] = max(cosines)
    assert largest[True] <= 1e-10
    assert largest[False] >= 1e-2


@pytest.mark.parametrize("name", SCALE_FREE)
def test_scaled_directions_divide_their_kernel_by_the_square(name):
    """w → c w divides K_direction by c² and leaves K_length, DGM's dependence on α; not with running statistics."""
    case, c = CASES[name], 3.0
    for train in (True, False):
        model, x = case.build(train=train, eps=1e-200)
        before = empirical_ntk(model, x)
        with torch.no_grad():
            for each in case.directions.split():
                model.get_parameter(each).mul_(c)
        after = empirical_ntk(model, x)
        scale = before.kernel.norm()
        errors = [
            float((expected - found).norm() / scale)
            for expected, found in (
                (before.direction / c**2, after.direction),
                (before.length, after.length),
                (before.rest, after.rest),
            )
        ]
        if train:
            assert max(errors) <= 1e-10
        else:
            assert max(errors) >= 1e-2


def test_batch_norm_undoes_the_length_of_a_weight_norm_before_it():
    model, x = CASES["mixed"].build(eps=1e-200)
    layers = empirical_ntk(model, x, layers=True).layers
    assert layers["0"].length.norm() <= 1e-20 * layers["1"].length.norm()
    held = empirical_ntk(model, x, layers=True, batch_stats=False).layers
    assert held["0"].length.norm() >= 1e-3 * held["1"].length.norm()


@pytest.mark.parametrize("batch_stats", [True, False])
@ALL
def test_the_kernel_is_as_without_the_split_at_the_same_cost(case, batch_stats):
    """No pass is added, and the sums, which are in another order, differ by rounding."""
    model, x = case.build()
    results = []
    for split in (None, BatchNormSplit()):
        with backward_passes() as passes:
            found = tangent_kernel_of_batches(model, whole([x]), batch_stats=batch_stats, split=split)
        results.append((found, passes.count))
    (found, passes), (plain, expected) = results
    assert passes == expected
    assert (found.kernel - plain.kernel).norm() <= 1e-14 * plain.kernel.norm()
    assert found.lengths == plain.lengths


def test_weight_norm_alone_is_not_traced_and_keeps_its_bits(monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(weight_norm(nn.Linear(4, 5)), nn.Tanh(), weight_norm(nn.Linear(5, 2))).double()
    x = torch.randn(6, 4, dtype=torch.float64)
    plain = tangent_kernel_of_batches(model, whole([x]), split=BatchNormSplit())
    monkeypatch.setattr("lightning_normtheory.scaling.split.feeding_layers", None)
    found = empirical_ntk(model, x)
    assert all(torch.equal(getattr(found, part), getattr(plain, part)) for part in PARTS)


@pytest.mark.parametrize("batch_stats", [True, False])
def test_random_directions_estimate_each_part(batch_stats):
    """The mean over all vectors of signs is exact: with two outputs these are two, up to a sign."""
    model, x = CASES["residual"].build()
    exact = empirical_ntk(model, x, batch_stats=batch_stats)
    wanted = {(1.0, 1.0), (1.0, -1.0)}
    singles = [empirical_ntk(model, x, batch_stats=batch_stats, directions=1, seed=seed) for seed in range(8)]
    kinds = {}
    for each in singles:
        torch.testing.assert_close(each.kernel, each.by_direction[0])
        kinds.setdefault(round(float(each.kernel.trace()), 9), each)
    assert len(kinds) == len(wanted)
    for part in PARTS:
        mean = sum(getattr(each, part) for each in kinds.values()) / 2
        torch.testing.assert_close(mean, getattr(exact, part), rtol=1e-10, atol=1e-12)


class Share(Processes):
    """One of two processes, which does not hear of the other's sums."""

    count = 2

    def __init__(self, rank):
        self.rank = rank


def test_the_shares_of_processes_add_up_part_by_part():
    model, x = CASES["mixed"].build(train=False)
    whole_kernel = tangent_kernel_of_batches(model, whole([x]))
    shares = [tangent_kernel_of_batches(model, whole([x]), processes=Share(rank), refine=False) for rank in (0, 1)]
    for part in PARTS:
        summed = sum(getattr(share, part) for share in shares)
        torch.testing.assert_close(summed, getattr(whole_kernel, part), rtol=1e-12, atol=1e-12)


def test_a_float32_model_is_split_in_float64_too():
    """Parameters that are lent in another precision keep their parts."""
    model, x = CASES["residual"].build()
    found = empirical_ntk(model.float(), x.float(), dtype=torch.float64)
    assert found.dtype == torch.float64
    assert_equal(found, blocks(model.double(), x.float().double(), CASES["residual"], "trace"))
