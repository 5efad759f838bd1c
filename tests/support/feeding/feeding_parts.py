"""What the networks of the tables are built of: layers, inputs, and forward passes that are not just a row."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional as F

from support.models import Graph, tie


def conv(inputs=3, outputs=4, kernel=3, **options):
    return nn.Conv2d(inputs, outputs, kernel, **{"padding": kernel // 2, "bias": False, **options})


def biased(inputs=3, outputs=4, kernel=3, **options):
    return conv(inputs, outputs, kernel, bias=True, **options)


def bn(channels=4):
    return nn.BatchNorm2d(channels)


def bn1d(channels=4):
    return nn.BatchNorm1d(channels)


def image(channels=3, size=6):
    return (torch.randn(5, channels, size, size, dtype=torch.float64),)


def images():
    return (*image(), *image())


def vector(features=3):
    return (torch.randn(9, features, dtype=torch.float64),)


def sequence(positions=7, features=3):
    return (torch.randn(6, positions, features, dtype=torch.float64),)


def tokens(*shape):
    return lambda: (torch.randint(0, 5, shape),)


@dataclass(frozen=True)
class Net:
    """A row of the table.

    Attributes:
        pairs: the true ones as "layer>batchnorm", from thinking; the oracle must agree.
        complete: whether all of them must be found. None may ever be invented.
        reasons: words that must occur in the unknown reason of a BatchNorm.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple] = image
    pairs: str = ""
    complete: bool = True
    reasons: dict[str, str] = field(default_factory=dict)

    @property
    def truth(self) -> set[tuple[str, str]]:
        return {tuple(pair.split(">")) for pair in self.pairs.split()}


def wrap(connect, **layers):
    """Return a function that builds a new Graph; layers are given as functions."""
    return lambda: Graph(connect, **{name: build() for name, build in layers.items()})


def sequential(*layers):
    return lambda: nn.Sequential(*(build() for build in layers))


def residual(m, x):
    return m.bn(m.first(x) + m.second(x))


def shared_twice(m, x):
    return m.bn(torch.cat([m.conv(x), m.conv(x.flip(0))], 1))


def gated(m, x):
    y = m.conv(x)
    return m.bn(y * torch.sigmoid(m.gate(y.mean((2, 3), keepdim=True))))


def discarded_inplace(change):
    def connect(m, x):
        y = m.conv(x)
        change(m, y)
        return m.bn(y)

    return connect


def through_a_view(m, x):
    y = m.conv(x)
    y.flatten(1).tanh_()
    return m.bn(y)


def data_dependent(m, x):
    return m.first(x) + m.second(x) if x.sum() < 1e9 else x


def untraceable_end(m, x):
    y = m.block(x + m.block[0](x))
    return y if y.sum() > 0 else -y


def batch_norm_again_on_one_branch(m, x):
    y = m.bn(m.conv(x))
    return m.bn(m.conv(x).tanh()) if y.sum() < 1e9 else y


def outside_of_the_block(m, x):
    return m.block(x + m.block[0](x)) if x.sum() < 1e9 else x


def dynamic_slope(m, x):
    y = m.conv(x)
    return m.bn(F.prelu(y, y.tanh().mean((0, 2, 3))))


def tied_but_one_biased(order):
    def build():
        plain, with_bias = conv(), biased()
        tie(plain, with_bias)
        layers = {"plain": plain, "with_bias": with_bias}
        return Graph(lambda m, x: m.bn(torch.cat([getattr(m, n)(x) for n in order], 1).relu()), **layers, bn=bn(8))

    return build


def tied_layers():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    tie(first, second)
    return Graph(lambda m, x: m.b(m.second(m.a(m.first(x)).tanh())), first=first, second=second, a=bn1d(), b=bn1d())


def tied_in_a_row():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    tie(first, second)
    return Graph(lambda m, x: m.bn(m.second(m.first(x))), first=first, second=second, bn=bn1d())


def shared_batch_norm_under_branches():
    shared = bn()
    return Graph(data_dependent, first=nn.Sequential(conv(), shared), second=nn.Sequential(conv(), shared))


def transposed(*arguments, **options):
    return wrap(lambda m, x: m.bn(m.layer(x).transpose(*arguments, **options)), layer=lambda: nn.Linear(3, 4), bn=bn1d)


def hooked(register):
    def build():
        net = nn.Sequential(biased(), nn.Identity(), bn())
        register(net)
        return net

    return build


def replaced_forward(position):
    """As accelerators and quantizers do it: on the instance."""

    def build():
        net = nn.Sequential(biased(), nn.Identity(), bn())
        original = net[position].forward
        net[position].forward = lambda x: original(x).tanh() if position < 2 else x.tanh()
        return net

    return build


def two_readers(m, x):
    y = m.conv(x)
    return m.first(y) + m.second(torch.cat([y, x], 1))[:, :4]


def sliced_and_summed(m, x):
    y = m.conv(x)
    return m.bn(torch.cat([y[:, :2] + m.other(x)[:, :2], y[:, 2:]], 1))


def half_squashed(m, x):
    halves = m.conv(x).chunk(2, 1)
    return m.bn(torch.cat([halves[0], halves[1].tanh()], 1))


def last_hidden(m, x):
    return m.bn(m.lstm(x)[0][:, -1])


def weight_used_outside(m, x):
    return m.bn(torch.cat([m.layer(x), F.linear(x, m.layer.weight).tanh()], -1))


def weight_used_first(m, x):
    outside = F.linear(x, m.layer.weight).tanh()
    return m.bn(torch.cat([outside, m.layer(x)], -1))
