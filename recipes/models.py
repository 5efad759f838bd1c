"""The models of the recipes, as small LightningModules."""

from lightning_normtheory.recipes.batchnorm_net import BatchNormNet
from lightning_normtheory.recipes.linearity_nets import BottleneckNet, WideNet
from lightning_normtheory.recipes.regimes_net import RegimesNet
from lightning_normtheory.recipes.tanh_mlp import TanhMLP
from lightning_normtheory.recipes.weightnorm_mlp import WeightNormMLP

__all__ = ["BatchNormNet", "BottleneckNet", "RegimesNet", "TanhMLP", "WeightNormMLP", "WideNet"]
