"""Classification and regression: batches of every form, and forwards that return more than a tensor."""

from collections import OrderedDict, UserDict

import pytorch_lightning as pl
import torch
import torchmetrics
from torch import nn
from torch.nn import functional as F

from reliability.trainings.training import SAMPLES, Module, Training, labels, loader, random

FEATURES, CLASSES = 4, 3


def mlp(inputs=FEATURES, outputs=CLASSES, width=5):
    return nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, outputs))


def vectors(classes=CLASSES):
    return loader(random(SAMPLES, FEATURES), labels(classes))


class PlainTuple(Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return loss

    def reference_outputs(self, batch):
        return self.net(batch[0])

    def reference_loss(self, batch):
        return F.nll_loss(self.reference_outputs(batch).log_softmax(1), batch[1])


class DictBatch(PlainTuple):
    def training_step(self, batch, batch_idx):
        return {"loss": F.cross_entropy(self(batch["image"]), batch["label"])}

    def reference_outputs(self, batch):
        return self.net(batch["image"])

    def reference_loss(self, batch):
        return F.nll_loss(self.net(batch["image"]).log_softmax(1), batch["label"])


def dicts():
    def collate(samples):
        x, y = zip(*samples)
        return {"name": [f"sample {int(i)}" for i in y], "image": torch.stack(x), "label": torch.stack(y)}

    return loader(random(SAMPLES, FEATURES), labels(CLASSES), collate_fn=collate)


class CallsForward(PlainTuple):
    """Calls ``self.forward``, past the hooks of the module."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.mse_loss(self.forward(x), F.one_hot(y, CLASSES).to(x))

    def reference_loss(self, batch):
        return (self.net(batch[0]) - F.one_hot(batch[1], CLASSES)).pow(2).mean()


class Wrapped(Module):
    """Around another LightningModule, whose step it calls."""

    expected_predictor = "inner"

    def __init__(self):
        super().__init__()
        self.inner = PlainTuple()
        self.inner.log = lambda *args, **kwargs: None  # it has no trainer

    def training_step(self, batch, batch_idx):
        return self.inner.training_step(batch, batch_idx)

    def reference_outputs(self, batch):
        return self.inner.net(batch[0])

    def reference_loss(self, batch):
        return self.inner.reference_loss(batch)


class LossAndAccuracy(PlainTuple):
    """The forward takes the batch and returns two numbers: f is the network inside."""

    expected_predictor = "net"

    def forward(self, batch):
        x, y = batch
        logits = self.net(x)
        return F.cross_entropy(logits, y), (logits.argmax(1) == y).float().mean()

    def training_step(self, batch, batch_idx):
        loss, accuracy = self(batch)
        self.log_dict({"loss": loss, "accuracy": accuracy})
        return loss


class FunctionalOnly(Module):
    """No module is called: there is no predictor to be found."""

    expected_predictor = ""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList([random(5, FEATURES) / 2, random(CLASSES, 5, seed=1) / 2])

    def training_step(self, batch, batch_idx):
        x, y = batch
        hidden = F.linear(x, self.weights[0]).tanh()
        return F.cross_entropy(F.linear(hidden, self.weights[1]), y)

    def reference_loss(self, batch):
        logits = (batch[0] @ self.weights[0].t()).tanh() @ self.weights[1].t()
        return F.nll_loss(logits.log_softmax(1), batch[1])


class Hydra(Module):
    """A template's module: a net, a criterion, metrics, and a step for all stages."""

    normalized = ("net.0",)

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, CLASSES))
        self.criterion = nn.CrossEntropyLoss()
        self.train_acc = torchmetrics.Accuracy(task="multiclass", num_classes=CLASSES)
        self.train_loss = torchmetrics.MeanMetric()

    def forward(self, x):
        return self.net(x.view(len(x), -1))

    def model_step(self, batch):
        x, y = batch
        logits = self.forward(x)
        return self.criterion(logits, y), logits.argmax(1), y

    def training_step(self, batch, batch_idx):
        loss, preds, targets = self.model_step(batch)
        self.train_loss(loss)
        self.train_acc(preds, targets)
        self.log("train/loss", self.train_loss, on_step=False, on_epoch=True)
        self.log("train/acc", self.train_acc, on_step=False, on_epoch=True)
        return loss

    def reference_outputs(self, batch):
        return self.net(batch[0].flatten(1))

    def reference_loss(self, batch):
        return F.nll_loss(self.reference_outputs(batch).log_softmax(1), batch[1])


def images():
    return loader(random(SAMPLES, 1, 4, 4), labels(CLASSES))


class BatchNormAct2d(nn.BatchNorm2d):
    """Normalization and activation in one layer, with a forward of its own."""

    def forward(self, x):
        if self.training:
            self.num_batches_tracked.add_(1)
        normalized = F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, self.training, self.momentum, self.eps
        )
        return F.silu(normalized)


class Backbone(nn.Module):
    """A small network of image models: stem, blocks with a shortcut, pooled head."""

    def __init__(self):
        super().__init__()
        self.conv_stem, self.bn1 = nn.Conv2d(1, 4, 3, padding=1, bias=False), BatchNormAct2d(4)
        self.conv_dw, self.bn2 = nn.Conv2d(4, 4, 3, padding=1, groups=4, bias=False), BatchNormAct2d(4)
        self.classifier = nn.Linear(4, CLASSES)

    def forward_features(self, x):
        x = self.bn1(self.conv_stem(x))
        return x + self.bn2(self.conv_dw(x))

    def forward(self, x):
        return self.classifier(F.dropout(self.forward_features(x).mean((2, 3)), 0.2, self.training))


class ImageModel(Module):
    normalized = ("model.conv_stem", "model.conv_dw")

    def __init__(self):
        super().__init__()
        self.model = Backbone()

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1], label_smoothing=0.1)

    def reference_outputs(self, batch):
        return self.model.classifier(self.model.forward_features(batch[0]).mean((2, 3)))

    def reference_loss(self, batch):
        log_p = self.reference_outputs(batch).log_softmax(1)
        return 0.9 * F.nll_loss(log_p, batch[1]) - 0.1 * log_p.mean()


class Segmentation(Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 3, 3, padding=1), nn.Softplus(), nn.ConvTranspose2d(3, CLASSES, 3, padding=1)
        )

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        image, mask = batch
        return F.cross_entropy(self(image), mask)

    def reference_outputs(self, batch):
        return self.net(batch[0])

    def reference_loss(self, batch):
        log_p = self.net(batch[0]).log_softmax(1)
        return -log_p.gather(1, batch[1][:, None]).mean()


def masks():
    return loader(random(SAMPLES, 1, 4, 4), labels(CLASSES, SAMPLES, 4, 4))


class MultiTask(Module):
    """A list of heads with different numbers of outputs: f has all of them."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(FEATURES, 5)
        self.heads = nn.ModuleList([nn.Linear(5, CLASSES), nn.Linear(5, 1)])

    def forward(self, x):
        h = self.trunk(x).tanh()
        return [head(h) for head in self.heads]

    def training_step(self, batch, batch_idx):
        x, y, z = batch
        logits, value = self(x)
        return F.cross_entropy(logits, y) + 0.5 * F.mse_loss(value.squeeze(1), z)

    def reference_outputs(self, batch):
        h = self.trunk(batch[0]).tanh()
        return torch.cat([self.heads[0](h), self.heads[1](h)], 1)

    def reference_loss(self, batch):
        f = self.reference_outputs(batch)
        return F.nll_loss(f[:, :CLASSES].log_softmax(1), batch[1]) + 0.5 * (f[:, CLASSES] - batch[2]).pow(2).mean()


def two_targets():
    return loader(random(SAMPLES, FEATURES), labels(CLASSES), random(SAMPLES, seed=2))


class Encoding(UserDict):
    """What a tokenizer returns: a mapping that is no dict."""

    def to(self, device):
        return Encoding({key: value.to(device) for key, value in self.items()})


class ModelOutput(OrderedDict):
    """What a pretrained model returns: a dict whose entries are attributes, too."""

    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class SequenceClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = nn.Embedding(7, 4)
        self.norm = nn.LayerNorm(4)
        self.encoder = nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.1)
        self.classifier = nn.Linear(4, CLASSES)

    def forward(self, input_ids, attention_mask, labels=None):
        hidden = F.gelu(self.encoder(self.norm(self.embeddings(input_ids))))
        pooled = (hidden * attention_mask[..., None]).sum(1) / attention_mask.sum(1, keepdim=True)
        logits = self.classifier(self.dropout(pooled))
        loss = F.cross_entropy(logits, labels) if labels is not None else None
        return ModelOutput(loss=loss, logits=logits)


class Transformers(Module):
    """A pretrained model that computes its own loss; the batch is passed as keyword arguments."""

    def __init__(self):
        super().__init__()
        self.model = SequenceClassifier()

    def forward(self, **inputs):
        return self.model(**inputs)

    def training_step(self, batch, batch_idx):
        outputs = self(**batch)
        self.log("train_loss", outputs.loss)
        return outputs[0] if isinstance(outputs, tuple) else outputs.loss

    def reference_outputs(self, batch):
        model, mask = self.model, batch["attention_mask"][..., None]
        hidden = F.gelu(model.encoder(model.norm(model.embeddings(batch["input_ids"]))))
        return model.classifier((hidden * mask).sum(1) / mask.sum(1))

    def reference_loss(self, batch):
        return F.nll_loss(self.reference_outputs(batch).log_softmax(1), batch["labels"])


def tokens():
    def collate(samples):
        names = ("input_ids", "attention_mask", "labels")
        return Encoding({name: torch.stack(parts) for name, parts in zip(names, zip(*samples))})

    ids = labels(7, SAMPLES, 5)
    lengths = 2 + labels(4, seed=3)
    mask = (torch.arange(5) < lengths[:, None]).long()
    return loader(ids, mask, labels(CLASSES, seed=2), collate_fn=collate)


class Unfreeze(pl.callbacks.BaseFinetuning):
    """Trains the head for an epoch, then everything."""

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer, lr=0.01)


class FineTuning(Module):
    normalized = ("backbone.0",)

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(FEATURES, 5), nn.BatchNorm1d(5), nn.Tanh())
        self.head = nn.Linear(5, CLASSES)

    def forward(self, x):
        return self.head(self.backbone(x))

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], 0.05)

    def reference_outputs(self, batch):
        return self.head(self.backbone(batch[0]))

    def reference_loss(self, batch):
        return F.nll_loss(self.reference_outputs(batch).log_softmax(1), batch[1])


TRAININGS = {
    "tuple": Training(PlainTuple, vectors),
    "dict": Training(DictBatch, dicts),
    "self.forward": Training(CallsForward, vectors),
    "wrapper": Training(Wrapped, vectors),
    "loss and accuracy": Training(LossAndAccuracy, vectors),
    "functional only": Training(FunctionalOnly, vectors),
    "hydra template": Training(Hydra, images),
    "timm": Training(ImageModel, images),
    "segmentation": Training(Segmentation, masks),
    "multi-task": Training(MultiTask, two_targets),
    "transformers": Training(Transformers, tokens),
    "fine-tuning": Training(FineTuning, vectors, callbacks=lambda: [Unfreeze()]),
}
