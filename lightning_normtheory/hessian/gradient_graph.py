"""The gradient of one batch's loss with its graph, which products with the Hessian differentiate again."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from lightning_normtheory.autodiff.second_derivatives import explain_second_derivative

__all__ = ["GradientGraph", "GradientObserver", "Gradients", "add_by_leaf"]

Gradients = Sequence[Tensor | None]


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
        gradients: Gradients,
        at_edges: Gradients,
        differentiate: Callable[[Tensor, Sequence[GradientEdge]], tuple[Gradients, Gradients]],
    ) -> None:
        """See the mean loss of a batch and its gradients by parameter and at the edges; ``differentiate`` returns those
        of another scalar of the same forward pass."""


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
