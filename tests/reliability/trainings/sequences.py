"""Sequences: language models, forecasting, source separation."""

from collections import namedtuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.data import DataLoader, IterableDataset

from reliability.trainings.training import BATCH, SAMPLES, Module, Training, labels, loader, random, weight_of

VOCABULARY = 6


class GPT(nn.Module):
    """One block of attention."""

    def __init__(self, width=4, positions=5):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, width), nn.Embedding(positions, width)
        self.ln = nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)

    def logits(self, idx):
        x = self.wte(idx) + self.wpe.weight[: idx.shape[1]]
        q, k, v = self.c_attn(self.ln(x)).chunk(3, -1)
        scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
        future = torch.ones(idx.shape[1], idx.shape[1], dtype=torch.bool, device=idx.device).triu(1)
        return self.lm_head(x + self.c_proj(scores.masked_fill(future, float("-inf")).softmax(-1) @ v))


class MinGPT(Module):
    """The forward returns logits and loss."""

    def __init__(self):
        super().__init__()
        self.transformer = GPT()

    def forward(self, idx, targets=None):
        logits = self.transformer.logits(idx)
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss

    def training_step(self, batch, batch_idx):
        idx, targets = batch
        _, loss = self(idx, targets)
        self.log("train_loss", loss)
        return loss

    def reference_outputs(self, batch):
        return self.transformer.logits(batch[0])

    def reference_loss(self, batch):
        log_p, known = self.transformer.logits(batch[0]).log_softmax(-1), batch[1] != -1
        return -log_p.gather(2, batch[1].clamp(0)[..., None])[..., 0][known].mean()


def text():
    idx = labels(VOCABULARY, SAMPLES, 6)
    targets = idx[:, 1:].clone()
    targets[:, 0] = -1
    return loader(idx[:, :-1], targets)


class TCN(Module):
    """Blocks of dilated causal convolutions with WeightNorm; the forward takes a tuple."""

    normalized = ("conv1", "conv2")

    def __init__(self):
        super().__init__()
        self.conv1 = weight_norm(nn.Conv1d(2, 3, 2))
        self.conv2 = weight_norm(nn.Conv1d(3, 1, 2, dilation=2))
        self.downsample = nn.Conv1d(2, 1, 1)
        self.dropout = nn.Dropout(0.2)
        self.train_criterion = nn.MSELoss()

    def forward(self, x_in):
        x, _ = x_in
        x = x.transpose(1, 2)
        hidden = self.dropout(F.relu(self.conv1(F.pad(x, (1, 0)))))
        hidden = self.conv2(F.pad(hidden, (2, 0)))
        return (hidden + self.downsample(x)).transpose(1, 2)[..., None]

    def _process_input_batch(self, batch):
        past_target, past_covariates, static_covariates = batch
        return torch.cat([past_target, past_covariates], 2), static_covariates

    def training_step(self, train_batch, batch_idx):
        output = self(self._process_input_batch(train_batch[:-1]))
        loss = self.train_criterion(output.squeeze(-1), train_batch[-1])
        self.log("train_loss", loss, batch_size=len(train_batch[0]), prog_bar=True)
        return loss

    def reference_outputs(self, batch):
        x = torch.cat([batch[0], batch[1]], 2).transpose(1, 2)
        hidden = F.conv1d(F.pad(x, (1, 0)), weight_of(self.conv1), self.conv1.bias).relu()
        hidden = F.conv1d(F.pad(hidden, (2, 0)), weight_of(self.conv2), self.conv2.bias, dilation=2)
        return (hidden + self.downsample(x)).transpose(1, 2)

    def reference_loss(self, batch):
        return (self.reference_outputs(batch) - batch[3]).pow(2).mean()


def covariates():
    past = [random(SAMPLES, 5, 1, seed=seed) for seed in range(2)]
    return loader(*past, random(SAMPLES, 1, seed=2), random(SAMPLES, 5, 1, seed=3))


Output = namedtuple("Output", ["prediction", "encoder_output", "decoder_lengths"])


class Forecasting(Module):
    """x is a dict, the target a pair with its weights, and the forward returns more than the prediction."""

    quantiles = (0.1, 0.5, 0.9)

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(3, 2)
        self.encoder = nn.GRU(2, 3, batch_first=True)
        self.output_layer = nn.Linear(5, 2 * len(self.quantiles))

    def forward(self, x):
        encoded, _ = self.encoder(x["encoder_cont"])
        features = torch.cat([encoded[:, -1], self.embedding(x["encoder_cat"])], 1)
        prediction = self.output_layer(features).view(-1, 2, len(self.quantiles))
        return Output(prediction=prediction, encoder_output=encoded, decoder_lengths=x["decoder_lengths"])

    def loss(self, prediction, target):
        y, weight = target
        errors = [(y - prediction[..., i], q) for i, q in enumerate(self.quantiles)]
        losses = torch.stack([torch.max((q - 1) * error, q * error) for error, q in errors], -1)
        return (losses.sum(-1) * weight).mean()

    def training_step(self, batch, batch_idx):
        x, y = batch
        out = self(x)
        loss = self.loss(out.prediction, y)
        self.log("train_loss", loss, batch_size=len(x["decoder_lengths"]))
        return loss

    def reference_outputs(self, batch):
        x = batch[0]
        last = self.encoder(x["encoder_cont"])[1][0]
        return self.output_layer(torch.cat([last, self.embedding(x["encoder_cat"])], 1))

    def reference_loss(self, batch):
        y, weight = batch[1]
        total = 0
        for i, q in enumerate(self.quantiles):
            error = y - self.reference_outputs(batch).view(-1, 2, 3)[..., i]
            total = total + (weight * torch.where(error > 0, q * error, (q - 1) * error)).mean()
        return total


def time_series():
    def collate(samples):
        cont, cat, y, weight = map(torch.stack, zip(*samples))
        lengths = torch.full((len(cont),), 2)
        return {"encoder_cat": cat, "encoder_cont": cont, "decoder_lengths": lengths}, (y, weight)

    weight = 0.5 + random(SAMPLES, 2, seed=4).abs()
    return loader(random(SAMPLES, 4, 2), labels(3), random(SAMPLES, 2, seed=3), weight, collate_fn=collate)


class MaskedMSE(nn.Module):
    def forward(self, y, y_hat, mask):
        return ((y - y_hat).pow(2) * mask).sum() / mask.sum()


class NeuralForecast(Module):
    """Every series of the batch gives several windows: f has more rows than the batch has samples."""

    input_size, horizon, step_size = 3, 2, 2

    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(self.input_size, 4), nn.SiLU(), nn.Linear(4, self.horizon))
        self.loss = MaskedMSE()

    def _create_windows(self, batch):
        windows = batch["temporal"].unfold(2, self.input_size + self.horizon, self.step_size)
        return windows.permute(0, 2, 3, 1).flatten(0, 1)

    def forward(self, windows_batch):
        return self.mlp(windows_batch["insample_y"])

    def training_step(self, batch, batch_idx):
        y, mask = self._create_windows(batch).unbind(-1)
        size = self.input_size
        windows_batch = {"insample_y": y[:, :size], "insample_mask": mask[:, :size], "futr_exog": None}
        output = self(windows_batch)
        return self.loss(y=y[:, size:], y_hat=output, mask=mask[:, size:])

    def reference_windows(self, batch):
        series = batch["temporal"]
        cut = [series[:, :, start : start + 5] for start in range(0, series.shape[2] - 4, 2)]
        return torch.stack(cut, 1).flatten(0, 1)  # the windows of a series in succession

    def reference_outputs(self, batch):
        return self.mlp(self.reference_windows(batch)[:, 0, :3])

    def reference_loss(self, batch):
        y, mask = self.reference_windows(batch)[:, :, 3:].unbind(1)
        return ((self.reference_outputs(batch) - y)[mask == 1] ** 2).mean()


def series():
    def collate(samples):
        return {"temporal": torch.stack([x for (x,) in samples]), "temporal_cols": ["y", "available_mask"]}

    y, mask = random(SAMPLES, 7), (random(SAMPLES, 7, seed=1) > -1).float()
    return loader(torch.stack([y, mask], 1), collate_fn=collate)


class Recurrent(Module):
    """Truncated back-propagation: the second half of the sequence starts from the detached state of the first."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(2, 3, batch_first=True)
        self.linear = nn.Linear(3, 2)

    def forward(self, x, hiddens=None):
        out, hiddens = self.lstm(x, hiddens)
        return self.linear(out), hiddens

    def training_step(self, batch, batch_idx):
        x, y = batch
        hiddens, loss = None, 0
        for part, target in zip(x.split(3, 1), y.split(3, 1)):
            out, hiddens = self(part, hiddens)
            loss = loss + F.mse_loss(out, target)
            hiddens = tuple(h.detach() for h in hiddens)
        return loss

    def reference_outputs(self, batch):
        return self.linear(self.lstm(batch[0][:, :3])[0])

    def reference_loss(self, batch):
        x, y = batch
        _, (h, c) = self.lstm(x[:, :3])
        second = self.linear(self.lstm(x[:, 3:], (h.detach(), c.detach()))[0])
        return (self.reference_outputs(batch) - y[:, :3]).pow(2).mean() + (second - y[:, 3:]).pow(2).mean()


def long_sequences():
    return loader(random(SAMPLES, 6, 2), random(SAMPLES, 6, 2, seed=1))


class NegativeSISDR(nn.Module):
    def forward(self, estimate, target):
        estimate, target = estimate - estimate.mean(-1, keepdim=True), target - target.mean(-1, keepdim=True)
        scale = (estimate * target).sum(-1, keepdim=True) / target.pow(2).sum(-1, keepdim=True)
        noise = estimate - scale * target
        ratio = (scale * target).pow(2).sum(-1) / (noise.pow(2).sum(-1) + 1e-8)
        return -10 * torch.log10(ratio + 1e-8).mean()


class Separation(Module):
    """A system of a model and a loss: the loss is below zero as soon as the estimate is any good."""

    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Conv1d(1, 3, 3, padding=1), nn.Tanh(), nn.Conv1d(3, 2, 3, padding=1))
        self.loss_func = NegativeSISDR()

    def forward(self, mixture):
        return mixture + 0.1 * self.model(mixture)

    def common_step(self, batch, batch_nb):
        inputs, targets = batch
        return self.loss_func(self(inputs), targets)

    def training_step(self, batch, batch_nb):
        loss = self.common_step(batch, batch_nb)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-3)

    def reference_outputs(self, batch):
        return batch[0] + 0.1 * self.model(batch[0])

    def reference_loss(self, batch):
        f, target = (x - x.mean(-1, keepdim=True) for x in (self.reference_outputs(batch), batch[1]))
        cosine_sq = (f * target).sum(-1) ** 2 / (f.pow(2).sum(-1) * target.pow(2).sum(-1))
        return -10 * (cosine_sq / (1 - cosine_sq)).log10().mean()


def mixtures():
    sources = random(SAMPLES, 2, 8)
    return loader(sources[:, :1] + 0.3 * random(SAMPLES, 1, 8, seed=1), sources[:, :1] + 0.1 * sources)


class Endless(IterableDataset):
    """Draws for ever."""

    def __iter__(self):
        while True:
            x = torch.randn(4)
            yield x, x[:2].sin()


class Streaming(Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch):
        return F.mse_loss(self(batch[0]), batch[1])

    def reference_outputs(self, batch):
        return self.net(batch[0])

    def reference_loss(self, batch):
        return (self.net(batch[0]) - batch[1]).pow(2).mean()


TRAININGS = {
    "minGPT": Training(MinGPT, text),
    "darts TCN": Training(TCN, covariates),
    "pytorch-forecasting": Training(Forecasting, time_series),
    "neuralforecast": Training(NeuralForecast, series),
    "truncated LSTM": Training(Recurrent, long_sequences),
    "asteroid": Training(Separation, mixtures),
    "endless stream": Training(Streaming, lambda: DataLoader(Endless(), BATCH), {"limit_train_batches": 3}),
}
