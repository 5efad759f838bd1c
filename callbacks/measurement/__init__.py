"""One measurement, of an epoch or a step.

* `measurement`: `Measurement`, which a diagnostic asks for quantities; loss, RSC ratio; made of the parts below.
* `function`: the trained function on the probe: loss and outputs of a batch, set up and restored.
* `smaller_batches`: repeats a measurement that runs out of memory.
* `trial`: tries the function on the first batch: finds loss and predictor, or says what is missing.
* `curvature`: quantities of the loss's Hessian, on one operator for all diagnostics; the predictor's Hessian.
* `kernels`: tangent kernels.
* `theory`: what the theorems ask: structure, inputs, targets, recognized loss; facts that later measurements reuse.
* `generalization_gap`: validation loss minus training loss.
* `batch_parts`: finds input and targets in a batch.
* `rsc_metric`: sums for the RSC ratio over batches and processes.
* `ranks`: several processes that fail and continue together.
"""
