"""ResNet18 for small images, with BatchNorm or WeightNorm, trained as in practice."""

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torchvision.models.resnet import BasicBlock  # type: ignore[import-untyped]

from lightning_normtheory.recipes.models.supervised import Supervised

__all__ = ["ResNet18"]

_STAGES = 4
_BLOCKS_OF_A_STAGE = 2


class ResNet18(Supervised):
    """Four stages of two residual blocks (He et al., 2016), for images of 32×32 or 28×28 pixels: the first convolution
    is 3×3, and only the end pools. Trained with cross entropy, SGD with momentum and a cosine schedule to zero.

    Weight decay acts on the weight vectors, W_i before a BatchNorm and v_i of a WeightNorm, but not on scales and
    shifts (γ, β, g, biases). The network does not depend on the norms of these vectors (except for the last layer with
    BatchNorm), so decay does not penalize the function: it lowers w_min, which raises the effective step η/‖W_i‖².
    Plain gradient descent on WeightNorm without decay cannot lower it (DGM, eq. 2.3).

    Args:
        inputs: C·H·H of the images, with 3 channels if possible, else 1.
        classes: k, the outputs.
        norm: ``"batch"``; or ``"weight"``: every convolution and the last layer is g v/‖v‖ with a bias, without
            BatchNorm.
        width: channels of the first stage; each further stage has twice as many.
        lr: of the first epoch.
        momentum: of SGD.
        weight_decay: of the weight vectors.

    Example:
        >>> model = ResNet18(inputs=784, norm="weight", width=4)
        >>> model(torch.zeros(5, 1, 28, 28)).shape
        torch.Size([5, 10])
    """

    def __init__(
        self,
        inputs: int = 3072,
        classes: int = 10,
        norm: Literal["batch", "weight"] = "batch",
        width: int = 64,
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 5e-4,
    ) -> None:
        super().__init__()
        if norm not in ("batch", "weight"):
            raise ValueError(f"Expected norm to be 'batch' or 'weight', but got {norm!r}.")
        self.save_hyperparameters()
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay
        self.net = _network(_channels(inputs), width, classes, nn.BatchNorm2d if norm == "batch" else nn.Identity)
        if norm == "weight":
            _apply_weight_norm(self.net)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, y)

    def configure_optimizers(self) -> Any:
        vectors: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in self.named_parameters():
            length = name.endswith("original0")  # g of a WeightNorm, stored as (units, 1, 1, 1)
            (others if length or parameter.dim() == 1 else vectors).append(parameter)
        groups: list[dict[str, Any]] = [{"params": vectors, "weight_decay": self.weight_decay}, {"params": others}]
        optimizer = torch.optim.SGD(groups, lr=self.lr, momentum=self.momentum)
        # Unlike CosineAnnealingLR it saves no length: a run resumed with more epochs follows the longer cosine.
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _cosine(self.trainer.max_epochs))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "epoch"}}


def _cosine(epochs: int | None) -> Callable[[int], float]:
    """Return the factor (1 + cos(π t/T))/2 of the learning rate in epoch t of T.

    Example:
        >>> [round(_cosine(4)(epoch), 3) for epoch in range(5)]
        [1.0, 0.854, 0.5, 0.146, 0.0]
    """
    if epochs is None or epochs < 1:
        raise ValueError(
            f"Expected a number of epochs for the cosine schedule, but the trainer has max_epochs = {epochs}. Set"
            " --trainer.max_epochs"
        )
    return lambda epoch: (1 + math.cos(math.pi * min(epoch / epochs, 1))) / 2


def _channels(inputs: int) -> int:
    """Return C of images of C·H·H numbers.

    Example:
        >>> _channels(3072), _channels(784)
        (3, 1)
    """
    for channels in (3, 1):
        if inputs > 0 and channels * math.isqrt(inputs // channels) ** 2 == inputs:
            return channels
    raise ValueError(
        f"Expected inputs = C·H·H with C = 3 or 1, such as 3072 = 3·32·32, but got {inputs}. Make the images square:"
        " --data.size 32"
    )


def _network(channels: int, width: int, classes: int, norm: type[nn.Module]) -> nn.Sequential:
    """Build it of torchvision's blocks. Its ResNet has a fixed width and a first layer for images of 224×224."""
    blocks, before = [], width
    for stage in range(_STAGES):
        planes = width * 2**stage
        for _ in range(_BLOCKS_OF_A_STAGE):
            stride, shortcut = 1, None
            if before != planes:  # the first block of each stage except the first
                stride = 2
                shortcut = nn.Sequential(nn.Conv2d(before, planes, 1, stride, bias=False), norm(planes))
            blocks.append(BasicBlock(before, planes, stride, shortcut, norm_layer=norm))
            before = planes
    net = nn.Sequential(
        *(nn.Conv2d(channels, width, 3, padding=1, bias=False), norm(width), nn.ReLU()),
        *blocks,
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes)),
    )
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    return net


@torch.no_grad()
def _apply_weight_norm(net: nn.Sequential) -> None:
    """Make every convolution and the last layer g v/‖v‖ (Salimans & Kingma, 2016) with a bias, initialized so that the
    network trains with the learning rate of BatchNorm. Unlike the initialization of their paper, this needs no data:

    * g = √2 roughly keeps the second moment of the activations from one ReLU to the next, since the weights of He et
      al. (2015) have ‖w_i‖² = 2 on average; for lengths of WeightNorm see Arpit, Campos & Bengio (2019).
    * g = √(2/B) at the end of each of the B residual branches keeps their sum of the order of one branch. Fixup (Zhang,
      Dauphin & Ma, 2019) uses zero there, but then the directions v of these layers would initially have no gradient.
    * Σ_j v_ij = 0 wherever the inputs come from a ReLU: their nonzero mean would dominate all units (Brock, De & Smith,
      2021).
    """
    ends = {block.conv2 for block in net.modules() if isinstance(block, BasicBlock)}
    for module in list(net.modules()):
        if not isinstance(module, (nn.Conv2d, nn.Linear)):
            continue
        if module is not net[0]:
            module.weight -= module.weight.flatten(1).mean(1).reshape(-1, *[1] * (module.weight.dim() - 1))
        weight_norm(module)
        if isinstance(module, nn.Conv2d):
            module.bias = nn.Parameter(torch.zeros(module.out_channels))
            lengths: Any = module.parametrizations
            lengths.weight.original0.fill_(math.sqrt(2 / len(ends) if module in ends else 2))
