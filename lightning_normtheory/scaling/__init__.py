"""How a scaling of weights passes through a model: the layers whose scale a BatchNorm undoes.

* ``batchnorm_inputs``: trace a model and find the layers whose output each BatchNorm normalizes (`feeding_layers`).
* ``split``: the parameters that are directions and lengths by that rule (`batch_norm_split`).
* ``flow``: rules for layers and BatchNorms, where a scaling of a unit starts and ends. The rule for another
  normalization, such as LayerNorm, belongs here; ``model.layers`` lists the layer classes.
* ``rules``: rules for all remaining operations (activations, pooling, reshaping): which of them pass a scaling on, and
  which write in place.
"""

from lightning_normtheory.scaling.batchnorm_inputs import Feeding, feeding_layers
from lightning_normtheory.scaling.split import BatchNormSplit, batch_norm_split

__all__ = ["BatchNormSplit", "Feeding", "batch_norm_split", "feeding_layers"]
