"""What a training of the table consists of, and the dense float64 reference of everything that is measured in it."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader, TensorDataset

from support.lit import trainer
from support.neutral_cases import Recorder, generators, state

SAMPLES, BATCH = 24, 8


class Module(pl.LightningModule):
    """A module of the table. It says what must be measured: the loss and the outputs of a batch, by hand, in float64.

    Attributes:
        expected_predictor: what the name of the predictor must contain; empty: there is none to be found.
        drawn_for_kernel: whether the kernel runs the step, which draws from seed 0 in every batch. Otherwise it applies
            the predictor to inputs that were drawn as for the loss.
        normalized: the names of the layers under WeightNorm, or that feed a BatchNorm.
        players: θ and the methods of loss and outputs, by name, if `parameters=` has to choose.
        handed: what the request to choose must contain: the losses that the step hands to `manual_backward`.
    """

    expected_predictor = "forward"
    drawn_for_kernel = False
    normalized: tuple[str, ...] = ()
    players: Mapping[str, "Player"] = {}
    handed: tuple[str, ...] = ()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05)

    def prepare_reference(self) -> None:
        """Do to the weights what every step does to them before it computes."""

    def reference_loss(self, batch: Any) -> Tensor:
        raise NotImplementedError

    def reference_outputs(self, batch: Any) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class Player:
    """One of the players of a game.

    Attributes:
        parameters: the argument of the callback.
        owned: the beginning of the names of its parameters.
        loss: the name of the method that is its loss.
        outputs: the name of the method that is its predictor.
        predictor: what the name of the predictor must contain.
    """

    parameters: Any
    owned: str
    loss: str
    outputs: str
    predictor: str


@dataclass(frozen=True)
class Training:
    """A module and its data."""

    module: Callable[[], Module]
    data: Callable[[], Any]
    trainer: Mapping[str, Any] = field(default_factory=dict)
    callbacks: Callable[[], Sequence[pl.Callback]] = tuple

    def fit(self, callbacks: Sequence[pl.Callback] = ()) -> tuple[Module, pl.Trainer, list]:
        """Train, and return everything that callbacks must not change as the third value."""
        pl.seed_everything(1)
        module, recorder = self.module(), Recorder()
        fit = trainer([*callbacks, *self.callbacks(), recorder], **{"max_epochs": 2, **self.trainer})
        fit.fit(module, self.data())
        recorder.note(state(fit, module), generators())
        return module, fit, recorder.seen


def loader(*tensors: Tensor, collate_fn: Callable | None = None) -> DataLoader:
    return DataLoader(TensorDataset(*tensors), BATCH, shuffle=True, collate_fn=collate_fn)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def labels(classes: int, *shape: int, seed: int = 1) -> Tensor:
    return torch.randint(0, classes, shape or (SAMPLES,), generator=torch.Generator().manual_seed(seed))


_draws = torch.Generator()


def noise(*shape: int) -> Tensor:
    """The normal numbers that a step draws while it is measured: float32, from a seed for each batch."""
    return torch.randn(*shape, generator=_draws).double()


def on_batches(
    function: Callable[[Any], Tensor], batches: Sequence[tuple[Any, int]], *, one_seed: bool = False
) -> list[Tensor]:
    """Apply the function to each batch. Its seed is 0, or the number of samples before it."""
    found, first = [], 0
    for batch, samples in batches:
        _draws.manual_seed(0 if one_seed else first)
        found.append(function(batch))
        first += samples
    return found


def double(value: Any) -> Any:
    """The same batch in float64."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {key: double(each) for key, each in value.items()}
    if isinstance(value, (tuple, list)):
        parts = [double(each) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if hasattr(value, "__dict__"):
        changed = copy.copy(value)
        vars(changed).update({name: double(each) for name, each in vars(value).items()})
        return changed
    return value


def twin_of(training: Training, module: Module) -> Module:
    """The same weights and buffers in float64, with dropout off and BatchNorm as in training."""
    twin = training.module()
    twin.load_state_dict(module.state_dict())
    twin.double().eval()
    for layer, original in zip(twin.modules(), module.modules()):
        layer.training = original.training and isinstance(layer, _BatchNorm)
    for parameter, original in zip(twin.parameters(), module.parameters()):
        parameter.requires_grad_(original.requires_grad)
    twin.prepare_reference()
    return twin


def min_weight_norm(module: Module, layers: Sequence[str]) -> float:
    """min ‖W_i‖ over the units, which have the first axis of each weight here."""
    tensors = dict(module.named_parameters())
    vectors = [
        tensors.get(f"{name}.parametrizations.weight.original1", tensors.get(f"{name}.weight")) for name in layers
    ]
    return min(float(vector.norm()) for weight in vectors for vector in weight.detach().double())


def weight_of(layer: nn.Module) -> Tensor:
    """w = g v/‖v‖ of a WeightNorm, in operations whose second derivatives torch has right."""
    chain = layer.parametrizations.weight
    v = chain.original1
    return chain.original0 * v / v.pow(2).sum(tuple(range(1, v.dim())), keepdim=True).sqrt()


@dataclass
class Expected:
    """The numbers of the probe; those of the outputs are None if there is no predictor.

    Attributes:
        hessian_norm: max |λ(∇²L)|, the scale of the rounding of λ_max.
        kernel_norm: λ_max(K), that of λ_min.
    """

    loss: float
    grad_norm_sq: float
    lambda_max: float
    hessian_norm: float
    mean_predictor_grad_norm_sq: float | None = None
    kernel_lambda_min: float | None = None
    kernel_norm: float | None = None


def expected(
    twin: Module,
    batches: Sequence[tuple[Any, int]],
    kernel_samples: int,
    loss: Callable[[Any], Tensor],
    outputs: Callable[[Any], Tensor] | None,
    owned: str = "",
) -> Expected:
    """Compute everything from the dense Hessian and the dense Jacobian.

    Args:
        batches: of the probe, in float64, with their numbers of samples.
        kernel_samples: the kernel is that of the first ones.
    """
    parameters = [p for name, p in twin.named_parameters() if p.requires_grad and name.startswith(owned)]
    n = sum(samples for _, samples in batches)
    value = sum(samples * each for (_, samples), each in zip(batches, on_batches(loss, batches))) / n
    gradient = flat_gradient(value, parameters, create_graph=True)
    hessian = torch.stack([flat_gradient(entry, parameters, retain_graph=True) for entry in gradient])
    eigenvalues = torch.linalg.eigvalsh((hessian + hessian.t()) / 2)
    found = Expected(float(value), float(gradient @ gradient), float(eigenvalues[-1]), float(eigenvalues.abs().max()))
    if outputs is None:
        return found
    values = on_batches(outputs, batches)
    mean = flat_gradient(sum(each.sum() for each in values), parameters, retain_graph=True)
    mean = mean / sum(each.numel() for each in values)
    found.mean_predictor_grad_norm_sq = float(mean @ mean)
    hold_statistics(twin, outputs, batches)
    values = on_batches(outputs, batches, one_seed=twin.drawn_for_kernel)
    kernel = dense_kernel(torch.cat([each.reshape(len(each), -1) for each in values])[:kernel_samples], parameters)
    spectrum = torch.linalg.eigvalsh(kernel)
    found.kernel_lambda_min, found.kernel_norm = float(spectrum[0]), float(spectrum[-1])
    return found


@torch.no_grad()
def hold_statistics(twin: Module, outputs: Callable[[Any], Tensor], batches: Sequence[tuple[Any, int]]) -> None:
    """Give every BatchNorm in training the statistics of the batches, averaged, as constants."""
    n = sum(samples for _, samples in batches)
    layers = [layer for layer in twin.modules() if isinstance(layer, _BatchNorm) and layer.training]
    entered: dict[nn.Module, list[Tensor]] = {layer: [] for layer in layers}
    hooks = [layer.register_forward_pre_hook(lambda layer, args: entered[layer].append(args[0])) for layer in layers]
    on_batches(outputs, batches)
    for hook in hooks:
        hook.remove()
    for layer, inputs in entered.items():
        channels = [x.transpose(0, 1).flatten(1) for x in inputs]  # of each batch: every layer is called once
        weights = [samples / n for _, samples in batches]
        layer.running_mean.copy_(sum(w * x.mean(1) for w, x in zip(weights, channels)))
        layer.running_var.copy_(sum(w * x.var(1) for w, x in zip(weights, channels)))
        layer.eval()


def dense_kernel(rows: Tensor, parameters: list[nn.Parameter]) -> Tensor:
    """(1/k) Σ_h ∇f_h ∇f_hᵀ of some rows of f (samples, k)."""
    jacobian = torch.stack([flat_gradient(entry, parameters, retain_graph=True) for entry in rows.flatten()])
    jacobian = jacobian.reshape(*rows.shape, -1)
    return torch.einsum("ihp,jhp->ij", jacobian, jacobian) / rows.shape[1]


def flat_gradient(value: Tensor, parameters: list[nn.Parameter], **options: bool) -> Tensor:
    if not value.requires_grad:
        return torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64)
    gradients = torch.autograd.grad(value, parameters, allow_unused=True, **options)
    filled = [torch.zeros_like(p) if g is None else g for g, p in zip(gradients, parameters)]
    return torch.cat([g.flatten() for g in filled])
