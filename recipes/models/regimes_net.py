"""The network of DGM's theorems."""

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from lightning_normtheory.linalg.spectrum import largest_eigenvalue
from lightning_normtheory.recipes.models.supervised import Supervised
from lightning_normtheory.theorems.papers.dgm import infinite_width_kernels

__all__ = ["RegimesNet"]


class RegimesNet(Supervised):
    """f(x) = (1/√m) Σ_k c_k σ(g_k v_kᵀx/‖v_k‖), σ = ReLU, with v_k ~ N(0, α²I), g_k = ‖v_k‖/α and c_k = ±1 fixed,
    trained with L = ½Σ_i(f(x_i) − y_i)² by gradient descent (DGM, eqs. (1.2), (2.4), (2.5)).

    α decides whether directions (α < 1) or lengths (α > 1) learn; the initial f does not depend on it.

    Args:
        inputs: d.
        width: m.
        alpha: α.
        step: the learning rate as a fraction of 2/λ_max, λ_max = ‖V∞‖/α² + ‖G∞‖ ≥ ‖Λ∞‖ on the training samples, or
            λ_max = ‖H∞‖ without WeightNorm.
        normalized: with WeightNorm. If false, the weights w_k = g_k v_k/‖v_k‖ are trained themselves, from the same
            start up to rounding, and α does not matter (DGM, eq. (1.1)).

    Example:
        >>> torch.manual_seed(0)  # doctest: +ELLIPSIS
        <torch._C.Generator ...>
        >>> model = RegimesNet(inputs=50, width=8, alpha=0.5)
        >>> g, v = (getattr(model.hidden.parametrizations.weight, f"original{i}") for i in (0, 1))
        >>> bool(((v.norm(dim=1) / g[:, 0]) - 0.5).abs().max() < 1e-6)
        True
    """

    def __init__(
        self, inputs: int = 50, width: int = 4096, alpha: float = 1.0, step: float = 0.25, normalized: bool = True
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.alpha, self.step_fraction, self.normalized = alpha, step, normalized
        # W = V/α has the rows g_k v_k/‖v_k‖; WeightNorm initializes g = ‖W_k‖ = ‖v_k‖/α and v = W_k.
        self.hidden = nn.Linear(inputs, width, bias=False)
        nn.init.normal_(self.hidden.weight)
        if normalized:
            weight_norm(self.hidden)
            with torch.no_grad():
                self.hidden.get_parameter("parametrizations.weight.original1").mul_(alpha)
        self.head = nn.Linear(width, 1, bias=False).requires_grad_(False)
        self.head.weight.copy_(torch.randint(0, 2, (1, width)) * 2 - 1.0).div_(width**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.hidden(x))).squeeze(1)

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        return 0.5 * (output - y).square().sum()

    def correct(self, output: Tensor, y: Tensor) -> Tensor:
        return output * y > 0

    def on_train_epoch_end(self) -> None:
        self.log("learning_rate", self.lr)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        V, G, H = infinite_width_kernels(self.trainer.datamodule.x)  # type: ignore[attr-defined]
        largest = largest_eigenvalue(V) / self.alpha**2 + largest_eigenvalue(G)
        self.lr = self.step_fraction * 2 / (largest if self.normalized else largest_eigenvalue(H))
        return super().configure_optimizers()
