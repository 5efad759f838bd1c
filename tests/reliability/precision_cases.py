"""Runs in every precision, compiled, checkpointed, in other memory formats and half frozen, and their references."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import BaseFinetuning, ModelSummary, StochasticWeightAveraging
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_normtheory import empirical_ntk, hessian_top_eigenvalue, min_weight_norm, rsc_ratio
from lightning_normtheory.callbacks import NormTheory

from reliability.outcome import Outcome
from support.batch_statistics import with_statistics_of
from support.lit import CLASSES, Wrapper, rows, trainer
from support.neutral_cases import Recorder, generators, state

SAMPLES, BATCH, FEATURES, SIDE, ROWS = 24, 8, 6, 4, 6
SINGLE = torch.finfo(torch.float32).eps
COMPILED: list[str] = []  # the graphs that were compiled


def counting(graph, inputs):
    """A backend that is quick, and counts."""
    COMPILED.append(str(graph.graph))
    return lookup_backend("aot_eager")(graph, inputs)


def dense():
    first = weight_norm(nn.Linear(FEATURES, 8)), nn.Tanh(), nn.Linear(8, 8), nn.BatchNorm1d(8)
    return nn.Sequential(*first, nn.SiLU(), nn.Linear(8, CLASSES))


def convolutional():
    first = weight_norm(nn.Conv2d(3, 4, 3)), nn.SiLU(), nn.Conv2d(4, 4, 2), nn.BatchNorm2d(4)
    return nn.Sequential(*first, nn.Flatten(), nn.Linear(4, CLASSES))


class Module(Wrapper):
    """Cross entropy and momentum on whatever network."""

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(trained, 0.05, momentum=0.9)


class Checkpointed(Module):
    """The first half is not kept for the backward pass but computed again."""

    reentrant = False

    def forward(self, x):
        inside = self.net[:3]
        if self.reentrant:
            x = x.requires_grad_()
        return self.net[3:](checkpoint(inside, x, use_reentrant=self.reentrant))


class ReentrantCheckpointed(Checkpointed):
    reentrant = True


class ChannelsLast(Module):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return [batch[0].to(memory_format=torch.channels_last), batch[1]]


class Thawing(BaseFinetuning):
    """The first layer is trained from the second epoch on."""

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer, lr=0.01)


def frozen(*names):
    """The dense network with the parameters frozen whose names contain one of these."""
    net = dense()
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(not any(part in name for part in names))
    return net


def compiled_in_place(net, **options):
    net.compile(backend=counting, **options)
    return net


@dataclass(frozen=True)
class Case:
    """A run.

    Attributes:
        module: makes it from a network.
        net: makes the network.
        dress: what is done with the network before it is trained: it must stay the same function.
        wrap: the same for the whole module.
        beside: other callbacks.
        digits: the relative error of one operation.
    """

    module: Callable[[nn.Module], pl.LightningModule] = Module
    net: Callable[[], nn.Module] = dense
    dress: Callable[[nn.Module], nn.Module] = lambda net: net
    wrap: Callable[[pl.LightningModule], Any] = lambda module: module
    beside: Callable[[], list[pl.Callback]] = list
    trainer: dict[str, Any] = field(default_factory=dict)
    images: bool = False
    digits: float = SINGLE


def precision(name, digits=SINGLE, **options):
    return Case(trainer={"precision": name}, digits=digits, **options)


CASES = {
    "32-true": precision("32-true"),
    # Mixed precision keeps the weights in float32, and the numbers are those of float32.
    "16-mixed": precision("16-mixed"),
    "bf16-mixed": precision("bf16-mixed"),
    "bf16-mixed, images": precision("bf16-mixed", net=convolutional, images=True),
    "64-true": precision("64-true", torch.finfo(torch.float64).eps),
    "bf16-true": precision("bf16-true", torch.finfo(torch.bfloat16).eps),
    "16-true": precision("16-true", torch.finfo(torch.float16).eps),
    "compiled network": Case(dress=lambda net: torch.compile(net, backend=counting)),
    "compiled network, dynamic shapes": Case(dress=lambda net: torch.compile(net, backend=counting, dynamic=True)),
    "compiled in place": Case(dress=compiled_in_place),
    "compiled layer": Case(dress=lambda net: nn.Sequential(torch.compile(net[:3], backend=counting), *net[3:])),
    "compiled module": Case(wrap=lambda module: torch.compile(module, backend=counting)),
    "compiled network, bf16-mixed": Case(
        dress=lambda net: torch.compile(net, backend=counting), trainer={"precision": "bf16-mixed"}
    ),
    "gradient checkpointing": Case(Checkpointed),
    "channels last": Case(
        ChannelsLast, convolutional, lambda net: net.to(memory_format=torch.channels_last), images=True
    ),
    "contiguous images": Case(net=convolutional, images=True),
    "all but one parameter frozen": Case(net=lambda: frozen("0.", "2.", "3.", "5.weight")),
    "a layer frozen": Case(net=lambda: frozen("2.")),
    "lengths frozen": Case(net=lambda: frozen("original0")),
    "directions frozen": Case(net=lambda: frozen("original1")),
    "thawed on the way": Case(beside=lambda: [Thawing()]),
    "weight averaging": Case(beside=lambda: [StochasticWeightAveraging(0.01, swa_epoch_start=1)]),
    "summary and clipping": Case(
        beside=lambda: [ModelSummary(max_depth=3)], trainer={"gradient_clip_val": 0.1, "enable_model_summary": True}
    ),
    "compiled with inductor": Case(dress=torch.compile),
}
# Compiling takes seconds, also with a quick backend.
SLOW = tuple(name for name in CASES if name.startswith("compiled") and name != "compiled in place")


def data(images, n=SAMPLES, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (3, SIDE, SIDE) if images else (FEATURES,)
    x = torch.randn(n, *shape, generator=generator)
    return TensorDataset(x, torch.randint(0, CLASSES, (n,), generator=generator))


class Layout(Recorder):
    """Also how the parameters lie in memory, and as what the network was when an epoch was measured."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        self.seen.append([(p.stride(), p.requires_grad, str(p.dtype)) for p in pl_module.parameters()])

    def on_train_epoch_end(self, trainer, pl_module):
        super().on_train_epoch_end(trainer, pl_module)
        self.trained = [p.requires_grad for p in pl_module.net.parameters()]
        self.tensors = [each.detach().clone() for each in (*pl_module.net.parameters(), *pl_module.net.buffers())]


def run(name, callbacks, epochs=2):
    """Everything that must be the same with and without us; also which graphs were compiled."""
    case = CASES[name]
    torch._dynamo.reset()
    COMPILED.clear()
    pl.seed_everything(1)
    recorder = Layout()
    fit = trainer([*callbacks, *case.beside(), recorder], max_epochs=epochs, num_sanity_val_steps=1, **case.trainer)
    module = case.wrap(case.module(case.dress(case.net())))
    held_out = DataLoader(data(case.images, 10, seed=1), 5)
    fit.fit(module, DataLoader(data(case.images), BATCH, shuffle=True), held_out)
    recorder.note(state(fit, fit.lightning_module), generators(), COMPILED)
    return recorder


def expected(name, recorder, probe, row):
    """What the theory floor says of the same weights, written plainly, in double precision: each number with what the
    one in the row may be off by, beside rounding."""
    net = CASES[name].net().double()
    for own, trained in zip(net.parameters(), recorder.trained):
        own.requires_grad_(trained)
    for own, value in zip((*net.parameters(), *net.buffers()), recorder.tensors):
        own.data.copy_(value)
    batches = [(batch.data[0].double(), batch.data[1]) for batch in probe.batches(0, 1)]
    rsc = rsc_ratio(net, nn.functional.cross_entropy, batches)
    top = hessian_top_eigenvalue(net, nn.functional.cross_entropy, batches, method="lanczos", tol=1e-7)
    held = with_statistics_of(net, [x for x, _ in batches])
    kernel = empirical_ntk(held, batches[0][0][:ROWS])
    return {
        "loss": (rsc.loss, 0.0),
        "grad_norm_sq": (rsc.grad_norm_sq, 0.0),
        "mean_predictor_grad_norm_sq": (rsc.mean_predictor_grad_norm_sq, 0.0),
        "hessian_lambda_max": (top.value, row["normtheory/hessian_lambda_max_residual"]),
        "ntk_lambda_max": (kernel.lambda_max, 0.0),
        "ntk_lambda_min": (kernel.lambda_min, row["normtheory/ntk_lambda_min_floor"] + kernel.floor),
        "min_weight_norm": (min_weight_norm(net), 0.0),
    }


def outcome(name, folder):
    """A run without and with us, in a folder that is also that of now, and the numbers of its last epoch beside their
    references."""
    bare = run(name, [])
    callback = NormTheory(probe=SAMPLES, ntk_samples=ROWS, on_error="raise")
    watched = run(name, [callback])
    different = [
        f"{name}: record {i} of the training" for i, (a, b) in enumerate(zip(bare.seen, watched.seen)) if a != b
    ]
    if len(bare.seen) != len(watched.seen):
        different.append(f"{name}: {len(watched.seen)} records of the training instead of {len(bare.seen)}")
    row = max(rows(folder).items())[1]
    references = expected(name, watched, callback.probe, row)
    for metric, (value, error) in references.items():
        found = row[f"normtheory/{metric}"]
        # Sums over a few layers and samples: some roundings, of different signs.
        if not abs(found - value) <= error + 8 * CASES[name].digits * abs(value):
            different.append(f"{name}, {metric}: {found!r} instead of {value!r}")
    return Outcome(len(bare.seen) + len(references), tuple(different))
