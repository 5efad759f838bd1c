"""`Findings`: what the trial of a `training_step` finds out."""

from dataclasses import dataclass

from lightning_normtheory.callbacks.step.predictor import CallOutput
from lightning_normtheory.hessian.operator import GraphSize

__all__ = ["Findings"]


@dataclass
class Findings:
    """Loss and predictor as found on the first batch, or why they are unknown.

    Attributes:
        loss_problem: why the loss is unknown; empty if it is known.
        outputs_problem: why the outputs are unknown; empty if they are known.
        losses: manual optimization: the numbers of the losses, among those handed to `backward`, that train θ.
        loss_names: their names in the step.
        batch_idx: the ``batch_idx`` to pass to every step; ``None``: the number of the batch.
        call: the call whose output is the predictor; ``None``: it is the user's own function, or unknown.
        repeatable: whether the call depends on its arguments alone, and can be repeated outside of the step.
        rows_from: the number of the argument, among all tensors in them, that has a row for each row of the output.
        as_samples: whether the output has a row for each sample of the batch.
        outputs: the number of outputs in each row; 0 if unknown.
        needs_graph: whether the loss cannot be computed without a graph, because it contains derivatives.
        predictor: the choice in words.
        beside: the names of the parameters that the loss depends on and the predictor does not.
        graph_size: of the gradient's graph on a batch; ``None`` until a Hessian is measured.
        separable: whether the loss of a batch is the mean of the losses of its parts; ``None`` until that is tried.
        structured: whether the layers' structure gives the gradients of parts of a batch (`BatchGram`); ``None`` until
            that is tried, or tried again.
        structured_uses: how many measurements have relied on it.
        remedy: what to pass for an unknown loss; empty: a loss function.
        seconds: the time of a gradient, forward and backward, on the batch of the trial; 0 if unknown.
        samples: the number of samples in that batch.
    """

    loss_problem: str = ""
    outputs_problem: str = ""
    losses: tuple[int, ...] = ()
    loss_names: tuple[str, ...] = ()
    batch_idx: int | None = None
    call: CallOutput | None = None
    repeatable: bool = False
    rows_from: int | None = None
    as_samples: bool = True
    outputs: int = 0
    needs_graph: bool = False
    predictor: str = ""
    beside: tuple[str, ...] = ()
    graph_size: GraphSize | None = None
    separable: bool | None = None
    structured: bool | None = None
    structured_uses: int = 0
    remedy: str = ""
    seconds: float = 0.0
    samples: int = 0
