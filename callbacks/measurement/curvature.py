"""Second derivatives on the probe: quantities of the loss's Hessian, and the norm of the predictor's."""

import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from lightning_normtheory.autodiff.weight_norm import EffectiveWeights
from lightning_normtheory.callbacks.measurement.function import MeasuredFunction
from lightning_normtheory.callbacks.measurement.gradients import GradientSums, ProbeGradients, StructuredSums
from lightning_normtheory.callbacks.measurement.kernels import Predictor
from lightning_normtheory.callbacks.measurement.passes import GRAPH, PRODUCT
from lightning_normtheory.callbacks.measurement.smaller_batches import (
    all_agree,
    cut_batches,
    cut_into_units,
    retry_smaller,
)
from lightning_normtheory.callbacks.samples.probe import ProbeBatch
from lightning_normtheory.hessian.gradient_graph import Differentiate, Gradients
from lightning_normtheory.hessian.operator import GraphSize, LossHessian, Memory
from lightning_normtheory.hessian.predictor import predictor_hessian
from lightning_normtheory.linalg.inner_products import dot
from lightning_normtheory.linalg.precision import to_float64
from lightning_normtheory.measuring.memory import free_bytes, is_out_of_memory
from lightning_normtheory.measuring.workspace import drop_free_memory
from lightning_normtheory.model.checks import some_samples
from lightning_normtheory.model.layers import with_batch_statistics

__all__ = ["Curvature", "HessianAnswer", "HessianRequest", "PredictorCurvature"]

# The memory of a training step, from that of the graph of a batch's gradient: the graph is about _GRAPH times that of
# the loss; parameters, gradients and the state of an optimizer are _STATE times the parameters. The Hessian may take
# _SHARE times as much in addition. A product takes _BETWEEN tensors of the largest size beside the graph. No more than
# _SMALL bytes are of no concern; on the CPU no more than _SPARE, where they spare products the time of new graphs.
_GRAPH, _STATE, _SHARE, _BETWEEN, _SMALL, _SPARE = 2.5, 4, 1.5, 5, 2**26, 2**29

# Vectors that a method may keep where memory is saved, and after it has run out again, before batches become smaller.
_SOME_VECTORS, _FEW_VECTORS = 8, 4
# A graph takes at most so many times the parameters for weights and their gradients.
_WEIGHTS = 3
# Vectors of the size of the parameters that a method and its products take beside the graphs, by measurement.
_VECTORS = 16


class HessianRequest(NamedTuple):
    """A quantity of H = ∇²L that a diagnostic needs in an epoch.

    Attributes:
        evaluate: computes the quantity from the operator H; it must do the same in every process.
        memory: ``"high"`` keeps the gradient graph for all products, ``"low"`` builds it again for each.
    """

    evaluate: Callable[[LossHessian], Any]
    memory: Memory = "high"


class HessianAnswer(NamedTuple):
    """The answer to a request.

    Attributes:
        value: what ``evaluate`` returned.
        seconds: the time that it took; the first request of an epoch also builds the gradient graph.
    """

    value: Any
    seconds: float


class PredictorCurvature(NamedTuple):
    """The predictor's Hessian on the first samples of the probe.

    Attributes:
        norm: max_i ‖∇²f(θ; x_i)‖₂ over samples and outputs.
        residual: ‖Hv − λv‖ of the largest.
        by_output: ‖∇²f_h(θ; x_i)‖₂ (samples, k).
    """

    norm: float
    residual: float
    by_output: Tensor


class _SharedPass:
    """Computes the losses for the graph of the gradient, and adds up what R and ‖ḡ‖² need of that graph."""

    def __init__(self, function: MeasuredFunction, sums: GradientSums | StructuredSums) -> None:
        self._function, self._sums = function, sums
        self._outputs: Tensor | None = None
        self._finished = False

    def loss_of(self, index: int) -> tuple[Tensor, int]:
        batch = self._function.batches[index]
        self._function.passes.add(GRAPH, batch.samples)
        if self._finished:
            loss = self._function.loss_of(batch)
        else:
            loss, self._outputs = self._function.loss_and_outputs(batch)
        return loss, batch.samples if batch.counts else 0

    @property
    def weights(self) -> EffectiveWeights | None:
        """The context of the losses, if the sums need their own."""
        return self._sums.weights if isinstance(self._sums, StructuredSums) else None

    def begin(self) -> None:
        self._outputs = None  # with the graph of an attempt that failed
        self._sums.begin()

    def edges(self, loss: Tensor) -> Sequence[GradientEdge]:
        return self._sums.edges(loss) if isinstance(self._sums, StructuredSums) else []

    def add(
        self,
        index: int,
        loss: Tensor,
        gradients: Callable[[], Gradients],
        at_edges: Gradients,
        differentiate: Differentiate,
    ) -> None:
        outputs, self._outputs = self._outputs, None
        batch = self._function.batches[index]
        if isinstance(self._sums, StructuredSums):
            self._sums.add(batch, loss, outputs, at_edges, differentiate)
        else:
            self._sums.add(batch, loss, outputs, lambda value: differentiate(value, None), gradients())

    def result(self, gradient: Tensor) -> ProbeGradients | None:
        return self._sums.result(gradient) if isinstance(self._sums, StructuredSums) else self._sums.result()

    def release(self) -> None:
        """Free everything; from now on only losses are computed, for the graphs of later products."""
        self._finished, self._outputs = True, None
        self._sums.release()


class Curvature:
    """Second derivatives on the probe in one epoch.

    Args:
        requests: what the epoch's diagnostics need of the Hessian, by their keys. All are evaluated on one operator, so
            that they share the gradient graph.
        sums: makes the sums for what the gradients of that graph say, or none; ``None``: nobody asks for it.

    Attributes:
        gradients: what the gradients of the graph say, once it was built.
        uses_structure: whether their spread is that of the layers' structure (`StructuredSums`), or was to be.
    """

    def __init__(
        self,
        function: MeasuredFunction,
        requests: Mapping[str, HessianRequest],
        sums: Callable[[], GradientSums | StructuredSums | None] | None = None,
    ) -> None:
        self.gradients: ProbeGradients | None = None
        self.uses_structure = False
        self._function = function
        self._requests = dict(requests)
        self._sums = sums
        self._sharing = False
        self._answers: dict[str, HessianAnswer] = {}
        self._alone = False

    @property
    def saves_memory(self) -> bool:
        """Whether a request asks for little memory."""
        return any(request.memory == "low" for request in self._requests.values())

    def answer(self, key: str) -> HessianAnswer:
        """Return the answer to the request of the diagnostic with this key.

        The first call evaluates all requests. If that fails, each one is evaluated alone when it is asked for, so that
        no request fails because of another one.
        """
        if key not in self._answers and not self._alone and len(self._requests) > 1:
            try:
                self._answers = self._evaluate(self._requests)
            except Exception:  # noqa: BLE001  # raised again below, if it concerns this request
                self._alone = True
        if key not in self._answers:
            self._answers.update(self._evaluate({key: self._requests[key]}))
        return self._answers[key]

    def _evaluate(self, requests: Mapping[str, HessianRequest]) -> dict[str, HessianAnswer]:
        whole = self._function.batches
        try:
            return self._evaluate_within_limit(requests)
        except Exception:
            if not self._sharing or self.gradients is not None:
                raise
        finally:
            self._function.batches = whole
        self._sharing = False  # what else was asked of the pass may have failed it
        return self._evaluate(requests)

    def _evaluate_within_limit(self, requests: Mapping[str, HessianRequest]) -> dict[str, HessianAnswer]:
        attempts: list[tuple[Memory, int | None]] = [("high", None), ("low", _SOME_VECTORS), ("low", _FEW_VECTORS)]
        if not self._fits() or any(each.memory == "low" for each in requests.values()):
            attempts.pop(0)
        for memory, vectors in attempts[:-1]:
            try:
                return self._function.processes.run_on_all(partial(self._on_operator, requests, memory, vectors))
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
            gc.collect()  # outside the except clause, where the traceback still holds the memory
            drop_free_memory()
        last = partial(self._on_operator, requests, *attempts[-1])
        if self._smaller_batches_help():
            return retry_smaller(self._function, last)
        return self._function.processes.run_on_all(last)

    def _smaller_batches_help(self) -> bool:
        """Whether a batch's graph is larger than the weights and gradients in it, which no smaller batch avoids."""
        graph = self._function.findings.graph_size
        theta = sum(p.nbytes for p in self._function.theta.values())
        return graph is None or not 0 < graph.total <= _WEIGHTS * theta

    def _fits(self) -> bool:
        """Whether the graphs of all batches fit into the memory that a training step suggests, and into what a device
        has free. If not even that of one batch does into the first, cut the batches: this changes the rounding, so it
        depends on the sizes of tensors only."""
        function = self._function
        graph = function.findings.graph_size
        if graph is None:
            try:
                graph = function.findings.graph_size = function.processes.run_on_all(self._graph_size)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                return False  # in all processes, whichever of them it was
        theta = sum(p.nbytes for p in function.theta.values())
        limit = max(_SMALL, _SHARE * (graph.total / _GRAPH + _STATE * theta))
        one = graph.total + _BETWEEN * graph.largest
        cut = one > limit and cut_batches(function, math.ceil(one / limit))
        device = function.model.device
        if device.type == "cpu":
            limit = max(limit, _SPARE)
        batches = max(math.ceil(len(function.all_batches) / function.processes.count), 1)
        kept = one + (batches - 1) * graph.total
        fits = kept <= limit or (batches == 1 and not cut)
        return fits and all_agree(function, kept + _VECTORS * theta <= free_bytes(device))

    def _graph_size(self) -> GraphSize:
        function = self._function
        with function.measuring():
            # Of the same batch in every process: all must decide alike.
            loss = partial(self._loss_of, function.all_batches[0])
            return LossHessian(function.theta, [loss]).graph_size()

    def _loss_of(self, batch: ProbeBatch) -> tuple[Tensor, int]:
        self._function.passes.add(GRAPH, batch.samples)
        return self._function.loss_of(batch), batch.samples if batch.counts else 0

    def _on_operator(
        self, requests: Mapping[str, HessianRequest], memory: Memory, vectors: int | None
    ) -> dict[str, HessianAnswer]:
        function = self._function
        losses = [partial(self._loss_of, batch) for batch in function.batches]
        answers = {}
        processes = function.processes
        shared = self._shared_pass(memory)
        if shared is not None:
            losses = [partial(shared.loss_of, index) for index in range(len(function.batches))]
        operator = LossHessian(
            function.theta,
            losses,
            memory=memory,
            vectors=vectors,
            processes=processes,
            observer=shared,
            weights=None if shared is None else shared.weights,
        )
        begin = time.perf_counter()
        with function.measuring(), operator as hessian:
            if shared is not None:
                try:
                    self.uses_structure = shared.weights is not None
                    hessian.prepare()
                    self.gradients = processes.run_on_all(partial(shared.result, hessian.gradient))
                finally:
                    shared.release()
            for key, request in requests.items():
                answers[key] = HessianAnswer(request.evaluate(hessian), time.perf_counter() - begin)
                begin = time.perf_counter()
            function.passes.add(PRODUCT, _samples(function.batches), hessian.products)
        return answers

    def _shared_pass(self, memory: Memory) -> "_SharedPass | None":
        """Return what also adds up the gradients of the graph, if somebody asks for them; in the first attempt only."""
        make, self._sums = self._sums, None
        sums = None if make is None or self.saves_memory else make()
        if isinstance(sums, StructuredSums) and memory == "low":
            sums = None  # the structure needs the inputs of all layers for all batches
        self._sharing = self._sharing or sums is not None
        return None if sums is None else _SharedPass(self._function, sums)

    def along(self, vector: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, int]:
        """Return vᵀH'v on training samples that are not in the probe: the share of each batch, or part of one, in these
        samples, its vᵀH'v, and their number; empty if there are none."""
        function, whole = self._function, self._function.batches
        function.batches = function.other_batches()
        try:
            if not function.batches:
                return torch.empty(0, device="cpu"), torch.empty(0, device="cpu"), 0
            cut_into_units(function)
            return retry_smaller(function, partial(self._along, vector))
        finally:
            function.batches = whole

    def _along(self, vector: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, int]:
        function = self._function
        own = torch.zeros(function.processes.count, len(function.batches), 2, dtype=torch.float64, device="cpu")
        with function.measuring():
            for index, batch in enumerate(function.batches):
                losses = [lambda batch=batch: (function.loss_of(batch), batch.samples)]
                function.passes.add(GRAPH, batch.samples)
                function.passes.add(PRODUCT, batch.samples)
                with LossHessian(function.theta, losses) as hessian:
                    v = hessian.space.flatten(vector)
                    curvature = dot(v, hessian @ v) / dot(v, v)
                if batch.counts:
                    own[function.processes.rank, index] = torch.tensor(
                        [batch.samples, curvature], dtype=torch.float64, device="cpu"
                    )
        sizes, values = function.processes.sum(own).flatten(0, 1).unbind(1)
        values, sizes = values[sizes > 0], sizes[sizes > 0]
        return sizes / sizes.sum(), values, int(sizes.sum())

    def predictor_hessian(
        self, samples: int, tol: float, max_hvps: int, *, one_output: bool = False
    ) -> PredictorCurvature:
        """Return ‖∇²f(θ; x_i)‖₂ of the first samples of the probe. Every process measures those of its own batches.

        Args:
            one_output: measure one output of each sample only, output i mod k of the i-th of a batch.
        """
        function = self._function
        k = max(function.findings.outputs, 1)
        largest = torch.zeros(2, dtype=torch.float64, device="cpu")
        table = torch.zeros(samples, k, dtype=torch.float64, device="cpu")
        with function.measuring():
            inputs = [(batch, function.inputs_of(batch)) for batch in function.batches if batch.counts]
            function.hold_statistics()  # after the inputs, which need resets of the model
            predictor = Predictor(function)
            for batch, x in inputs:
                if batch.first >= samples:
                    continue
                # The whole batch, not only the samples asked for, unless samples are known to be independent.
                asked = min(samples - batch.first, batch.samples)
                if function.findings.separable and not with_batch_statistics(function.model):
                    x = some_samples(x, batch.samples, slice(asked))
                result = predictor_hessian(
                    predictor,
                    x,
                    tol=tol,
                    max_hvps=max_hvps,
                    first=asked,
                    one_output=one_output,
                    functional=function.user_predict is not None or function.findings.repeatable,
                )
                top = int(result.norms.argmax())
                found = torch.tensor(
                    [float(result.norms[top]), float(result.residuals[top])], dtype=torch.float64, device="cpu"
                )
                largest = max(largest, found, key=lambda pair: float(pair[0]))
                rows = to_float64(result.by_output).cpu()
                if rows.shape[1] == k:
                    table[batch.first : batch.first + len(rows)] = rows
        pairs = torch.zeros(function.processes.count, 2, dtype=torch.float64, device="cpu")
        pairs[function.processes.rank] = largest
        pairs = function.processes.sum(pairs)
        norm, residual = pairs[pairs[:, 0].argmax()].tolist()
        return PredictorCurvature(norm, residual, function.processes.sum(table))


def _samples(batches: Sequence[ProbeBatch]) -> int:
    return sum(batch.samples for batch in batches if batch.counts)
