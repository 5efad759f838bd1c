"""The user's `training_step`, run without training.

* `training_step`: calls it, and returns its loss.
* `findings`: what its trial finds out.
* `predictor`: finds the predictor: the call of the model whose output the loss is computed from.
* `manual_step`: reads off the losses of a step that optimizes manually.
* `theta`: the parameters in which loss and outputs are differentiated.
* `silence`: mutes the loggers.
"""
