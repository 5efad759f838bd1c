"""Brute-force references. Nothing here imports the code under test: each quantity is computed from its definition."""

import copy
import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.utils import parametrize

Pair = tuple[str, str]


class UndecidedError(Exception):
    """The oracle has no answer: a difference is too large for rounding and too small for a real change."""


LAYERS = (nn.Linear, nn.Bilinear, _ConvNd, nn.Embedding, nn.EmbeddingBag)

# BatchNorm's eps breaks scale invariance: here it is too small to show next to any variance that is not rounding.
TINY_EPS = 1e-200
# An output that a scaling leaves alone differs by rounding: 2.2e-16, times what cancels in x - mean, times the depth.
ROUNDING = 1e-8
# An output that depends on the scaling in another way moved by far more than this in every model here. Between the two
# thresholds the oracle has no answer, and says so.
REAL_CHANGE = 1e-6


def norm(entries: Iterator[float]) -> float:
    return sum(entry * entry for entry in entries) ** 0.5


def unit_indices(module: nn.Module) -> list[tuple]:
    """The index into ``module.weight`` that selects the weights of each output unit, from the formula of the layer."""
    everything = slice(None)
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return [(everything, unit) for unit in range(module.embedding_dim)]
    if isinstance(module, _ConvTransposeNd):
        inputs, outputs = module.in_channels // module.groups, module.out_channels // module.groups
        return [
            (slice(group * inputs, (group + 1) * inputs), unit)
            for group in range(module.groups)
            for unit in range(outputs)
        ]
    return [(unit,) for unit in range(len(module.weight))]


def loop_norms(module: nn.Module) -> list[float]:
    """‖W_i‖ of every output unit of a plain layer, entry by entry."""
    return [norm(module.weight[index].detach().double().flatten().tolist()) for index in unit_indices(module)]


def loop_norms_except(v: Tensor, dim: int | None) -> list[float]:
    """‖v_i‖ for every index i of the axis ``dim`` of a WeightNorm's direction: one number for all where it is None."""
    sums: dict[int, float] = {}
    for position in itertools.product(*map(range, v.shape)):
        unit = 0 if dim is None else position[dim]
        sums[unit] = sums.get(unit, 0.0) + float(v[position].detach().double()) ** 2
    return [sums[unit] ** 0.5 for unit in sorted(sums)]


def bake_weight_norm(model: nn.Module) -> None:
    """Replace every WeightNorm by a plain parameter with the effective weight."""
    for module in model.modules():
        if parametrize.is_parametrized(module, "weight"):
            parametrize.remove_parametrizations(module, "weight")
        elif hasattr(module, "weight_g"):
            nn.utils.remove_weight_norm(module)


def layer_names(model: nn.Module) -> dict[str, str]:
    """Every layer that has a weight, with the first name under which that weight occurs: tied layers share it."""
    first: dict[int, str] = {}
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LAYERS)}
    return {name: first.setdefault(id(module.weight), name) for name, module in layers.items()}


def scale_invariant_pairs(model: nn.Module, inputs: tuple, *, every_unit: bool = True) -> set[Pair]:
    """Every (layer, BatchNorm) such that doubling the weights of one unit of the layer changes what enters the
    BatchNorm in training mode, and never what leaves it.

    Args:
        model: is converted to float64, its eps to `TINY_EPS`, WeightNorm to plain weights.
        inputs: of one forward pass with enough samples that no two distinct channels look alike.
        every_unit: double one unit at a time. Otherwise all units of a layer at once, each by a power of two of its
            own: were one of them not scale-free, the output would show it.
    """
    bake_weight_norm(model)
    model.double().train()
    batch_norms = {
        name: module for name, module in model.named_modules() if {"running_mean", "running_var"} <= {*module._buffers}
    }
    for module in batch_norms.values():
        module.eps = TINY_EPS
    before = _record(model, batch_norms, inputs)
    entering: set[Pair] = set()
    leaving: set[Pair] = set()
    for layer in sorted(set(layer_names(model).values())):
        module = model.get_submodule(layer)
        for factors in _scalings(len(unit_indices(module)), every_unit):
            after = _record_scaled(model, module, factors, batch_norms, inputs)
            entering |= {(layer, name) for name in batch_norms if _changed(before[name], after[name], "input")}
            leaving |= {(layer, name) for name in batch_norms if _changed(before[name], after[name], "output")}
    return entering - leaving


def _scalings(units: int, every_unit: bool) -> list[list[float]]:
    # Powers of two: without a bias the scaling is exact in floating point, and even noise is scaled without noise.
    if every_unit:
        return [[2.0 if unit == other else 1.0 for other in range(units)] for unit in range(units)]
    shuffled = torch.randperm(units, generator=torch.Generator().manual_seed(0))
    return [[(0.25, 0.5, 2.0, 4.0)[position % 4] for position in shuffled.tolist()]]


def _record_scaled(model: nn.Module, module: nn.Module, factors: list[float], batch_norms: dict, inputs: tuple) -> dict:
    weight = module.weight.detach()
    original = weight.clone()
    for index, factor in zip(unit_indices(module), factors):
        weight[index] *= factor
    recorded = _record(model, batch_norms, inputs)
    weight.copy_(original)
    return recorded


def _record(model: nn.Module, batch_norms: dict[str, nn.Module], inputs: tuple) -> dict[str, list[dict[str, Tensor]]]:
    calls: dict[str, list[dict[str, Tensor]]] = {name: [] for name in batch_norms}

    def hook(name: str) -> Callable:
        return lambda _, args, output: calls[name].append({"input": args[0].clone(), "output": output.clone()})

    handles = [module.register_forward_hook(hook(name)) for name, module in batch_norms.items()]
    torch.manual_seed(0)  # the same dropout masks every time
    with torch.no_grad():
        model(*inputs)
    for handle in handles:
        handle.remove()
    return calls


def _changed(before: list[dict[str, Tensor]], after: list[dict[str, Tensor]], side: str) -> bool:
    if len(before) != len(after):
        raise UndecidedError("The scaling changed how often a BatchNorm is called.")
    return any(_call_changed(a, b, side) for a, b in zip(before, after))


def _call_changed(before: dict[str, Tensor], after: dict[str, Tensor], side: str) -> bool:
    a, b = before[side].transpose(0, 1).flatten(1), after[side].transpose(0, 1).flatten(1)
    # A channel that is constant in both passes (dead behind a ReLU) is rounding divided by rounding: it says nothing.
    moves = ~(_constant(before["input"]) & _constant(after["input"]))
    if side == "input":
        moves = torch.ones_like(moves)
    scale = a.abs().amax(1).clamp_min(1.0 if side == "output" else torch.finfo(a.dtype).tiny)
    difference = float((((a - b).abs().amax(1) / scale)[moves]).max()) if moves.any() else 0.0
    if side == "output" and ROUNDING < difference < REAL_CHANGE:
        raise UndecidedError(f"Neither rounding nor a real change: {difference:.1e}.")
    return difference > ROUNDING


def _constant(value: Tensor) -> Tensor:
    """Which channels (axis 1) vary by no more than rounding."""
    channels = value.transpose(0, 1).flatten(1)
    return channels.amax(1) - channels.amin(1) <= 1e-10 * channels.abs().amax(1)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """Every parameter that requires a gradient, tied ones once."""
    unique = {id(parameter): parameter for module in model.modules() for parameter in module._parameters.values()}
    return [parameter for parameter in unique.values() if parameter is not None and parameter.requires_grad]


def jacobian(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs (n, k) and ∂f_h(x_i)/∂θ as (n, k, p), one backward pass per entry, with the model's flags as they are."""
    parameters = trainable(model)
    outputs = model(x)
    outputs = outputs.reshape(len(outputs), -1)
    rows = []
    for value in outputs.flatten():
        gradients = torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True)
        filled = [torch.zeros_like(p) if g is None else g for g, p in zip(gradients, parameters)]
        rows.append(torch.cat([g.flatten() for g in filled]))
    return outputs.detach(), torch.stack(rows).reshape(*outputs.shape, -1)


def exact_gradient(model: nn.Module, loss: Callable, batches: list[tuple[Tensor, Tensor]]) -> Tensor:
    """∇L (p,) of L = (1/n) Σ_b n_b loss(f(x_b), y_b); first derivatives of PyTorch are exact, also of WeightNorm."""
    parameters = trainable(model)
    total = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64)
    for x, y in batches:
        gradients = torch.autograd.grad(loss(model(x), y), parameters, allow_unused=True)
        filled = [torch.zeros_like(p) if g is None else g.to_dense() for g, p in zip(gradients, parameters)]
        total += len(x) * torch.cat([g.flatten() for g in filled])
    return total / sum(len(x) for x, _ in batches)


def difference_hessian(model: nn.Module, loss: Callable, batches: list[tuple[Tensor, Tensor]]) -> Tensor:
    """∇²L (p, p), column by column, from central differences of exact gradients in float64.

    Steps h and 2h together err by h⁴ times a sixth derivative of L, which near a BatchNorm of three samples is large:
    with h = 1e-4 by 1e-16 times that. The rounding of the gradients, divided by h, is 1e-11.
    """
    h = 1e-4
    columns = []
    for parameter in trainable(model):
        for entry in parameter.data.view(-1).split(1):
            original = float(entry)
            at = {}
            for multiple in (-2, -1, 1, 2):
                entry.fill_(original + multiple * h)
                at[multiple] = exact_gradient(model, loss, batches)
            entry.fill_(original)
            columns.append((8 * (at[1] - at[-1]) - (at[2] - at[-2])) / (12 * h))
    return torch.stack(columns, 1)


def square_loss(outputs: Tensor, y: Tensor) -> tuple[float, Tensor]:
    """(1/n) Σ_i Σ_h (f_h(x_i) − y_ih)², the loss of the theory, and its derivative in the outputs (n, k)."""
    residuals = outputs - y.reshape(outputs.shape)
    n = len(outputs)
    return float((residuals**2).sum() / n), 2 * residuals / n


def mean_square_loss(outputs: Tensor, y: Tensor) -> tuple[float, Tensor]:
    """`torch.nn.MSELoss`: the loss of the theory divided by the number of outputs."""
    loss, derivative = square_loss(outputs, y)
    return loss / outputs.shape[1], derivative / outputs.shape[1]


def cross_entropy(outputs: Tensor, y: Tensor) -> tuple[float, Tensor]:
    """(1/n) Σ_i −log softmax(f(x_i))[y_i], and its derivative in the outputs (n, k)."""
    probabilities = outputs.exp() / outputs.exp().sum(1, keepdim=True)
    n = len(outputs)
    picked = torch.eye(outputs.shape[1], dtype=outputs.dtype)[y]
    return float(-(probabilities * picked).sum(1).log().sum() / n), (probabilities - picked) / n


def dense_rsc(
    model: nn.Module, loss: Callable, batches: list[tuple[Tensor, Tensor]]
) -> tuple[float, float, float, float]:
    """(L, ‖∇L‖², ‖∇L‖²/L, ‖ḡ‖²) from full Jacobians; ``loss`` as above."""
    samples = outputs_seen = 0
    loss_sum = 0.0
    loss_gradient: Tensor | float = 0.0
    predictor_gradient: Tensor | float = 0.0
    for x, y in batches:
        outputs, jacobians = jacobian(model, x)
        value, derivative = loss(outputs, y)
        n = len(outputs)
        loss_sum += n * value
        loss_gradient = loss_gradient + n * torch.einsum("nk,nkp->p", derivative, jacobians)
        predictor_gradient = predictor_gradient + jacobians.sum((0, 1))
        samples, outputs_seen = samples + n, outputs_seen + outputs.numel()
    grad_norm_sq = float(((loss_gradient / samples) ** 2).sum())
    mean_predictor = float(((predictor_gradient / outputs_seen) ** 2).sum())
    return loss_sum / samples, grad_norm_sq, grad_norm_sq / (loss_sum / samples), mean_predictor


def role(name: str) -> str:
    """Which part of the tangent kernel a parameter belongs to, by the names that PyTorch's WeightNorms give."""
    if name.endswith(("_v", "original1")):
        return "direction"
    return "length" if name.endswith(("_g", "original0")) else "rest"


def batch_norm_roles(model: nn.Module, x: Tensor) -> dict[str, str]:
    """Directions and lengths of BatchNorm by parameter name, from the definition: the pairs of `scale_invariant_pairs`.

    In such a pair the layer's weight is a direction and the BatchNorm's scale a length.
    """
    if not any(isinstance(module, _BatchNorm) for module in model.modules()):
        return {}
    names = {name for name, _ in model.named_parameters()}
    found: dict[str, str] = {}
    samples = torch.randn(12, *x.shape[1:], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for layer, batch_norm in scale_invariant_pairs(copy.deepcopy(model), (samples,)):
        found |= {f"{batch_norm}.weight".lstrip("."): "length", f"{layer}.weight".lstrip("."): "direction"}
    return {name: part for name, part in found.items() if name in names}


def contract(jacobians: Tensor, outputs: str) -> Tensor:
    """The kernel of Jacobians (n, k, p): all outputs sample by sample, their average, or that of their sum."""
    n, k, p = jacobians.shape
    if outputs == "full":
        return jacobians.reshape(n * k, p) @ jacobians.reshape(n * k, p).t()
    if outputs == "trace":
        return sum(jacobians[:, h] @ jacobians[:, h].t() for h in range(k)) / k
    return jacobians.sum(1) @ jacobians.sum(1).t()


def dense_kernel(model: nn.Module, x: Tensor, outputs: str) -> dict[str, Tensor]:
    """The tangent kernel and its parts from the full Jacobian, whose columns belong to the parts by their names, and by
    what scaling a unit changes at a BatchNorm."""
    _, jacobians = jacobian(model, x)
    names = {id(p): name for name, p in model.named_parameters()}
    of_batch_norm = batch_norm_roles(model, x)
    roles = [of_batch_norm.get(name, role(name)) for p in trainable(model) for name in [names[id(p)]] * p.numel()]
    parts = {"kernel": contract(jacobians, outputs)}
    for part in ("direction", "length", "rest"):
        columns = torch.tensor([i for i, each in enumerate(roles) if each == part], dtype=torch.long)
        parts[part] = contract(jacobians[:, :, columns], outputs)
    return parts
