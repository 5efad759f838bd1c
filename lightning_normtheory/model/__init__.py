"""Models, their parameters and their inputs.

* ``checks``: check models, batches, outputs and losses; select samples of an input
* ``batches``: batches of samples, and joining them
* ``parameters``: parameters as one flat vector
* ``layers``: layers under WeightNorm and BatchNorm, and their weight vectors
"""
