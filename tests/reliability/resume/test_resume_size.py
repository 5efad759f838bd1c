"""How much larger the callbacks make a checkpoint.

``cd tests && python -m reliability.resume.test_resume_size`` prints the table.
"""

import io

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.data import DataLoader, TensorDataset

from lightning_normtheory.callbacks import NormTheory

from support.lit import Wrapper, trainer
from support.models import Graph

WIDTH, FEATURES, ROWS = 96, 16, 8
# What torch needs around a tensor, and the callback for its settings, indices and numbers.
PER_TENSOR, PLAIN = 640, 8192


def residual(channels=16):
    """A block of a ResNet with its stem and head."""
    return Graph(
        lambda m, x: m.head((m.start(x) + m.block(m.start(x))).relu().mean((2, 3))),
        start=nn.Sequential(nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, channels, 3, padding=1), nn.BatchNorm2d(channels)),
        block=nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        ),
        head=nn.Linear(channels, 1),
    )


def chain(layer):
    return nn.Sequential(
        layer(nn.Linear(FEATURES, WIDTH)), nn.Tanh(), layer(nn.Linear(WIDTH, WIDTH)), nn.Tanh(), nn.Linear(WIDTH, 1)
    )


def two_layers():
    return nn.Sequential(
        nn.Linear(FEATURES, 4 * WIDTH), nn.BatchNorm1d(4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, 1, bias=False)
    )


# name: (network, how many float32 numbers of fit start are kept apart from θ₀: BN's U = (a, c); in float64 N(v_0) and
# b − mean)
NETS = {
    "chain with WeightNorm": (lambda: chain(weight_norm), 0),
    "chain without": (lambda: chain(lambda layer: layer), 0),
    "BN's two-layer form": (two_layers, (2 + 2 * 2) * 4 * WIDTH),
    "residual network": (residual, 0),
}


class Module(Wrapper):
    def training_step(self, batch, batch_idx):
        return (self(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


def saved(state):
    file = io.BytesIO()
    torch.save(state, file)
    return file.tell()


def measure(name):
    """The parameters, their number of tensors, the bytes of our state, and those of model and optimizer."""
    torch.manual_seed(0)
    callback, module = NormTheory(probe=ROWS, ntk_samples=ROWS, on_error="raise"), Module(NETS[name][0]())
    data = TensorDataset(torch.randn(ROWS, FEATURES), torch.arange(ROWS)[:, None] % 2.0)
    run = trainer([callback], max_epochs=1)
    run.fit(module, DataLoader(data, ROWS))
    parameters = list(module.parameters())
    rest = saved([module.state_dict(), run.optimizers[0].state_dict()])
    return sum(p.numel() for p in parameters), len(parameters), saved(callback.state_dict()), rest


@pytest.mark.parametrize("name", NETS)
def test_a_checkpoint_grows_by_what_the_docs_say(name):
    parameters, tensors, ours, _ = measure(name)
    # Of λ_max five bytes for each parameter and three times 256 numbers; the triangle of the kernel in float64; θ₀ and
    # what else is kept in float32.
    content = 5 * parameters + 3 * 4 * 256 + 4 * ROWS * (ROWS + 1) + 4 * (parameters + NETS[name][1])
    assert content <= ours <= content + PER_TENSOR * (tensors + 8) + PLAIN


if __name__ == "__main__":
    for name in NETS:
        parameters, _, ours, rest = measure(name)
        print(f"{name}: {parameters} parameters, {ours} bytes, {ours / rest:.0%} of model and Adam")
