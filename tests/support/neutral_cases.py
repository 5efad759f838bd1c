"""Runs of a trainer, and a record of everything that must not differ between two of them."""

import random
from collections import deque

import lightning.pytorch
import numpy as np
import pytorch_lightning as pl
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from support.lit import CLASSES, FEATURES, Augmented, Classifier, Stream, loader, tensors, trainer

PREFIXES = ("normtheory", "other", "generator/", "generator_layers", "critic/", "critic_layers")


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


def state(trainer, module, logged=True):
    metrics = trainer.callback_metrics if logged else {}  # which computes them
    return {
        "weights": module.state_dict(),
        "optimizer": [optimizer.state_dict() for optimizer in trainer.optimizers],
        "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "gradients": {name: p.grad for name, p in module.named_parameters()},
        "logged": {k: v for k, v in metrics.items() if not k.startswith(PREFIXES)},
        "modes": [m.training for m in module.modules()],
        "attributes": {k: v for k, v in vars(module).items() if isinstance(v, (int, float, str, list, dict, deque))
                       and not k.startswith("_")},
        "metrics": [m.metric_state for m in module.modules() if isinstance(m, torchmetrics.Metric)],
        "meter": vars(module.meter) if hasattr(module, "meter") else None,
    }  # fmt: skip


def freeze(value):
    """A copy that compares bit by bit."""
    if isinstance(value, torch.Tensor):
        array = value.detach().cpu().clone().contiguous()
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
    """A batch sampler with its own state and no batch size."""

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
