"""For every assumption of every theorem, a network, its samples, its loss and its run on which only this one fails."""

import math
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from lightning_normtheory.theorems.verdicts import Run

from support.models import direction, length
from support.theory.bound_cases import Times
from support.theory.theorem_cases import DGMNetwork, paper_network, square, unit_samples


@dataclass
class Case:
    net: nn.Module
    x: torch.Tensor
    y: torch.Tensor
    loss: object
    run: Run


def half_sum(f, y):
    return 0.5 * (f - y).square().sum()


def absolute(f, y):
    return (f - y).abs().mean()


def targets(n):
    return torch.rand(n, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def wn(**changes):
    values = {"wn_alpha": 0.1, "wn_beta": 0.8, "rho_1": 0.01, "loss": 1.0}
    net = paper_network(16, 2, 1.0)
    return replace(Case(net, unit_samples(8, 3), targets(8), square, Run(rate=0.1, values=values)), **changes)


def gaussian(d=3, width=256, sigma=0.4, head=None, activation=nn.Tanh, seed=0):
    """RSC's network with two hidden layers; with σ = 1 and a head of N(0, 1), LIN's."""
    torch.manual_seed(seed)
    layers = []
    for inputs in (d, width):
        layers += [Times(inputs**-0.5), nn.Linear(inputs, width, bias=False), activation()]
        nn.init.normal_(layers[-2].weight, std=sigma)
    last = nn.Linear(width, 1, bias=False)
    v = torch.randn(1, width)
    last.weight.data = v if head == "normal" else F.normalize(v)
    return nn.Sequential(*layers, Times(width**-0.5), last).double()


def rsc(**changes):
    values = {"rsc_alpha": 0.1, "rsc_beta": 0.8, "rho": 0.01, "loss": 1.0}
    x = math.sqrt(3) * unit_samples(8, 3)
    return replace(Case(gaussian(), x, targets(8), square, Run(rate=0.1, values=values)), **changes)


def lin(**changes):
    net = gaussian(sigma=1.0, head="normal")
    run = Run(rate=0.1, values={"loss": 1.0})
    return replace(Case(net, unit_samples(8, 3), targets(8), square, run), **changes)


def dgm(alpha=0.5, d=50, **changes):
    distances = {"weightnorm_displacement_v": 1e-4, "weightnorm_displacement_g": 2e-4}
    values = {**distances, "dgm_radius_v": 1e-3, "dgm_radius_g": 2e-3}
    run = Run(rate=0.1, values=values, lambda_max=1.0, kernel_samples=8)
    return replace(Case(DGMNetwork(d, 64, alpha), unit_samples(8, d), targets(8), half_sum, run), **changes)


def bn(width=256, d=50, **changes):
    torch.manual_seed(0)
    layers = nn.Linear(d, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 1, bias=False)
    net = nn.Sequential(*layers).double()
    nn.init.normal_(net[0].weight, std=d**-0.5)
    nn.init.normal_(net[3].weight, std=width**-0.5)
    y = torch.tensor([0.0, 1.0] * 4, dtype=torch.float64)[:, None]
    run = Run(rate=0.1, batch=1, epoch=1, values={"loss": 1.0})
    return replace(
        Case(net, unit_samples(8, d) / 2, y, F.binary_cross_entropy_with_logits, run),
        **changes,
    )


def changed(net, change):
    change(net)
    return net


class Residual(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x) + self.net(x)


def plain_layer(net):
    weight = net[2].weight.detach().clone()
    net[2] = nn.Linear(16, 16, bias=False).double()
    net[2].weight.data = weight


def normed_head(net):
    weight = net[-1].weight.detach().clone()
    net[-1] = weight_norm(nn.Linear(16, 1, bias=False).double())
    direction(net[-1]).data.copy_(weight)
    length(net[-1]).data.fill_(1.0)


def biased(index):
    def change(net):
        net[index].bias = nn.Parameter(torch.zeros(net[index].out_features, dtype=torch.float64))

    return change


def with_factor(net):
    return nn.Sequential(*net[:-1], Times(0.5), net[-1])


def two_outputs(net):
    head = net[-1]
    net[-1] = nn.Linear(head.in_features, 2, bias=False).double()
    net[-1].weight.data = torch.cat([head.weight.data, -head.weight.data])


def two_wide(net, width):
    """The second hidden layer gets another width; all else stays as in the paper."""
    torch.manual_seed(1)
    if isinstance(net[0], Times):
        hidden = nn.Linear(256, width, bias=False).double()
        nn.init.normal_(hidden.weight, std=float(net[4].weight.detach().std()))
        head = nn.Linear(width, 1, bias=False).double()
        v = torch.randn(1, width, dtype=torch.float64)
        head.weight.data = v if float(net[-1].weight.detach().norm()) > 2 else F.normalize(v)
        return nn.Sequential(*net[:4], hidden, net[5], Times(width**-0.5), head)
    layer = weight_norm(nn.Linear(16, width, bias=False).double())
    length(layer).data.fill_(width**-0.5)
    length(layer).requires_grad_(False)
    head = nn.Linear(width, 1, bias=False).double()
    head.weight.data = F.normalize(torch.randn(1, width, dtype=torch.float64))
    return nn.Sequential(net[0], net[1], layer, net[3], head)


def with_dropout(net, place=1):
    return nn.Sequential(*net[:place], nn.Dropout(0.5), *net[place:])


def uniform(tensor):
    bound = math.sqrt(3) * float(tensor.detach().std())
    nn.init.uniform_(tensor.detach(), -bound, bound)


def set_weight(index, function):
    def change(net):
        net[index].weight.data = function(net[index].weight.data)

    return change


def freeze(index, name="weight"):
    def change(net):
        layer = net[index]
        (direction(layer) if hasattr(layer, "parametrizations") else getattr(layer, name)).requires_grad_(False)

    return change


def dgm_with(change, **options):
    case = dgm(**options)
    change(case.net)
    return case


def uniform_directions(net):
    v = direction(net.hidden)
    nn.init.uniform_(v.detach(), -0.5 * math.sqrt(3), 0.5 * math.sqrt(3))
    length(net.hidden).data.copy_(v.detach().norm(dim=1, keepdim=True) / 0.5)


def replaced(x, index, row):
    x = x.clone()
    x[index] = row(x)
    return x


class Dropped(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.hidden, self.out, self.drop = net.hidden, net.out, nn.Dropout(0.5)

    def forward(self, x):
        return self.out(self.drop(torch.relu(self.hidden(x))))


def run_with(case, **changes):
    case.run = replace(case.run, **changes)
    return case


def valued(case, **values):
    return run_with(case, values={**case.run.values, **values})


def doubled(index):
    return set_weight(index, lambda w: 2 * w)


def constant_head(net):
    net[7].weight.data.fill_(1 / 16)


def another_phi(index):
    return lambda net: net.__setitem__(index, nn.Softsign())


def free_lengths(net):
    length(net[0]).requires_grad_(True)


def truncated(net):
    """At two standard deviations, and then with the standard deviation of the other layer."""
    nn.init.trunc_normal_(net[4].weight, std=0.4, a=-0.8, b=0.8).data.mul_(1.137)


def other_factor(net):
    return nn.Sequential(*net[:3], Times(0.5), *net[4:])


def second(row):
    """Eight samples of which the second depends on the others."""
    return replaced(unit_samples(8, 50), 1, row)


def own(change=None, activation=nn.Tanh):
    """WN's own network, changed."""
    return changed(paper_network(16, 2, 1.0, activation), change or (lambda net: None))


def plain(change):
    """RSC's own network, changed."""
    return changed(gaussian(), change)


def wide(change=None, **options):
    """LIN's own network, changed."""
    return changed(gaussian(sigma=1.0, head="normal", **options), change or (lambda net: None))


def normed(change):
    """BN's own network, changed."""
    return changed(bn().net, change)


LOGISTIC = F.binary_cross_entropy_with_logits
CLASSES = torch.tensor([0.0, 1.0] * 4, dtype=torch.float64)[:, None]
PAIRS = torch.rand(8, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
ADAM = "the optimizer is Adam, not gradient descent"
MINI = "mini-batches of 2 of 8 samples"
CHAIN, SMOOTH, STEEP, ONE_PHI = "f is a chain of layers", "φ is smooth", "φ is 1-Lipschitz", "one φ"
DESCENT, WHOLE = "gradient descent", "steps on the whole"

# The theorem's key, the case, the beginning of the assumption that fails, and what is found.
CASES = [
    # WN, Theorem 5.1
    ("wn_5_1", lambda: wn(net=Residual(own())), CHAIN, "branches"),
    ("wn_5_1", lambda: wn(net=own(plain_layer)), "WeightNorm in every", "no WeightNorm (2)"),
    ("wn_5_1", lambda: wn(net=own(free_lengths)), "lengths g", "trained lengths g (0)"),
    ("wn_5_1", lambda: wn(net=own(lambda n: length(n[0]).data.mul_(2))), "lengths g", "other than 1/√m"),
    ("wn_5_1", lambda: wn(net=two_wide(own(), 12)), "one width", "16, 12"),
    ("wn_5_1", lambda: wn(net=own(biased(2))), "no biases", "a bias (2)"),
    ("wn_5_1", lambda: wn(net=own(biased(4))), "no biases", "output layer has a bias"),
    ("wn_5_1", lambda: wn(net=own(normed_head)), "a linear output", "has WeightNorm"),
    ("wn_5_1", lambda: wn(net=with_factor(own())), "a linear output", "factor"),
    ("wn_5_1", lambda: wn(net=own(doubled(4))), "‖v_0‖ = 1", "2, not 1"),
    ("wn_5_1", lambda: wn(net=own(None, nn.ReLU)), SMOOTH, "ReLU is not smooth"),
    ("wn_5_1", lambda: wn(net=own(None, nn.GELU)), STEEP, "1.129"),
    ("wn_5_1", lambda: wn(net=own(another_phi(3))), ONE_PHI, "different"),
    ("wn_5_1", lambda: wn(x=2 * unit_samples(8, 3)), "‖x_i‖ = 1", "is 2, not 1"),
    ("wn_5_1", lambda: wn(x=unit_samples(8, 3) * torch.linspace(1, 1.1, 8)[:, None]), "‖x_i‖ = 1", "between 1 and"),
    ("wn_5_1", lambda: wn(loss=absolute), "square loss", "neither a square loss"),
    ("wn_5_1", lambda: wn(loss=lambda f, y: square(f, y) + 1e-3), "square loss", "neither a square loss"),
    ("wn_5_1", lambda: wn(loss=lambda f, y: square(f, y) / 2), "L = (1/n)", "0.5 times"),
    ("wn_5_1", lambda: wn(loss=half_sum), "L = (1/n)", "a sum over batches of 8 samples"),
    ("wn_5_1", lambda: wn(net=own(two_outputs), y=PAIRS), "one output", "2 outputs"),
    ("wn_5_1", lambda: wn(net=own(freeze(0))), "every layer is trained", "not trained: 0"),
    ("wn_5_1", lambda: wn(net=with_dropout(own(), 2)), "no dropout", "dropout in training (2)"),
    ("wn_5_1", lambda: run_with(wn(), optimizer=ADAM), DESCENT, "Adam"),
    ("wn_5_1", lambda: run_with(wn(), optimizer="momentum of 0.9"), DESCENT, "momentum of 0.9"),
    ("wn_5_1", lambda: run_with(wn(), batches=MINI), WHOLE, "mini-batches of 2 of 8"),
    ("wn_5_1", lambda: valued(wn(), wn_alpha=-0.1), "α > 0 (A3.1)", "α = -0.1"),
    ("wn_5_1", lambda: run_with(wn(), rate=2.6), "η < 2/β", "ηβ = 2.08"),
    ("wn_5_1", lambda: valued(wn(), rho_1=math.inf), "v within ρ₁", "not finite"),
    # WN, Theorem 6.1
    ("wn_6_1", lambda: wn(net=own(None, nn.Sigmoid)), "φ(0) = 0", "0.5, not 0"),
    ("wn_6_1", lambda: wn(net=own(None, nn.ReLU)), SMOOTH, "ReLU is not smooth"),
    ("wn_6_1", lambda: wn(net=own(None, nn.GELU)), STEEP, "1.129"),
    ("wn_6_1", lambda: wn(net=own(another_phi(3))), ONE_PHI, "different"),
    ("wn_6_1", lambda: wn(y=2 * targets(8)), "|y| ≤ 1", "above 1"),
    ("wn_6_1", lambda: wn(x=2 * unit_samples(8, 3)), "‖x_i‖ = 1", "is 2, not 1"),
    ("wn_6_1", lambda: wn(net=own(plain_layer)), "WeightNorm in every", "no WeightNorm (2)"),
    ("wn_6_1", lambda: wn(net=own(free_lengths)), "lengths g", "trained"),
    ("wn_6_1", lambda: wn(net=own(biased(4))), "no biases", "output layer has a bias"),
    ("wn_6_1", lambda: wn(net=two_wide(own(), 12)), "one width", "16, 12"),
    ("wn_6_1", lambda: wn(net=own(normed_head)), "a linear output", "has WeightNorm"),
    ("wn_6_1", lambda: wn(net=own(doubled(4))), "‖v_0‖ = 1", "2, not 1"),
    ("wn_6_1", lambda: wn(loss=lambda f, y: square(f, y) / 2), "L = (1/n)", "0.5 times"),
    ("wn_6_1", lambda: wn(y=CLASSES, loss=LOGISTIC), "square loss", "logistic"),
    ("wn_6_1", lambda: wn(net=own(two_outputs), y=PAIRS), "one output", "2 outputs"),
    ("wn_6_1", lambda: valued(wn(), rho_1=math.inf), "v within ρ₁", "not finite"),
    # RSC, Theorems 5.1 to 5.3
    ("rsc_5_1", lambda: rsc(net=Residual(gaussian())), CHAIN, "branches"),
    ("rsc_5_1", lambda: rsc(net=plain(lambda n: weight_norm(n[1]))), "fully connected", "WeightNorm (1)"),
    ("rsc_5_1", lambda: rsc(net=plain(biased(4))), "no biases", "a bias (4)"),
    ("rsc_5_1", lambda: rsc(net=other_factor(gaussian())), "a factor 1/√fan-in", "no factor"),
    ("rsc_5_1", lambda: rsc(net=two_wide(gaussian(), 300)), "one width", "256, 300"),
    ("rsc_5_1", lambda: rsc(net=plain(lambda n: uniform(n[4].weight))), "W_0 ~ N", "1.73 standard deviations"),
    ("rsc_5_1", lambda: rsc(net=plain(truncated)), "W_0 ~ N", "not Gaussian"),
    ("rsc_5_1", lambda: rsc(net=plain(doubled(1))), "W_0 ~ N", "standard deviation"),
    ("rsc_5_1", lambda: rsc(net=plain(doubled(7))), "‖v_0‖ = 1", "2, not 1"),
    ("rsc_5_1", lambda: rsc(net=plain(constant_head)), "v_0 is a random", "mean"),
    ("rsc_5_1", lambda: rsc(net=gaussian(d=300), x=300**0.5 * unit_samples(8, 300)), "m ≥ d", "below the 300"),
    ("rsc_5_1", lambda: rsc(net=gaussian(activation=nn.ReLU)), SMOOTH, "ReLU is not smooth"),
    ("rsc_5_1", lambda: rsc(net=gaussian(activation=nn.SiLU)), STEEP, "1.1"),
    ("rsc_5_1", lambda: rsc(net=plain(another_phi(2))), ONE_PHI, "different"),
    ("rsc_5_1", lambda: rsc(x=unit_samples(8, 3)), "‖x_i‖ = √3", "is 1, not √3"),
    ("rsc_5_1", lambda: rsc(loss=absolute), "square loss", "neither"),
    ("rsc_5_1", lambda: rsc(loss=lambda f, y: 2 * square(f, y)), "L = (1/n)", "2 times"),
    ("rsc_5_1", lambda: rsc(net=plain(two_outputs), y=PAIRS), "one output", "2 outputs"),
    ("rsc_5_1", lambda: rsc(net=plain(freeze(1))), "every layer is trained", "not trained: 1"),
    ("rsc_5_1", lambda: rsc(net=with_dropout(gaussian(), 3)), "no dropout", "dropout in training (3)"),
    ("rsc_5_1", lambda: run_with(rsc(), optimizer="weight decay of 0.1"), DESCENT, "weight decay"),
    ("rsc_5_1", lambda: run_with(rsc(), batches=MINI), WHOLE, "mini-batches"),
    ("rsc_5_1", lambda: valued(rsc(), rsc_alpha=-1.0), "α > 0 (A4.1)", "α = -1"),
    ("rsc_5_1", lambda: valued(rsc(), rsc_beta=30.0), "η < 2/β", "ηβ = 3"),
    ("rsc_5_1", lambda: valued(rsc(), rho=math.inf), "θ in the spectral ball", "not finite"),
    # DGM, Theorems 4.1 and 4.2
    ("dgm_4_1", lambda: dgm_with(lambda n: n.out.weight.data.mul_(2)), "DGM's network", "not ±1/√m"),
    ("dgm_4_1", lambda: dgm_with(lambda n: n.out.requires_grad_(True)), "DGM's network", "other parameters are"),
    ("dgm_4_1", lambda: dgm_with(lambda n: length(n.hidden).data[0].mul_(2)), "DGM's network", "one α"),
    ("dgm_4_1", lambda: dgm(net=DGMNetwork(50, 64, 0.5, torch.tanh)), "DGM's network", "two-layer ReLU"),
    ("dgm_4_1", lambda: dgm_with(uniform_directions), "v_k(0) ~ N", "not Gaussian"),
    ("dgm_4_1", lambda: dgm(x=100 * unit_samples(8, 50)), "‖x_i‖ ≤ 1", "reaches 100"),
    ("dgm_4_1", lambda: dgm(x=second(lambda x: x[0])), "no two samples", "samples 0 and 1 are parallel"),
    ("dgm_4_1", lambda: dgm(x=second(lambda x: -0.5 * x[0])), "no two samples", "samples 0 and 1 are parallel"),
    ("dgm_4_1", lambda: dgm(x=second(lambda x: 0 * x[0])), "no two samples", "sample 1 is zero"),
    ("dgm_4_1", lambda: dgm(d=49), "d ≥ 50", "49, below 50"),
    ("dgm_4_1", lambda: dgm(loss=absolute), "square loss", "neither"),
    ("dgm_4_1", lambda: dgm(loss=square), "L = ½Σ", "a mean with the constant 1"),
    ("dgm_4_1", lambda: dgm(loss=lambda f, y: 2 * half_sum(f, y)), "L = ½Σ", "a sum with the constant 1"),
    ("dgm_4_1", lambda: dgm(net=Dropped(DGMNetwork(50, 64, 0.5))), "no dropout", "dropout in training (drop)"),
    ("dgm_4_1", lambda: run_with(dgm(), optimizer=ADAM), DESCENT, "Adam"),
    ("dgm_4_1", lambda: run_with(dgm(), batches=MINI), WHOLE, "mini-batches"),
    ("dgm_4_1", lambda: run_with(dgm(), rate=0.34), "η‖Λ‖ ≤ 1/3", "0.34, above 1/3"),
    ("dgm_4_1", lambda: valued(dgm(), weightnorm_displacement_v=0.01), "‖v_k − v_k(0)‖", "0.01 is above R_v = 0.001"),
    ("dgm_4_1", lambda: valued(dgm(), weightnorm_displacement_g=0.01), "‖v_k − v_k(0)‖", "0.01 is above R_g = 0.002"),
    ("dgm_4_2", lambda: run_with(dgm(alpha=3.0), rate=0.34), "η‖Λ‖ ≤ 1/3", "0.34, above 1/3"),
    ("dgm_4_2", lambda: dgm(alpha=3.0, d=49), "d ≥ 50", "49, below 50"),
    # LIN, Theorem 3.2
    ("lin_3_2", lambda: lin(net=nn.Sequential(*wide(), nn.Tanh())), "layers and", "output layer is not linear"),
    ("lin_3_2", lambda: lin(net=wide(biased(4))), "no biases", "a bias (4)"),
    ("lin_3_2", lambda: lin(net=wide(lambda n: weight_norm(n[4]))), "layers and", "WeightNorm or otherwise (4)"),
    ("lin_3_2", lambda: lin(net=other_factor(wide())), "a factor 1/√fan-in", "no factor"),
    ("lin_3_2", lambda: lin(net=two_wide(wide(), 300)), "one width", "256, 300"),
    ("lin_3_2", lambda: lin(net=gaussian(sigma=1.5, head="normal")), "W_0 ~ N(0, 1)", "1.54, not 1"),
    ("lin_3_2", lambda: lin(net=wide(lambda n: uniform(n[4].weight))), "W_0 ~ N(0, 1)", "1.73"),
    ("lin_3_2", lambda: lin(net=wide(d=300), x=unit_samples(8, 300)), "m > d", "not above the 300"),
    ("lin_3_2", lambda: lin(net=wide(activation=nn.ReLU)), SMOOTH, "ReLU is not smooth"),
    ("lin_3_2", lambda: lin(net=wide(another_phi(2))), ONE_PHI, "different"),
    ("lin_3_2", lambda: lin(net=wide(two_outputs), y=PAIRS), "one output", "2 outputs"),
    ("lin_3_2", lambda: lin(net=wide(freeze(1))), "every layer is trained", "not trained: 1"),
    ("lin_3_2", lambda: lin(net=with_dropout(wide(), 3)), "no dropout", "dropout in training (3)"),
]  # fmt: skip

WIDTH, RATE = "m within", "η = 1/(28"
# BN asks for widths that nobody has: here the width, and in PyTorch the step, fail beside the named assumption.
BN_CASES = [
    (lambda: bn(), "", ""),
    (lambda: bn(net=normed(lambda n: nn.init.ones_(n[1].bias))), "BN's network", "bias of the BatchNorm"),
    (lambda: bn(x=10 * unit_samples(8, 50)), "‖x̄_i‖ ≤ 1", "may be at most 1"),
    (lambda: bn(loss=square), "logistic loss", "not the logistic loss"),
    (lambda: bn(loss=lambda f, y: 2 * LOGISTIC(f, y)), "logistic loss", "2 times"),
    (lambda: bn(y=torch.tensor([0.0, 0.5, 1.0, 1.0] * 2).double()[:, None]), "y = ±1", "two classes"),
    (lambda: bn(y=torch.tensor([0.3, 0.7] * 4).double()[:, None]), "y = ±1", "two classes"),
    (lambda: bn(x=replaced(unit_samples(8, 50) / 2, 1, lambda x: x[0])), "γ_a + γ_c > 0", "is 0"),
    (lambda: bn(net=normed(lambda n: nn.init.constant_(n[1].weight, 2.0))), "c = 1", "not 1"),
    (lambda: bn(net=normed(lambda n: uniform(n[0].weight))), "V_0 ~ N", "not Gaussian"),
    (lambda: bn(net=normed(lambda n: uniform(n[3].weight))), "a_0 ~ N", "not Gaussian"),
    (lambda: bn(net=normed(freeze(0))), "a, c and V are trained", "not trained: v"),
    (lambda: bn(net=with_dropout(bn().net, 3)), "no dropout", "dropout in training (3)"),
    (lambda: run_with(bn(), optimizer=ADAM), "steps θ − η∇ℓ_i", "Adam"),
    (lambda: run_with(bn(), batch=8), "SGD: one sample", "on 8 samples"),
    (lambda: run_with(bn(), batches=MINI), "μ and Σ of the whole", "mini-batches"),
    (lambda: run_with(bn(), epoch=2), "fresh samples", "pass 2"),
]  # fmt: skip
