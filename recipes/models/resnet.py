"""ResNet18 for small images, with BatchNorm or with WeightNorm, trained as in practice."""

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
    """Four stages of two residual blocks (He et al., 2016), in the form for images of 32×32 or 28×28 pixels: it begins
    with a 3×3 convolution and pools at the end only. Cross entropy, SGD with momentum, a cosine schedule to zero.

    Weight decay acts on the weight vectors, W_i before a BatchNorm and v_i of a WeightNorm, and not on what scales and
    shifts them (γ, β, g, biases). The network does not depend on the norms of these vectors (but for the last layer of
    the BatchNorm form), so decay is no penalty on the function: it lowers w_min, which raises the effective step
    η/‖W_i‖². Plain gradient descent on WeightNorm without decay could not lower it (DGM, eq. 2.3).

    Args:
        inputs: C·H·H of the images, with 3 channels if that is possible, else with one.
        classes: k, the outputs.
        norm: ``"batch"``; or ``"weight"``: every convolution and the last layer is g v/‖v‖ with a bias, and there is no
            BatchNorm.
        width: the channels of the first stage; every further stage has twice as many.
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
            _under_weight_norm(self.net)

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
        # A function of the epoch, no scheduler that saves its length: a run resumed with more epochs gets their cosine.
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _cosine(self.trainer.max_epochs))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "epoch"}}


def _cosine(epochs: int | None) -> Callable[[int], float]:
    """The factor (1 + cos(π t/T))/2 of the learning rate in epoch t of T.

    Example:
        >>> [round(_cosine(4)(epoch), 3) for epoch in range(5)]
        [1.0, 0.854, 0.5, 0.146, 0.0]
    """
    if epochs is None or epochs < 1:
        raise ValueError(
            f"Expected the number of epochs, for the cosine schedule, but the trainer has max_epochs = {epochs}. Set"
            " --trainer.max_epochs"
        )
    return lambda epoch: (1 + math.cos(math.pi * min(epoch / epochs, 1))) / 2


def _channels(inputs: int) -> int:
    """C of images of C·H·H numbers.

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
    """Of torchvision's blocks. Its ResNet itself has a fixed width, and begins as images of 224×224 need it."""
    blocks, before = [], width
    for stage in range(_STAGES):
        planes = width * 2**stage
        for _ in range(_BLOCKS_OF_A_STAGE):
            stride, shortcut = 1, None
            if before != planes:  # the first block of a stage, but for the first stage
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
def _under_weight_norm(net: nn.Sequential) -> None:
    """Every convolution and the last layer as g v/‖v‖ (Salimans & Kingma, 2016), with a bias, and so begun that the
    network trains with the step of BatchNorm. No data is needed for that, unlike for the beginning of their paper:

    * g = √2 about keeps the second moment of the activations from a ReLU to the next, since ‖w_i‖² = 2 is what the
      weights of He et al. (2015) have on average; for lengths of WeightNorm see Arpit, Campos & Bengio (2019).
    * g = √(2/B) at the end of each of the B residual branches: their sum is of the order of one of them. Fixup (Zhang,
      Dauphin & Ma, 2019) has zero there; then the directions v of these layers would have no gradient at first.
    * Σ_j v_ij = 0 wherever the inputs come from a ReLU, hence have a mean: it would be most of what all units see
      (Brock, De & Smith, 2021).
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
