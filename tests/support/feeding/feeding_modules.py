"""Modules that users write: layers, BatchNorms, and blocks that feed them."""

import torch
from torch import nn
from torch.nn import functional as F

from support.feeding.feeding_parts import biased, bn, bn1d, conv


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
