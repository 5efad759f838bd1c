"""All rows of the table of limits."""

from benchmarks import overhead
from benchmarks.limits import eigenvalue, kernels
from benchmarks.limits.neighbor import busy_neighbor
from benchmarks.results import record

__all__ = ["measure"]


def measure(runs: int, steps: int, busy: bool = False, tiny: bool = False) -> None:
    """Record every row ``runs`` times.

    Args:
        steps: of the epochs beside which the whole suite is measured; fewer than a real epoch has are scaled up.
        busy: beside another process that copies memory.
        tiny: the smallest networks, without the suite.
    """
    table = "limits, tiny" if tiny else "limits beside a busy process" if busy else "limits"
    network = "tiny" if tiny else "wn-mlp"
    with busy_neighbor(busy):
        eigenvalue.measure_parts(table, network, runs)
        eigenvalue.measure_warm(table, network, runs)
        eigenvalue.measure_cold(table, network, runs)
        for name in kernels.CASES:
            if (name == "tiny") == tiny:
                kernels.measure(table, name, runs)
        if not tiny:
            _suite(table, runs, steps)


def _suite(table: str, runs: int, steps: int) -> None:
    """The whole suite after the epochs from the second on."""
    row = "NormTheory(), warm, WN MLP 3072-2048-2048-10"
    for epoch in overhead.run(runs + 1, steps).epochs[1:]:
        training = epoch.training * overhead.STEPS / steps
        record(table, row, "cost", epoch.spent / epoch.gradient)
        record(table, row, "products", epoch.products, "count")
        record(table, row, "share of an epoch", epoch.spent / training, "%")
        record(table, row, "epoch", training / epoch.gradient)
        for part, seconds in epoch.parts.items():
            record(f"{table}: parts of the suite", part, "cost", seconds / epoch.gradient)
