"""What the papers' experiments must show, on the recipes' own networks and data, at a size for tests."""

import math
from statistics import fmean

import pytest
import torch
from torch import nn

from lightning_normtheory import batchnorm_margin, empirical_ntk, infinite_width_kernels
from lightning_normtheory.ntk import kernel_change
from lightning_normtheory.recipes.datasets.images import Images
from lightning_normtheory.recipes.datasets.synthetic import GaussianClasses, Sphere
from lightning_normtheory.recipes.models import BatchNormNet, BottleneckNet, RegimesNet, WideNet
from lightning_normtheory.theorems import batchnorm_form


def lambda_min(kernel):
    return float(torch.linalg.eigvalsh(kernel)[0])


def descend(model, data, lr, steps):
    """Run gradient descent with the model's own loss; yield after every quarter of the steps."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        model.loss(model(data.x), data.y).backward()
        optimizer.step()
        if step % (steps // 4) == 0:
            yield step


class Softmax(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x).softmax(1)


def kernel_changes(make, networks, steps, seeds=2):
    """Compute ΔK of each network built from a model, averaged over the seeds."""
    data = GaussianClasses()
    changes = []
    for seed in range(seeds):
        torch.manual_seed(seed)
        model = make()
        views = [network(model) for network in networks]
        start = [empirical_ntk(view, data.x, outputs="full").kernel for view in views]
        largest = empirical_ntk(model, data.x, outputs="full").lambda_max
        found = [0.0] * len(views)
        for _ in descend(model, data, 0.5 * 2 * len(data.x) / (model.curvature * largest), steps):
            now = [empirical_ntk(view, data.x, outputs="full").kernel for view in views]
            found = [max(old, kernel_change(k, k0)) for old, k, k0 in zip(found, now, start, strict=True)]
        changes.append(found)
    return [fmean(column) for column in zip(*changes, strict=True)]


def itself(model):
    return model


def test_wide_networks_with_a_linear_output_become_linear_and_others_do_not():
    linear, softmax = {}, {}
    for width in (100, 3000):
        linear[width], softmax[width] = kernel_changes(lambda m=width: WideNet(width=m), [itself, Softmax], 200)
    assert math.log(linear[3000] / linear[100]) / math.log(30) < -0.4
    assert min(softmax.values()) > 0.3
    assert softmax[3000] > softmax[100] / 2  # a fall like m^(−0.4) would leave a quarter


def test_a_swish_at_the_output_keeps_the_kernel_moving():
    changes = [kernel_changes(lambda m=m: WideNet(width=m, output="swish"), [itself], 200)[0] for m in (100, 3000)]
    assert min(changes) > 0.3


def test_a_narrow_bottleneck_keeps_the_kernel_moving():
    (narrow,) = kernel_changes(lambda: BottleneckNet(width=1000, bottleneck=3), [itself], 1000, seeds=3)
    (wide,) = kernel_changes(lambda: BottleneckNet(width=1000, bottleneck=100), [itself], 400, seeds=1)
    assert narrow > 0.3
    assert wide < narrow / 2


def test_without_biases_the_bottleneck_network_cannot_tell_the_classes_apart():
    """f(cx) = c·f(x) for c > 0: the class around 0 gets the signs of the other two."""
    model = BottleneckNet(width=50, bottleneck=5, bias=False)
    x = torch.randn(7, 1)
    torch.testing.assert_close(model(3 * x), 3 * model(x))
    assert not torch.allclose(BottleneckNet(width=50, bottleneck=5)(3 * x), 3 * model(x))


def regime(alpha, width=8192):
    torch.manual_seed(0)
    data, model = Sphere(n=32), RegimesNet(width=width, alpha=alpha)
    return data, model, empirical_ntk(model, data.x)


def test_directions_carry_the_kernel_for_small_alpha_and_lengths_for_large():
    data = Sphere(n=32)
    V, G, _ = infinite_width_kernels(data.x)
    crossover = math.sqrt(lambda_min(V) / lambda_min(G))
    assert 5 < crossover < 50
    for alpha in (crossover / 3, crossover * 3):
        _, _, kernel = regime(alpha)
        assert (kernel.direction_lambda_min > kernel.length_lambda_min) == (alpha < crossover)


@pytest.mark.parametrize("alpha", [0.1, 1.0, 10.0, 100.0])
def test_the_kernel_stays_above_the_threshold_and_the_residual_contracts(alpha):
    data, model, kernel = regime(alpha)
    V, G, _ = infinite_width_kernels(data.x)
    threshold = lambda_min(V) / (2 * alpha**2) if alpha <= 1 else lambda_min(G) / 2
    lr = 0.5 / kernel.lambda_max
    residual = 2 * float(model.loss(model(data.x), data.y).detach())
    for step in descend(model, data, lr, 50):
        now = 2 * float(model.loss(model(data.x), data.y).detach())
        assert now <= (1 - lr * threshold) ** step * residual
        assert empirical_ntk(model, data.x).lambda_min > threshold


@pytest.mark.parametrize("alpha", [0.3, 3.0])
def test_without_weight_norm_the_same_function_is_trained_in_other_parameters(alpha):
    """The start is that of any α, and the kernel is H = V + G (DGM, Proposition 1)."""
    models = []
    for normalized in (True, False):
        torch.manual_seed(0)
        models.append(RegimesNet(width=512, alpha=alpha, normalized=normalized).double())
    x = Sphere(n=16).x.double()
    normalized, plain = (empirical_ntk(model, x) for model in models)
    torch.testing.assert_close(models[0](x), models[1](x), rtol=1e-5, atol=1e-6)
    unnormalized = alpha**2 * normalized.direction + normalized.length
    torch.testing.assert_close(plain.kernel, unnormalized, rtol=1e-4, atol=1e-6)
    assert float(plain.direction.abs().max()) == 0
    assert [name for name, p in models[1].named_parameters() if p.requires_grad] == ["hidden.weight"]


def test_the_margin_of_the_scales_is_tiny_and_that_of_the_outputs_grows_with_the_width():
    images = Images(classes=[3, 5], scale="ball", flatten=True, targets="sign", limit=300)
    images.setup("fit")
    x, y = images.train[:]
    gammas = {}
    for width in (128, 512, 2048):
        torch.manual_seed(0)
        model = BatchNormNet(width=width)
        form = batchnorm_form(model, x, model(x))
        gammas[width] = [batchnorm_margin(f, y).value / width**0.5 for f in (form.features_a, form.features_c)]
    assert gammas[128][0] < gammas[512][0] < gammas[2048][0]
    assert all(c < a / 10 for a, c in gammas.values())
