"""Measure a model without changing it.

* ``preserve``: run a block on a model and restore the model afterwards; the entry point
* ``snapshot``: remember and restore the mutable state reachable from some objects
* ``same_bits``: compare the memory of tensors and arrays
* ``watched``: large containers, of which a snapshot remembers what is taken out; ``watched_types``: their subclasses
* ``statistics``: hold the statistics of BatchNorm constant, at those of some batches
* ``rng``: seed random generators inside a block, restore them afterwards
* ``eager``: run compiled models uncompiled
* ``interrupts``: defer Ctrl+C while state is restored
* ``memory``: recognize out-of-memory errors
* ``workspace``: keep the memory of large tensors from one measurement to the next
* ``processes``: the interface of several processes that measure together
* ``progress``: report the steps of long loops
"""
