"""Models for the tests of the tangent kernel, in addition to the common table."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.nn.utils.parametrizations import weight_norm as parametrized_weight_norm
from torch.utils.checkpoint import checkpoint

from lightning_normtheory.model.batches import SampleBatch

from support.models import MODELS, WEIGHT_NORM_FORMS, Graph, Model, hook_weight_norm, length


class Tokens(Model):
    """A model whose inputs are indices."""

    def data(self, n=7, *, seed=0, dtype=torch.float64):
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, 6, (n, *self.shape), generator=generator), torch.zeros(n)


def head(layer: nn.Module, features: int, activation: nn.Module | None = None) -> nn.Module:
    return nn.Sequential(layer, activation or nn.Tanh(), nn.Flatten(), nn.Linear(features, 3))


def language_model(tied: bool) -> nn.Module:
    """Embedding, position, LayerNorm, attention; the output layer may share the embedding's weight."""

    def connect(m, x):
        h = m.norm(m.tokens(x) + m.position(torch.arange(x.shape[1])))
        return m.out((h + m.attention(h, h, h, need_weights=False)[0]).mean(1))

    model = Graph(
        connect,
        tokens=nn.Embedding(6, 4, padding_idx=1),
        position=nn.Embedding(5, 4),
        norm=nn.LayerNorm(4),
        attention=nn.MultiheadAttention(4, 2, batch_first=True),
        out=nn.Linear(4, 6),
    )
    if tied:
        model.out.weight = model.tokens.weight
    return model


class Parameters(nn.Module):
    """Parameters outside of layers: added, multiplied, subtracted, multiplied from either side."""

    def __init__(self):
        super().__init__()
        self.position = nn.Parameter(torch.randn(1, 3, 4))
        self.gain = nn.Parameter(torch.randn(4))
        self.scalar = nn.Parameter(torch.randn(()))
        self.right = nn.Parameter(torch.randn(4, 3))
        self.left = nn.Parameter(torch.randn(2, 3))

    def forward(self, x):
        h = (x + self.position) * self.gain
        h = torch.tanh(h * self.scalar) @ self.right
        return (self.left @ h).tanh().flatten(1)


class SequenceFirst(nn.Module):
    """Positions before samples, as in recurrent networks."""

    def __init__(self):
        super().__init__()
        self.first = parametrized_weight_norm(nn.Linear(4, 5))
        self.norm = nn.LayerNorm(5)
        self.second = nn.Linear(5, 3, bias=False)

    def forward(self, x):
        h = self.norm(self.first(x.transpose(0, 1)).tanh())
        return self.second(h)[-1]


class Merged(nn.Module):
    """Samples and positions in one axis of images, sample by sample."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 2)
        self.linear = nn.Linear(8, 3)

    def forward(self, x):
        n, t = x.shape[:2]
        return self.linear(self.conv(x.flatten(0, 1)[:, None]).tanh().flatten(1).view(n, t, -1)).sum(1)


class MergedDepthwise(nn.Module):
    """A depthwise convolution that two of several axes share, used twice."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(2, 2, 2, padding=1, groups=2)
        self.linear = nn.Linear(10, 3)

    def forward(self, x):
        n, t = x.shape[:2]
        h = self.conv(self.conv(x.flatten(0, 1)).tanh())
        return self.linear(h.tanh().flatten(1).view(n, t, -1)).sum(1)


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(parametrized_weight_norm(nn.Linear(4, 5)), nn.Tanh())
        self.out = nn.Linear(5, 3)

    def forward(self, x):
        return self.out(checkpoint(self.block, x, use_reentrant=False))


def second_use_of_a_direction() -> nn.Module:
    """v is also used outside its WeightNorm, and g in two of them: their gradients are sums over these uses."""
    first, second = hook_weight_norm(nn.Linear(4, 4)), hook_weight_norm(nn.Linear(4, 4))
    second.weight_g = first.weight_g
    return Graph(
        lambda m, x: m.out((m.second(m.first(x).tanh()) + x @ m.first.weight_v).tanh()),
        first=first,
        second=second,
        out=nn.Linear(4, 3),
    )


def zero_length() -> nn.Module:
    """A unit of length zero, and one whose bias is much larger than its length."""
    model = nn.Sequential(parametrized_weight_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3))
    with torch.no_grad():
        length(model[0])[0] = 0.0
        length(model[0])[1] = 1e-6
        model[0].bias[1] = 3.0
    return model


def in_place() -> nn.Module:
    return nn.Sequential(
        parametrized_weight_norm(nn.Conv2d(2, 3, 2)), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(27, 3)
    )


def weight_norm_of(layer, form, dim, features):
    return head(WEIGHT_NORM_FORMS[form](layer(), "weight", dim), features)


GROUPED = partial(nn.Conv2d, 4, 6, (2, 3), stride=(1, 2), padding=(1, 0), dilation=(2, 1), groups=2)
DEPTHWISE = partial(nn.Conv2d, 3, 6, 3, stride=2, padding=2, dilation=2, groups=3)
TRANSPOSED = partial(nn.ConvTranspose2d, 4, 6, 2, stride=2, padding=1, output_padding=1, groups=2, dilation=2)

# Models whose structure gives all gradients.
STRUCTURED = {
    "grouped-conv": Model(lambda: head(GROUPED(), 6 * 4 * 2), (4, 4, 5)),
    "depthwise-conv": Model(lambda: head(nn.Conv1d(3, 6, 2, groups=3), 18), (3, 4)),
    "depthwise-conv-2d": Model(lambda: head(DEPTHWISE(), 6 * 3 * 3), (3, 5, 5)),
    "depthwise-conv-reflect": Model(
        lambda: head(nn.Conv2d(3, 3, (3, 2), padding=1, groups=3, padding_mode="reflect"), 60), (3, 4, 4)
    ),
    "depthwise-conv-3d": Model(lambda: head(nn.Conv3d(2, 2, 2, groups=2), 16), (2, 3, 3, 3)),
    "depthwise-conv-transposed": Model(lambda: head(nn.ConvTranspose1d(3, 6, 3, 2, groups=3), 54), (3, 4)),
    "depthwise-conv-merged": Model(MergedDepthwise, (2, 2, 3)),
    "depthwise-conv-bn": Model(
        lambda: nn.Sequential(
            *(nn.Conv2d(2, 4, 3, padding=1, groups=2, bias=False), nn.BatchNorm2d(4), nn.ReLU6()),
            *(nn.Conv2d(4, 3, 1, bias=False), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(27, 3)),
        ),
        (2, 3, 3),
        coupled=True,
    ),
    **{
        f"wn-depthwise-conv-{form}-dim-{dim}": Model(partial(weight_norm_of, DEPTHWISE, form, dim, 54), (3, 5, 5))
        for form in WEIGHT_NORM_FORMS
        for dim in (0, 1, None)
    },
    "circular-conv": Model(lambda: head(nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), 48), (2, 4, 4)),
    "same-conv": Model(lambda: head(nn.Conv1d(2, 3, 4, padding="same"), 15), (2, 5)),
    "conv-3d": Model(lambda: head(nn.Conv3d(1, 2, 2), 16), (1, 3, 3, 3)),
    "transposed-conv-2d": Model(lambda: head(TRANSPOSED(), 6 * 6 * 6), (4, 3, 3)),
    "transposed-conv-3d": Model(lambda: head(nn.ConvTranspose3d(2, 1, 2), 27), (2, 2, 2, 2)),
    **{
        f"wn-grouped-conv-dim-{dim}": Model(partial(weight_norm_of, GROUPED, "parametrized", dim, 48), (4, 4, 5))
        for dim in (0, 1, 2, 3, None)
    },
    **{
        f"wn-transposed-conv-dim-{dim}": Model(partial(weight_norm_of, TRANSPOSED, "hook", dim, 216), (4, 3, 3))
        for dim in (0, 1, 2, 3, None)
    },
    "wn-sequence": Model(lambda: head(parametrized_weight_norm(nn.Linear(4, 5)), 15), (3, 4)),
    "wn-conv-bias": Model(
        lambda: nn.Sequential(
            parametrized_weight_norm(nn.Conv2d(2, 3, 3)),
            nn.Tanh(),
            parametrized_weight_norm(nn.Conv2d(3, 3, 3)),
            nn.Flatten(),
        ),
        (2, 5, 5),
    ),
    "wn-zero-length": Model(zero_length),
    "wn-in-place": Model(in_place, (2, 4, 4)),
    "group-norm": Model(
        lambda: nn.Sequential(nn.Conv1d(2, 4, 2), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)), (2, 4)
    ),
    "sequence-first": Model(SequenceFirst, (3, 4)),
    "merged-axes": Model(Merged, (2, 3, 3)),
    "checkpointed": Model(Checkpointed),
    "checkpointed-conv": Model(
        lambda: Graph(
            lambda m, x: m.out(checkpoint(m.block, x, use_reentrant=False).flatten(1)),
            block=nn.Sequential(parametrized_weight_norm(nn.Conv1d(2, 4, 2)), nn.GroupNorm(2, 4), nn.Tanh()),
            out=nn.Linear(12, 3),
        ),
        (2, 4),
    ),
    "parameters": Model(Parameters, (3, 4), (6,)),
}
# Models with parameters whose gradients are computed sample by sample; for the language models that is the table of
# positions, which is looked up once for all samples.
ONE_BY_ONE = {
    "tied-language-model": Tokens(partial(language_model, True), (4,), (6,)),
    "language-model": Tokens(partial(language_model, False), (4,), (6,)),
    "bilinear": Model(lambda: Graph(lambda m, x: m.layer(x, x), layer=nn.Bilinear(4, 4, 3))),
    "embedding-bag": Tokens(lambda: nn.Sequential(nn.EmbeddingBag(6, 4), nn.Tanh(), nn.Linear(4, 3)), (4,)),
    "wn-embedding": Tokens(lambda: head(parametrized_weight_norm(nn.Embedding(6, 4)), 16), (4,)),
    "spectral-norm": Model(lambda: head(spectral_norm(nn.Linear(4, 5)).eval(), 5)),
    "prelu": Model(lambda: head(nn.Linear(4, 5), 5, nn.PReLU(5))),
    "wn-entangled": Model(second_use_of_a_direction),
}
KERNEL_MODELS = {**MODELS, **STRUCTURED, **ONE_BY_ONE}

# Small models have singular kernels, which raise a warning.
SINGULAR = pytest.mark.filterwarnings("ignore:The kernel has")
PARTS = ("kernel", "direction", "length", "rest")


def assert_equal(found, expected):
    """Compare to 1e-10, relative to the whole kernel."""
    scale = expected["kernel"].norm()
    for part in PARTS:
        assert (getattr(found, part) - expected[part]).norm() <= 1e-10 * scale, part


def whole(batches):
    """Make batches of which all samples are asked for."""
    return [SampleBatch(x, len(x), len(x)) for x in batches]
