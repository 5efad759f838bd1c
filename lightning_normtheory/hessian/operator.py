"""Compute Hessian-vector products of a loss, exact for WeightNorm and BatchNorm."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from lightning_normtheory.autodiff.graph import stop_at_nodes
from lightning_normtheory.autodiff.second_derivatives import refuse_wrong_second_derivatives, twice_differentiable
from lightning_normtheory.autodiff.weight_norm import EffectiveWeights
from lightning_normtheory.hessian.gradient_graph import (
    GradientGraph,
    GradientObserver,
    Gradients,
    WeightedSums,
    add_by_leaf,
)
from lightning_normtheory.measuring.memory import is_out_of_memory, saved_bytes
from lightning_normtheory.measuring.preserve import preserve_state
from lightning_normtheory.measuring.processes import SINGLE_PROCESS, Processes, Refusal
from lightning_normtheory.measuring.progress import tick
from lightning_normtheory.measuring.rng import isolated_rng
from lightning_normtheory.measuring.workspace import empty, give_back
from lightning_normtheory.model.checks import count_output_samples, list_batches, require_graph, trainable_parameters
from lightning_normtheory.model.parameters import FlatParameters

__all__ = ["GraphSize", "LossHessian", "Memory", "hessian_operator", "hessian_vector_product"]

Memory = Literal["high", "low"]
LossOfBatch = Callable[[], tuple[Tensor, int]]
# Seconds: if the gradient of a batch takes longer, so do products, and Ctrl+C must not wait for them.
_SLOW = 0.1


def hessian_vector_product(
    model: nn.Module,
    loss: Callable[[Tensor, Any], Tensor],
    batches: Iterable[tuple[Any, Any]],
    vector: Mapping[str, Tensor],
    *,
    batch_stats: bool | None = None,
) -> dict[str, Tensor]:
    """Compute ∇²L(θ)·vector for L = (1/n) Σ_i ℓ(f(x_i), y_i), exactly and over all batches.

    PyTorch's second derivative of WeightNorm is wrong; this function avoids it (see `EffectiveWeights`). For several
    products with the same Hessian, use `hessian_operator`, which keeps the graph.

    Args:
        model: f; the first axis of its output holds the samples.
        loss: ``loss(output, target)``, a mean over the samples of a batch.
        batches: pairs ``(x, y)``. Batches of different sizes are weighted by their size.
        vector: one tensor per trainable parameter, by its name in ``model.named_parameters()``.
        batch_stats: whether BatchNorm uses the statistics of each batch; ``None`` follows ``model.training``.

    Returns:
        The product by parameter name, in the shapes of the parameters.

    Example:
        f = wx, L = ½Σ(wx_i − y_i)² over two samples: L'' = x_1² + x_2²

        >>> model = nn.Linear(1, 1, bias=False)
        >>> x, y = torch.tensor([[1.0], [3.0]]), torch.tensor([[0.0], [1.0]])
        >>> hessian_vector_product(model, nn.functional.mse_loss, [(x, y)], {"weight": torch.ones(1, 1)})
        {'weight': tensor([[10.]])}
    """
    with hessian_operator(model, loss, batches, batch_stats=batch_stats, memory="low") as hessian:
        return hessian.space.unflatten(hessian @ hessian.space.flatten(vector))


@contextmanager
def hessian_operator(
    model: nn.Module,
    loss: Callable[[Tensor, Any], Tensor],
    batches: Iterable[tuple[Any, Any]],
    *,
    batch_stats: bool | None = None,
    memory: Memory = "high",
) -> Iterator["LossHessian"]:
    """Open the Hessian of the mean loss for any number of products, and restore the model on exit.

    The arguments are those of `hessian_vector_product` and, for ``memory``, of `LossHessian`.

    Example:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> x, y = torch.tensor([[1.0], [3.0]]), torch.tensor([[0.0], [1.0]])
        >>> with hessian_operator(model, nn.functional.mse_loss, [(x, y)]) as hessian:
        ...     [float(hessian @ torch.tensor([t])) for t in (1.0, 2.0)]
        [10.0, 20.0]
    """

    parameters = trainable_parameters(model)
    batches = list_batches(batches)
    with preserve_state(model, batch_stats=batch_stats) as reset_state, torch.enable_grad():

        def loss_of(x: Any, y: Any) -> tuple[Tensor, int]:
            reset_state()
            output = model(x)
            return loss(output, y), count_output_samples(output)

        with LossHessian(parameters, [partial(loss_of, x, y) for x, y in batches], memory=memory) as hessian:
            yield hessian


class GraphSize(NamedTuple):
    """The memory of a gradient's graph in bytes.

    Attributes:
        total: of all tensors that it keeps, the gradient among them.
        largest: of the largest one.
    """

    total: int
    largest: int


class LossHessian:
    """H = ∇²L of L = (1/n) Σ_b n_b L_b as a symmetric map of flat vectors: ``hessian @ vector``.

    The gradient is differentiated along the vector, H v = ∂/∂u ⟨∇L(u), v⟩, where u are the parameters and, for weights
    under WeightNorm, the effective weights; `WeightNormMap` maps the result back to lengths and directions. Use it as a
    context, which frees the graphs on exit, and do not change the model between the first product and the last.

    Args:
        parameters: θ by name.
        losses: one function per batch that returns the batch's mean loss and its number of samples.
        memory: ``"high"`` keeps the graph of the gradient for all products; ``"low"`` rebuilds it, batch by batch, for
            each product. ``"high"`` becomes ``"low"`` if a single process runs out of memory, or if the loss of one
            batch writes to tensors that the graph of another one needs.
        vectors: the largest number of vectors (p,) that a method should keep.
        processes: the processes that hold the other batches; gradient and products are sums over all of them.
        observer: sees the gradient of every batch when the graphs are built first.
        weights: in whose context the losses are computed, if the caller wants to see the effective weights.

    Attributes:
        products: the number of products so far.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        losses: Sequence[LossOfBatch],
        *,
        memory: Memory = "high",
        vectors: int | None = None,
        processes: Processes = SINGLE_PROCESS,
        observer: GradientObserver | None = None,
        weights: EffectiveWeights | None = None,
    ) -> None:
        if memory not in ("high", "low"):
            raise ValueError(f"Expected memory to be 'high' or 'low', but got {memory!r}.")
        self.space = FlatParameters(parameters)
        self.vectors = min(vectors or self.space.size, self.space.size)
        self._losses = losses
        self._memory = memory
        self._processes = processes
        self._observer = observer
        self._weights = EffectiveWeights(light=True) if weights is None else weights
        self._graphs: list[GradientGraph] = []
        self._slopes = WeightedSums(len(losses))  # in effective weights
        self._gradient: Tensor | None = None
        self._samples = 0.0
        self.products = 0
        self._released = False

    def __enter__(self) -> "LossHessian":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    @property
    def gradient(self) -> Tensor:
        """∇L (p,), computed once."""
        if self._gradient is None:
            total = self._processes.sum(self._processes.run_on_all(self._gradient_sum))
            self._samples = float(total[-1])
            if self._samples == 0:
                raise ValueError("Expected at least one sample, but the batches hold none.")
            self._gradient = total[:-1].div_(self._samples)
        return self._gradient

    def prepare(self) -> None:
        """Build the graphs and compute ∇L, which others then ask for; the observer sees all batches."""
        _ = self.gradient
        self._observer = None

    def forget_gradient(self) -> None:
        """Free ∇L. It is computed again if it is asked for."""
        if self._gradient is not None:
            give_back(self._gradient)
        self._gradient = None

    def __matmul__(self, vector: Tensor) -> Tensor:
        """H v, both (p,)."""
        product = self.unchecked(vector)
        # Test the sum first, which is quicker. It may also overflow where every entry is finite.
        if not math.isfinite(float(product.sum())) and not bool(torch.isfinite(product).all()):
            raise FloatingPointError("Expected a finite Hessian-vector product, but it has NaN or infinite entries.")
        return product

    def unchecked(self, vector: Tensor) -> Tensor:
        """H v, which may have NaN or infinite entries: a test waits for the device."""
        if self._released:
            raise RuntimeError("Expected a product inside the with block: outside, the model may have changed.")
        if vector.shape != (self.space.size,):
            raise ValueError(f"Expected a vector of {self.space.size} entries, but got shape {tuple(vector.shape)}.")
        if self._samples == 0:
            _ = self.gradient  # counts them
        self.products += 1
        part = self._processes.run_on_all(partial(self._part_of_product, vector.detach()))
        if isinstance(part, Refusal):
            self._memory = "low"
            self._graphs.clear()
            part = self._processes.run_on_all(partial(self._weighted_product, vector.detach()))
        return self._processes.sum(part)

    def graph_size(self) -> "GraphSize":
        """Count the memory of the first batch's gradient graph, from its tensors alone; the graph is not kept."""

        def count() -> GraphSize:
            with saved_bytes() as saved:
                graph, _ = self._differentiate(0)
            sizes = [*saved.values(), *(gradient.nbytes for gradient in graph.gradients)]
            return GraphSize(sum(sizes), max(sizes, default=0))

        try:
            return self._weights.run(count)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            # A transform of torch.func in the loss allows no hooks. What fails for another reason, fails again.
            return GraphSize(0, 0)
        finally:
            self._drop_graphs()

    def release(self) -> None:
        """Free the graphs. No product is possible afterwards."""
        self._released = True
        self._drop_graphs()

    def _drop_graphs(self) -> None:
        self._graphs.clear()
        self._slopes.release()
        self._weights.maps.clear()

    # -- this process's part -------------------------------------------------------------------------------------------

    def _gradient_sum(self) -> Tensor:
        def attempt() -> Tensor:
            self._drop_graphs()  # of an attempt that failed
            return self._collect_gradients()

        try:
            return self._weights.run(attempt)
        except Exception as error:
            # Several processes must switch together: their caller decides.
            if self._processes.count > 1 or self._memory == "low" or not is_out_of_memory(error):
                raise
            self._memory = "low"
        # Outside the except clause, where the traceback would keep the last graph alive.
        return self._gradient_sum()

    def _collect_gradients(self) -> Tensor:
        """Σ_b n_b ∇L_b (p,) and, behind it, the number of samples."""
        total = empty(self.space.size + 1, dtype=self.space.dtype, device=self.space.device).zero_()
        parts = self.space.views(total[:-1])
        if self._observer is not None:
            self._observer.begin()
        for index in range(len(self._losses)):
            tick("batch")
            graph, at_edges = self._differentiate(index, self._observer)
            found = dict(zip(graph.leaves, graph.gradients))
            if self._observer is not None:
                gradients = partial(self._by_parameter, found)
                self._observer.add(index, graph.loss, gradients, at_edges, self._gradients_beside)
                del gradients
            del at_edges
            if graph.samples:
                add_by_leaf(parts, ((leaf, each) for leaf, each in found.items() if leaf in parts), graph.samples)
                self._slopes.add({leaf: each for leaf, each in found.items() if leaf not in parts}, graph.samples)
                total[-1] += graph.samples
            if self._memory == "high":
                self._graphs.append(graph)
            del graph, found  # before the next ones are built
        add_by_leaf(parts, self._pulled(self._slopes.sums, lent=True), self._slopes.unit)
        return total

    def _pulled(self, effective: Mapping[Tensor, Tensor], *, lent: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
        """Gradients in effective weights as gradients in those lengths and directions that are trained.

        Args:
            lent: whether each is valid only until the next one.
        """
        trained = set(self.space.parameters.values())
        for each in self._weights.maps.values():
            if each.w in effective:
                pulled = each.pull(effective[each.w], lent=lent)
                yield from ((p, part) for p, part in zip((each.g, each.v), pulled) if p in trained)
                if lent:
                    give_back(pulled[1])

    def _gradients_beside(self, value: Tensor, edges: Sequence[GradientEdge] | None) -> Gradients:
        """The gradients of another scalar of the last forward pass, whose graph is kept: by parameter, or at edges."""
        leaves = self._leaves()
        with self._weights.in_backward(), twice_differentiable():
            wanted: list[Any] = list(leaves if edges is None else edges)
            found = torch.autograd.grad(value, wanted, retain_graph=True, allow_unused=True)
        if edges is not None:
            return found
        return self._by_parameter({leaf: each for leaf, each in zip(leaves, found) if each is not None})

    def _by_parameter(self, gradients: Mapping[Tensor, Tensor]) -> list[Tensor | None]:
        """Gradients by leaf as gradients by parameter, in terms of lengths and directions for effective weights."""
        found = {leaf: gradients[leaf] for leaf in self.space.parameters.values() if leaf in gradients}
        for parameter, part in self._pulled(gradients):
            found[parameter] = found[parameter] + part if parameter in found else part
        return [found.get(p) for p in self.space.parameters.values()]

    def _leaves(self) -> list[Tensor]:
        return [*self.space.parameters.values(), *(each.w for each in self._weights.maps.values())]

    def _differentiate(self, index: int, observer: GradientObserver | None = None) -> tuple[GradientGraph, Gradients]:
        """The gradient of a batch, and those at the edges that an observer asks for."""
        begin = time.perf_counter()
        # Use the same random numbers each time, so that every product is with the same Hessian.
        with isolated_rng(index), self._weights, self._weights.in_backward(), twice_differentiable():
            loss, samples = self._losses[index]()
        if not isinstance(loss, Tensor):
            raise TypeError(f"Expected the loss to be a tensor, but got {type(loss).__name__}.")
        if loss.numel() != 1:
            raise ValueError(f"Expected a scalar loss, but got a tensor of shape {tuple(loss.shape)}.")
        require_graph(loss, "a loss")
        if not math.isfinite(float(loss.detach())):
            raise FloatingPointError(
                f"Expected a finite loss, but batch {index} gives {float(loss.detach())}: its Hessian is undefined."
            )
        refuse_wrong_second_derivatives(loss)
        leaves = self._leaves()
        with self._weights.in_backward(), twice_differentiable():
            edges = [] if observer is None else observer.edges(loss)
            wanted: list[Any] = [*leaves, *edges]
            found = torch.autograd.grad(loss.sum(), wanted, create_graph=True, allow_unused=True)
        gradients = found[: len(leaves)]
        if time.perf_counter() - begin > _SLOW:
            stop_at_nodes(gradient for gradient in gradients if gradient is not None)
        at_edges = [None if each is None else each.detach() for each in found[len(leaves) :]]
        return GradientGraph(loss, samples, leaves, gradients), at_edges

    def _part_of_product(self, vector: Tensor) -> Tensor | Refusal:
        """Refuse if a graph is no longer valid, since the loss of a later batch has written to a tensor in it."""
        try:
            return self._weighted_product(vector)
        except RuntimeError as error:
            if self._memory == "low" or "modified by an inplace operation" not in str(error):
                raise
            return Refusal(0)

    def _weighted_product(self, vector: Tensor) -> Tensor:
        # The parts of a model may be on several devices.
        tangents = {p: part.to(p.device) for p, part in self.space.views(vector).items()}
        for each in self._weights.maps.values():
            # A frozen length or direction does not move.
            tangents.update({p: torch.zeros_like(p) for p in (each.g, each.v) if p not in tangents})
            tangents[each.w] = each.push(tangents[each.g], tangents[each.v])
        own, moved, keep = set(self.space.parameters.values()), WeightedSums(len(self._losses)), self._memory == "high"
        # With WeightNorm, most of the product follows from what moves in effective weights, whose memory it needs not
        # take as long as there are graphs.
        product = None if self._weights.maps else self._zeros()
        sums = {} if product is None else self.space.views(product)
        for index in range(len(self._losses)):
            graph = self._graphs[index] if keep else self._differentiate(index)[0]
            # Also for a batch that does not count: its backward pass may wait for other processes.
            with self._weights.in_backward(), twice_differentiable():
                along = dict(graph.along(tangents, keep=keep))
            if graph.samples:
                weight = graph.samples / self._samples
                add_by_leaf(sums, ((leaf, each) for leaf, each in along.items() if leaf in own), weight)
                moved.add({leaf: each for leaf, each in along.items() if leaf not in own}, graph.samples)
            del graph, along  # before the next ones
        if product is not None:
            return product
        product = empty(self.space.size, dtype=self.space.dtype, device=self.space.device)
        parts = self.space.views(product)
        written = self._write_pulled_tangents(parts, moved.sums)
        for p, part in parts.items():
            if p not in written:
                part.zero_()
        add_by_leaf(parts, sums.items(), 1.0)
        moved.release()
        return product

    def _zeros(self) -> Tensor:
        return empty(self.space.size, dtype=self.space.dtype, device=self.space.device).zero_()

    def _write_pulled_tangents(self, parts: Mapping[Tensor, Tensor], moved: Mapping[Tensor, Tensor]) -> set[Tensor]:
        """Write the derivatives of `_pulled` along the tangents to ``parts``, by parameter, where the gradients in
        effective weights are the slopes and change by ``moved``; return which were written.

        The maps are the same for all batches, and linear in what they pull.
        """
        written: set[Tensor] = set()
        slopes, weight = self._slopes.sums, self._slopes.unit / self._samples
        for each in (each for each in self._weights.maps.values() if each.w in slopes):
            into = parts.get(each.v) if each.v not in written else None
            g_part, v_part = each.pull_tangent(slopes[each.w], moved.get(each.w), weight=weight, into=into)
            for p, part in ((each.g, g_part), (each.v, v_part)):
                if p in written:
                    parts[p].add_(part)
                elif p in parts:
                    written.add(p)
                    if part is not into:
                        parts[p].copy_(part)
            if into is None:
                give_back(v_part)
        return written
