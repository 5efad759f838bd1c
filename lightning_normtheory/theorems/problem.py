"""Collect the properties that theorems assume: the network's form, activations, samples, targets and loss."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from lightning_normtheory.architecture.activations import ActivationConstants
from lightning_normtheory.architecture.chain import Chain, Link, chain_of
from lightning_normtheory.architecture.operations import Activation, Affine, Input, LogSoftmax, Opaque, Operation, walk
from lightning_normtheory.architecture.recorder import record_forward
from lightning_normtheory.linalg.precision import norm_in_float64, to_float64
from lightning_normtheory.measuring.preserve import preserve_state
from lightning_normtheory.model.layers import batch_norm_layers
from lightning_normtheory.record.wording import join_names
from lightning_normtheory.theorems.complexity import Complexity, NoBound, network_complexity
from lightning_normtheory.theorems.losses import KnownLoss, identify_loss

__all__ = ["Problem", "input_norms", "network_problem"]

# Relative tolerance for comparing norms in float32.
_CLOSE = 1e-3
# Number of samples on which the forward pass is recorded.
_RECORDED = 4


@dataclass(frozen=True)
class Problem:
    """A model, its samples and its loss.

    Attributes:
        output: the recorded forward pass.
        x_norms: the smallest and the largest ‖x_i‖.
        loss: the training loss, or why it is not known.
        trained: the trained parameters by name.
    """

    output: Operation
    x_norms: tuple[float, float]
    loss: KnownLoss | str
    trained: Mapping[str, Tensor] = field(default_factory=dict)

    @cached_property
    def chain(self) -> Chain | str:
        """The network as a chain of layers that holds all trained parameters, or why it is none."""
        return self._chain_of(self.output)

    @cached_property
    def loss_chain(self) -> Chain | str:
        """The chain that the loss is of: that of the logits, where the cross entropy is computed from log_softmax."""
        return self.chain if self._logits is self.output else self._chain_of(self._logits)

    def _chain_of(self, output: Operation) -> Chain | str:
        found = chain_of(output)
        if isinstance(found, str):
            return found
        inside = {id(tensor) for tensor in found.tensors}
        others = [name for name, parameter in self.trained.items() if id(parameter) not in inside]
        return f"{others[0]!r} is trained, but is not used as a weight or bias of a layer" if others else found

    @cached_property
    def complexity(self) -> Complexity | str:
        """The complexity of the network's class, or why there is no bound for it."""
        try:
            return network_complexity(self._logits)
        except NoBound as reason:
            return str(reason)

    @property
    def _logits(self) -> Operation:
        """The output, or what its log_softmax is of: the NLL loss is the cross entropy of both."""
        output, loss = self.output, self.loss
        if not isinstance(output, LogSoftmax) or isinstance(loss, str) or loss.name != "cross_entropy":
            return output
        # The only axis that can be that of the classes.
        axes = [axis for axis, length in enumerate(output.shape) if length == loss.classes]
        return output.source if axes == [output.axis] else output

    @cached_property
    def activations(self) -> tuple[ActivationConstants, ...]:
        """The activations of the network, each once."""
        found = {step.constants for step in walk(self.output) if isinstance(step, Activation)}
        return tuple(sorted(found, key=lambda constants: constants.name))

    @property
    def recognized(self) -> bool:
        """Whether every operation of the network has a rule."""
        return not any(isinstance(step, Opaque) for step in walk(self.output))

    @property
    def inputs(self) -> int | None:
        """d, the number of entries of a sample; ``None`` if the recorded pass does not show it."""
        return next((step.size for step in walk(self.output) if isinstance(step, Input)), None)

    @property
    def x_norm(self) -> float:
        """max ‖x_i‖."""
        return self.x_norms[1]

    @property
    def outputs(self) -> int:
        return max(self.output.size, 1)

    def inputs_have_norm(self, value: float) -> bool:
        return all(math.isclose(norm, value, rel_tol=_CLOSE) for norm in self.x_norms)

    @cached_property
    def weight_norm_differences(self) -> tuple[str, ...]:
        """Differences from the hidden layers of WN: WeightNorm without bias, lengths g = 1/√m, not trained."""
        if isinstance(self.chain, str):
            return (self.chain,)
        return _by_layer(self.chain.links[:-1], _differences_to_weight_norm) + _widths(self.chain)

    @cached_property
    def rsc_differences(self) -> tuple[str, ...]:
        """Differences from the layers of RSC: no WeightNorm, no bias, a factor 1/√(fan-in) in every layer."""
        if isinstance(self.chain, str):
            return (self.chain,)
        return _by_layer(self.chain.links, _differences_to_rsc) + _widths(self.chain)

    @property
    def has_weight_norm_form(self) -> bool:
        """Whether the constants of WN hold for this network, for any number of outputs and any ‖v_h‖."""
        chain = self.chain
        if isinstance(chain, str) or self.weight_norm_differences:
            return False
        head = chain.head
        plain_head = head.affine.origin.kind == "parameter" and head.affine.bias is None
        plain_head = plain_head and math.isclose(head.before * head.after, 1, rel_tol=_CLOSE)
        return plain_head and self.inputs_have_norm(1.0) and self._has_smooth_activations

    @property
    def has_rsc_form(self) -> bool:
        """Whether the constants of RSC hold for this network, for any number of outputs and any ‖v_h‖."""
        if isinstance(self.chain, str) or self.rsc_differences:
            return False
        inputs = self.chain.links[0].affine.weight.shape[1]
        return self.inputs_have_norm(math.sqrt(inputs)) and self._has_smooth_activations

    @property
    def _has_smooth_activations(self) -> bool:
        """Whether all layers have the same smooth φ with |φ'| ≤ 1."""
        (*others, phi) = self.activations or (None,)
        return phi is not None and not others and phi.lipschitz <= 1 and math.isfinite(phi.smoothness)


def network_problem(
    model: nn.Module, x: Tensor, y: Tensor | None = None, loss: Callable[[Tensor, Tensor], Tensor] | None = None
) -> Problem:
    """Collect the properties of a model on samples x (n, …) with targets y and its training loss.

    If every BatchNorm keeps running statistics, they are used, so that samples are independent. The model is restored.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        >>> x = torch.nn.functional.normalize(torch.randn(8, 3))
        >>> problem = network_problem(model, x, torch.zeros(8, 1), nn.MSELoss())
        >>> problem.chain.depth, problem.activations[0].name, problem.loss.name
        (1, 'tanh', 'square')
    """
    tracked = all(layer.running_mean is not None for layer in batch_norm_layers(model).values())
    with preserve_state(model, batch_stats=False if tracked else None):
        output = record_forward(model, x[:_RECORDED])
        norms = input_norms(x)
        known: KnownLoss | str = "the loss is not known: no loss and targets were given"
        if y is not None and loss is not None:
            with torch.no_grad():
                outputs = model(x)
                if isinstance(outputs, Tensor):
                    known = _identified(outputs, y, loss)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return Problem(output, (float(norms.min()), float(norms.max())), known, trained)


def _identified(outputs: Tensor, y: Tensor, loss: Callable[[Tensor, Tensor], Tensor]) -> KnownLoss | str:
    def evaluate(which: Tensor) -> tuple[float, Tensor]:
        part = which.to(outputs.device)
        return float(loss(outputs[part], y[part.to(y.device)])), outputs[part]

    countable = y.dim() > 0 and len(y) == len(outputs)
    return identify_loss(float(loss(outputs, y)), outputs, y, evaluate if countable else None)


def input_norms(x: Tensor) -> Tensor:
    """Return ‖x_i‖ (n,); a sample of T tokens is T unit vectors.

    Example:
        >>> input_norms(torch.tensor([[3.0, 4.0]])), input_norms(torch.tensor([[7, 7, 2, 0]]))
        (tensor([5.], dtype=torch.float64), tensor([2.], dtype=torch.float64))
    """
    samples = x.detach().flatten(1) if x.dim() > 1 else x.detach()[:, None]
    return to_float64(samples if x.is_floating_point() else torch.ones_like(samples)).norm(dim=1)


def _by_layer(links: Iterable[Link], differences: Callable[[Link], list[str]]) -> tuple[str, ...]:
    """Return each difference once, with the names of its layers."""
    found: dict[str, list[str]] = {}
    for link in links:
        for difference in differences(link):
            found.setdefault(difference, []).append(link.affine.origin.name.removesuffix(".weight"))
    return tuple(f"{difference} ({join_names(names)})" for difference, names in found.items())


def _widths(chain: Chain) -> tuple[str, ...]:
    widths = dict.fromkeys(link.affine.size for link in chain.links[:-1])
    return (f"hidden layers of different widths ({join_names(map(str, widths))})",) if len(widths) > 1 else ()


def _differences_to_weight_norm(link: Link) -> list[str]:
    affine = link.affine
    found = _is_convolution(affine) + _has_bias(affine) + _has_factor(link)
    if affine.origin.kind != "weight_norm":
        return ["no WeightNorm", *found]
    g, v = affine.origin.tensors
    norms, lengths = norm_in_float64(affine.weight, dim=1), to_float64(g.detach()).abs().flatten()
    # An embedding or a transposed convolution has its units on another axis.
    if affine.origin.dim != 0 or g.numel() != len(norms) or not _all_close(norms / lengths, 1.0):
        found.append("not one length g per unit")
    elif g.requires_grad:
        found.append("trained lengths g")
    elif not _all_close(link.after * g.detach(), len(v) ** -0.5):
        found.append("lengths g other than 1/√m")
    return found


def _differences_to_rsc(link: Link) -> list[str]:
    affine = link.affine
    found = ["WeightNorm"] if affine.origin.kind == "weight_norm" else []
    found += _is_convolution(affine) + _has_bias(affine)
    if not math.isclose(link.before, link.factor, rel_tol=_CLOSE):
        found.append("pooling before the layer")
    scaled = math.isclose(link.factor * link.after, affine.weight.shape[1] ** -0.5, rel_tol=_CLOSE)
    return found if scaled else [*found, "no factor 1/√fan-in"]


def _has_factor(link: Link) -> list[str]:
    return [] if math.isclose(link.before, 1, rel_tol=_CLOSE) else ["a factor before the layer"]


def _is_convolution(affine: Affine) -> list[str]:
    return ["applied at several positions"] if affine.reach * affine.positions > 1 else []


def _has_bias(affine: Affine) -> list[str]:
    return ["a bias"] if affine.bias is not None else []


def _all_close(values: Tensor, number: float) -> bool:
    return bool(((values - number).abs() <= _CLOSE * abs(number)).all())
