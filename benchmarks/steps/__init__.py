"""How much longer an average step takes if every step, or every 256th, is measured: ``python -m benchmarks steps``.

* `factors`: `NormTheory` in a fit, and the table.
* `cockpit`: Cockpit's full set of instruments, if it is installed.
"""

from benchmarks.steps.factors import measure

__all__ = ["measure"]
