"""The table of plain torch models that the quantities of the theory floor are tried on."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.utils.parametrizations import weight_norm as parametrized_weight_norm


def hook_weight_norm(module: nn.Module, name: str = "weight", dim: int | None = 0) -> nn.Module:
    """The older form of WeightNorm, which many models still use, without its warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(module, name, dim)


# PyTorch's two forms of WeightNorm.
WEIGHT_NORM_FORMS = {"hook": hook_weight_norm, "parametrized": parametrized_weight_norm}

PLAIN_LAYERS = {
    "linear": lambda: nn.Linear(3, 4),
    "linear one unit": lambda: nn.Linear(3, 1),
    "linear one input": lambda: nn.Linear(1, 3),
    "linear one weight": lambda: nn.Linear(1, 1),
    "bilinear": lambda: nn.Bilinear(2, 3, 4),
    "conv1d": lambda: nn.Conv1d(2, 3, 4),
    "conv2d": lambda: nn.Conv2d(2, 3, (1, 2)),
    "conv3d": lambda: nn.Conv3d(2, 3, 2),
    "grouped conv": lambda: nn.Conv2d(4, 6, 2, groups=2),
    "depthwise conv": lambda: nn.Conv2d(3, 6, 2, groups=3),
    "transposed conv1d": lambda: nn.ConvTranspose1d(2, 3, 4),
    "transposed conv2d": lambda: nn.ConvTranspose2d(2, 3, 2),
    "transposed conv3d": lambda: nn.ConvTranspose3d(2, 3, 2),
    "grouped transposed conv": lambda: nn.ConvTranspose2d(4, 6, 2, groups=2),
    "depthwise transposed conv": lambda: nn.ConvTranspose1d(3, 3, 2, groups=3),
    "embedding": lambda: nn.Embedding(5, 3),
    "embedding bag": lambda: nn.EmbeddingBag(5, 3),
}


class Graph(nn.Module):
    """Layers by name and a function ``forward(layers, x)`` that connects them."""

    def __init__(self, connect: Callable, **layers: nn.Module) -> None:
        super().__init__()
        self.connect = connect
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x):
        return self.connect(self, x)


class Cube(torch.autograd.Function):
    """x³, whose author has ruled out a second derivative."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return 3 * gradient * ctx.saved_tensors[0] ** 2


def tie(first: nn.Module, *others: nn.Module) -> nn.Module:
    """Let all layers share the weight of the first."""
    for other in others:
        other.weight = first.weight
    return first


def freeze(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def length(layer: nn.Module, name: str = "weight") -> Tensor:
    """g of a WeightNorm, in either form."""
    if hasattr(layer, name + "_g"):
        return getattr(layer, name + "_g")
    return layer.parametrizations[name].original0


def direction(layer: nn.Module, name: str = "weight") -> Tensor:
    """v of a WeightNorm, in either form."""
    if hasattr(layer, name + "_v"):
        return getattr(layer, name + "_v")
    return layer.parametrizations[name].original1


def weight_norm_mlp(form: str, dim: int | None = 0) -> nn.Module:
    normalize = partial(WEIGHT_NORM_FORMS[form], dim=dim)
    return nn.Sequential(normalize(nn.Linear(4, 6)), nn.Tanh(), normalize(nn.Linear(6, 3)))


def tied_mlp() -> nn.Module:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
    tie(first, second)
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), nn.Linear(4, 3))


def batch_norm_mlp() -> nn.Module:
    """With running statistics that are not those of any batch."""
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))
    nn.init.uniform_(model[1].running_mean, -1.0, 1.0)
    nn.init.uniform_(model[1].running_var, 0.5, 2.0)
    return model


def residual_block() -> nn.Module:
    """A residual sum of BatchNorm branches, with smooth activations."""
    return Graph(
        lambda m, x: m.head(
            (m.shortcut(x) + m.second_norm(m.second(m.first_norm(m.first(x)).tanh()))).tanh().flatten(1)
        ),
        first=nn.Conv2d(2, 3, 3, padding=1, bias=False),
        first_norm=nn.BatchNorm2d(3),
        second=nn.Conv2d(3, 3, 3, padding=1, bias=False),
        second_norm=nn.BatchNorm2d(3),
        shortcut=nn.Conv2d(2, 3, 1),
        head=nn.Linear(27, 3),
    )


def weight_norm_residual(form: str) -> nn.Module:
    normalize = WEIGHT_NORM_FORMS[form]
    return Graph(
        lambda m, x: m.head(x + m.second(m.first(x).tanh())),
        first=normalize(nn.Linear(4, 5)),
        second=normalize(nn.Linear(5, 4)),
        head=nn.Linear(4, 3),
    )


def weight_norm_conv(form: str, dim: int | None) -> nn.Module:
    normalize = partial(WEIGHT_NORM_FORMS[form], dim=dim)
    return nn.Sequential(normalize(nn.Conv2d(2, 3, 3)), nn.SiLU(), nn.Flatten(), normalize(nn.Linear(27, 3), dim=0))


def frozen_length(form: str) -> nn.Module:
    """One layer trains its directions alone, as in the WN paper, the other its lengths alone."""
    model = weight_norm_mlp(form)
    length(model[0]).requires_grad_(False)
    direction(model[2]).requires_grad_(False)
    return model


def shared_weight_norm(form: str) -> nn.Module:
    layer = WEIGHT_NORM_FORMS[form](nn.Linear(4, 4))
    return Graph(lambda m, x: m.head(m.layer(m.layer(x).tanh()).tanh()), layer=layer, head=nn.Linear(4, 3))


def weight_norm_lstm() -> nn.Module:
    lstm = nn.LSTM(2, 4, batch_first=True)
    for name in ("weight_ih_l0", "weight_hh_l0"):
        lstm = hook_weight_norm(lstm, name)
    return Graph(lambda m, x: m.head(m.lstm(x)[0][:, -1]), lstm=lstm, head=nn.Linear(4, 3))


def attention() -> nn.Module:
    return Graph(
        lambda m, x: m.head(m.encoder(x).mean(1)),
        encoder=nn.TransformerEncoderLayer(4, 2, 6, dropout=0.1, activation="gelu", batch_first=True),
        head=parametrized_weight_norm(nn.Linear(4, 3)),
    )


def batch_norm_conv() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(27, 3))


@dataclass(frozen=True)
class Model:
    """A row of the table.

    Attributes:
        build: makes the model, the same one every time (`make` seeds it).
        shape: of one input.
        outputs: of one output; () where the model returns one number per sample.
        coupled: whether samples see each other in training mode (BatchNorm).
    """

    build: Callable[[], nn.Module]
    shape: tuple[int, ...] = (4,)
    outputs: tuple[int, ...] = (3,)
    coupled: bool = False

    def make(self, dtype: torch.dtype = torch.float64) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return self.build().to(dtype)

    def data(self, n: int = 7, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(n, *self.shape, generator=generator, dtype=torch.float64)
        y = torch.randn(n, *self.outputs, generator=generator, dtype=torch.float64)
        return x.to(dtype), y.to(dtype)

    def labels(self, n: int = 7) -> Tensor:
        return torch.arange(n) % self.outputs[0]


MODELS = {
    "mlp": Model(lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))),
    "conv": Model(
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.GELU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(3, 3)), (2, 5, 5)
    ),
    "transposed-conv": Model(
        lambda: nn.Sequential(nn.ConvTranspose1d(2, 4, 2, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3)), (2, 3)
    ),
    **{
        f"wn-{form}-dim-{dim}": Model(partial(weight_norm_mlp, form, dim))
        for form in WEIGHT_NORM_FORMS
        for dim in (0, 1, None)
    },
    "bn": Model(batch_norm_mlp, coupled=True),
    "bn-conv": Model(batch_norm_conv, (2, 5, 5), coupled=True),
    "layer-norm": Model(lambda: nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.SiLU(), nn.Linear(6, 3))),
    "tied": Model(tied_mlp),
    "frozen": Model(lambda: nn.Sequential(freeze(nn.Linear(4, 6)), nn.Tanh(), nn.Linear(6, 3))),
    "unused": Model(lambda: Graph(lambda m, x: m.used(x).tanh(), used=nn.Linear(4, 3), unused=nn.Linear(5, 2))),
    "matrix-output": Model(lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Unflatten(1, (2, 3))), outputs=(2, 3)),
    "number-output": Model(lambda: nn.Sequential(nn.Linear(4, 1), nn.Tanh(), nn.Flatten(0)), outputs=()),
    **{f"wn-residual-{form}": Model(partial(weight_norm_residual, form)) for form in WEIGHT_NORM_FORMS},
    **{
        f"wn-conv-{form}-dim-{dim}": Model(partial(weight_norm_conv, form, dim), (2, 5, 5))
        for form, dim in (("hook", 0), ("parametrized", 1), ("hook", 2), ("parametrized", 3), ("hook", None))
    },
    **{f"wn-shared-{form}": Model(partial(shared_weight_norm, form)) for form in WEIGHT_NORM_FORMS},
    **{f"wn-frozen-{form}": Model(partial(frozen_length, form)) for form in WEIGHT_NORM_FORMS},
    "wn-negative-dim": Model(
        lambda: nn.Sequential(
            parametrized_weight_norm(nn.Conv1d(2, 3, 2), dim=-3),
            nn.Tanh(),
            nn.Flatten(),
            hook_weight_norm(nn.Linear(6, 3), dim=-2),
        ),
        (2, 3),
    ),
    "wn-bias": Model(
        lambda: nn.Sequential(parametrized_weight_norm(nn.Linear(4, 6), "bias"), nn.Tanh(), nn.Linear(6, 3))
    ),
    "wn-one-unit": Model(lambda: nn.Sequential(parametrized_weight_norm(nn.Linear(4, 1)), nn.Tanh(), nn.Linear(1, 3))),
    "bn-residual": Model(residual_block, (2, 3, 3), coupled=True),
    "wn-lstm": Model(weight_norm_lstm, (5, 2)),
    "attention": Model(attention, (3, 4)),
    "lstm": Model(
        lambda: Graph(
            lambda m, x: m.head(m.lstm(x)[0][:, -1]), lstm=nn.LSTM(2, 4, batch_first=True), head=nn.Linear(4, 3)
        ),
        (5, 2),
    ),
}
