"""What the networks of `feeding_nets` are built of: layers, inputs, and forward passes that are not just a row."""

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


class MyBlock(nn.Module):
    def __init__(self, inputs=3):
        super().__init__()
        self.conv, self.bn = conv(inputs), bn()

    def forward(self, x):
        return F.relu(self.bn(self.conv(x)))


class MySequential(nn.Sequential):
    pass


class BackwardSequential(nn.Sequential):
    """Connects its layers in another order than it lists them."""

    def forward(self, x):
        for layer in reversed(self):
            x = layer(x)
        return x


class NamedConv(nn.Conv2d):
    """A user's class that computes what its parent computes."""


class StandardizedConv(nn.Conv2d):
    """Its weight is normalized on the way: doubling it changes nothing at all."""

    def forward(self, x):
        norms = self.weight.flatten(1).norm(dim=1).reshape(-1, 1, 1, 1)
        return self._conv_forward(x, self.weight / norms, self.bias)


class StandardizedInside(nn.Conv2d):
    """The same, without its own forward."""

    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(x, weight / weight.flatten(1).norm(dim=1).reshape(-1, 1, 1, 1), bias)


class CallsItsParent(nn.Conv2d):
    def forward(self, x):
        return super().forward(x)


class PaddingConv(nn.Conv2d):
    """Pads its input by itself, and may carry its normalization, as detectors write it."""

    def __init__(self, *arguments, norm=None, **options):
        super().__init__(*arguments, **options)
        self.norm = norm

    def forward(self, x):
        y = F.conv2d(F.pad(x, (0, 1, 0, 1)), self.weight, self.bias, self.stride)
        return y if self.norm is None else self.norm(y)


class ScaledPaddingConv(nn.Conv2d):
    """Its input depends on its own weight."""

    def forward(self, x):
        return F.conv2d(x * self.weight.sum(), self.weight, self.bias).tanh()


class BatchNormAct(nn.BatchNorm2d):
    """BatchNorm, dropout and activation in one, with a forward pass of its own."""

    def __init__(self, channels=4, act=nn.ReLU):
        super().__init__(channels)
        self.drop, self.act = nn.Identity(), act()

    def forward(self, x):
        if self.training and self.track_running_stats:
            self.num_batches_tracked.add_(1)
        statistics = self.running_mean, self.running_var
        x = F.batch_norm(x, *statistics, self.weight, self.bias, self.training, self.momentum, self.eps)
        return self.act(self.drop(x))


class BatchNormThenAct(nn.BatchNorm2d):
    def forward(self, x):
        return F.silu(super().forward(x))


class SyncBatchNormThenAct(nn.SyncBatchNorm):
    def forward(self, x):
        return F.silu(super().forward(x))


class SquashingBatchNorm(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x.tanh())


class AnyShape(nn.BatchNorm2d):
    def _check_input_dim(self, x):
        pass


class ActivatedBatchNorm(nn.Module):
    """No child of torch's BatchNorm, as in-place activated BatchNorm is none."""

    def __init__(self, channels=4):
        super().__init__()
        self.eps = 1e-5
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x):
        statistics = self.running_mean, self.running_var
        x = F.batch_norm(x, *statistics, self.weight, self.bias, training=self.training, eps=self.eps)
        return F.leaky_relu(x, 0.01)


class ArithmeticBatchNorm(ActivatedBatchNorm):
    def forward(self, x):
        mean, var = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), keepdim=True)
        return (x - mean) * (var + self.eps).rsqrt()


class FrozenBatchNorm(nn.Module):
    """Buffers only, as detectors use it."""

    def __init__(self, channels=4):
        super().__init__()
        self.eps = 1e-5
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.rand(channels) + 0.5)

    def forward(self, x):
        scale = self.weight * (self.running_var + self.eps).rsqrt()
        return x * scale.view(-1, 1, 1) + (self.bias - self.running_mean * scale).view(-1, 1, 1)


class AlwaysRunning(nn.BatchNorm2d):
    def forward(self, x):
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)


class NormalizesInline(nn.Module):
    """Calls batch_norm without being one; ``part`` is what it normalizes."""

    def __init__(self, part=lambda m, x: m.conv(x)):
        super().__init__()
        self.conv, self.gamma, self.part = conv(), nn.Parameter(torch.ones(4)), part

    def forward(self, x):
        return F.batch_norm(self.part(self, x), None, None, self.gamma, training=True)


def two_readers(m, x):
    y = m.conv(x)
    return m.first(y) + m.second(torch.cat([y, x], 1))[:, :4]


def sliced_and_summed(m, x):
    y = m.conv(x)
    return m.bn(torch.cat([y[:, :2] + m.other(x)[:, :2], y[:, 2:]], 1))


class Squash(nn.Module):
    """Looks at its data: cannot be traced."""

    def forward(self, x):
        return x.tanh() if x.sum() < 1e9 else x


class SquashingIdentity(nn.Identity):
    """Neither traceable nor the identity, whatever its parent is."""

    def forward(self, x):
        return x.tanh() if x.sum() < 1e9 else x


class Pairs(nn.Module):
    """Returns a tuple."""

    def __init__(self):
        super().__init__()
        self.conv = conv()

    def forward(self, x):
        return self.conv(x), x


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.bn, self.other = conv(), biased(), bn(8), bn(3)

    def forward(self, x, y):
        return self.bn(torch.cat([self.first(x), self.second(y)], 1)), self.other(y)


class SelfAttentionBefore(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.bn = nn.MultiheadAttention(4, 2, batch_first=True), bn1d(7)

    def forward(self, x):
        return self.bn(self.attention(x, x, x)[0])


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
