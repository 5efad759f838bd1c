"""What trainers do with devices: mixed precision, data that are there, channels_last, compiled models, resuming."""

import warnings
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins import MixedPrecision
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from lightning_normtheory.callbacks import NormTheory

from reliability.processes.process_cases import differences
from support.accelerator import device as standin
from support.accelerator import on_device
from support.accelerator.trainer import arguments
from support.lit import CLASSES, Classifier, loader, rows, tensors, trainer

SLOW = ((), pytest.mark.slow)
MPS = pytest.param("mps", marks=pytest.mark.slow)
# Some 160 roundings in float32: two passes through two layers, with sums of up to 48 terms.
CLOSE = 160 * 2.0**-24


class State(pl.Callback):
    """What must be the same with us as without us, at the end of each epoch."""

    def __init__(self):
        self.found = []

    def on_train_epoch_end(self, trainer, pl_module):
        optimizers = [each.state_dict() for each in trainer.optimizers]
        tensors = [*pl_module.state_dict().values(), *_tensors(optimizers)]
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self.found.append(
            (
                [(each.detach().cpu().numpy().tobytes(), each.stride()) for each in tensors],
                None if scaler is None else scaler.state_dict(),
                torch.get_device_module(pl_module.device).get_rng_state().tolist(),
                torch.get_rng_state().tolist(),
            )
        )


def _tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for each in inside for tensor in _tensors(each)]


def classifier(net="wn"):
    torch.manual_seed(1)
    return Classifier(net)


def fit(folder, module, data, *, ours=True, **options):
    """Return the trained module, its states, and our rows. Nothing may fail."""
    torch.manual_seed(0)
    state, callbacks = State(), [NormTheory(on_error="raise", ntk_samples=12)] if ours else []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = {"max_epochs": 2, "default_root_dir": folder, **arguments(), **options}
        trainer([*callbacks, state], **options).fit(module, data)
    return module.cpu(), state.found, rows(folder) if ours else {}


def assert_neutral(folder: Path, make, data, **options):
    """Train without us and with us, with equal arguments; return the module and the rows."""
    new = {name: value if callable(value) else (lambda value=value: value) for name, value in options.items()}
    _, bare, _ = fit(folder / "bare", make(), data(), ours=False, **{name: each() for name, each in new.items()})
    module, watched, found = fit(folder / "watched", make(), data(), **{name: each() for name, each in new.items()})
    assert watched == bare
    return module, found


@pytest.mark.slow
@on_device("cuda", "mps")
def test_bf16_is_undisturbed_and_measured_in_float32(device, tmp_path):
    mixed_precision(tmp_path, lambda: MixedPrecision("bf16-mixed", device=device.type))


@on_device("cuda")  # torch's GradScaler knows by the name of the device that MPS has no float64
def test_16_bits_with_a_scaler_are_undisturbed_and_measured_in_float32(device, tmp_path):
    def plugin():
        # The first steps overflow, later ones do not.
        return MixedPrecision("16-mixed", device=device.type, scaler=torch.amp.GradScaler(device.type, 2.0**20))

    mixed_precision(tmp_path, plugin)


def mixed_precision(folder, plugin):
    def make():
        module = classifier("plain")
        module.net.insert(2, nn.Dropout(0.3))
        return module

    module, found = assert_neutral(folder, make, lambda: loader(48), plugins=plugin)
    x, y = tensors(48)
    loss = nn.functional.cross_entropy(module.double().eval()(x.double()), y)
    gradients = torch.autograd.grad(loss, list(module.parameters()))
    ratio = sum(float(each.square().sum()) for each in gradients) / float(loss)
    assert found[1]["normtheory/loss"] == pytest.approx(float(loss), rel=1e-6)
    assert found[1]["normtheory/rsc_ratio"] == pytest.approx(ratio, rel=CLOSE)


class Stream(IterableDataset):
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __iter__(self):
        return zip(self.x, self.y)


def loaders(x, y):
    dataset, weights = TensorDataset(x, y), [float(i % 4 > 0) for i in range(len(x))]
    return {
        "in order": lambda: DataLoader(dataset, 8),
        "shuffled": lambda: DataLoader(dataset, 8, shuffle=True),
        "weights": lambda: DataLoader(dataset, 8, sampler=WeightedRandomSampler(weights, 48)),
        "subset": lambda: DataLoader(dataset, 8, sampler=SubsetRandomSampler(range(20))),
        "batches of indices": lambda: DataLoader(dataset, batch_sampler=BatchSampler(RandomSampler(x), 8, False)),
        "whole batches": lambda: DataLoader(list(zip(x.split(8), y.split(8))), batch_size=None, shuffle=True),
        "stream": lambda: DataLoader(Stream(x, y), 8),
    }


@on_device("cuda", MPS)
@pytest.mark.parametrize("order", [pytest.param(name, marks=SLOW[name != "shuffled"]) for name in loaders(*tensors(8))])
def test_data_that_are_on_the_device_already(device, order, tmp_path):
    x, y = tensors(48)
    _, there = assert_neutral(tmp_path, classifier, loaders(x.to(device), y.to(device))[order])
    _, _, here = fit(tmp_path / "host", classifier(), loaders(x, y)[order]())
    assert differences(here, there, 0.0).differences == ()


class Watching(NormTheory):
    """Counts what waits for the device while the samples are read and while they are measured."""

    def on_train_start(self, trainer, pl_module):
        with standin.synchronizations(inside="/callbacks/") as self.reading:
            super().on_train_start(trainer, pl_module)

    def _measure(self, trainer, pl_module):
        with standin.synchronizations(inside="/callbacks/samples/") as self.measuring:
            return super()._measure(trainer, pl_module)


@on_device("cuda")
def test_samples_on_the_device_are_not_copied_to_the_host(device, tmp_path):
    x, y = tensors(48)
    callback = Watching(on_error="raise")
    options = {"max_epochs": 1, "default_root_dir": tmp_path, **arguments()}
    trainer([callback], **options).fit(classifier(), loaders(x.to(device), y.to(device))["shuffled"]())
    assert set(callback.reading.places) == set()
    assert [place for place in callback.measuring.places if "elsewhere" not in place] == []
    assert all(part.device == device for batch in callback.probe.batches(0, 1) for part in batch.data)


class Convolutional(Classifier):
    def __init__(self, memory_format, lr=0.05):
        torch.manual_seed(1)
        super().__init__("wn", lr)
        self.memory_format = memory_format
        layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Conv2d(4, 4, 3, padding=1), nn.Tanh()
        self.net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, CLASSES))
        self.to(memory_format=memory_format)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch[0].to(memory_format=self.memory_format), batch[1]


@on_device("cuda", MPS)
def test_channels_last(device, tmp_path):
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(40, 3, 6, 6, generator=generator), torch.randint(0, CLASSES, (40,), generator=generator)

    def data():
        return DataLoader(TensorDataset(x, y), 8)

    module, _ = assert_neutral(tmp_path, lambda: Convolutional(torch.channels_last), data)
    assert module.net[0].weight.is_contiguous(memory_format=torch.channels_last)
    # Without learning, which may amplify the rounding of kernels that add in another order.
    first, last = (
        fit(tmp_path / str(each), Convolutional(each, lr=0.0), data())[2]
        for each in (torch.contiguous_format, torch.channels_last)
    )
    assert differences(first, last, 1e-4).differences == ()


@on_device("cuda", MPS)
def test_a_compiled_model_is_measured_uncompiled_and_not_compiled_again(device, tmp_path):
    compiled = []

    def compiler(graph, inputs):
        compiled.append([tuple(each.shape) for each in inputs if isinstance(each, torch.Tensor)])
        return graph.forward

    def make():
        torch._dynamo.reset()
        compiled.append("a new run")
        module = classifier()
        module.net = torch.compile(module.net, backend=compiler)
        return module

    assert_neutral(tmp_path, make, lambda: loader(48))
    middle = len(compiled) // 2
    assert middle > 1
    assert compiled[:middle] == compiled[middle:]


@on_device("cuda", MPS)
@pytest.mark.parametrize("begins_on", [pytest.param("cpu", marks=pytest.mark.slow), "device"])
def test_a_checkpoint_of_one_device_is_resumed_on_another(device, begins_on, tmp_path):
    places = {"cpu": dict, "device": arguments}

    def run(name, place, epochs, checkpoint=None):
        folder = tmp_path / name
        save = pl.callbacks.ModelCheckpoint(folder, save_last=True, save_on_train_epoch_end=True)
        options = {"max_epochs": epochs, "default_root_dir": folder, "enable_checkpointing": True, **place()}
        callbacks = [NormTheory(on_error="raise", ntk_samples=12, probe=20), save]
        data = loader(48, shuffle=False), loader(16, shuffle=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer(callbacks, **options).fit(classifier("bn"), *data, ckpt_path=checkpoint)
        return rows(folder)

    ends_on = "device" if begins_on == "cpu" else "cpu"
    whole = run("whole", places[begins_on], 4)
    run("begun", places[begins_on], 2)
    resumed = run("resumed", places[ends_on], 4, tmp_path / "begun" / "last.ckpt")
    assert differences({epoch: whole[epoch] for epoch in (2, 3)}, resumed, 1e-4).differences == ()


class Divided(Classifier):
    """The last layer stays on the CPU."""

    def on_fit_start(self):
        self.net[2].cpu()

    def forward(self, x):
        return self.net[2](self.net[1](self.net[0](x)).cpu())

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1].cpu())


@on_device("cuda", MPS)
def test_a_model_on_two_devices_is_measured_but_for_its_kernel(device, tmp_path):
    found, reasons = {}, ""
    for cls in (Classifier, Divided):
        torch.manual_seed(1)
        module, folder = cls("wn", lr=0.0), tmp_path / cls.__name__
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fit = trainer([NormTheory()], max_epochs=1, default_root_dir=folder, **arguments())
            fit.fit(module, loader(48))
        found[cls] = rows(folder)[0]
        reasons = next(folder.rglob("normtheory.jsonl")).read_text()
    for name in ("loss", "rsc_ratio", "mean_predictor_grad_norm_sq", "hessian_lambda_max", "min_weight_norm"):
        one, two = (found[cls][f"normtheory/{name}"] for cls in (Classifier, Divided))
        assert two == pytest.approx(one, rel=CLOSE), name
    assert "Expected all trained parameters on one device, but they are on standin:0 and cpu" in reasons
