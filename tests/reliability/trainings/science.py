"""Tables, molecules, graphs and cells: batches of objects, networks that are called part by part."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributions import Normal, Poisson, kl_divergence
from torch.nn import functional as F

from reliability.trainings.training import SAMPLES, Module, Training, labels, loader, noise, random

CLASSES = 3


class Tabular(Module):
    """The forward takes the dict of the batch and returns logits with the features of the backbone."""

    normalized = ("_backbone.0",)

    def __init__(self):
        super().__init__()
        self.embedding_layer = nn.Embedding(3, 2)
        self._backbone = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU())
        self._head = nn.Linear(4, CLASSES)
        self.loss = nn.CrossEntropyLoss()

    def embed_input(self, x):
        return torch.cat([x["continuous"], self.embedding_layer(x["categorical"])], 1)

    def compute_head(self, backbone_features):
        return OrderedDict(logits=self._head(backbone_features), backbone_features=backbone_features)

    def forward(self, x):
        return self.compute_head(self._backbone(self.embed_input(x)))

    def training_step(self, batch, batch_idx):
        y_hat = self(batch)["logits"]
        loss = self.loss(y_hat, batch["target"].squeeze(1))
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def reference_outputs(self, batch):
        x = torch.cat([batch["continuous"], self.embedding_layer(batch["categorical"])], 1)
        return self._head(self._backbone(x))

    def reference_loss(self, batch):
        return F.nll_loss(self.reference_outputs(batch).log_softmax(1), batch["target"][:, 0])


def table():
    def collate(samples):
        return dict(zip(("continuous", "categorical", "target"), map(torch.stack, zip(*samples))))

    return loader(random(SAMPLES, 3), labels(3), labels(CLASSES, SAMPLES, 1, seed=2), collate_fn=collate)


@dataclass
class Graphs:
    """Several graphs in one: their nodes in succession, and for each node the number of its graph."""

    x: Tensor
    edge_index: Tensor
    batch: Tensor
    y: Tensor
    num_graphs: int

    def to(self, device, non_blocking=False):
        moved = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in vars(self).items()}
        return Graphs(**moved)


def join_graphs(samples):
    """Rings of three to five nodes."""
    sizes = [int(size) for _, size, _ in samples]
    first = [sum(sizes[:i]) for i in range(len(sizes))]
    edges = [[start + i, start + (i + 1) % size] for start, size in zip(first, sizes) for i in range(size)]
    both = torch.tensor([*edges, *([b, a] for a, b in edges)]).t()
    return Graphs(
        x=torch.cat([x[:size] for (x, _, _), size in zip(samples, sizes)]),
        edge_index=both,
        batch=torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)),
        y=torch.stack([y for _, _, y in samples]),
        num_graphs=len(sizes),
    )


class GraphConv(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.lin_rel, self.lin_root = nn.Linear(inputs, outputs), nn.Linear(inputs, outputs, bias=False)

    def forward(self, x, edge_index):
        source, target = edge_index
        return self.lin_rel(torch.zeros_like(x).index_add(0, target, x[source])) + self.lin_root(x)


def dense_adjacency(graphs):
    """A (nodes, nodes), with A[i, j] = 1 for an edge from j to i, and the mean over the nodes of each graph."""
    nodes = len(graphs.x)
    adjacency = graphs.x.new_zeros(nodes, nodes)
    adjacency[graphs.edge_index[1], graphs.edge_index[0]] = 1
    members = F.one_hot(graphs.batch).to(graphs.x).t()
    return adjacency, members / members.sum(1, keepdim=True)


class GraphNetwork(Module):
    """The batch is an object, and the forward takes its parts."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = GraphConv(2, 4), GraphConv(4, 4)
        self.lin = nn.Linear(4, CLASSES)

    def forward(self, x, edge_index, batch):
        x = self.conv1(x, edge_index).relu()
        x = self.conv2(x, edge_index)
        total = x.new_zeros(int(batch.max()) + 1, x.shape[1]).index_add(0, batch, x)
        pooled = total / torch.bincount(batch)[:, None]
        return self.lin(F.dropout(pooled, 0.5, training=self.training))

    def training_step(self, data, batch_idx):
        loss = F.cross_entropy(self(data.x, data.edge_index, data.batch), data.y)
        self.log("train_loss", loss, batch_size=data.num_graphs)
        return loss

    def reference_outputs(self, graphs):
        a, mean = dense_adjacency(graphs)
        h = (self.conv1.lin_rel(a @ graphs.x) + self.conv1.lin_root(graphs.x)).relu()
        return self.lin(mean @ (self.conv2.lin_rel(a @ h) + self.conv2.lin_root(h)))

    def reference_loss(self, graphs):
        return F.nll_loss(self.reference_outputs(graphs).log_softmax(1), graphs.y)


def graphs():
    return loader(random(SAMPLES, 5, 2), 3 + labels(3, seed=3), labels(CLASSES), collate_fn=join_graphs)


class MoleculeBatch(NamedTuple):
    bmg: Graphs
    V_d: Tensor | None
    targets: Tensor
    weights: Tensor
    lt_mask: Tensor | None


class MessagePassing(nn.Module):
    def __init__(self):
        super().__init__()
        self.W_i, self.W_h = nn.Linear(2, 4), nn.Linear(4, 4, bias=False)

    def forward(self, bmg, V_d=None):
        source, target = bmg.edge_index
        initial = self.W_i(bmg.x)
        hidden = initial.tanh()
        return (initial + self.W_h(torch.zeros_like(hidden).index_add(0, target, hidden[source]))).tanh()


class MeanAggregation(nn.Module):
    def forward(self, H, batch):
        total = H.new_zeros(int(batch.max()) + 1, H.shape[1]).index_add(0, batch, H)
        return total / torch.bincount(batch)[:, None]


class RegressionFFN(nn.Module):
    def __init__(self):
        super().__init__()
        self.ffn = nn.Sequential(nn.Linear(4, 4), nn.SiLU(), nn.Linear(4, 1))

    def forward(self, Z):
        return 2 * self.ffn(Z) + 1  # in the units of the targets

    def train_step(self, Z):
        return self.ffn(Z)


class WeightedMSE(nn.Module):
    def forward(self, preds, targets, mask, weights):
        return (mask * weights[:, None] * (preds - targets).pow(2)).sum() / mask.sum()


class MPNN(Module):
    """A network that is called part by part, the last one by a method: its own forward is not used in training."""

    expected_predictor = "predictor.ffn"

    def __init__(self):
        super().__init__()
        self.message_passing, self.agg, self.bn = MessagePassing(), MeanAggregation(), nn.BatchNorm1d(4)
        self.predictor = RegressionFFN()
        self.criterion = WeightedMSE()

    def fingerprint(self, bmg, V_d=None):
        return self.bn(self.agg(self.message_passing(bmg, V_d), bmg.batch))

    def forward(self, bmg, V_d=None):
        return self.predictor(self.fingerprint(bmg, V_d))

    def training_step(self, batch, batch_idx):
        bmg, V_d, targets, weights, _ = batch
        mask = targets.isfinite()
        preds = self.predictor.train_step(self.fingerprint(bmg, V_d))
        loss = self.criterion(preds, targets.nan_to_num(nan=0.0), mask, weights)
        self.log("train_loss", loss, batch_size=len(targets), on_epoch=True)
        return loss

    def reference_outputs(self, batch):
        a, mean = dense_adjacency(batch.bmg)
        initial = self.message_passing.W_i(batch.bmg.x)
        hidden = (initial + self.message_passing.W_h(a @ initial.tanh())).tanh()
        return self.predictor.ffn(self.bn(mean @ hidden))

    def reference_loss(self, batch):
        known = batch.targets.isfinite()
        errors = (self.reference_outputs(batch) - batch.targets)[known] ** 2
        return (errors * batch.weights[:, None][known]).mean()


def molecules():
    def collate(samples):
        bmg = join_graphs([sample[:3] for sample in samples])
        return MoleculeBatch(bmg, None, bmg.y, torch.stack([sample[3] for sample in samples]), None)

    targets = random(SAMPLES, 1, seed=4)
    targets[::7] = float("nan")
    weights = 0.5 + random(SAMPLES, seed=5).abs()
    return loader(random(SAMPLES, 5, 2), 3 + labels(3, seed=3), targets, weights, collate_fn=collate)


@dataclass
class Elbo:
    loss: Tensor
    reconstruction_loss: Tensor
    kl_local: Tensor


class CellModule(nn.Module):
    """A variational autoencoder of counts."""

    def __init__(self, genes=4, latent=2):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(genes, 4), nn.Tanh())
        self.mean_encoder, self.var_encoder = nn.Linear(4, latent), nn.Linear(4, latent)
        self.decoder = nn.Sequential(nn.Linear(latent, 4), nn.Tanh(), nn.Linear(4, genes))

    def inference(self, x):
        q = self.encoder(torch.log1p(x))
        qz_m, qz_v = self.mean_encoder(q), self.var_encoder(q).exp() + 1e-4
        qz = Normal(qz_m, qz_v.sqrt())
        return {"qz": qz, "z": qz.rsample(), "library": x.sum(1)}

    def generative(self, z, library):
        px_scale = F.softplus(self.decoder(z))
        return {"px_scale": px_scale, "px_rate": library[:, None] * px_scale}

    def forward(self, tensors, kl_weight=1.0):
        inference = self.inference(tensors["X"])
        generative = self.generative(inference["z"], inference["library"])
        reconstruction = -Poisson(generative["px_rate"]).log_prob(tensors["X"]).sum(-1)
        kl = kl_divergence(inference["qz"], Normal(0.0, 1.0)).sum(-1)
        return inference, generative, Elbo((reconstruction + kl_weight * kl).mean(), reconstruction, kl)


class Cells(Module):
    """The forward returns what was inferred, what is generated from it, and an object with the loss."""

    drawn_for_kernel = True

    def __init__(self):
        super().__init__()
        self.module = CellModule()
        self.loss_kwargs = {}

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def training_step(self, batch, batch_idx):
        self.loss_kwargs["kl_weight"] = min(1.0, 0.5 * (self.current_epoch + 1))
        _, _, scvi_loss = self.forward(batch, **self.loss_kwargs)
        self.log("train_loss", scvi_loss.loss, on_epoch=True)
        return scvi_loss.loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-2)

    def posterior(self, x):
        q = self.module.encoder((1 + x).log())
        return self.module.mean_encoder(q), (self.module.var_encoder(q).exp() + 1e-4).sqrt()

    def reference_outputs(self, batch):
        mean, deviation = self.posterior(batch["X"])
        z = mean + deviation * noise(*mean.shape)
        return batch["X"].sum(1, keepdim=True) * F.softplus(self.module.decoder(z))

    def reference_loss(self, batch):
        x, rate = batch["X"], self.reference_outputs(batch)
        mean, deviation = self.posterior(x)
        reconstruction = (rate - x * rate.log() + (x + 1).lgamma()).sum(1)
        kl = (mean.pow(2) + deviation.pow(2) - 1 - 2 * deviation.log()).sum(1) / 2
        return (reconstruction + kl).mean()


def counts():
    def collate(samples):
        return {"X": torch.stack([x for x, _ in samples]), "batch": torch.stack([b for _, b in samples])}

    return loader(1.0 + labels(9, SAMPLES, 4), labels(1, SAMPLES, 1), collate_fn=collate)


TRAININGS = {
    "pytorch-tabular": Training(Tabular, table),
    "PyG": Training(GraphNetwork, graphs),
    "chemprop": Training(MPNN, molecules),
    "scvi-tools": Training(Cells, counts),
}
