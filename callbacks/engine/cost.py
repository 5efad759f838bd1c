"""What measurements are expected to cost, known after the trial of the training step and before they are made."""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

__all__ = [
    "FORWARD",
    "GRAPH",
    "PRODUCT",
    "SHARED",
    "Sizes",
    "compared",
    "products_cost",
    "rough_duration",
]

# Costs in G, the time of one gradient of the loss on the whole probe: a forward pass without a graph, the graph of the
# gradient, and a product with the Hessian on that graph. Measured, see docs/benchmarks.md.
FORWARD, GRAPH, PRODUCT = 0.4, 1.5, 2.5


class Sizes(NamedTuple):
    """The counts that the cost of a measurement depends on.

    Attributes:
        probe: the number of samples of the probe, in this process.
        batch: the number of samples in one of its batches.
        outputs: k, the number of outputs of each sample; 0 if they are unknown.
        parameters: p, the number of parameters that are differentiated in.
        validation: the number of validation samples, in this process; 0 without validation.
    """

    probe: int
    batch: int
    outputs: int = 1
    parameters: int = 1
    validation: int = 0

    def share(self, samples: int) -> float:
        """Return the number of samples in the batches that hold the first ones, as a fraction of the probe.

        Example:
            >>> Sizes(probe=512, batch=64).share(100)
            0.25
        """
        return min(math.ceil(samples / self.batch) * self.batch, self.probe) / self.probe


# Quantities of a `Measurement` that several diagnostics ask for, and that are computed once: their costs in G.
SHARED: Mapping[str, Callable[[Sizes], float]] = MappingProxyType(
    {
        "rsc": lambda sizes: 1.8 if sizes.outputs else 1.0,  # one forward pass; gradients of loss and sum of outputs
        "problem": lambda sizes: 3 * FORWARD * sizes.share(min(2 * sizes.batch, 64)),
        "gap": lambda sizes: FORWARD * (1 + sizes.validation / sizes.probe) if sizes.validation else 0.0,
    }
)


def products_cost(products: int, memory: Literal["high", "low"]) -> float:
    """Return the cost of products with the loss's Hessian in G; with little memory, each builds the graph again."""
    return products * PRODUCT + GRAPH * (1 if memory == "high" else products)


def rough_duration(seconds: float) -> str:
    """
    Example:
        >>> [rough_duration(seconds) for seconds in (0.31, 3.7, 75, 150, 9000)]
        ['0.3 s', '4 s', '75 s', '2.5 min', '2.5 h']
    """
    if seconds < 100:
        return f"{seconds:.0f} s" if seconds >= 0.95 else f"{seconds:.1g} s"
    return f"{seconds / 60:.2g} min" if seconds < 6000 else f"{seconds / 3600:.2g} h"


def compared(fraction: float) -> str:
    """
    Example:
        >>> [compared(fraction) for fraction in (0.001, 0.034, 4.567)]
        ['less than 1 % of', '3 % of', '5 times as long as']
    """
    if fraction >= 2:
        return f"{fraction:.0f} times as long as"
    return f"{100 * fraction:.0f} % of" if fraction >= 0.01 else "less than 1 % of"
