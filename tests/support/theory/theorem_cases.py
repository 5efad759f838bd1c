"""Networks of the papers' own forms, their data, and a fit that trains one."""

import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.data import DataLoader, TensorDataset

from support.lit import Classifier, rows, trainer
from support.models import direction, length
from support.theory.bound_cases import Times


def paper_network(width, depth, norms, activation=nn.Tanh, seed=0):
    """WN's own: WeightNorm without bias, g = 1/√m fixed, a unit vector at the output."""
    torch.manual_seed(seed)
    modules, features = [], 3
    for _ in range(depth):
        layer = weight_norm(nn.Linear(features, width, bias=False))
        v = layer.parametrizations.weight.original1
        v.data = norms * nn.functional.normalize(torch.randn(v.shape), dim=1)
        layer.parametrizations.weight.original0.data.fill_(width**-0.5)
        layer.parametrizations.weight.original0.requires_grad_(False)
        modules += [layer, activation()]
        features = width
    head = nn.Linear(width, 1, bias=False)
    head.weight.data = nn.functional.normalize(torch.randn(1, width), dim=1)
    return nn.Sequential(*modules, head).double()


def square(outputs, y):
    return (outputs - y).square().sum(1).mean()


def unit(n=20, d=3):
    return nn.functional.normalize(torch.randn(n, d, dtype=torch.float64), dim=1)


def targets(n=20):
    return torch.rand(n, 1, dtype=torch.float64)


def rsc_network(width=16, activation=nn.Tanh):
    """f = vᵀα_L/√m, α_l = φ(W_l α_{l−1}/√m_{l−1}), with ‖v‖ = 1 and ‖x‖ = √d."""
    layers = []
    for inputs in (3, width):
        layers += [Times(inputs**-0.5), nn.Linear(inputs, width, bias=False), activation()]
        nn.init.normal_(layers[-2].weight)
    head = nn.Linear(width, 1, bias=False)
    head.weight.data = nn.functional.normalize(torch.randn(1, width))
    return nn.Sequential(*layers, Times(width**-0.5), head).double()


def dgm_network(width=64):
    layer, head = weight_norm(nn.Linear(3, width, bias=False)), nn.Linear(width, 1, bias=False)
    v, g = layer.parametrizations.weight.original1, layer.parametrizations.weight.original0
    v.data.normal_()
    g.data = 2 * v.data.norm(dim=1, keepdim=True)  # α = 1/2
    head.weight.data = torch.sign(torch.randn(1, width)) / width**0.5
    head.requires_grad_(False)
    return nn.Sequential(layer, nn.ReLU(), head).double()


class DGMNetwork(nn.Module):
    """f = (1/√m) Σ_k c_k σ(g_k v_kᵀx/‖v_k‖), v_k ~ N(0, α²I), g_k = ‖v_k‖/α, c_k = ±1 (DGM, Section 2)."""

    def __init__(self, d, m, alpha, activation=torch.relu):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.hidden = weight_norm(nn.Linear(d, m, bias=False))
        self.out = nn.Linear(m, 1, bias=False).requires_grad_(False)
        self.activation = activation
        self.double()
        with torch.no_grad():
            v = alpha * torch.randn(m, d, generator=generator, dtype=torch.float64)
            direction(self.hidden).copy_(v)
            length(self.hidden).copy_(v.norm(dim=1, keepdim=True) / alpha)
            signs = torch.randint(0, 2, (1, m), generator=generator, dtype=torch.float64) * 2 - 1
            self.out.weight.copy_(signs / m**0.5)

    def forward(self, x):
        return self.out(self.activation(self.hidden(x)))


def unit_samples(n=6, d=10, seed=0):
    x = torch.randn(n, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return x / x.norm(dim=1, keepdim=True)


class Regression(Classifier):
    """Any network with the square loss and plain gradient descent on whole batches."""

    def __init__(self, net, lr=0.01, loss=square):
        super().__init__("plain", lr)
        self.net, self._criterion = net, loss

    def training_step(self, batch, batch_idx):
        return self._criterion(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], self.lr)


def samples(n=24, norm=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = norm * nn.functional.normalize(torch.randn(n, 3, dtype=torch.float64, generator=generator), dim=1)
    return x, torch.rand(n, 1, dtype=torch.float64, generator=generator)


def fit(callback, module, data, validation=None, epochs=2, **kwargs):
    batches = DataLoader(TensorDataset(*data), len(data[0]))
    held_out = None if validation is None else DataLoader(TensorDataset(*validation), 8)
    trainer([callback], max_epochs=epochs, **kwargs).fit(module, batches, held_out)
    return {name.removeprefix("normtheory/"): value for name, value in rows()[epochs - 1].items()}


def two_layers(width=32):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(3, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 1, bias=False)
    ).double()


def two_classes(n=24):
    x, y = samples(n)
    return x / 2, (y > 0.5).double()
