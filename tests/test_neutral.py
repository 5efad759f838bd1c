"""Training with our callbacks is bitwise the training without them."""

import random
from collections import deque

import lightning.pytorch
import numpy as np
import pytest
import pytorch_lightning as pl
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_normtheory.callbacks import HessianTopEigenvalue, MinWeightNorm, NormTheory, RSCRatio

from lit import CLASSES, FEATURES, Augmented, Classifier, Stream, loader, tensors, trainer


class Recorder(pl.Callback):
    """Everything that must not differ, at every batch and at the end of every epoch."""

    def __init__(self):
        self.seen = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.note(batch, generators())

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.note(outputs, state(trainer, pl_module))

    def on_train_epoch_end(self, trainer, pl_module):
        self.note(state(trainer, pl_module), generators())

    def note(self, *values):
        self.seen.append(freeze(values))


def generators():
    return random.getstate(), np.random.get_state(), torch.random.get_rng_state()


def state(trainer, module):
    return {
        "weights": module.state_dict(),
        "optimizer": [optimizer.state_dict() for optimizer in trainer.optimizers],
        "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "gradients": {name: p.grad for name, p in module.named_parameters()},
        "logged": {k: v for k, v in trainer.callback_metrics.items() if not k.startswith(("normtheory", "other"))},
        "modes": [m.training for m in module.modules()],
        "attributes": {k: v for k, v in vars(module).items() if isinstance(v, (int, float, str, list, dict, deque))
                       and not k.startswith("_")},
        "metrics": [m.metric_state for m in module.modules() if isinstance(m, torchmetrics.Metric)],
        "meter": vars(module.meter) if hasattr(module, "meter") else None,
    }  # fmt: skip


def freeze(value):
    """A copy that compares bit by bit."""
    if isinstance(value, torch.Tensor):
        array = value.detach().clone().contiguous()
        return str(array.dtype), tuple(array.shape), array.reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, dict):
        return {k: freeze(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, deque)):
        return [freeze(v) for v in value]
    return value if isinstance(value, (int, str, bool, type(None))) else repr(value)


class Collecting(Classifier):
    """Keeps every kind of record of its own batches."""

    class Meter:
        def __init__(self):
            self.values, self.total = [], 0.0

    def __init__(self, net="bn-dropout"):
        super().__init__(net)
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(CLASSES)
        self.plain_metrics = {"mean": [torchmetrics.MeanMetric()]}
        self.meter = self.Meter()
        self.steps, self.running = 0, 0.0
        self.history, self.last, self.by_class = [], deque(maxlen=3), {}
        self.total = torch.zeros(())
        self.register_buffer("average", torch.zeros(FEATURES))

    def on_train_epoch_start(self):
        self.outputs = []  # does not exist before: a diagnostic must not run training_step earlier

    def training_step(self, batch, batch_idx):
        x, y = batch
        output = self(x)
        loss = nn.functional.cross_entropy(output, y)
        self.accuracy(output, y)
        self.plain_metrics["mean"][0].update(loss.detach())
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.log_dict({"train_loss": loss})
        self.steps += 1
        self.running = 0.9 * self.running + float(loss.detach())
        self.history.append(float(loss.detach()))
        self.outputs.append(output.detach())
        self.last.append(batch_idx)
        self.by_class.setdefault(int(y[0]), []).append(batch_idx)
        self.total += loss.detach()
        self.meter.values.append(self.steps)
        self.meter.total += float(loss.detach())
        self.average.lerp_(x.mean(0), 0.1)
        return {"loss": loss, "extra": output.detach()}

    def on_train_epoch_end(self):
        self.log("epoch_mean", torch.stack([o.mean() for o in self.outputs]).mean())
        self.plain_metrics["mean"][0].reset()


class Clipped(Classifier):
    """Writes into its own weights during the step, past autograd."""

    def training_step(self, batch, batch_idx):
        for p in self.parameters():
            p.data.mul_(0.999)
        return super().training_step(batch, batch_idx)


class Reaching(Classifier):
    """A step that reaches out of the module."""

    def training_step(self, batch, batch_idx):
        for group in self.optimizers().param_groups:
            group["lr"] *= 0.97
        if self.trainer.optimizers[0].param_groups[0]["lr"] < 0.03:
            self.trainer.should_stop = True
        return super().training_step(batch, batch_idx)


class Scheduled(Classifier):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9, weight_decay=1e-3)
        steps = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=100)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return [optimizer], [
            {"scheduler": steps, "interval": "step"},
            {"scheduler": plateau, "monitor": "val_loss", "interval": "epoch"},
        ]


class OnDevice(Classifier):
    """Augments in the batch-transfer hooks, in place."""

    def on_before_batch_transfer(self, batch, dataloader_idx):
        batch[0].add_(torch.rand(1))
        return batch

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return [batch[0] + torch.randn_like(batch[0]), batch[1]]


class Recurrent(Classifier):
    def __init__(self):
        super().__init__("plain")
        self.lstm = nn.LSTM(FEATURES, FEATURES, 2, dropout=0.5, batch_first=True)

    def forward(self, x):
        return self.net(self.lstm(x[:, None])[0][:, -1])


class Frozen(Classifier):
    """BatchNorm kept in eval mode, half of the weights frozen."""

    def __init__(self):
        super().__init__("bn")
        self.net[0].requires_grad_(False)

    def on_train_epoch_start(self):
        self.net[1].eval()


class TwoLoaders(Classifier):
    def training_step(self, batch, batch_idx):
        return sum(super(TwoLoaders, self).training_step(part, batch_idx) for part in batch.values())


class DictBatches(Classifier):
    def training_step(self, batch, batch_idx):
        return super().training_step((batch["image"], batch["label"]), batch_idx)


def dict_collate(samples):
    x, y = zip(*samples)
    return {"image": torch.stack(x), "label": torch.stack(y), "names": [str(int(i)) for i in y]}


def first_loader_output(module, batch):
    return module(batch["a"][0])


class Buckets:
    """A batch sampler with a state of its own and no batch size."""

    def __init__(self):
        self.rng, self.rounds = random.Random(3), 0

    def __iter__(self):
        self.rounds += 1
        order = list(range(50))
        self.rng.shuffle(order)
        return iter([order[:7], order[7:20], order[20:50]])

    def __len__(self):
        return 3


class Sliced:
    """A loader of the user's own making."""

    def __iter__(self):
        order = torch.randperm(50)
        return iter([[t[order[i : i + 8]] for t in tensors()] for i in range(0, 50, 8)])

    def __len__(self):
        return 7


def augmented(**kwargs):
    return DataLoader(Augmented(), 8, shuffle=True, **kwargs)


def combined(mode):
    return pl.utilities.CombinedLoader({"a": loader(), "b": loader(30, 5)}, mode)


# name: (module, loader, arguments of the callback, arguments of the trainer)
CASES = {
    "weightnorm": (lambda: Classifier("wn"), loader, {}, {}),
    "weightnorm hook": (lambda: Classifier("wn-hook"), loader, {}, {}),
    "batchnorm": (Classifier, loader, {}, {}),
    "batchnorm running statistics": (Classifier, loader, {"batch_stats": False}, {}),
    "batchnorm frozen": (Frozen, loader, {}, {}),
    "dropout": (lambda: Classifier("bn-dropout"), loader, {}, {}),
    "plain": (lambda: Classifier("plain"), loader, {}, {}),
    "everything collected": (Collecting, loader, {}, {}),
    "weights written in the step": (Clipped, loader, {}, {}),
    "reaching for optimizer and trainer": (Reaching, loader, {}, {}),
    "schedulers": (Scheduled, loader, {}, {}),
    "transfer hooks": (OnDevice, loader, {}, {}),
    "lstm dropout": (Recurrent, loader, {}, {}),
    "augmentation": (Classifier, augmented, {}, {}),
    "augmentation, 2 workers": (Classifier, lambda: augmented(num_workers=2), {}, {}),
    "persistent workers": (Classifier, lambda: augmented(num_workers=2, persistent_workers=True), {}, {}),
    "user generator": (Classifier, lambda: augmented(generator=torch.Generator().manual_seed(5)), {}, {}),
    "iterable": (Classifier, lambda: DataLoader(Stream(), 8), {"probe": 20}, {}),
    "iterable, 2 workers": (Classifier, lambda: DataLoader(Stream(), 8, num_workers=2), {"probe": 20}, {}),
    "not a DataLoader": (Classifier, Sliced, {}, {}),
    "batch sampler": (Classifier, lambda: DataLoader(Augmented(), batch_sampler=Buckets()), {}, {}),
    "whole batches": (Classifier, lambda: DataLoader(TensorDataset(*(t.unflatten(0, (5, 10)) for t in tensors())),
                                                     batch_size=None, shuffle=True), {}, {}),
    "two loaders": (TwoLoaders, lambda: combined("max_size_cycle"), {"predict": first_loader_output}, {}),
    "two loaders, shorter ends": (TwoLoaders, lambda: combined("min_size"), {"predict": first_loader_output}, {}),
    "dict batches": (DictBatches, lambda: loader(collate_fn=dict_collate),
                     {"predict": lambda m, b: m(b["image"])}, {}),
    # Before a validation Lightning drops the gradients; without one they are still there when we measure.
    "no validation": (Classifier, loader, {}, {"limit_val_batches": 0}),
    "everything collected, no validation": (Collecting, loader, {}, {"limit_val_batches": 0}),
    "gradient accumulation": (Classifier, loader, {}, {"accumulate_grad_batches": 3}),
    "accumulation, no validation": (Classifier, loader, {}, {"accumulate_grad_batches": 4, "limit_val_batches": 0}),
    "gradient clipping": (Classifier, loader, {}, {"gradient_clip_val": 0.1}),
    "64-true": (Classifier, loader, {}, {"precision": "64-true"}),
    "bf16-mixed": (Classifier, loader, {}, {"precision": "bf16-mixed"}),
    "every second epoch": (Classifier, loader, {"every_n_epochs": 2}, {}),
    "a large probe": (Classifier, loader, {"probe": 10_000}, {}),
    "reloaded loaders": (Classifier, loader, {}, {"reload_dataloaders_every_n_epochs": 1}),
}  # fmt: skip


def run(case, callbacks, package=pl):
    module, data, _, arguments = CASES[case]
    package.seed_everything(1)
    recorder = Recorder() if package is pl else OtherRecorder()
    fit = trainer([*callbacks, recorder], package=package, num_sanity_val_steps=1, **arguments)
    model = module()
    fit.fit(model, data(), loader(20, shuffle=False))
    recorder.note(state(fit, model), generators())
    return recorder.seen


class OtherRecorder(lightning.pytorch.Callback):
    """The same for the other package."""

    __init__ = Recorder.__init__
    on_train_batch_start = Recorder.on_train_batch_start
    on_train_batch_end = Recorder.on_train_batch_end
    on_train_epoch_end = Recorder.on_train_epoch_end
    note = Recorder.note


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES)
def test_training_is_bitwise_the_same(case):
    bare = run(case, [])
    watched = run(case, [NormTheory(on_error="raise", **CASES[case][2])])
    assert len(bare) == len(watched)
    for position, (a, b) in enumerate(zip(bare, watched)):
        assert a == b, f"first difference in record {position} of {len(bare)}"


def test_the_comparison_notices_a_disturbance():
    class Careless(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            torch.rand(1)

    assert run("batchnorm", []) != run("batchnorm", [Careless()])


def test_metrics_that_the_module_completes_at_the_end_of_its_epoch():
    """Without the Recorder, which reads what is logged in both runs."""

    class Late(Classifier):
        def __init__(self):
            super().__init__("wn")
            self.total = torchmetrics.SumMetric()

        def training_step(self, batch, batch_idx):
            self.total.update(1.0)
            self.log("total", self.total, on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

        def on_train_epoch_end(self):
            self.total.update(1000.0)

    def total(callbacks):
        fit = trainer(callbacks, max_epochs=1)
        fit.fit(Late(), loader())
        return float(fit.callback_metrics["total"])

    assert total([]) == total([NormTheory(on_error="raise")]) == 1007


def test_several_callbacks_at_once():
    together = [MinWeightNorm(), RSCRatio(on_error="raise", probe=16), NormTheory(prefix="other", on_error="raise")]
    assert run("batchnorm", []) == run("batchnorm", together)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES)
def test_curvature_in_low_memory_and_of_the_predictor(case):
    """With every choice that `NormTheory` does not make: forward passes in every product, vmap, Lanczos."""
    options = {"method": "lanczos", "memory": "low", "predictor_samples": 3, "max_hvps": 4}
    assert run(case, []) == run(case, [HessianTopEigenvalue(on_error="raise", **options, **CASES[case][2])])


class Module(lightning.pytorch.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, CLASSES))

    forward, training_step, validation_step = Classifier.forward, Classifier.training_step, Classifier.validation_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.05)


def test_the_other_package():
    CASES["other package"] = (Module, loader, {}, {})
    try:
        bare = run("other package", [], lightning.pytorch)
        assert bare == run("other package", [NormTheory(on_error="raise")], lightning.pytorch)
    finally:
        del CASES["other package"]


def test_a_failing_diagnostic_leaves_no_trace():
    def fails(module, batch):
        module.net[0].weight.data.zero_()
        module.train(False)
        torch.rand(3)
        fails.calls += 1
        if fails.calls > 1:  # the first call is the trial at fit start
            raise RuntimeError("on purpose")
        return module(batch[0])

    fails.calls = 0
    with pytest.warns(UserWarning, match="on purpose"):
        watched = run("batchnorm", [RSCRatio(predict=fails)])
    assert watched == run("batchnorm", [])


def test_loggers_see_no_trial_of_the_step(tmp_path):
    class Talkative(Classifier):
        def training_step(self, batch, batch_idx):
            self.logger.experiment.add_scalar("direct", 1.0, self.global_step)
            self.logger.log_metrics({"metrics": 1.0})
            return super().training_step(batch, batch_idx)

    class Experiment:
        def __init__(self):
            self.calls = 0

        def add_scalar(self, *args):
            self.calls += 1

    class Log(pl.loggers.logger.DummyLogger):
        def __init__(self):
            super().__init__()
            self.metrics, self.inner = [], Experiment()
            self.save_dir_, self._version = str(tmp_path), 0

        experiment = property(lambda self: self.inner)
        save_dir = property(lambda self: self.save_dir_)

        def log_metrics(self, metrics, step=None):
            self.metrics.append((sorted(metrics), step))

    def calls(callbacks):
        log = Log()
        torch.manual_seed(0)
        trainer(callbacks, logger=log).fit(Talkative(), loader())
        return log.inner.calls, [m for m in log.metrics if m[0] == ["metrics"]]

    assert calls([]) == calls([NormTheory(on_error="raise")])
