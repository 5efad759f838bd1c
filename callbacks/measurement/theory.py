"""What the theorems ask about the trained function: its structure, inputs, targets, loss and step size."""

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from lightning_normtheory.architecture.operations import Opaque, Operation, form, opaque, walk
from lightning_normtheory.architecture.recorder import record_forward
from lightning_normtheory.callbacks.measurement.batch_parts import other_tensors
from lightning_normtheory.callbacks.measurement.function import MeasuredFunction
from lightning_normtheory.callbacks.measurement.gradient_steps import gradient_steps
from lightning_normtheory.callbacks.measurement.passes import FORWARD
from lightning_normtheory.callbacks.samples.batch_contents import describe
from lightning_normtheory.callbacks.samples.probe import ProbeBatch
from lightning_normtheory.linalg.precision import to_float64
from lightning_normtheory.measuring.rng import isolated_rng
from lightning_normtheory.model.batches import joined
from lightning_normtheory.model.checks import some_samples
from lightning_normtheory.model.layers import batch_norm_layers
from lightning_normtheory.scaling.split import BatchNormSplit
from lightning_normtheory.theorems.losses import KnownLoss, as_targets, identify_loss, same_loss
from lightning_normtheory.theorems.papers.bn_form import BatchNormForm, batchnorm_form, batchnorm_network
from lightning_normtheory.theorems.papers.dgm import DGMForm, dgm_form
from lightning_normtheory.theorems.papers.lin import OutputGradients, output_gradients
from lightning_normtheory.theorems.problem import Problem, input_norms

__all__ = ["KnownFacts", "TheoryInputs"]

# Samples on which the forward pass is recorded.
_RECORDED = 4
# After so many measurements, the recorded network is replayed on other samples again.
_REPLAYED = 16
# Samples of the first batch and of the last, which may be shorter, on which the loss is recognized.
_LOSS_SAMPLES = 32


@dataclass
class KnownFacts:
    """Facts about a run that one epoch finds out and later epochs reuse.

    Attributes:
        x_norms: the smallest and the largest norm of an input of the probe.
        perturbed_loss: the loss as recognized at perturbed parameters, or why it was not recognized.
        scaled: whether the loss was recognized by parts of a batch, since it is a sum or has a constant of its own. If
            the first finite loss was not, later ones are not looked at that way, which takes more forward passes.
        targets: the labels of the first samples of the probe, by their number.
        structure: the form of the network that was recorded and replayed on other samples, and in how many measurements
            it has been the same.
        split: the directions and lengths of BatchNorm, by the structure of the model that was traced.
        full_samples: the number of samples whose kernel of all outputs is wanted.
        in_float64: the number of further measurements in which a kernel begins in float64, by its kind.

    A checkpoint keeps the loss, whether it is scaled, and the last two.
    """

    x_norms: tuple[float, float] | None = None
    perturbed_loss: KnownLoss | str | None = None
    scaled: bool | None = None
    targets: dict[int, Tensor | None] = field(default_factory=dict)
    structure: tuple[Hashable, int] = (None, 0)
    split: dict[Hashable, BatchNormSplit] = field(default_factory=dict)
    full_samples: int = 0
    in_float64: dict[str, int] = field(default_factory=dict)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, as plain values."""
        loss = self.perturbed_loss
        known = tuple(loss) if isinstance(loss, KnownLoss) else loss
        found = {"perturbed": known, "scaled": self.scaled}
        return {**found, "full_samples": self.full_samples, "in_float64": dict(self.in_float64)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "KnownFacts":
        loss = state.get("perturbed")
        known = loss if loss is None or isinstance(loss, str) else KnownLoss(*loss)
        begun = {"full_samples": state.get("full_samples", 0), "in_float64": dict(state.get("in_float64", {}))}
        return cls(perturbed_loss=known, scaled=state.get("scaled"), **begun)


class TheoryInputs:
    """What the theorems ask about the function, in one epoch.

    Args:
        facts: what earlier epochs found out; completed here.
    """

    def __init__(self, function: MeasuredFunction, facts: KnownFacts) -> None:
        self._function = function
        self._facts = facts
        self._perturbed: list[Tensor] = []
        self._looked = False
        self._dgm_forms: dict[int, DGMForm | str] = {}
        self._batchnorm_forms: dict[int, BatchNormForm | str] = {}

    @cached_property
    def problem(self) -> Problem:
        """The network's structure, its inputs and its loss, as the theorems need them."""
        facts = self._facts
        with self._function.measuring(independent=True):
            output = self._record_forward()
            if isinstance(output, Opaque) and not output.shape:  # what is recorded may not show the number of outputs
                with self._function.without_graph():
                    shape = self._function.outputs_of(self._function.all_batches[0]).shape[1:]
                output = opaque(output.reason, output.sources, tuple(shape))
            # A loss or an input that was not finite in one epoch may be finite in the next: look again.
            if facts.x_norms is None or not all(map(math.isfinite, facts.x_norms)):
                facts.x_norms = self._x_norms()
            loss = self._identify_loss()
            if facts.scaled is None and (self._looked or isinstance(loss, KnownLoss)):
                facts.scaled = self._looked and isinstance(loss, KnownLoss)
            if isinstance(loss, KnownLoss) and facts.perturbed_loss is None:
                facts.perturbed_loss = self._identify_loss(perturbed=True)
                self._perturbed = []  # as large as the model
        # A loss that differs at other parameters has a term that happens to be zero at these.
        if isinstance(loss, KnownLoss) and facts.perturbed_loss is not None:
            loss = same_loss([loss, facts.perturbed_loss])
        return Problem(output, facts.x_norms, loss, self._function.theta)

    @property
    def loss(self) -> KnownLoss | str:
        """The training loss, as in `problem`; the square loss with the largest target of the whole probe."""
        loss = self.problem.loss
        if isinstance(loss, str) or not loss.is_square or self.target_matrix is None:
            return loss
        return loss._replace(largest_target=float(self.target_matrix.abs().max()))

    def is_random(self) -> bool:
        """Return whether the training step draws random numbers in training mode, as with a functional dropout."""
        function = self._function
        batch, layers = function.all_batches[0], set(batch_norm_layers(function.model).values())
        training = [module for module in function.model.modules() if module.training and module not in layers]
        found = []
        with function.measuring(independent=True), function.without_graph():
            data = some_samples(function.on_device(batch), batch.samples, slice(min(batch.samples, _RECORDED)))
            for seed in (1, 2):
                function.reset_state()
                for module in training:  # `measuring` has switched it off
                    module.training = True
                try:
                    with isolated_rng(seed):
                        found.append(float(function.loss_on(data, batch.index).detach()))
                except Exception:  # noqa: BLE001  # of a step that needs whole batches: then it is not known
                    return False
        # Sums on a GPU differ by rounding.
        return math.isfinite(found[0]) and not math.isclose(*found, rel_tol=1e-5)

    @property
    def plain_learning_rate(self) -> float | None:
        """η of plain gradient steps θ − η∇L with one η for all parameters; ``None`` for anything else."""
        return gradient_steps(self._function).rate

    def _record_forward(self) -> Operation:
        """Record the forward pass on the first samples of the probe."""
        function = self._function
        batch = function.all_batches[0]
        recorded = min(batch.samples, _RECORDED)
        few = some_samples(function.on_device(batch), batch.samples, slice(recorded))
        _, parts = function.parts_of(few, batch, recorded)
        if parts is None:
            return opaque(f"the predictor's input is not a single tensor of a batch ({describe(batch.data)})")

        def forward(x: Tensor) -> Tensor:
            with function.fresh(batch):
                return function.outputs(function.model, parts.with_input(x))

        structure, uses = self._facts.structure
        known = structure if (uses + 1) % _REPLAYED else None
        output = record_forward(function.model, parts.x, forward, known=known)
        found = form(output)
        self._facts.structure = (found, uses + 1) if found == structure else (found, 0)
        return output

    def _x_norms(self) -> tuple[float, float]:
        """Return the smallest and the largest norm of an input of the probe."""
        function = self._function
        found = [
            function.parts_of(function.on_device(batch), batch, batch.samples)[1] for batch in function.all_batches
        ]
        norms = [input_norms(parts.x) for parts in found if parts is not None]
        together = torch.cat(norms) if len(norms) == len(found) else torch.tensor([math.nan], device="cpu")
        return float(together.min()), float(together.max())

    def _identify_loss(self, *, perturbed: bool = False) -> KnownLoss | str:
        """Recognize the loss by its value on some samples, at every measurement: it may change in training.

        Without targets, tokens among the inputs may be the text whose next token is predicted.

        Args:
            perturbed: whether at perturbed parameters.
        """
        function = self._function
        found = []
        for batch in (function.all_batches[0], *function.all_batches[1:][-1:]):
            n = min(batch.samples, _LOSS_SAMPLES)
            data = some_samples(function.on_device(batch), batch.samples, slice(n))
            inputs, targets = function.possible_targets(data, batch, n)
            text = [] if targets else [x for x in other_tensors(data, [], n) if not x.is_floating_point()]
            loss, outputs = self._evaluate(data, inputs, batch, perturbed)
            look = bool(targets) and self._facts.scaled is not False
            evaluate = partial(self._evaluate_some, data, batch, n, perturbed) if look else None
            recognized = [identify_loss(loss, outputs, y.to(outputs.device), evaluate) for y in targets or text]
            unknown = "the loss is unknown: no targets can be told from the inputs in its batches"
            reason = recognized[0] if targets else unknown
            known = next((each for each in recognized if isinstance(each, KnownLoss)), reason)
            if isinstance(known, KnownLoss) and known.summed:  # of these few samples; a measured batch has more
                known = known._replace(scale=known.scale * batch.samples / n, summed=batch.samples)
            found.append(known)
            if isinstance(known, str):
                break  # it is the same in all batches, or unknown
        return same_loss(found)

    def _evaluate(self, data: Any, inputs: Any, batch: ProbeBatch, perturbed: bool) -> tuple[float, Tensor]:
        """Return the loss and the outputs of some samples of a batch."""
        function = self._function
        with function.without_graph():
            with function.fresh(batch):
                if perturbed:
                    self._perturb()
                loss, outputs = function.loss_and_outputs_on(data, batch.index)
            if outputs is None:  # they are computed in a pass of their own
                with function.fresh(batch):
                    if perturbed:
                        self._perturb()
                    outputs = function.outputs(function.model, inputs)
        function.passes.add(FORWARD, len(outputs))  # that of the loss
        return float(loss.detach()), outputs.detach()

    def _evaluate_some(
        self, data: Any, batch: ProbeBatch, n: int, perturbed: bool, which: Tensor
    ) -> tuple[float, Tensor] | None:
        """Return the loss and the outputs of those of n samples that have these indices; ``None`` if the step fails."""
        self._looked = True
        part = some_samples(data, n, which.to(self._function.model.device))
        try:
            inputs, _ = self._function.possible_targets(part, batch, len(which))
            return self._evaluate(part, inputs, batch, perturbed)
        except Exception:  # noqa: BLE001  # of a step that needs whole batches: then the loss is not recognized
            return None

    def _perturb(self) -> None:
        """Perturb the parameters, in the same way each time; the next reset restores them."""
        parameters = [p for p in self._function.model.parameters() if p.is_floating_point()]
        with isolated_rng(), torch.no_grad():
            # Once: the random numbers of a large layer take longer than its forward pass on a few samples.
            self._perturbed = self._perturbed or [
                p + 0.1 * torch.randn_like(p) * p.abs().mean().clamp_min(0.1) for p in parameters
            ]
            for parameter, perturbed in zip(parameters, self._perturbed):
                parameter.copy_(perturbed)

    def targets(self, samples: int) -> Tensor | None:
        """Return the labels of the first samples of the probe; ``None`` if they cannot be told from the inputs."""
        if samples not in self._facts.targets:
            self._facts.targets[samples] = self._find_targets(samples)
        return self._facts.targets[samples]

    def _find_targets(self, samples: int) -> Tensor | None:
        function, found = self._function, []
        with function.measuring():
            for batch, asked in function.first(samples):
                if function.user_predict is not None and isinstance(batch.data, (tuple, list)) and len(batch.data) > 2:
                    return None  # the user's function may read two inputs
                inputs, parts = function.parts_of(function.on_device(batch), batch, batch.samples)
                if parts is None or (y := parts.y) is None or (y.dim() > 1 and not y.is_floating_point()):
                    return None  # integers with several axes are labels of a sequence, or of pixels
                if y.shape == parts.x.shape:
                    with function.without_graph(), function.fresh(batch):
                        outputs = function.outputs(function.model, inputs)
                    if outputs.numel() != y.numel():
                        return None  # another view of the samples, not what f is to reproduce
                found.append(y[:asked].cpu())
        return torch.cat(found) if len({y.shape[1:] for y in found}) == 1 else None

    @cached_property
    def target_matrix(self) -> Tensor | None:
        """The targets of the probe as numbers (n, k), classes as unit vectors; ``None`` if there are none."""
        n = sum(batch.samples for batch in self._function.all_batches)
        targets = self.targets(n)
        if targets is None:
            return None
        return as_targets(torch.zeros(n, self.problem.outputs, dtype=torch.float64, device="cpu"), targets)

    def residuals(self, samples: int) -> Tensor | None:
        """Return f(x_i) − y_i (samples, k) of the first samples of the probe, with the statistics of BatchNorm that
        kernels have; ``None`` without targets."""
        function, targets = self._function, self.targets(samples)
        if targets is None:
            return None
        with function.measuring(), torch.no_grad():
            found = function.first_samples(samples)
            function.hold_statistics()  # after the inputs, which need resets of the model
            whole = [function.outputs(function.model, x)[:asked] for x, _, asked in found]
            outputs = torch.cat([each.reshape(len(each), -1).cpu() for each in whole])  # also of outputs (samples,)
        y = as_targets(outputs, targets) if len(outputs) == len(targets) else None
        return None if y is None else to_float64(outputs) - to_float64(y)

    def output_gradients(self, samples: int) -> OutputGradients:
        """Return the derivatives of the outputs in the input and in hidden values, on first samples of the probe.

        Raises:
            ValueError: if an operation of the network has no rule; the message has the reason.
        """
        function, output = self._function, self.problem.output
        batch = function.all_batches[0]
        few = min(batch.samples, samples)
        with function.measuring(independent=True):
            data = some_samples(function.on_device(batch), batch.samples, slice(few))
            _, parts = function.parts_of(data, batch, few)
            if parts is None:
                raise ValueError(f"the predictor's input is not a single tensor of a batch ({describe(batch.data)})")
            unknown = [step.reason for step in walk(output) if isinstance(step, Opaque)]
            if unknown:
                raise ValueError(unknown[0])
            return output_gradients(output, parts.x)

    def dgm_form(self, samples: int) -> DGMForm | str:
        """Return the constants of DGM's theorems on the first samples of the probe, or why there are none."""
        if samples not in self._dgm_forms:
            self._dgm_forms[samples] = self._dgm_form(samples)
        return self._dgm_forms[samples]

    def _dgm_form(self, samples: int) -> DGMForm | str:
        function = self._function
        if function.findings.outputs > 1:
            return f"the model has {function.findings.outputs} outputs, not one"
        inputs, outputs = [], []
        with function.measuring(), torch.no_grad():
            for batch, asked in function.first(samples):
                _, parts = function.parts_of(function.on_device(batch), batch, batch.samples)
                if parts is None:
                    return "the input cannot be identified in its batches"
                inputs.append(parts.x[:asked].flatten(1))
                outputs.append(function.outputs_of(batch)[:asked].reshape(asked, -1))
                if inputs[-1].shape[1:] != inputs[0].shape[1:]:
                    return "the inputs have different shapes"
                if outputs[-1].shape[1] != 1:
                    return f"the model has {outputs[-1].shape[1]} outputs, not one"
            return dgm_form(function.model, torch.cat(inputs), torch.cat(outputs))

    def batchnorm_form(self, samples: int) -> BatchNormForm | str:
        """Return the network in BN's form, with its features on the first samples as one batch, or why it has no such
        form."""
        if samples not in self._batchnorm_forms:
            self._batchnorm_forms[samples] = self._find_batchnorm_form(samples)
        return self._batchnorm_forms[samples]

    def _find_batchnorm_form(self, samples: int) -> BatchNormForm | str:
        function = self._function
        network = batchnorm_network(function.model)
        if isinstance(network, str):
            return network  # other models need not take all samples at once
        with function.measuring(), torch.no_grad():
            (inputs, n), *others = joined(function.first_samples(samples))
            x = function.input_in(inputs, n)
            if others or x is None:
                return "the input cannot be identified in its batches, or they are of different forms"
            function.reset_state()
            network.norm.training = True  # use the statistics of these samples; `measuring` restores the flag
            return batchnorm_form(function.model, x.flatten(1), function.outputs(function.model, inputs))
