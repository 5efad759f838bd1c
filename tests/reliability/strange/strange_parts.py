"""The parts that strange models are made of: layers of many kinds under many normalizations, connected in odd ways."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

from support.models import WEIGHT_NORM_FORMS, Cube, direction, length

# What a layer may be, by the number of axes of one sample: features, (channels, positions), (channels, rows, columns).
KINDS = {
    1: ("linear",),
    2: ("conv", "grouped", "transposed", "lstm", "gru", "attention"),
    3: ("conv", "grouped", "transposed"),
}
SMOOTH = ("tanh", "silu", "gelu", "softplus", "bend")
KINKED = ("relu", "relu in place", "leaky in place")


@dataclass(frozen=True)
class Block:
    """One layer with what surrounds it.

    Attributes:
        kind: of the layer.
        width: its output channels.
        norm: ``"none"``, ``"hook"`` or ``"parametrized"`` WeightNorm, ``"batch"``, ``"layer"``, ``"group"``,
            ``"spectral"``.
        dim: of the WeightNorm.
        tensor: which weight of a recurrent or attention layer is under WeightNorm.
        batch_norm: affine, tracking, momentum.
        residual: the input is added to the output.
        twice: the same layer is applied again.
        tied: the weight is that of the block before.
        checkpointed: the block is recomputed in the backward pass.
        frozen: ``"g"``, ``"v"`` or ``"layer"``, where something is.
    """

    kind: str
    width: int
    norm: str = "none"
    dim: int | None = 0
    tensor: str = "weight"
    batch_norm: tuple[bool, bool, float | None] = (True, True, 0.1)
    activation: str = "tanh"
    bias: bool = True
    dropout: float = 0.0
    residual: bool = False
    twice: bool = False
    tied: bool = False
    checkpointed: bool = False
    frozen: str = ""

    def __str__(self) -> str:
        details = [self.norm if self.norm not in WEIGHT_NORM_FORMS else f"{self.norm} {self.tensor} dim={self.dim}"]
        if self.norm == "batch":
            details = ["batch affine={} tracking={} momentum={}".format(*self.batch_norm)]
        details += [name for name in ("residual", "twice", "tied", "checkpointed") if getattr(self, name)]
        details += [f"frozen {self.frozen}"] if self.frozen else []
        details += ["dropout"] if self.dropout else []
        return f"{self.kind}({self.width}) [{', '.join(details)}] {self.activation}"

    @property
    def normalizes_layer(self) -> bool:
        """Whether a BatchNorm follows a layer with one weight."""
        return self.norm == "batch" and self.kind not in ("lstm", "gru", "attention")


class Bend(torch.autograd.Function):
    """x + x³/10, with a backward pass that can be differentiated."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x + x**3 / 10

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (1 + 3 * ctx.saved_tensors[0] ** 2 / 10)


class Applied(nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def activation(name: str) -> nn.Module | None:
    made = {
        "none": lambda: None,
        "tanh": nn.Tanh,
        "silu": nn.SiLU,
        "gelu": nn.GELU,
        "softplus": nn.Softplus,
        "relu": nn.ReLU,
        "relu in place": lambda: nn.ReLU(inplace=True),
        "leaky in place": lambda: nn.LeakyReLU(0.2, inplace=True),
        "bend": lambda: Applied(Bend.apply),
        "cube": lambda: Applied(Cube.apply),
    }
    return made[name]()


class Recurrent(nn.Module):
    """LSTM or GRU over (samples, channels, positions)."""

    def __init__(self, kind: str, channels: int, width: int, bias: bool):
        super().__init__()
        self.cell = {"lstm": nn.LSTM, "gru": nn.GRU}[kind](channels, width, bias=bias, batch_first=True)

    def forward(self, x):
        return self.cell(x.transpose(1, 2))[0].transpose(1, 2)


class Attention(nn.Module):
    """Self-attention over (samples, channels, positions)."""

    def __init__(self, channels: int, bias: bool):
        super().__init__()
        heads = 2 if channels % 2 == 0 else 1
        self.attention = nn.MultiheadAttention(channels, heads, bias=bias, batch_first=True)

    def forward(self, x):
        x = x.transpose(1, 2)
        return self.attention(x, x, x, need_weights=False)[0].transpose(1, 2)


def output_shape(block: Block, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of one sample behind the layer."""
    channels, *places = shape
    if block.kind == "attention":
        return shape
    if block.kind == "grouped":
        return channels * max(1, block.width // channels), *places
    return block.width, *(size + 1 if block.kind == "transposed" else size for size in places)


def make_layer(block: Block, shape: tuple[int, ...]) -> nn.Module:
    """The layer for samples of this shape."""
    channels, *places = shape
    if block.kind == "linear":
        return nn.Linear(channels, block.width, bias=block.bias)
    if block.kind in ("lstm", "gru"):
        return Recurrent(block.kind, channels, block.width, block.bias)
    if block.kind == "attention":
        return Attention(channels, block.bias)
    if block.kind == "transposed":
        transposed = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d}[len(places)]
        return transposed(channels, block.width, 2, bias=block.bias)
    groups = channels if block.kind == "grouped" else 1
    conv = {1: nn.Conv1d, 2: nn.Conv2d}[len(places)]
    return conv(channels, output_shape(block, shape)[0], 3, padding=1, groups=groups, bias=block.bias)


def owner(layer: nn.Module, tensor: str) -> tuple[nn.Module, str]:
    """The module that holds a weight, and the weight's name there."""
    for inner in (getattr(layer, "cell", None), getattr(layer, "attention", None)):
        layer = inner or layer
    return (layer.out_proj, "weight") if tensor == "out_proj" else (layer, tensor)


class Strange(nn.Module):
    """A block as a module."""

    def __init__(self, block: Block, shape: tuple[int, ...], before: "Strange | None"):
        super().__init__()
        self.block = block
        self.layer, self.shape = make_layer(block, shape), output_shape(block, shape)
        if block.tied:
            self.layer.weight = before.layer.weight
        if block.norm in WEIGHT_NORM_FORMS:
            module, name = owner(self.layer, block.tensor)
            WEIGHT_NORM_FORMS[block.norm](module, name, dim=block.dim)
        elif block.norm == "spectral":
            spectral_norm(self.layer)
        self.norm = make_norm(block, self.shape)
        if getattr(self.norm, "bias", None) is not None:
            nn.init.uniform_(self.norm.bias, 0.1, 0.5)  # zero is the kink of a ReLU, where a channel may be constant
        self.activation = activation(block.activation)
        self.dropout = nn.Dropout(block.dropout) if block.dropout else None
        self.freeze()

    def freeze(self):
        if self.block.frozen == "layer":
            self.layer.requires_grad_(False)
        elif self.block.frozen:
            module, name = owner(self.layer, self.block.tensor)
            {"g": length, "v": direction}[self.block.frozen](module, name).requires_grad_(False)

    def steps(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        for step in (self.norm, self.activation, self.dropout):
            y = y if step is None else step(y)
        return y

    def forward(self, x):
        y = checkpoint(self.steps, x, use_reentrant=False) if self.block.checkpointed else self.steps(x)
        if self.block.twice:
            y = self.steps(y)
        return x + y if self.block.residual else y


def make_norm(block: Block, shape: tuple[int, ...]) -> nn.Module | None:
    channels, *places = shape
    if block.norm == "batch":
        affine, tracking, momentum = block.batch_norm
        layer = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d)[len(places)]
        return layer(channels, affine=affine, track_running_stats=tracking, momentum=momentum)
    if block.norm == "group" and math.prod(shape) > 1:  # of one number, PyTorch refuses a batch of one
        return nn.GroupNorm(2 if channels % 2 == 0 and places else 1, channels)
    return nn.LayerNorm(shape) if block.norm in ("layer", "group") else None
