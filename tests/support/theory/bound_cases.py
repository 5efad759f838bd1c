"""Random networks for the bounds: chains of every kind that the constants are derived for, in float64."""

import math

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.parametrizations import weight_norm

SMOOTH = (nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.Softplus, nn.Softsign, nn.Mish)


class Times(nn.Module):
    """A factor that is written into the network, such as 1/√m."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x


def random_chain(seed: int) -> tuple[nn.Module, Tensor]:
    """A small chain and three samples: any depth, outputs, activation, WeightNorm of any ``dim`` or none, lengths
    trained or not, biases, convolutions with strides and padding, average pooling, factors."""
    generator = torch.Generator().manual_seed(seed)

    def draw(n: int) -> int:
        return int(torch.randint(0, n, (), generator=generator))

    torch.manual_seed(seed)
    activation, bias, normalized, width = SMOOTH[draw(len(SMOOTH))], draw(2) == 1, draw(4) > 0, 1 + draw(4)

    def layer(module: nn.Module) -> nn.Module:
        return weight_norm(module, dim=(0, 0, None, 1)[draw(4)]) if normalized else module

    modules: list[nn.Module] = []
    if draw(3) == 0:
        convolution = nn.Conv1d(2, width, 1 + draw(3), stride=1 + draw(2), padding=draw(2), bias=bias)
        modules = [layer(convolution), activation(), nn.AvgPool1d(2), nn.Flatten()]
        x = torch.randn(3, 2, 6, dtype=torch.float64, generator=generator)
        features = nn.Sequential(*modules).double()(x).shape[1]
    else:
        x, features = torch.randn(3, 3, dtype=torch.float64, generator=generator), 3
    for _ in range(1 + draw(3) - bool(modules)):
        modules += [layer(nn.Linear(features, width, bias=bias)), Times(0.3 + draw(3)), activation()]
        features = width
    head = nn.Linear(features, 1 + draw(3), bias=bias)
    net = nn.Sequential(*modules, layer(head) if draw(3) == 0 else head).double()
    frozen = draw(3) == 0
    for name, parameter in net.named_parameters():
        parameter.data.mul_(0.2 + 3 * float(torch.rand((), generator=generator)))
        if frozen and name.endswith("original0"):
            parameter.requires_grad_(False)
    return net, x


class At:
    """A network's value, gradients and Hessian at any parameters, by autograd and differences of exact gradients."""

    def __init__(self, net: nn.Module, x: Tensor) -> None:
        self.net, self.x = net, x
        self.parameters = {name: p.detach() for name, p in net.named_parameters() if p.requires_grad}
        self.sizes = [p.numel() for p in self.parameters.values()]
        self.theta = torch.cat([p.reshape(-1) for p in self.parameters.values()])

    def outputs(self, theta: Tensor, x: Tensor) -> Tensor:
        parts = zip(self.parameters.items(), theta.split(self.sizes))
        return functional_call(self.net, {name: part.view(p.shape) for (name, p), part in parts}, (x,))

    def gradient(self, theta: Tensor, direction: Tensor, sample: int) -> Tensor:
        """∇(c·f)(x_i)."""
        theta = theta.clone().requires_grad_()
        value = self.outputs(theta, self.x[sample : sample + 1])[0] @ direction
        return torch.autograd.grad(value, theta)[0]

    def jacobian_norm(self, theta: Tensor, sample: int, k: int) -> float:
        rows = [self.gradient(theta, row, sample) for row in torch.eye(k, dtype=torch.float64)]
        return float(torch.linalg.matrix_norm(torch.stack(rows), 2))

    def hessian_norm(self, theta: Tensor, direction: Tensor, sample: int, h: float = 1e-5) -> float:
        """PyTorch's own second derivatives are wrong under WeightNorm: differences of gradients are not."""
        columns = [
            (self.gradient(theta + step, direction, sample) - self.gradient(theta - step, direction, sample)) / (2 * h)
            for step in h * torch.eye(len(theta), dtype=torch.float64)
        ]
        H = torch.stack(columns)
        return float(torch.linalg.matrix_norm((H + H.mT) / 2, 2))

    def input_jacobian_norm(self, theta: Tensor, sample: int) -> float:
        x = self.x[sample : sample + 1].clone().requires_grad_()
        rows = [torch.autograd.grad(value, x, retain_graph=True)[0].reshape(-1) for value in self.outputs(theta, x)[0]]
        return float(torch.linalg.matrix_norm(torch.stack(rows), 2))

    def in_ball(self, radius: float, seed: int) -> Tensor:
        step = torch.randn(len(self.theta), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        return self.theta + radius * step / step.norm()


def largest_norm(x: Tensor) -> float:
    return math.sqrt(float(x.flatten(1).square().sum(1).max()))
