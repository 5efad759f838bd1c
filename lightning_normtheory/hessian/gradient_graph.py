"""The gradient of one batch's loss with its graph, which products with the Hessian differentiate again."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from lightning_normtheory.autodiff.second_derivatives import explain_second_derivative
from lightning_normtheory.measuring.workspace import empty, give_back

__all__ = ["Differentiate", "GradientGraph", "GradientObserver", "Gradients", "WeightedSums", "add_by_leaf"]

Gradients = Sequence[Tensor | None]
# Returns the gradients of another scalar of a forward pass whose graph is kept: by parameter, or at edges.
Differentiate = Callable[[Tensor, Sequence[GradientEdge] | None], Gradients]


class GradientObserver(Protocol):
    """Sees the gradients of the batches of a `LossHessian`."""

    def begin(self) -> None:
        """Begin with the first batch, again if an attempt has failed."""

    def edges(self, loss: Tensor) -> Sequence[GradientEdge]:
        """Return places in the graph of a loss whose gradients it wants to see, too."""

    def add(
        self,
        index: int,
        loss: Tensor,
        gradients: Callable[[], Gradients],
        at_edges: Gradients,
        differentiate: Differentiate,
    ) -> None:
        """See the mean loss of a batch and its gradients: by parameter, which are computed when asked for, and at the
        edges."""


class GradientGraph:
    """The gradient of one batch's loss with respect to the leaves, with its graph."""

    def __init__(self, loss: Tensor, samples: int, leaves: list[Tensor], gradients: Gradients) -> None:
        self.samples, self.loss = samples, loss
        entering = [(leaf, gradient) for leaf, gradient in zip(leaves, gradients) if gradient is not None]
        self.leaves = [leaf for leaf, _ in entering]
        self._with_graph = [gradient for _, gradient in entering]
        self.gradients = [gradient.detach() for gradient in self._with_graph]

    def along(self, tangents: Mapping[Tensor, Tensor], *, keep: bool) -> list[tuple[Tensor, Tensor]]:
        """Differentiate the gradient along the tangents, by leaf; ``keep`` the graph for the next call."""
        # Where the loss is linear in a parameter, its gradient is constant and has no graph.
        curved = [(g, leaf) for g, leaf in zip(self._with_graph, self.leaves) if g.requires_grad]
        if not curved:
            return []
        outputs = [gradient for gradient, _ in curved]
        directions = [tangents[leaf].to(gradient) for gradient, leaf in curved]
        try:
            products = torch.autograd.grad(outputs, self.leaves, directions, retain_graph=keep, allow_unused=True)
        except RuntimeError as error:
            raise explain_second_derivative(self.loss, error) from error
        return [(leaf, value) for leaf, value in zip(self.leaves, products) if value is not None]


def add_by_leaf(sums: dict[Tensor, Tensor], values: Iterable[tuple[Tensor, Tensor]], weight: float) -> None:
    """Add weighted values by leaf, in place, or in new memory: autograd may return the tangents themselves."""
    for leaf, value in values:
        if leaf in sums:
            into = sums[leaf]
            into.add_(value.detach().to_dense().to(into.device, into.dtype), alpha=weight)
        else:
            sums[leaf] = value.detach().to_dense().to(torch.promote_types(value.dtype, torch.float32)) * weight


class WeightedSums:
    """Σ_b n_b x_b of tensors by leaf, for batches of n_b samples. Of a single batch, x itself, which is not copied.

    Args:
        batches: their number.

    Attributes:
        sums: by leaf.
        unit: what a sum must be multiplied with.

    Example:
        >>> leaf, sums = torch.zeros(1), WeightedSums(2)
        >>> for samples in (2, 3):
        ...     sums.add({leaf: torch.ones(1)}, samples)
        >>> sums.unit * sums.sums[leaf]
        tensor([5.])
    """

    def __init__(self, batches: int) -> None:
        self._single, self._own = batches == 1, list[Tensor]()
        self.sums: dict[Tensor, Tensor] = {}
        self.unit = 1.0

    def add(self, values: Mapping[Tensor, Tensor], samples: int) -> None:
        """Add those of a batch."""
        if self._single:
            self.sums, self.unit = {leaf: value.detach().to_dense() for leaf, value in values.items()}, float(samples)
            return
        for leaf, value in values.items():
            if leaf not in self.sums:
                dtype = torch.promote_types(value.dtype, torch.float32)
                self.sums[leaf] = empty(*value.shape, dtype=dtype, device=value.device).zero_()
                self._own.append(self.sums[leaf])
        add_by_leaf(self.sums, values.items(), samples)

    def release(self) -> None:
        """Free the sums."""
        give_back(*self._own)
        self._own.clear()
        self.sums = {}
