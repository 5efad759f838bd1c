"""Run a network for the tangent kernel: outputs with a graph, the leaves to differentiate in, another precision."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_normtheory.autodiff.composed import composed_operations
from lightning_normtheory.autodiff.graph import leaves, refuse_reentrant_checkpoints
from lightning_normtheory.autodiff.weight_norm import EffectiveWeights, WeightNormMap
from lightning_normtheory.linalg.precision import converted
from lightning_normtheory.measuring.rng import isolated_rng
from lightning_normtheory.model.checks import count_output_samples, map_leaves, require_graph, trainable_parameters
from lightning_normtheory.model.layers import layer_of_parameter, weight_norm_parameters
from lightning_normtheory.ntk.factors import Part, Result
from lightning_normtheory.ntk.parameter_uses import light_leaf
from lightning_normtheory.scaling.split import BatchNormSplit

__all__ = ["Converted", "Leaf", "Network", "RecordingWeights"]

_LAYERS = {nn.functional.linear, nn.functional.conv1d, nn.functional.conv2d, nn.functional.conv3d}
_Clone = type(torch.ones(1, requires_grad=True, device="cpu").clone().grad_fn)


@dataclass(frozen=True, eq=False)
class Leaf:
    """A tensor with respect to which gradients are taken: a parameter, or a weight under WeightNorm."""

    name: str
    layer: str
    part: Part
    tensor: Tensor
    weight_norm: WeightNormMap | None = None


class RecordingWeights(EffectiveWeights):
    """Effective weights that also record the results of the layers that use them.

    Attributes:
        recording: whether results are recorded from now on.
    """

    def __init__(self, *, light: bool = False) -> None:
        super().__init__(light=light)
        self.recording = True
        self._results: dict[Any, tuple[Tensor, int, Tensor | None]] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        if self.recording and func in _LAYERS and len(args) > 1 and result.grad_fn is not None and self._made(args[1]):
            node, values = result.grad_fn, result.detach()
            if node.name() in ("ViewBackward0", "UnsafeViewBackward0"):  # a Linear on sequences is one on rows
                node, values = node.next_functions[0][0], values.flatten(0, -2)
            bias = args[2] if len(args) > 2 else (kwargs or {}).get("bias")
            if bias is not None and func is not nn.functional.linear:
                bias = bias.detach().view(-1, *[1] * (values.dim() - 2))
            self._results[node] = values, values._version, bias
        return result

    def _made(self, weight: Tensor) -> bool:
        """Whether it is an effective weight: only these are clones, or the sum with a leaf of ours."""
        node = weight.grad_fn
        if not self._light or node is None:
            return isinstance(node, _Clone)
        leaf = light_leaf(node)
        return leaf is not None and any(leaf is each.w for each in self.maps.values())

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """As in `EffectiveWeights`; also, every operation of a recurrent layer is in the graph."""
        with super().in_backward(), composed_operations():
            yield

    def forget(self) -> None:
        """Drop the recorded results."""
        self._results.clear()

    def result(self, node: Any) -> Result | None:
        """The result of the layer with this node in the graph; ``None`` if it was changed in place since."""
        values, version, bias = self._results.get(node, (None, 0, None))
        if values is None or values._version != version:
            return None
        if bias is None:
            return Result(values, values.new_zeros(1))
        return Result(values - bias, bias)


class Converted:
    """Lend a model parameters and buffers of another dtype. Use it inside `preserve_state`, which restores its own.

    Where a device has no float64, they are lent on the CPU, and the model runs there.
    The model's own parameters are not changed: assigning data of another dtype to a parameter makes torch drop the
    hooks on its gradient, among them those with which processes exchange gradients.

    Args:
        model: call `Converted.apply` now, and again whenever its state has been reset.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self._model, self._dtype = model, dtype
        self._originals = [p for p in model.parameters() if p.is_floating_point()]
        lent = {id(p): converted(p.detach(), dtype) for p in self._originals}
        self._lent = {id(p): nn.Parameter(lent[id(p)], requires_grad=p.requires_grad) for p in self._originals}

    def apply(self) -> None:
        for original in self._originals:
            # The last forward pass may have written to it.
            self._lent[id(original)].data.copy_(converted(original.detach(), self._dtype))
        for module in self._model.modules():
            for place in (module._parameters, vars(module)):
                for name, value in list(place.items()):
                    if id(value) in self._lent:
                        place[name] = self._lent[id(value)]
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = converted(buffer, self._dtype)
            if isinstance(module, nn.RNNBase):  # also keeps its weights in a list
                module._flat_weights = [self._lent.get(id(weight), weight) for weight in module._flat_weights]

    def check(self, output: Tensor) -> None:
        """
        Raises:
            RuntimeError: if the model used one of its own parameters, which it keeps outside its modules.
        """
        own = {id(p) for p in self._originals}
        if any(id(leaf) in own for leaf in leaves(output)):
            raise RuntimeError(
                f"Expected parameters as attributes of modules, but {type(self._model).__name__} uses one that it keeps"
                " elsewhere, for example in a list. Assign it to a module."
            )


class Network:
    """f, with the parameters with respect to which it is differentiated.

    Args:
        reset_state: puts the model back into the state in which every forward pass begins.
        converted: the parameters in another precision, if the model's own is not used.
        split: the parameters that are directions and lengths by BatchNorm. Those of WeightNorm are found here.
    """

    def __init__(
        self,
        model: nn.Module,
        reset_state: Callable[[], object],
        converted: Converted | None,
        split: BatchNormSplit,
    ) -> None:
        self.model = model
        self.split = split
        self.weights = RecordingWeights()
        self._reset_state, self._converted = reset_state, converted
        self._begin()
        self._begun = True
        parts = _parts(model, split)
        parameters = trainable_parameters(model)
        if len(devices := dict.fromkeys(str(p.device) for p in parameters.values())) > 1:
            raise ValueError(
                f"Expected all trained parameters on one device, but they are on {' and '.join(devices)}: the parts of"
                " the tangent kernel cannot be added up."
            )
        self.parameters = [
            Leaf(name, layer_of_parameter(name), parts.get(id(p), "rest"), p) for name, p in parameters.items()
        ]
        self._weight_leaves: dict[int, Leaf] = {}

    def _begin(self) -> None:
        self._reset_state()
        if self._converted is not None:
            self._converted.apply()

    def __call__(self, x: Any, samples: int) -> Tensor:
        """The outputs (samples, k) with their graph, whose leaves are the parameters themselves.

        Raises:
            TypeError: if the output is no real tensor with the samples in front.
            ValueError: if it has another number of samples, or no graph.
        """
        if not self._begun:
            self._begin()
        self._begun = False
        # A copy, since the forward pass may write into its input. If it draws random numbers, the same each time.
        x = map_leaves(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, x)
        with isolated_rng():
            output = self.model(x)
        if isinstance(output, Tensor) and output.dim() == 0 and samples == 1:
            output = output.reshape(1)  # the model squeezes its outputs
        count_output_samples(output)
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
        """The outputs as above, with weights under WeightNorm as leaves."""

        def forward() -> Tensor:
            self.weights.forget()
            with self.weights, self.weights.in_backward():
                return self(x, samples)

        return self.weights.run(forward)

    def leaves(self) -> list[Leaf]:
        """The parameters, and the weights under WeightNorm that `with_leaves` has met so far."""
        return [*self.parameters, *map(self._weight_leaf, self.weights.maps.values())]

    def _weight_leaf(self, each: WeightNormMap) -> Leaf:
        """One object for each weight: leaves are keys of dicts."""
        if id(each.w) not in self._weight_leaves:
            owners = {id(leaf.tensor): leaf for leaf in self.parameters}
            owner = owners.get(id(each.v)) or owners[id(each.g)]
            self._weight_leaves[id(each.w)] = Leaf(owner.name, owner.layer, owner.part, each.w, each)
        return self._weight_leaves[id(each.w)]

    def parameters_of(self, leaves: Iterable[Leaf]) -> list[Leaf]:
        """The parameters from which some leaves are computed."""
        wanted: set[int] = set()
        for leaf in leaves:
            tensors = [leaf.tensor] if leaf.weight_norm is None else [leaf.weight_norm.g, leaf.weight_norm.v]
            wanted.update(map(id, tensors))
        return [leaf for leaf in self.parameters if id(leaf.tensor) in wanted]


def _parts(model: nn.Module, split: BatchNormSplit) -> dict[int, Part]:
    """The part of each parameter that is not in the rest, by its id."""
    parts: dict[int, Part] = {}
    for name, parameter in model.named_parameters():
        if name in split.directions or name in split.lengths:
            parts[id(parameter)] = "direction" if name in split.directions else "length"
    for _, g, v in (triple for module in model.modules() for triple in weight_norm_parameters(module)):
        parts.update({id(g): "length", id(v): "direction"})
    return parts
