"""The empirical tangent kernel.

In the order in which a measurement passes through the modules:

* ``empirical``: the public function; chooses the precision and builds the result
* ``network``: run the model, also in another dtype; parameters and WeightNorm weights as leaves of the graph
* ``strategies``: the ways to compute the kernel, tried in order until one fits
* ``directions``: the combinations of outputs that are differentiated, random ones among them
* ``plan``: choose for each parameter whether the structure of its layer gives its gradients
* ``parameter_uses``: find the uses of each parameter in the autograd graph, one rule for each operation
* ``sample_axis``: find the axis of the samples in a tensor inside the network
* ``verification``: check that batching changes no outputs and gradients; the reasons to refuse a strategy
* ``gradients``: gradients from the structure, in a sample loop, or through the whole batch
* ``memory``: **the memory limit** (`MEMORY_LIMIT`), the portions that keep it, the retry with less
* ``assembly``: add up the kernel block by block, shared between processes
* ``factors``: the gradients of one parameter as factors; WeightNorm's split into lengths and directions
* ``gram``: Gram matrices of such factors without forming gradients
* ``rank``: limits of the rank, duplicate samples
* ``result``: `TangentKernel`, its parts, spectrum and error bound; compare it with an earlier one and with the labels

And, for the spread of the loss's gradients:

* ``batch_gram``: inner products of the gradients of samples, from the pass that computes the gradient of their sum
"""

from lightning_normtheory.ntk.empirical import empirical_ntk
from lightning_normtheory.ntk.result import TangentKernel, kernel_change, label_alignment

__all__ = ["TangentKernel", "empirical_ntk", "kernel_change", "label_alignment"]
