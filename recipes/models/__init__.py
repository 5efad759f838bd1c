"""The models of the recipes, small LightningModules."""

from lightning_normtheory.recipes.models.batchnorm_net import BatchNormNet
from lightning_normtheory.recipes.models.linearity_nets import BottleneckNet, ConvolutionNet, ResidualNet, WideNet
from lightning_normtheory.recipes.models.regimes_net import RegimesNet
from lightning_normtheory.recipes.models.tanh_mlp import TanhMLP
from lightning_normtheory.recipes.models.weightnorm_mlp import WeightNormMLP

__all__ = [
    "BatchNormNet",
    "BottleneckNet",
    "ConvolutionNet",
    "RegimesNet",
    "ResidualNet",
    "TanhMLP",
    "WeightNormMLP",
    "WideNet",
]
