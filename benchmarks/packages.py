"""Trainings of other packages, small and on synthetic data: as their documentation writes them, plus the callbacks.

Packages are imported where they are used, so that the ones that are missing are in nobody's way.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

__all__ = ["TRAININGS", "Training"]

EPOCHS = 2
Run = Callable[[dict[str, Any]], Any]


class Training(NamedTuple):
    """A training and its package. ``run`` takes the arguments of a trainer, callbacks among them."""

    package: str
    run: Run


def darts_tcn(options: dict[str, Any]) -> None:
    """Weight-normalized convolutions, a square loss."""
    from darts import TimeSeries
    from darts.models import TCNModel

    series = TimeSeries.from_values(_waves(60)[0].astype(np.float32))
    model = TCNModel(
        input_chunk_length=16,
        output_chunk_length=4,
        num_filters=4,
        weight_norm=True,
        n_epochs=EPOCHS,
        batch_size=16,
        random_state=0,
        pl_trainer_kwargs=options,
    )
    model.fit(series)


def scvi_tools(options: dict[str, Any]) -> None:
    """A variational autoencoder of counts; batches are dicts, and the step calls the plan's ``forward``."""
    import anndata
    import scvi
    from scvi.model import SCVI

    scvi.settings.seed = 0  # of the split into training and validation
    counts = np.random.default_rng(0).poisson(1.0, (64, 10)).astype(np.float32)
    data = anndata.AnnData(counts)
    SCVI.setup_anndata(data)
    model = SCVI(data, n_hidden=16, n_latent=3)
    model.train(batch_size=16, **_but(options, "logger"))


def forecasting(name: str, options: dict[str, Any]) -> None:
    """Batches are (dict, (target, weight)); ``forward`` takes the dict and returns a named tuple."""
    import pandas
    import pytorch_forecasting
    from lightning.pytorch import Trainer

    values = _waves(20, 4)
    frame = pandas.DataFrame(
        {
            "time": np.tile(np.arange(20), 4),
            "series": np.repeat(list("abcd"), 20),
            "value": values.reshape(-1),
        }
    )
    known = {} if name == "NBeats" else {"time_varying_known_reals": ["time"], "static_categoricals": ["series"]}
    data = pytorch_forecasting.TimeSeriesDataSet(
        frame,
        time_idx="time",
        target="value",
        group_ids=["series"],
        max_encoder_length=12,
        max_prediction_length=4,
        time_varying_unknown_reals=["value"],
        **known,
    )
    sizes: dict[str, dict[str, Any]] = {
        "NBeats": {"widths": [16, 16], "num_blocks": [1, 1], "num_block_layers": [2, 2]},
        "TemporalFusionTransformer": {"hidden_size": 8, "attention_head_size": 1, "hidden_continuous_size": 4},
        "DeepAR": {"hidden_size": 8, "rnn_layers": 1},
    }
    model = getattr(pytorch_forecasting, name).from_dataset(data, learning_rate=0.01, log_interval=-1, **sizes[name])
    Trainer(**options).fit(model, data.to_dataloader(train=True, batch_size=16, num_workers=0))


def chemprop(options: dict[str, Any]) -> None:
    """Batches are graphs of molecules; the step calls parts of the module, not its ``forward``."""
    from chemprop import data, models
    from chemprop import nn as parts
    from lightning.pytorch import Trainer

    chains = ["C" * n + end for n in range(2, 18) for end in ("O", "N", "Cl", "=O")]
    points = [data.MoleculeDatapoint.from_smi(smiles, [float(len(smiles) % 5)]) for smiles in chains]
    model = models.MPNN(
        parts.BondMessagePassing(d_h=16, depth=2),
        parts.MeanAggregation(),
        parts.RegressionFFN(input_dim=16, hidden_dim=16),
        batch_norm=True,
    )
    Trainer(**options).fit(model, data.build_dataloader(data.MoleculeDataset(points), batch_size=16))


def tabular(options: dict[str, Any]) -> None:
    """Batches are dicts, the step calls ``forward`` with them."""
    import pandas
    from pytorch_tabular import TabularModel
    from pytorch_tabular.config import DataConfig, OptimizerConfig, TrainerConfig
    from pytorch_tabular.models import CategoryEmbeddingModelConfig

    random = np.random.default_rng(0)
    frame = pandas.DataFrame(random.normal(size=(128, 4)), columns=list("abcd"))
    frame["kind"] = random.choice(["x", "y", "z"], 128)
    frame["target"] = (frame["a"] + (frame["kind"] == "x") > 0).astype(int)
    callbacks = options["callbacks"]
    model = TabularModel(
        data_config=DataConfig(target=["target"], continuous_cols=list("abcd"), categorical_cols=["kind"]),
        model_config=CategoryEmbeddingModelConfig(task="classification", layers="16-8", use_batch_norm=True),
        optimizer_config=OptimizerConfig(),
        trainer_config=TrainerConfig(
            batch_size=32,
            max_epochs=EPOCHS,
            accelerator="cpu",
            progress_bar="none",
            early_stopping=None,
            checkpoints=None,
            load_best=False,
            auto_lr_find=False,
            trainer_kwargs=_but(options, "callbacks", "max_epochs", "accelerator", "enable_progress_bar", "logger"),
        ),
        verbose=False,
    )
    model.fit(train=frame, callbacks=callbacks)


def timm(name: str, options: dict[str, Any]) -> None:
    """A classifier of images."""
    import pytorch_lightning as pl
    import timm

    class Classifier(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = timm.create_model(name, num_classes=3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            x, y = batch
            loss = nn.functional.cross_entropy(self(x), y)
            self.log("train_loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    images = TensorDataset(torch.randn(16, 3, 32, 32), torch.arange(16) % 3)
    pl.Trainer(**options).fit(Classifier(), DataLoader(images, 8, shuffle=True))


def byol(options: dict[str, Any]) -> None:
    """Two views, a momentum encoder that the step itself moves, a loss below zero."""
    import pytorch_lightning as pl
    from lightly.loss import NegativeCosineSimilarity
    from lightly.models.modules import BYOLPredictionHead, BYOLProjectionHead
    from lightly.models.utils import deactivate_requires_grad, update_momentum
    from lightly.utils.scheduler import cosine_schedule

    class BYOL(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = nn.Sequential(
                nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()
            )
            self.projection_head = BYOLProjectionHead(32, 16, 8)
            self.prediction_head = BYOLPredictionHead(8, 16, 8)
            self.backbone_momentum = copy.deepcopy(self.backbone)
            self.projection_head_momentum = copy.deepcopy(self.projection_head)
            deactivate_requires_grad(self.backbone_momentum)
            deactivate_requires_grad(self.projection_head_momentum)
            self.criterion = NegativeCosineSimilarity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.prediction_head(self.projection_head(self.backbone(x)))

        def forward_momentum(self, x: torch.Tensor) -> torch.Tensor:
            return self.projection_head_momentum(self.backbone_momentum(x)).detach()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            momentum = cosine_schedule(self.current_epoch, EPOCHS, 0.9, 1)
            update_momentum(self.backbone, self.backbone_momentum, m=momentum)
            update_momentum(self.projection_head, self.projection_head_momentum, m=momentum)
            first, second = batch
            loss = self.criterion(self(first), self.forward_momentum(second))
            loss = 0.5 * (loss + self.criterion(self(second), self.forward_momentum(first)))
            self.log("train_loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.06)

    images = torch.randn(96, 3, 16, 16)
    views = TensorDataset(images + 0.1 * torch.randn_like(images), images + 0.1 * torch.randn_like(images))
    pl.Trainer(**options).fit(BYOL(), DataLoader(views, 32, shuffle=True))


def bert(options: dict[str, Any]) -> None:
    """Dict batches; the model computes loss and logits and returns both in an object."""
    import pytorch_lightning as pl
    from transformers import BertConfig, BertForSequenceClassification

    class Bert(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = BertForSequenceClassification(
                BertConfig(
                    vocab_size=50,
                    hidden_size=16,
                    num_hidden_layers=2,
                    num_attention_heads=2,
                    intermediate_size=32,
                    max_position_embeddings=16,
                    num_labels=3,
                )
            )

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = self.model(**batch).loss
            self.log("train_loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    lengths = torch.randint(4, 12, (96,))
    samples = [
        {
            "input_ids": torch.randint(0, 50, (12,)),
            "attention_mask": (torch.arange(12) < length).long(),
            "labels": length % 3,
        }
        for length in lengths
    ]
    pl.Trainer(**options).fit(Bert(), DataLoader(samples, 32, shuffle=True))


def _waves(steps: int, series: int = 1) -> np.ndarray:
    """Sines of different frequencies with noise, ``(series, steps)``."""
    noise = np.random.default_rng(0).normal(size=(series, steps))
    return np.sin(np.arange(steps) * (0.3 + 0.1 * np.arange(series)[:, None])) + 0.1 * noise


def _but(options: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in names}


TRAININGS: dict[str, Training] = {
    "darts TCNModel": Training("darts", darts_tcn),
    "scvi-tools SCVI": Training("scvi-tools", scvi_tools),
    **{
        f"pytorch-forecasting {name}": Training("pytorch-forecasting", partial(forecasting, name))
        for name in ("TemporalFusionTransformer", "NBeats", "DeepAR")
    },
    "chemprop MPNN": Training("chemprop", chemprop),
    "pytorch-tabular CategoryEmbedding": Training("pytorch-tabular", tabular),
    **{
        f"timm {name}": Training("timm", partial(timm, name))
        for name in (
            "resnetv2_18",
            "efficientnet_b0",
            "regnety_002",
            "mobilenetv3_small_050",
            "densenet121",
            "convnext_atto",
        )
    },
    "lightly BYOL": Training("lightly", byol),
    "Hugging Face BERT": Training("transformers", bert),
}
