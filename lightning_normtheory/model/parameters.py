"""Convert parameters by name to one flat vector, and back."""

from collections.abc import Mapping
from functools import reduce

import torch
from torch import Tensor

from lightning_normtheory.record.wording import join_names

__all__ = ["FlatParameters"]


class FlatParameters:
    """The space ℝᵖ of the parameters θ, in the order of the dict, in their common dtype, at least float32.

    Example:
        >>> space = FlatParameters({"w": torch.zeros(2, 2), "b": torch.zeros(1)})
        >>> space.flatten({"w": torch.eye(2), "b": torch.ones(1)})
        tensor([1., 0., 0., 1., 1.])
        >>> space.unflatten(torch.arange(5.0))["b"]
        tensor([4.])
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.parameters = dict(parameters)
        self.size = sum(p.numel() for p in self.parameters.values())
        first = next(iter(self.parameters.values()))
        self.dtype = reduce(torch.promote_types, (p.dtype for p in self.parameters.values()), torch.float32)
        self.device = first.device

    def views(self, flat: Tensor) -> dict[Tensor, Tensor]:
        """The part of each parameter, in its shape, sharing memory with ``flat``."""
        sizes = [p.numel() for p in self.parameters.values()]
        return {p: part.view(p.shape) for p, part in zip(self.parameters.values(), flat.split(sizes))}

    def join(self, parts: Mapping[Tensor, Tensor]) -> Tensor:
        """Make a flat vector from one part for each parameter; missing parts are zero."""
        filled = [parts[p].to_dense() if p in parts else torch.zeros_like(p) for p in self.parameters.values()]
        return torch.cat([part.detach().reshape(-1).to(self.device, self.dtype) for part in filled])

    def flatten(self, named: Mapping[str, Tensor]) -> Tensor:
        """
        Raises:
            ValueError: if names or shapes are not those of the parameters.
        """
        names = join_names(map(repr, self.parameters))
        if not isinstance(named, Mapping):
            raise TypeError(f"Expected a dict of tensors by the names {names}, but got {type(named).__name__}.")
        wrong = [f"{name!r} is missing" for name in sorted(self.parameters.keys() - named.keys())[:1]]
        wrong += [f"{name!r} is not among them" for name in sorted(named.keys() - self.parameters.keys())[:1]]
        if wrong:
            raise ValueError(f"Expected a tensor for each trainable parameter, {names}, but {' and '.join(wrong)}.")
        for name, p in self.parameters.items():
            if named[name].shape != p.shape:
                raise ValueError(f"Expected shape {tuple(p.shape)} for {name!r}, but got {tuple(named[name].shape)}.")
        return self.join({p: named[name] for name, p in self.parameters.items()})

    def unflatten(self, flat: Tensor) -> dict[str, Tensor]:
        return dict(zip(self.parameters, self.views(flat).values()))
