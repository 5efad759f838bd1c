"""The verdict on each theorem: every assumption of its paper by name, about the network and about the run.

* ``facts``: what verdicts are judged by (`Facts`, `Run`), and how an assumption becomes a verdict.
* ``chains``: assumptions that several theorems make about chains of layers.
* ``wn``, ``rsc``, ``dgm``, ``bn``, ``lin``: the theorems of each paper.
* ``table``: all of them (`applicable_theorems`, `judge_theorems`, `judge_run`).
"""

from lightning_normtheory.theorems.verdicts.facts import Facts, Run
from lightning_normtheory.theorems.verdicts.table import applicable_theorems, judge_run, judge_theorems

__all__ = ["Facts", "Run", "applicable_theorems", "judge_run", "judge_theorems"]
