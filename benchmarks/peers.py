"""Other tools that find the top eigenvalue of a Hessian, each as its documentation says, at a tolerance of 1e-3."""

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["PEERS", "installed"]

Solver = Callable[[nn.Module, Callable[..., Tensor], Tensor, Tensor], float]


def pyhessian(model: nn.Module, loss: Callable[..., Tensor], x: Tensor, y: Tensor) -> float:
    from pyhessian import hessian

    values, _ = hessian(model, loss, data=(x, y), cuda=False).eigenvalues(maxIter=100, tol=1e-3)
    # It leaves gradients with their graphs in the parameters.
    model.zero_grad()
    return float(values[0])


def curvlinops(model: nn.Module, loss: Callable[..., Tensor], x: Tensor, y: Tensor) -> float:
    from curvlinops import HessianLinearOperator
    from scipy.sparse.linalg import eigsh

    parameters: Any = [p for p in model.parameters() if p.requires_grad]
    operator = HessianLinearOperator(model, nn.CrossEntropyLoss(), parameters, [(x, y)], check_deterministic=False)
    start = torch.randn(operator.shape[1]).numpy()
    values, _ = eigsh(operator.to_scipy(), k=1, which="LA", tol=1e-3, v0=start)
    return float(values[0])


def eigenthings(model: nn.Module, loss: Callable[..., Tensor], x: Tensor, y: Tensor) -> float:
    from hessian_eigenthings import HessianOperator, lanczos, supervised_loss

    operator = HessianOperator(model, [(x, y)], supervised_loss(loss))
    seed = int(torch.randint(0, 10_000, ()))
    return float(lanczos(operator, k=1, which="LA", tol=1e-3, max_iter=100, seed=seed).eigenvalues[0])


def backpack(model: nn.Module, loss: Callable[..., Tensor], x: Tensor, y: Tensor) -> float:
    """Its products, with SciPy's solver."""
    from backpack.hessianfree.hvp import hessian_vector_product
    from backpack.utils.convert_parameters import vector_to_parameter_list
    from scipy.sparse.linalg import LinearOperator, eigsh

    parameters = list(model.parameters())
    value = loss(model(x), y)
    gradient = torch.autograd.grad(value, parameters, create_graph=True)

    def multiply(vector: Any) -> Any:
        parts = vector_to_parameter_list(torch.from_numpy(vector), parameters)
        product = hessian_vector_product(value, parameters, parts, grad_params=gradient)
        return nn.utils.parameters_to_vector([part.contiguous() for part in product]).numpy()

    start = torch.randn(sum(p.numel() for p in parameters)).numpy()
    operator = LinearOperator((len(start), len(start)), matvec=multiply, dtype=start.dtype)
    return float(eigsh(operator, k=1, which="LA", tol=1e-3, v0=start, return_eigenvectors=False)[0])


def cockpit(model: nn.Module, loss: Callable[..., Tensor], x: Tensor, y: Tensor) -> float:
    """Its instrument HessMaxEV, with its own limits: BackPACK's products in a power iteration."""
    from cockpit.quantities.hess_max_ev import HVPLinearOperator

    parameters = list(model.parameters())
    value = loss(model(x), y)
    gradient = torch.autograd.grad(value, parameters, create_graph=True)
    return float(HVPLinearOperator(value, parameters, grad_params=gradient).power_iteration())


# By the name under which each is installed.
PEERS: dict[str, Solver] = {
    "pyhessian": pyhessian,
    "curvlinops-for-pytorch": curvlinops,
    "hessian-eigenthings": eigenthings,
    "backpack-for-pytorch": backpack,
    "cockpit-for-pytorch": cockpit,
}


def installed(package: str) -> str | None:
    """The version, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
