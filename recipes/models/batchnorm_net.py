"""The network of BN's theory and experiments."""

from torch import Tensor, nn

from lightning_normtheory.recipes.models.supervised import Supervised

__all__ = ["BatchNormNet"]


class BatchNormNet(Supervised):
    """f(x) = Σ_j a_j σ(c_j⟨v_j, x − μ⟩/N(v_j)), σ = ReLU, for two classes, with the logistic loss and no shift.

    Initially V ~ N(0, I/d), c = 1, a ~ N(0, I/m) (BN, Section 1.1). Labels are −1 and +1.

    Args:
        inputs: d.
        width: m.
        lr: of plain SGD; the paper's experiments use 0.01 to 0.1.
        eps: ε of N(v)² = var + ε. PyTorch requires ε > 0; 1e-30 is negligible against any variance of float32 inputs.

    Example:
        >>> import torch
        >>> model = BatchNormNet(inputs=4, width=8)
        >>> x, y = torch.randn(6, 4), torch.tensor([1.0, -1, 1, -1, 1, -1])
        >>> model(x).shape, float(model.loss(torch.zeros(6), y)) == float(torch.tensor(2.0).log())
        (torch.Size([6]), True)
    """

    def __init__(self, inputs: int = 784, width: int = 1024, lr: float = 0.05, eps: float = 1e-5) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        hidden, norm, head = (
            nn.Linear(inputs, width, bias=False),
            nn.BatchNorm1d(width, eps=eps),
            nn.Linear(width, 1, bias=False),
        )
        nn.init.normal_(hidden.weight, std=inputs**-0.5)
        nn.init.normal_(head.weight, std=width**-0.5)
        norm.bias.requires_grad_(False)  # the theory has no shift
        self.net = nn.Sequential(nn.Flatten(), hidden, norm, nn.ReLU(), head)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).squeeze(1)

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        return nn.functional.softplus(-y * output).mean()

    def correct(self, output: Tensor, y: Tensor) -> Tensor:
        return output * y > 0
