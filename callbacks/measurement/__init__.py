"""What one epoch measures, and on which samples.

* `epoch`: `EpochMeasurement`, which a diagnostic asks for quantities; loss, RSC ratio; made of the parts below.
* `function`: the trained function on the probe: loss and outputs of a batch, set up and restored; less memory.
* `curvature`: quantities of the loss's Hessian, on one operator for all diagnostics; the predictor's Hessian.
* `kernels`: tangent kernels.
* `theory`: what the theorems ask: structure, inputs, targets, recognized loss; facts that later epochs reuse.
* `generalization_gap`: validation loss minus training loss.
* `probe`: the training samples; `validation_probe`: the validation samples; `population`: what they are drawn from.
* `batch_parts`: finds input and targets in a batch.
* `rsc_metric`: sums for the RSC ratio over batches and processes.
* `ranks`: several processes that fail and continue together.
* `silence`: mutes the loggers while the user's `training_step` runs.
"""
