"""A network as the tangent kernel sees it: outputs with a graph, and the leaves in which they are differentiated."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_normtheory.autodiff.graph import refuse_reentrant_checkpoints
from lightning_normtheory.autodiff.weight_norm import DifferentiatedInside, EffectiveWeights, WeightNormMap
from lightning_normtheory.measuring.rng import isolated_rng
from lightning_normtheory.model.checks import count_samples, map_leaves, require_graph, trainable_parameters
from lightning_normtheory.model.layers import layer_of_parameter, weight_norm_parameters
from lightning_normtheory.ntk.factors import Part, Result
from lightning_normtheory.ntk.precision import Converted

__all__ = ["Leaf", "Network", "RecordingWeights"]

_LAYERS = {nn.functional.linear, nn.functional.conv1d, nn.functional.conv2d, nn.functional.conv3d}
_Clone = type(torch.ones(1, requires_grad=True).clone().grad_fn)


@dataclass(frozen=True, eq=False)
class Leaf:
    """A tensor in which gradients are taken: a parameter, or a weight under WeightNorm."""

    name: str
    layer: str
    part: Part
    tensor: Tensor
    weight_norm: WeightNormMap | None = None


class RecordingWeights(EffectiveWeights):
    """Also keeps what layers under WeightNorm have made of their input."""

    def __init__(self) -> None:
        super().__init__()
        self._results: dict[Any, tuple[Tensor, int, Tensor | None]] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        # Of the weights that layers are called with, only ours are clones.
        if func in _LAYERS and len(args) > 1 and isinstance(args[1].grad_fn, _Clone) and result.grad_fn is not None:
            node, values = result.grad_fn, result.detach()
            if node.name() in ("ViewBackward0", "UnsafeViewBackward0"):  # a Linear on sequences is one on rows
                node, values = node.next_functions[0][0], values.flatten(0, -2)
            bias = args[2] if len(args) > 2 else (kwargs or {}).get("bias")
            self._results[node] = values, values._version, bias
        return result

    def forget(self) -> None:
        self._results.clear()

    def result(self, node: Any) -> Result | None:
        """Of the layer with this node in the graph, unless it has been changed in place since."""
        values, version, bias = self._results.get(node, (None, 0, None))
        if values is None or values._version != version:
            return None
        if bias is None:
            return Result(values, values.new_zeros(1))
        return Result(values - bias.view(-1, *[1] * (values.dim() - 2)), bias)


class Network:
    """f, with the parameters in which it is differentiated.

    Args:
        reset_buffers: gives the model the state that every forward pass begins with.
        converted: the precision in which it is differentiated, if it is not the model's own.
    """

    def __init__(self, model: nn.Module, reset_buffers: Callable[[], None], converted: Converted | None = None) -> None:
        self.model = model
        self.weights = RecordingWeights()
        self._reset_buffers, self._converted = reset_buffers, converted
        self._begin()
        roles = _roles(model)
        self.parameters = [_leaf(name, p, roles) for name, p in trainable_parameters(model).items()]
        self._leaves = {id(leaf.tensor): leaf for leaf in self.parameters}

    def _begin(self) -> None:
        self._reset_buffers()
        if self._converted is not None:
            self._converted.apply()

    def __call__(self, x: Any, samples: int) -> Tensor:
        """The outputs (samples, k) with their graph; the parameters themselves are its leaves.

        Raises:
            TypeError: if they are no real tensor with the samples in front.
            ValueError: if there is another number of them, or no graph.
        """
        self._begin()
        # A copy: the forward pass may write into its input. And the same random numbers each time, if it draws any.
        x = map_leaves(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, x)
        with isolated_rng():
            output = self.model(x)
        if isinstance(output, Tensor) and output.dim() == 0 and samples == 1:
            output = output.reshape(1)  # of a model that squeezes its outputs
        count_samples(output)
        if not output.is_floating_point():
            raise TypeError(f"Expected floating-point outputs, but the model returns {output.dtype}.")
        if len(output) != samples or output.numel() == 0:
            raise ValueError(
                f"Expected the model to return (samples, outputs), a row for each of {samples} samples, but got shape"
                f" {tuple(output.shape)}. Wrap the model in a module whose forward() gives them that form."
            )
        require_graph(output, "an output")
        refuse_reentrant_checkpoints(output)
        if self._converted is not None:
            self._converted.check(output)
        return output.reshape(samples, -1)

    def with_leaves(self, x: Any, samples: int) -> Tensor:
        """The same, with weights under WeightNorm as leaves."""
        self.weights.forget()
        try:
            with self.weights, self.weights.in_backward():
                return self(x, samples)
        except DifferentiatedInside:
            self.compose()
        return self.with_leaves(x, samples)

    def compose(self) -> None:
        """From now on, have g and v in the graph and not the weights that they make."""
        self.weights.composed = True
        self.weights.maps.clear()
        self._leaves = {id(leaf.tensor): leaf for leaf in self.parameters}

    def leaves(self) -> list[Leaf]:
        """Of what `with_leaves` has given so far."""
        for each in self.weights.maps.values():
            if id(each.w) not in self._leaves:
                owner = self._leaves.get(id(each.v)) or self._leaves[id(each.g)]
                self._leaves[id(each.w)] = Leaf(owner.name, owner.layer, owner.part, each.w, each)
        return list(self._leaves.values())

    def raw(self, leaves: Iterable[Leaf]) -> list[Leaf]:
        """The parameters behind some leaves."""
        wanted: set[int] = set()
        for leaf in leaves:
            tensors = [leaf.tensor] if leaf.weight_norm is None else [leaf.weight_norm.g, leaf.weight_norm.v]
            wanted.update(map(id, tensors))
        return [leaf for leaf in self.parameters if id(leaf.tensor) in wanted]


def _roles(model: nn.Module) -> dict[int, Part]:
    roles: dict[int, Part] = {}
    for module in model.modules():
        for _, g, v in weight_norm_parameters(module):
            roles.update({id(g): "length", id(v): "direction"})
    return roles


def _leaf(name: str, parameter: Tensor, roles: dict[int, Part]) -> Leaf:
    return Leaf(name, layer_of_parameter(name), roles.get(id(parameter), "rest"), parameter)
