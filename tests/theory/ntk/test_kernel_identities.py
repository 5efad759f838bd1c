"""Identities and bounds from the papers for the tangent kernel, its parts, and other quantities."""

import math
import warnings
from collections import UserDict
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from lightning_normtheory import empirical_ntk, infinite_width_kernels, rsc_ratio
from lightning_normtheory.measuring.preserve import preserve_state
from lightning_normtheory.model.batches import SampleBatch
from lightning_normtheory.ntk import kernel_change, label_alignment
from lightning_normtheory.ntk.empirical import tangent_kernel_of_batches
from lightning_normtheory.ntk.rank import count_distinct
from lightning_normtheory.theorems.papers.dgm import DGMForm, dgm_form

from support.models import MODELS, length
from support.theory.hessian_cases import sum_square
from support.theory.theorem_cases import DGMNetwork, unit_samples

SMALL = [
    "mlp",
    "wn-hook-dim-0",
    "wn-parametrized-dim-1",
    "wn-conv-hook-dim-0",
    "bn",
    "tied",
    "attention",
    "matrix-output",
]


@pytest.fixture(autouse=True)
def _small_models_have_singular_kernels():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The kernel has")
        yield


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", SMALL)
def test_the_mean_gradient_is_a_sum_over_the_kernel(name, train):
    """‖ḡ‖² = 1ᵀK1/(nk)² ≥ λ_min(K)/(nk), and R = (4/n)·rᵀKr/‖r‖² with the residuals r, so it lies between
    4λ_min/n and 4λ_max/n."""
    case = MODELS[name]
    model, (x, y) = case.make().train(train), case.data()
    K = empirical_ntk(model, x, outputs="full")
    measured = rsc_ratio(model, sum_square, [(x, y)])
    rows, n = len(K.kernel), len(x)
    assert measured.mean_predictor_grad_norm_sq == pytest.approx(float(K.kernel.sum()) / rows**2, rel=1e-10)
    assert measured.mean_predictor_grad_norm_sq >= K.lambda_min / rows - K.floor
    with preserve_state(model):
        r = (model(x) - y).detach().flatten()
    assert measured.ratio == pytest.approx(4 / n * float(r @ K.kernel @ r / (r @ r)), rel=1e-10)
    assert 4 / n * (K.lambda_min - K.floor) <= measured.ratio <= 4 / n * K.lambda_max * (1 + 1e-12)


@pytest.mark.slow
@given(seed=st.integers(0, 10**6), n=st.integers(1, 6), width=st.integers(1, 8))
@settings(max_examples=60, deadline=None)
def test_trace_and_sum_against_all_outputs(seed, n, width):
    """λ_min(trace) ≥ λ_min(full) and λ_min(sum)/k ≥ λ_min(full): neither certifies that K is positive definite."""
    torch.manual_seed(seed)
    model = nn.Sequential(weight_norm(nn.Linear(3, width)), nn.Tanh(), nn.Linear(width, 3)).double()
    x = torch.randn(n, 3, dtype=torch.float64)
    full, trace, total = (empirical_ntk(model, x, outputs=outputs) for outputs in ("full", "trace", "sum"))
    blocks = full.kernel.view(n, 3, n, 3)
    torch.testing.assert_close(trace.kernel, torch.einsum("ihjh->ij", blocks) / 3, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(total.kernel, blocks.sum((1, 3)), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(full.over_samples, trace.kernel, rtol=1e-10, atol=1e-12)
    assert trace.lambda_min >= full.lambda_min - full.floor
    assert total.lambda_min / 3 >= full.lambda_min - full.floor
    for each in (full, trace, total):  # every part is a Gram matrix
        for part in (each.direction, each.length, each.rest):
            assert float(torch.linalg.eigvalsh(part)[0]) >= -each.floor


@pytest.mark.parametrize("alpha", [0.1, 0.5, 1.0, 2.0, 10.0])
def test_proposition_1_for_every_alpha(alpha):
    """V + G = H, the kernel of the network without WeightNorm, whatever α is, with V = α² K_direction."""
    x, network = unit_samples(), DGMNetwork(10, 64, alpha)
    K = empirical_ntk(network, x)
    plain = nn.Sequential(nn.Linear(10, 64, bias=False), nn.ReLU(), nn.Linear(64, 1, bias=False)).double()
    with torch.no_grad():
        plain[0].weight.copy_(network.hidden.weight)
        plain[2].weight.copy_(network.out.weight).requires_grad_(False)
    H = empirical_ntk(plain, x)
    torch.testing.assert_close(alpha**2 * K.direction + K.length, H.kernel, rtol=1e-10, atol=1e-13)
    assert K.lambda_min >= K.direction_lambda_min + K.length_lambda_min - K.floor
    # The kernels cross at α_× = √(λ_min(V)/λ_min(G)), which does not depend on α.
    V_least, G_least = (float(torch.linalg.eigvalsh(part)[0]) for part in (alpha**2 * K.direction, K.length))
    assert K.crossover * alpha == pytest.approx((V_least / G_least) ** 0.5, rel=1e-6)


def test_infinite_width_is_the_limit_of_wide_networks():
    """A network of width m deviates by O(1/√m): 4 times the width, half the distance."""
    x = unit_samples()
    V, G, H = infinite_width_kernels(x)
    torch.testing.assert_close(V + G, H)
    distances = []
    for m in (40_000, 160_000, 640_000):
        K = empirical_ntk(DGMNetwork(10, m, 2.0), x)
        torch.testing.assert_close(4 * K.direction, V, rtol=0, atol=20 / m**0.5 * float(V.abs().max()))
        torch.testing.assert_close(K.length, G, rtol=0, atol=20 / m**0.5 * float(G.abs().max()))
        distances.append(float((K.kernel - V / 4 - G).norm()))
    assert distances[2] < 0.5 * distances[0]


@pytest.mark.parametrize("d", [2, 5])
def test_infinite_width_is_an_average_over_gaussian_units(d):
    """E[σ'(v·x_i)σ'(v·x_j)] x_i·x_j and E[(v·x_i)₊(v·x_j)₊/‖v‖²], the second by Monte Carlo over 2·10⁶ directions. Its
    standard error is below 1/√(2·10⁶) = 7e-4 times the norms; five of them are allowed."""
    x = torch.tensor([[1.0] + [0.0] * (d - 1), [3.0, 4.0] + [0.0] * (d - 2), [-1.0, 0.1] + [0.0] * (d - 2)]).double()
    _, G, H = infinite_width_kernels(x)
    v = torch.randn(2_000_000, d, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    z = (v @ x.t()).relu()
    scale = x.norm(dim=1)[:, None] * x.norm(dim=1)
    active = (z > 0).double()
    assert ((active.t() @ active / len(v)) * (x @ x.t()) - H).abs().max() <= 5 * 7e-4 * scale.max()
    unit = z / v.norm(dim=1, keepdim=True)
    assert ((unit.t() @ unit / len(v) - G).abs() / scale).max() <= 5 * 7e-4


def test_infinite_width_at_angles_where_the_arc_cosine_is_bad():
    x = torch.tensor([[1.0, 0.0], [1.0, 1e-9], [-1.0, 1e-9], [0.0, 0.0]], dtype=torch.float64)
    _, G, H = infinite_width_kernels(x)
    assert float(H[0, 0] - H[0, 1]) == pytest.approx(1e-9 / (2 * math.pi), rel=1e-5)
    assert float(H[0, 2]) == pytest.approx(-1e-9 / (2 * math.pi), rel=1e-5)
    assert float(G[0, 2]) == pytest.approx(0.0, abs=1e-12)
    assert not H[3].any()
    assert not G[3].any()
    with pytest.raises(ValueError, match=r"\(n, d\), but got \(2, 3, 4\)"):
        infinite_width_kernels(torch.zeros(2, 3, 4))


@pytest.mark.parametrize("alpha", [0.5, 1.0, 3.0])
def test_the_constants_of_the_theorems(alpha):
    x = unit_samples()
    network = DGMNetwork(10, 20_000, alpha)
    form = dgm_form(network, x, network(x))
    assert isinstance(form, DGMForm)
    V, G, _ = infinite_width_kernels(x)
    assert form.alpha == pytest.approx(alpha)
    assert form.lambda_0 == pytest.approx(float(torch.linalg.eigvalsh(V)[0]))
    assert form.mu_0 == pytest.approx(float(torch.linalg.eigvalsh(G)[0]))
    expected = form.lambda_0 / (2 * alpha**2) if alpha <= 1 else form.mu_0 / 2
    assert form.threshold == expected
    assert empirical_ntk(network, x).lambda_min > form.threshold


def changed(change):
    network = DGMNetwork(10, 16, 1.0)
    with torch.no_grad():
        change(network)
    return network


@pytest.mark.parametrize(
    ("network", "reason"),
    [
        (changed(lambda m: setattr(m, "activation", torch.tanh)), "two-layer ReLU"),
        (changed(lambda m: m.out.weight.mul_(2)), "±1/√m"),
        (changed(lambda m: m.out.requires_grad_(True)), "other parameters"),
        (changed(lambda m: length(m.hidden)[0].mul_(2)), "one α"),
        (changed(lambda m: length(m.hidden).requires_grad_(False)), "other parameters"),
        (changed(lambda m: setattr(m, "hidden", nn.Linear(10, 16, bias=False).double())), "0 weights"),
        (changed(lambda m: setattr(m, "hidden", weight_norm(nn.Linear(10, 16).double()))), "without bias"),
        (
            changed(lambda m: setattr(m, "out", nn.Linear(16, 2, bias=False).requires_grad_(False).double())),
            "output layer",
        ),
    ],
)
def test_why_a_network_has_not_the_form(network, reason):
    x = unit_samples()
    found = dgm_form(network, x, network(x))
    assert isinstance(found, str)
    assert reason in found


@pytest.mark.parametrize(("alpha", "steps"), [(0.5, 60), (3.0, 60)])
def test_the_least_eigenvalue_stays_above_the_threshold(alpha, steps):
    """DGM, Theorems 4.1 and 4.2, over gradient descent on ½Σ(f − y)², with the rate that they promise."""
    x = unit_samples()
    y = torch.tensor([1.0, -1.0, 0.5, -0.5, 1.0, -1.0], dtype=torch.float64)
    network = DGMNetwork(10, 8_000, alpha)
    form = dgm_form(network, x, network(x))
    rate = 0.2 / empirical_ntk(network, x).lambda_max
    parameters = [p for p in network.parameters() if p.requires_grad]
    losses = []
    for _ in range(steps):
        residual = network(x)[:, 0] - y
        losses.append(float(residual.detach().square().sum()))
        gradients = torch.autograd.grad(residual.square().sum() / 2, parameters)
        with torch.no_grad():
            for p, gradient in zip(parameters, gradients):
                p -= rate * gradient
    assert empirical_ntk(network, x).lambda_min > form.threshold
    assert losses[-1] <= losses[0] * (1 - rate * form.threshold) ** (steps - 1)


def test_change():
    K = torch.eye(3, dtype=torch.float64)
    assert kernel_change(K, K) == 0.0
    assert kernel_change(3 * K, K) == pytest.approx(2.0)


@given(seed=st.integers(0, 10**6), classes=st.integers(2, 4))
@settings(max_examples=40, deadline=None)
def test_alignment_is_a_cosine(seed, classes):
    generator = torch.Generator().manual_seed(seed)
    y = torch.cat([torch.arange(classes), torch.randint(0, classes, (5,), generator=generator)])
    J = torch.randn(len(y), 4, generator=generator, dtype=torch.float64)
    one_hot = nn.functional.one_hot(y).double()
    C = torch.eye(len(y)).double() - 1 / len(y)
    K, T = C @ J @ J.t() @ C, C @ one_hot @ one_hot.t() @ C
    expected = float((K * T).sum() / (K.norm() * T.norm()))
    assert label_alignment(J @ J.t(), y) == pytest.approx(expected, abs=1e-12)
    assert label_alignment(J @ J.t(), one_hot) == pytest.approx(expected, abs=1e-12)
    assert -1e-12 <= expected <= 1 + 1e-12
    assert label_alignment(one_hot @ one_hot.t() + 3.0, y) == pytest.approx(1.0)


def test_kernels_of_other_sizes_are_refused():
    K = torch.eye(6).double()
    with pytest.raises(ValueError, match=r"same samples and outputs, but got \(6, 6\) and \(3, 3\)"):
        kernel_change(K, torch.eye(3).double())
    with pytest.raises(ValueError, match="over_samples"):
        label_alignment(K, torch.arange(3))


def test_alignment_with_constant_labels_is_undefined():
    assert math.isnan(label_alignment(torch.eye(3).double(), torch.zeros(3, dtype=torch.long)))


def test_distinct_samples_are_counted_by_their_bits():
    x = torch.randn(64, 10, generator=torch.Generator().manual_seed(0))
    assert count_distinct([SampleBatch.whole(x)]) == 64
    assert count_distinct([SampleBatch.whole(x), SampleBatch.whole(x[:10])]) == 64
    assert count_distinct([SampleBatch(x[:40], 40, 20), SampleBatch(x[:40], 40, 30)]) == 30
    assert count_distinct([SampleBatch.whole({"a": x, "b": torch.zeros(64, 2, dtype=torch.bool)})]) == 64
    nearly = x.clone()
    nearly[1] = torch.nextafter(x[0], torch.tensor(10.0))
    assert count_distinct([SampleBatch.whole(nearly)]) == 64


class Opaque:
    """A batch that only its own methods can take apart."""

    __slots__ = ("x",)

    def __init__(self, x):
        self.x = x


ONES = torch.ones(4, 2)


@pytest.mark.parametrize(
    ("x", "distinct"),
    [
        (ONES, 1),
        ({"x": ONES, "id": ["a", "b", "a", "c"]}, 3),
        ({"x": ONES, "id": (1, 2, 3, 4), "scale": 2.0, "unit": "m", "none": None, "zero": torch.tensor(0)}, 4),
        (UserDict(x=ONES), 1),
        ([ONES, SimpleNamespace(y=torch.arange(4))], 4),
        (SimpleNamespace(x=ONES, kind="a"), 1),
        (Opaque(torch.randn(4, 2)), None),
        ({"x": ONES, "graph": Opaque(torch.randn(4, 2))}, None),
        ({"y": torch.zeros(4), "nodes": torch.randn(9, 2)}, None),
        ([torch.randn(3), torch.randn(2), torch.randn(5), torch.randn(1)], None),
        ("text", None),
        ({}, None),
    ],
)
def test_samples_that_cannot_be_told_apart_are_not_equal(x, distinct):
    assert count_distinct([SampleBatch(x, 4, 4)]) == distinct


def test_a_batch_of_objects_has_no_known_duplicates():
    """Used to say: the rank is at most 1, the other samples are duplicates."""

    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))

        def forward(self, batch):
            return self.net(batch.x)

    torch.manual_seed(0)
    model, x = Reader().double(), torch.randn(12, 3).double()
    expected = empirical_ntk(model.net, x).kernel
    opaque = tangent_kernel_of_batches(model, [SampleBatch(Opaque(x), 12, 12)])
    assert torch.allclose(opaque.kernel, expected, rtol=1e-12)
    assert (opaque.duplicates, opaque.rank_limit, opaque.deficiency) == (0, 12, "")
    assert opaque.coupled
    assert "or the batch cannot be divided" in opaque.remark
    # A record of tensors is divided, as a dict is: nothing is slower.
    record = tangent_kernel_of_batches(model, [SampleBatch(SimpleNamespace(x=x), 12, 4)])
    assert torch.allclose(record.kernel, expected[:4, :4], rtol=1e-12)
    assert not record.coupled
    assert not record.one_by_one
    twice = SimpleNamespace(x=torch.cat([x, x[:1]]))
    assert tangent_kernel_of_batches(model, [SampleBatch(twice, 13, 13)]).duplicates == 1
