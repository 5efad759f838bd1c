"""The costs that have a limit, in G, alone on the machine or beside a busy neighbor: ``python -m benchmarks limits``.

* `table`: all rows.
* `eigenvalue`: the Hessian's graph, its products, and λ_max, cold and as the callback warms it.
* `kernels`: the tangent kernel, in processes of their own.
* `neighbor`: a process that keeps one core and the memory busy.
"""

from benchmarks.limits.table import measure

__all__ = ["measure"]
