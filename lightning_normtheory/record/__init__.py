"""Read and write the file of a run. Loads neither torch nor Lightning."""

from lightning_normtheory.record.history import History, read_histories
from lightning_normtheory.record.theorem_status import TheoremStatus, theorem_table

__all__ = ["History", "TheoremStatus", "read_histories", "theorem_table"]
