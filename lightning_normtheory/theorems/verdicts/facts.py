"""What verdicts are judged by, and how assumptions become a verdict."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from torch import Tensor, nn

from lightning_normtheory.record.theorem_status import NOT_YET, Assumption, TheoremStatus, Verdict
from lightning_normtheory.record.wording import join_names
from lightning_normtheory.theorems.losses import KnownLoss
from lightning_normtheory.theorems.papers.bn_bounds import BatchNormTheorem, batchnorm_theorem
from lightning_normtheory.theorems.papers.bn_form import BatchNormForm
from lightning_normtheory.theorems.papers.bn_margin import batchnorm_margin, class_signs
from lightning_normtheory.theorems.papers.dgm import DGMForm
from lightning_normtheory.theorems.problem import Problem

__all__ = ["NOT_SHOWN", "Facts", "Judge", "Run", "dropout_layers", "status"]

# δ of BN's theorem, which holds with probability 1 − 20δ only; that of `BatchNormTheory`.
_BN_DELTA = 0.01
# Why it cannot be checked that samples are i.i.d.
NOT_SHOWN = "samples do not show how they were drawn"


@dataclass(frozen=True)
class Facts:
    """A network at initialization, its samples and its loss.

    Attributes:
        problem: the network's form, inputs and loss.
        dgm: the constants of DGM, or why the network does not have its form.
        batchnorm: the network in BN's form, or why it does not have it.
        targets: the labels of the samples of ``batchnorm``, if they are known.
        dropout: the names of layers that drop values at random in training.
        samples: n, the size of the training set; ``None`` if it is not known.
        examined: the number of samples that ``problem`` is about; ``None``: all.
        random: whether the training step draws random numbers.
        delta: the probability that DGM's theorems fail, as in `WeightNormTheory`.
    """

    problem: Problem
    dgm: DGMForm | str = "the network has not been compared with DGM's"
    batchnorm: BatchNormForm | str = "the network has not been compared with BN's"
    targets: Tensor | None = None
    dropout: tuple[str, ...] = ()
    samples: int | None = None
    examined: int | None = None
    random: bool = False
    delta: float = 0.05

    @property
    def dropped(self) -> str:
        """Why training is random; empty if it is not known to be."""
        if self.dropout:
            return f"dropout in training ({join_names(self.dropout)})"
        return "the training step draws random numbers" if self.random else ""

    def part(self, examined: int | None) -> str:
        """Return which part of the training set so many samples are; empty for all of it."""
        if examined is None or examined == self.samples:
            return ""
        return f"on {examined} of {self.samples or 'an unknown number of'} samples"

    @cached_property
    def signs(self) -> Tensor | None:
        """The labels as ±1, if there are two classes of them."""
        return None if isinstance(self.batchnorm, str) else class_signs(self.targets, len(self.batchnorm.x_centered))

    @cached_property
    def margin(self) -> float | None:
        """γ_a + γ_c of BN with the factor 1/√m, if the network has its form and the labels two classes."""
        form = self.batchnorm
        if isinstance(form, str) or self.signs is None:
            return None
        total = sum(batchnorm_margin(features, self.signs).value for features in (form.features_a, form.features_c))
        return float(total) / math.sqrt(len(form.v))

    @cached_property
    def batchnorm_theorem(self) -> BatchNormTheorem | None:
        """The numbers of BN, Theorem 2.1 for one step; ``None`` without a positive margin."""
        form = self.batchnorm
        if isinstance(form, str) or not self.margin or self.margin <= 0:
            return None
        width, d = form.v.shape
        n = self.samples or len(form.x_centered)
        return batchnorm_theorem(
            epsilon_n=form.epsilon_n, gamma=self.margin, n=n, d=d, width=width, steps=1, delta=_BN_DELTA
        )


@dataclass(frozen=True)
class Run:
    """How the network is trained, and what one measurement has found.

    Attributes:
        optimizer: why a step is not θ − η∇L with one η for all parameters; empty if it is.
        batches: why a step is not on the whole training set; empty if it is.
        rate: η.
        probe: why the values are not those of the whole training set; empty if they are.
        batch: the number of samples in a step; ``None`` if it is not known.
        epoch: the number of passes over the training set that are complete.
        values: metrics of the measurement by name; empty before the first one.
        lambda_max: the largest eigenvalue of the tangent kernel.
        kernel_samples: the number of its samples.
        samples: n, the size of the training set; ``None`` if it is not known.
        loss: the training loss, or why it is not known.
        asked_rate: η that BN's theorem asks for; ``None`` if it is not known.
    """

    optimizer: str = ""
    batches: str = ""
    rate: float | None = None
    probe: str = ""
    batch: int | None = None
    epoch: int = 0
    values: Mapping[str, float] = field(default_factory=dict)
    lambda_max: float | None = None
    kernel_samples: int = 0
    samples: int | None = None
    loss: KnownLoss | str = "the loss is not known"
    asked_rate: float | None = None


class Judge:
    """Collects the assumptions of one theorem.

    Args:
        part: whether they are about the network and its data, or about the run.

    Example:
        >>> judge = Judge("network")
        >>> judge.check("‖x‖ = 1", "", "1")
        >>> judge.check("no biases", "a bias (0)", needed=False)
        >>> judge.unknown("i.i.d. samples", "samples do not show how they were drawn")
        >>> [(each.name, each.state) for each in judge.found]
        [('‖x‖ = 1', 'holds'), ('no biases', 'fails'), ('i.i.d. samples', 'cannot be checked')]
    """

    def __init__(self, part: Literal["network", "run"], found: Iterable[Assumption] = ()) -> None:
        self._part: Literal["network", "run"] = part
        self.found = list(found)

    def check(self, name: str, problem: str | Iterable[str], value: str = "", *, needed: bool = True) -> None:
        """Add an assumption, which holds if there is no problem.

        Args:
            value: what was found where it holds.
            needed: whether our own bounds need it.
        """
        text = problem if isinstance(problem, str) else "; ".join(problem)
        state: Literal["holds", "fails"] = "fails" if text else "holds"
        self.found.append(Assumption(name, self._part, state, text or value, needed))

    def check_samples(
        self, part: str, name: str, problem: str | Iterable[str], value: str = "", *, needed: bool = True
    ) -> None:
        """Add an assumption about all samples: that it holds on a part of them, as in `Facts.part`, is not enough."""
        if part and not problem:
            self.unknown(name, f"{value or 'holds'} {part}")
        else:
            self.check(name, problem, value, needed=needed)

    def unknown(self, name: str, missing: str) -> None:
        """Add an assumption that cannot be checked."""
        self.found.append(Assumption(name, self._part, "cannot be checked", missing))


def status(theorem: str, network: Judge, run: Judge | None, notes: Sequence[str] = ()) -> TheoremStatus:
    """Return the verdict that follows from the assumptions about the network, and about the run if there is one."""
    found = (*network.found, *([] if run is None else run.found))
    failing = [each for each in network.found if each.state == "fails"]
    failing_run = [] if run is None else [each for each in run.found if each.state == "fails"]
    unknown = [each for each in found if each.state == "cannot be checked" and each.found != NOT_YET]
    unchecked = [f"not checked: {each.name} ({each.found})" for each in unknown]
    verdict: Verdict
    if any(each.needed for each in failing):
        verdict, reasons = "does not apply", [each.found for each in failing if each.needed]
    elif failing:
        verdict, reasons = "generalized", [each.found for each in failing]
    elif run is None or failing_run or any(each.found == NOT_YET for each in run.found):
        verdict, reasons = "fits", [f"the run: {each.found}" for each in failing_run] + unchecked
    else:
        verdict, reasons = "applies", unchecked
    if verdict != "does not apply":
        reasons = [*reasons, *notes]
    return TheoremStatus(theorem, verdict, tuple(dict.fromkeys(reasons)), found)


def dropout_layers(model: nn.Module) -> tuple[str, ...]:
    """Return the names of layers that drop values at random in training.

    Example:
        >>> dropout_layers(nn.Sequential(nn.Dropout(0.0), nn.Dropout(0.5)))
        ('1',)
    """
    kinds = nn.modules.dropout._DropoutNd
    return tuple(name for name, module in model.named_modules() if isinstance(module, kinds) and module.p > 0)
