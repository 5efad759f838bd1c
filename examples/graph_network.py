"""A graph network in plain PyTorch: a batch is an object that holds several graphs; the outputs have a row for each."""

from dataclasses import dataclass, replace

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from lightning_normtheory.callbacks import NormTheory


@dataclass
class GraphBatch:
    """Several graphs in one: all nodes in succession, and the number of the graph of each node."""

    x: Tensor
    edge_index: Tensor
    batch: Tensor
    y: Tensor

    def to(self, device, non_blocking=False):
        return replace(self, **{name: x.to(device, non_blocking=non_blocking) for name, x in vars(self).items()})


class Graphs(Dataset):
    """Rings and stars of four to eight nodes, with random features: the label tells which."""

    def __init__(self, samples=256):
        self.sizes = torch.randint(4, 9, (samples,)).tolist()
        self.labels = torch.randint(2, (samples,)).tolist()
        self.features = [torch.randn(size, 4) for size in self.sizes]

    def __len__(self):
        return len(self.sizes)

    def __getitem__(self, i):
        nodes = torch.arange(self.sizes[i])
        edges = torch.stack([nodes, nodes.roll(1)]) if self.labels[i] else torch.stack([nodes[1:] * 0, nodes[1:]])
        return self.features[i], torch.cat([edges, edges.flip(0)], 1), self.labels[i]


def collate(samples):
    sizes = torch.tensor([len(x) for x, _, _ in samples])
    offsets = sizes.cumsum(0) - sizes
    return GraphBatch(
        x=torch.cat([x for x, _, _ in samples]),
        edge_index=torch.cat([edges + offset for (_, edges, _), offset in zip(samples, offsets)], 1),
        batch=torch.repeat_interleave(torch.arange(len(sizes)), sizes),
        y=torch.tensor([y for _, _, y in samples]),
    )


class GraphConv(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.lin = nn.Linear(2 * inputs, outputs, bias=False)
        self.norm = nn.BatchNorm1d(outputs)

    def forward(self, x, edge_index):
        source, target = edge_index
        received = torch.zeros_like(x).index_add(0, target, x[source])
        return F.relu(self.norm(self.lin(torch.cat([x, received], 1))))


class GNN(pl.LightningModule):
    def __init__(self, width=16, lr=0.05):
        super().__init__()
        self.lr = lr
        self.convs = nn.ModuleList([GraphConv(4, width), GraphConv(width, width)])
        self.head = nn.Linear(width, 2)

    def forward(self, x, edge_index, batch):
        for conv in self.convs:
            x = conv(x, edge_index)
        sums = x.new_zeros(int(batch.max()) + 1, x.shape[1]).index_add(0, batch, x)
        return self.head(sums / torch.bincount(batch)[:, None])

    def training_step(self, data, batch_idx):
        loss = F.cross_entropy(self(data.x, data.edge_index, data.batch), data.y)
        self.log("train_loss", loss, batch_size=len(data.y), prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.lr)


def main():
    pl.seed_everything(0)
    trainer = pl.Trainer(max_epochs=3, log_every_n_steps=4, callbacks=[NormTheory()])
    trainer.fit(GNN(), DataLoader(Graphs(), batch_size=32, shuffle=True, collate_fn=collate))


if __name__ == "__main__":
    main()
