"""Recognize the two-layer network with BatchNorm of BN's theorems, and compute its quantities."""

from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from lightning_normtheory.linalg.arithmetic import operand_eps
from lightning_normtheory.model.layers import batch_norm_layers

__all__ = ["BatchNormForm", "BatchNormNetwork", "batchnorm_form", "batchnorm_network"]


class BatchNormNetwork(NamedTuple):
    """The layers of a network of BN's form, f(x) = Σ_j a_j σ(c_j⟨v_j, x − μ⟩/N(v_j)); training updates the weights.

    Attributes:
        hidden: the Linear whose weight is V (m, d). Its bias has no effect, since the mean is subtracted.
        norm: the BatchNorm whose weight is c (m,).
        head: the Linear whose weight is a (1, m).
    """

    hidden: nn.Linear
    norm: nn.Module
    head: nn.Linear

    @property
    def v(self) -> Tensor:
        return self.hidden.weight

    @property
    def a(self) -> Tensor:
        return self.head.weight[0]

    @property
    def c(self) -> Tensor:
        """BatchNorm's weight; ones if ``affine=False``."""
        weight = cast(Tensor | None, self.norm.weight)
        return torch.ones_like(self.a) if weight is None else weight

    @property
    def shift(self) -> float:
        """The largest |bias| of the BatchNorm and the output layer; BN's network has none."""
        biases = [cast(Tensor | None, bias) for bias in (self.norm.bias, self.head.bias)]
        return max((float(bias.detach().abs().max()) for bias in biases if bias is not None), default=0.0)


@dataclass(frozen=True, eq=False)
class BatchNormForm:
    """A network of BN's form on some samples, with the statistics of these samples.

    The paper's f has no factor 1/√m, since a ~ N(0, I/m) includes it; a is PyTorch's weight. c is BatchNorm's weight, V
    the weight of the hidden layer (initialized as N(0, I/d) in the paper, uniformly in PyTorch), and labels are ±1.

    Attributes:
        network: the layers; ``v``, ``c`` and ``a`` are their current weights.
        factors: N_j = √(var_j + ε) (m,), with the biased variance.
        x_centered: the samples minus their mean (n, d). Both, and all computed quantities, are float64 on the CPU.
    """

    network: BatchNormNetwork
    factors: Tensor
    x_centered: Tensor

    @property
    def v(self) -> Tensor:
        return self.network.v

    @property
    def c(self) -> Tensor:
        return self.network.c

    @property
    def a(self) -> Tensor:
        return self.network.a

    @property
    def epsilon_n(self) -> float:
        """ε_N = max_j 1/N_j (BN, Assumption 1.1)."""
        return float(1 / self.factors.min())

    @property
    def features_a(self) -> Tensor:
        """∂_a f(x_i) = (σ(c_j⟨v_j, x̄_i⟩/N_j))_j, of shape (n, m) (BN, Section 1.3)."""
        return torch.relu(_double(self.c) * self._normalized)

    @property
    def features_c(self) -> Tensor:
        """∂_c f(x_i) = (a_j σ'(c_j⟨v_j, x̄_i⟩/N_j)⟨v_j, x̄_i⟩/N_j)_j, of shape (n, m) (BN, Section 1.3)."""
        normalized = self._normalized
        return _double(self.a) * normalized * (_double(self.c) * normalized > 0)

    @property
    def outputs(self) -> Tensor:
        """f(x_i) (n,)."""
        return self.features_a @ _double(self.a)

    def normalized_margin(self, labels: Tensor) -> float:
        """Compute γ(W) = min_i y_i f(x_i)/(‖a‖‖c‖) of the network itself (BN, Section 1.4).

        There is no factor 1/√m, since a ~ N(0, I/m) includes it. A network that errs on a sample has a negative margin.

        Args:
            labels: y_i = ±1 (n,).
        """
        signed = _double(labels) * self.outputs
        return float(signed.min() / (_double(self.a).norm() * _double(self.c).norm()))

    @property
    def _normalized(self) -> Tensor:
        return self.x_centered @ _double(self.v).t() / self.factors


def batchnorm_network(model: nn.Module) -> BatchNormNetwork | str:
    """Find the layers of BN's network by their types and shapes, or return the reason why there are none.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
        >>> batchnorm_network(model).v.shape
        torch.Size([8, 3])
        >>> batchnorm_network(nn.Linear(3, 1))
        'the model has 0 BatchNorm layers, not one'
    """
    norms = list(batch_norm_layers(model).values())
    if len(norms) != 1:
        return f"the model has {len(norms)} BatchNorm layers, not one"
    if isinstance(norms[0], nn.SyncBatchNorm):
        return "the BatchNorm is synchronized between processes"
    if not isinstance(norms[0], nn.BatchNorm1d):
        return f"the BatchNorm is a {type(norms[0]).__name__}, not a BatchNorm1d"
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if len(linear) != 2:
        return f"the model has {len(linear)} Linear layers, not two"
    width = norms[0].num_features
    fitting = [
        (hidden, head)
        for hidden, head in (linear, linear[::-1])
        if hidden.out_features == head.in_features == width and head.out_features == 1
    ]
    if not fitting:
        return f"the Linear layers do not lead to the {width} features of the BatchNorm and from there to one output"
    known = [*linear, norms[0]]
    own = {id(parameter) for module in known for parameter in module._parameters.values()}
    if any(id(parameter) not in own for parameter in model.parameters()) or any(
        "weight" not in module._parameters for module in known
    ):
        return "the model has other parameters than the weights and biases of these layers"
    return BatchNormNetwork(fitting[0][0], norms[0], fitting[0][1])


def batchnorm_form(model: nn.Module, x: Tensor, outputs: Tensor) -> BatchNormForm | str:
    """Compute the quantities of BN's theorems, or return the reason why the model does not have their form.

    The form is a Linear, whose bias has no effect, a BatchNorm without shift, ReLU, and a Linear to one output without
    bias. A shift or bias of 0 is allowed, trained or not. Frozen parameters are allowed.

    Args:
        x: the samples (n, d), as they enter the first layer.
        outputs: the model's outputs (n, 1) for x as one batch, with its statistics. They must agree with a ReLU between
            the layers, however the model implements it.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1, bias=False))
        >>> x = torch.randn(5, 3)
        >>> batchnorm_form(model, x, model(x)).features_a.shape
        torch.Size([5, 8])
    """
    network = batchnorm_network(model)
    if isinstance(network, str):
        return network
    if x.dim() != 2 or x.shape[1] != network.hidden.in_features or len(x) < 2:
        return f"the input has shape {tuple(x.shape)}, not (n, {network.hidden.in_features}) with n > 1"
    if outputs.numel() != len(x):
        return f"the outputs have shape {tuple(outputs.shape)}, not ({len(x)}, 1)"
    if network.shift != 0:
        return "the bias of the BatchNorm or of the output layer is not zero"
    centered = _double(x) - _double(x).mean(0)
    factors = ((centered @ _double(network.v).t()).square().mean(0) + cast(float, network.norm.eps)).sqrt()
    if not bool((factors > 0).all()):
        return "a unit is constant on these samples, or a value is not finite"
    form = BatchNormForm(network, factors, centered)
    # Half of the model's digits: rounding in the network is far smaller, unless operands are rounded more (TF32).
    eps = max(torch.finfo(outputs.dtype).eps ** 0.5, operand_eps(outputs.device, outputs.dtype))
    tol = eps * float((form.features_a @ _double(network.a).abs()).max())
    if not float((form.outputs - _double(outputs).flatten()).abs().max()) <= tol:
        return "the outputs are not those of a two-layer ReLU network with the statistics of this batch"
    return form if tol > 0 else "the outputs are all zero, so the activation cannot be checked"


def _double(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().to(torch.float64)  # not every device has float64
