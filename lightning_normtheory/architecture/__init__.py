"""The forward pass recorded as a graph of operations.

* ``recorder``: run a model on a few samples and record every torch call (`record_forward`).
* ``operations``: the nodes of the graph (`Affine`, `Activation`, `EntrywiseScaling`, `Sum`, …) and how to walk it.
* ``calls``: one recorded torch call, and how to repeat it.
* ``linear``: rules for linear layers, convolutions, BatchNorm, pooling and reshaping. The rule for another
  normalization, such as LayerNorm, belongs here.
* ``entrywise``: rules for activations, arithmetic, sums and concatenations.
* ``activations``: Lipschitz and smoothness constants of activations.
* ``chain``: a network that is a chain of layers, with bounds for each layer (`chain_of`).

An operation without a rule becomes `Opaque`, with the reason; no theorem makes a statement about it.
"""

from lightning_normtheory.architecture.chain import Chain, chain_of
from lightning_normtheory.architecture.recorder import record_forward

__all__ = ["Chain", "chain_of", "record_forward"]
