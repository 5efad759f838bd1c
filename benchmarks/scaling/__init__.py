"""How the cost and the memory of a measurement grow, counted: ``python -m benchmarks scaling``.

* `counting`: floating-point operations, bytes, and the peak of memory of a piece of code.
* `fits`: a fit whose measurements are counted, by part.
* `axes`: width, depth, samples, outputs and processes, with fitted exponents.
* `resnet50`: the counts from which docs/benchmarks.md derives what ImageNet would cost.
"""

from benchmarks.scaling.axes import measure
from benchmarks.scaling.resnet50 import measure as measure_resnet50

__all__ = ["measure", "measure_resnet50"]
