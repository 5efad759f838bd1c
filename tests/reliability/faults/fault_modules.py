"""Modules and callbacks with numbers that are not finite in some epochs, and what the definitions say then."""

import math

import pytorch_lightning as pl
import torch
from torch import nn

from support.lit import Classifier, nets
from support.models import direction
from support.oracles import dense_kernel, exact_gradient

NAN = math.nan


class Guarded(Classifier):
    """Throws away what is not finite in a gradient, so that the weights survive: the user's own protection."""

    def on_after_backward(self):
        for p in self.parameters():
            p.grad.nan_to_num_(0.0, 0.0, 0.0)


class ScaledLoss(Guarded):
    """Its loss is multiplied in some epochs."""

    def __init__(self, factor, epochs, net="wn"):
        super().__init__(net)
        self.factor, self.epochs = factor, epochs

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * self.factor if self.current_epoch in self.epochs else loss


class Unguarded(ScaledLoss):
    def on_after_backward(self):
        pass


class Transferred(Guarded):
    """One entry of the inputs becomes something else on its way to the device, in some epochs."""

    def __init__(self, value, epochs, net="wn"):
        super().__init__(net)
        self.value, self.epochs = value, epochs

    def on_after_batch_transfer(self, batch, dataloader_idx):
        if self.current_epoch in self.epochs and self.trainer.training:
            batch[0][0, 0] = self.value
        return batch


class BrokenGradient(torch.autograd.Function):
    """The identity, with a gradient that is none."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * NAN


class NoGradient(Guarded):
    """A finite loss whose gradient is not, in some epochs."""

    def __init__(self, epochs, net="wn"):
        super().__init__(net)
        self.epochs = epochs

    def forward(self, x):
        outputs = super().forward(x)
        return BrokenGradient.apply(outputs) if self.current_epoch in self.epochs and self.trainer.training else outputs


class Regression(Guarded):
    """The square loss of targets (n, 3)."""

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        pass


class Broken(pl.Callback):
    """A tensor of the module has another entry at the end of some epochs, and its own again when the next one begins.

    Before ours: what they see is broken.
    """

    def __init__(self, find, value, epochs):
        self.find, self.value, self.epochs, self.kept = find, value, epochs, None

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch in self.epochs:
            tensor = self.find(pl_module).data
            self.kept = tensor.clone()
            tensor[0] = self.value

    def on_train_epoch_start(self, trainer, pl_module):
        if self.kept is not None:
            self.find(pl_module).data.copy_(self.kept)
            self.kept = None


class Definitions(pl.Callback):
    """What is to be found at the end of every epoch, from the definitions in float64.

    For networks without BatchNorm; the data are all of the probe, whatever its order.
    """

    def __init__(self, net, data, loss):
        self.net, self.data, self.loss, self.found = net, data, loss, {}

    def on_train_epoch_end(self, trainer, pl_module):
        with torch.random.fork_rng():
            model = nets()[self.net]().double()
        model.load_state_dict({k: v.double() for k, v in pl_module.net.state_dict().items()})
        x, y = self.data
        x, y = x.double(), y.double() if y.is_floating_point() else y
        value = float(self.loss(model(x), y))
        gradient = float((exact_gradient(model, self.loss, [(x, y)]) ** 2).sum())
        kernel = dense_kernel(model, x, "trace")["kernel"]
        finite = bool(kernel.isfinite().all())
        outputs = model(x)
        sums = torch.autograd.grad(outputs.sum(), list(model.parameters()))
        self.found[trainer.current_epoch] = {
            "loss": value,
            "grad_norm_sq": gradient,
            "rsc_ratio": gradient / value if value else NAN,
            "ntk_lambda_max": float(torch.linalg.eigvalsh(kernel)[-1]) if finite else NAN,
            "mean_predictor_grad_norm_sq": float(sum((g**2).sum() for g in sums)) / outputs.numel() ** 2,
            **({"min_weight_norm": float(direction(model[0]).norm(dim=1).min())} if self.net.startswith("wn") else {}),
        }
