"""Run a model in another precision while it is measured."""

import torch
from torch import Tensor, nn

from lightning_normtheory.autodiff.graph import leaves

__all__ = ["Converted"]


class Converted:
    """Lend a model parameters and buffers of another dtype. Use it inside `preserve_state`, which restores its own.

    The model's own parameters are not changed: assigning data of another dtype to a parameter makes torch drop the
    hooks on its gradient, among them those with which processes exchange gradients.

    Args:
        model: call `Converted.apply` now, and again whenever its state has been reset.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self._model, self._dtype = model, dtype
        self._originals = [p for p in model.parameters() if p.is_floating_point()]
        self._lent = {id(p): nn.Parameter(p.detach().to(dtype), requires_grad=p.requires_grad) for p in self._originals}

    def apply(self) -> None:
        for original in self._originals:
            self._lent[id(original)].data.copy_(original)  # the last forward pass may have written to it
        for module in self._model.modules():
            for place in (module._parameters, vars(module)):
                for name, value in list(place.items()):
                    if id(value) in self._lent:
                        place[name] = self._lent[id(value)]
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_floating_point():
                    module._buffers[name] = buffer.to(self._dtype)
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
