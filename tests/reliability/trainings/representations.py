"""Self-supervised learning and distillation: several views, teachers that move in the step, queues and centers."""

import copy

import torch
from torch import nn
from torch.nn import functional as F

from reliability.trainings.training import SAMPLES, Module, Training, labels, loader, random

FEATURES, WIDTH, EMBEDDING = 4, 5, 3


def backbone():
    return nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh())


def head(outputs=EMBEDDING):
    return nn.Linear(WIDTH, outputs)


def frozen(module):
    return copy.deepcopy(module).requires_grad_(False)


@torch.no_grad()
def update_momentum(student, teacher, m):
    for s, t in zip(student.parameters(), teacher.parameters()):
        t.data = t.data * m + s.data * (1 - m)


def moved(student, teacher, m):
    """The teacher that the next step sees, for the reference."""
    changed = copy.deepcopy(teacher)
    for s, t in zip(student.parameters(), changed.parameters()):
        t.data.lerp_(s.data, 1 - m)
    return changed


def views(number=2):
    def collate(samples):
        return [torch.stack(view) for view in zip(*samples)][:-1], torch.zeros(len(samples))

    x = random(SAMPLES, FEATURES)
    noisy = [x + 0.3 * random(SAMPLES, FEATURES, seed=seed) for seed in range(1, number + 1)]
    return loader(*noisy, labels(2), collate_fn=collate)


class BYOL(Module):
    """A teacher follows the student in every step, before the loss."""

    momentum = 0.9

    def __init__(self):
        super().__init__()
        self.backbone, self.projection_head = backbone(), head()
        self.prediction_head = nn.Linear(EMBEDDING, EMBEDDING)
        self.backbone_momentum, self.projection_head_momentum = frozen(self.backbone), frozen(self.projection_head)

    def forward(self, x):
        return self.prediction_head(self.projection_head(self.backbone(x)))

    def forward_momentum(self, x):
        return self.projection_head_momentum(self.backbone_momentum(x)).detach()

    def training_step(self, batch, batch_idx):
        update_momentum(self.backbone, self.backbone_momentum, self.momentum)
        update_momentum(self.projection_head, self.projection_head_momentum, self.momentum)
        x0, x1 = batch[0]
        p0, z0 = self.forward(x0), self.forward_momentum(x0)
        p1, z1 = self.forward(x1), self.forward_momentum(x1)
        similarity = F.cosine_similarity(p0, z1).mean() + F.cosine_similarity(p1, z0).mean()
        return 2 - similarity

    def reference_outputs(self, batch):
        return self.prediction_head(self.projection_head(self.backbone(batch[0][0])))

    def reference_loss(self, batch):
        x0, x1 = batch[0]
        base = moved(self.backbone, self.backbone_momentum, self.momentum)
        top = moved(self.projection_head, self.projection_head_momentum, self.momentum)
        total = 0
        for x, other in ((x0, x1), (x1, x0)):
            p, z = self.prediction_head(self.projection_head(self.backbone(x))), top(base(other))
            total = total + 1 - (p / p.norm(dim=1, keepdim=True) * (z / z.norm(dim=1, keepdim=True))).sum(1).mean()
        return total


class SimCLR(Module):
    """Both views pass in one call: f has twice as many rows as the batch has samples."""

    temperature = 0.5

    def __init__(self):
        super().__init__()
        self.encoder, self.projector = backbone(), head()

    def forward(self, x):
        return F.normalize(self.projector(self.encoder(x)))

    def training_step(self, batch, batch_idx):
        z = self(torch.cat(batch[0]))
        similarity = (z @ z.t() / self.temperature).masked_fill(torch.eye(len(z), dtype=torch.bool), -1e4)
        partner = torch.arange(len(z)).roll(len(z) // 2)
        return F.cross_entropy(similarity, partner)

    def reference_outputs(self, batch):
        z = self.projector(self.encoder(torch.cat(batch[0])))
        return z / z.pow(2).sum(1, keepdim=True).sqrt()

    def reference_loss(self, batch):
        z, n = self.reference_outputs(batch), len(batch[0][0])
        similarity = (z @ z.t() / self.temperature).exp()
        others = similarity.sum(1) - similarity.diagonal()
        positive = torch.cat([similarity.diagonal(n), similarity.diagonal(-n)])
        return (others / positive).log().mean()


class MoCo(Module):
    """A queue of earlier keys is the set of negatives."""

    momentum, temperature = 0.99, 0.2

    def __init__(self):
        super().__init__()
        self.encoder_q = nn.Sequential(backbone(), head())
        self.encoder_k = frozen(self.encoder_q)
        self.register_buffer("queue", F.normalize(random(12, EMBEDDING, seed=9)))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    def forward(self, img_q, img_k):
        q = F.normalize(self.encoder_q(img_q), dim=1)
        with torch.no_grad():
            k = F.normalize(self.encoder_k(img_k), dim=1)
        return q, k

    @torch.no_grad()
    def _dequeue_and_enqueue(self, keys):
        places = (self.queue_ptr + torch.arange(len(keys))) % len(self.queue)
        self.queue[places] = keys
        self.queue_ptr[0] = (self.queue_ptr + len(keys)) % len(self.queue)

    def training_step(self, batch, batch_idx):
        update_momentum(self.encoder_q, self.encoder_k, self.momentum)
        q, k = self(*batch[0])
        positive = torch.einsum("nc,nc->n", q, k)[:, None]
        logits = torch.cat([positive, q @ self.queue.clone().t()], 1) / self.temperature
        self._dequeue_and_enqueue(k)
        return F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long))

    def reference_outputs(self, batch):
        q = self.encoder_q(batch[0][0])
        return q / q.norm(dim=1, keepdim=True)

    def reference_loss(self, batch):
        q, k = self.reference_outputs(batch), moved(self.encoder_q, self.encoder_k, self.momentum)(batch[0][1])
        positive = (q * k).sum(1) / k.norm(dim=1) / self.temperature
        negative = q @ self.queue.t() / self.temperature
        return (torch.cat([positive[:, None], negative], 1).logsumexp(1) - positive).mean()


class SwAV(Module):
    """The trained prototypes are normalized in place in every step."""

    temperature = 0.5

    def __init__(self):
        super().__init__()
        self.backbone, self.projection_head = backbone(), head()
        self.prototypes = nn.Linear(EMBEDDING, 4, bias=False)

    def forward(self, x):
        return self.prototypes(F.normalize(self.projection_head(self.backbone(x)), dim=1))

    @staticmethod
    @torch.no_grad()
    def sinkhorn(scores):
        codes = (scores / 0.5).exp()
        for _ in range(3):
            codes = codes / codes.sum(0, keepdim=True) / codes.shape[1]
            codes = codes / codes.sum(1, keepdim=True) / codes.shape[0]
        return codes * codes.shape[0]

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            self.prototypes.weight.copy_(F.normalize(self.prototypes.weight, dim=1))
        scores = [self(x) for x in batch[0]]
        loss = 0
        for here, other in ((0, 1), (1, 0)):
            codes = self.sinkhorn(scores[other].detach())
            loss = loss - (codes * F.log_softmax(scores[here] / self.temperature, 1)).sum(1).mean()
        return loss / 2

    def prepare_reference(self):
        """The state in which the step computes: its own first act."""
        weight = self.prototypes.weight.data
        weight /= weight.norm(dim=1, keepdim=True)

    def scores(self, x):
        z = self.projection_head(self.backbone(x))
        return self.prototypes(z / z.norm(dim=1, keepdim=True))

    def reference_outputs(self, batch):
        return self.scores(batch[0][0])

    def reference_loss(self, batch):
        first, second = map(self.scores, batch[0])
        cross = (self.sinkhorn(second.detach()) * (first / self.temperature).log_softmax(1)).sum(1)
        cross = cross + (self.sinkhorn(first.detach()) * (second / self.temperature).log_softmax(1)).sum(1)
        return -cross.mean() / 2


class DINO(Module):
    """Two global and two local views; the teacher sees the global ones, and its outputs are centered."""

    momentum = 0.9

    def __init__(self):
        super().__init__()
        self.student = nn.Sequential(backbone(), head())
        self.teacher = frozen(self.student)
        self.register_buffer("center", torch.zeros(1, EMBEDDING))

    def forward(self, x):
        return self.student(x)

    def training_step(self, batch, batch_idx):
        update_momentum(self.student, self.teacher, self.momentum)
        crops = batch[0]
        with torch.no_grad():
            targets = [self.teacher(x) for x in crops[:2]]
        predictions = [self(x) for x in crops]
        losses = [
            -(((t - self.center) / 0.5).softmax(-1) * p.log_softmax(-1)).sum(-1).mean()
            for i, t in enumerate(targets)
            for j, p in enumerate(predictions)
            if i != j
        ]
        self.center.mul_(0.9).add_(0.1 * torch.cat(targets).mean(0, keepdim=True))
        return torch.stack(losses).mean()

    def reference_outputs(self, batch):
        return self.student(batch[0][0])

    def reference_loss(self, batch):
        teacher = moved(self.student, self.teacher, self.momentum)
        total = 0
        for i in range(2):
            target = (2 * (teacher(batch[0][i]) - self.center)).softmax(1)
            for j in set(range(4)) - {i}:
                total = total - (target * self.student(batch[0][j]).log_softmax(1)).sum(1).mean() / 6
        return total


class Distillation(Module):
    """A frozen teacher in eval mode gives soft targets."""

    def __init__(self):
        super().__init__()
        self.teacher = frozen(nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)))
        self.student = nn.Sequential(backbone(), head())

    def on_train_epoch_start(self):
        self.teacher.eval()

    def forward(self, x):
        return self.student(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        with torch.no_grad():
            soft = (self.teacher(x) / 2).softmax(1)
        logits = self(x)
        distilled = F.kl_div((logits / 2).log_softmax(1), soft, reduction="batchmean")
        return 0.5 * F.cross_entropy(logits, y) + 2 * distilled

    def reference_outputs(self, batch):
        return self.student(batch[0])

    def reference_loss(self, batch):
        logits, soft = self.student(batch[0]), (self.teacher(batch[0]) / 2).softmax(1)
        divergence = (soft * (soft.log() - (logits / 2).log_softmax(1))).sum(1).mean()
        return 0.5 * F.nll_loss(logits.log_softmax(1), batch[1]) + 2 * divergence


TRAININGS = {
    "lightly BYOL": Training(BYOL, views),
    "SimCLR": Training(SimCLR, views),
    "MoCo": Training(MoCo, views),
    "SwAV": Training(SwAV, views),
    "DINO": Training(DINO, lambda: views(4)),
    "distillation": Training(Distillation, lambda: loader(random(SAMPLES, FEATURES), labels(3))),
}
