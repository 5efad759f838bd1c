"""One measurement, of an epoch or a step.

* `measurement`: `Measurement`, which a diagnostic asks for quantities; loss; made of the parts below.
* `function`: the trained function on the probe: loss and outputs of a batch, set up and restored.
* `gradients`: adds up gradients of the loss and of the outputs, for R, from passes of their own or the Hessian's.
* `passes`: counts the passes that a measurement makes.
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
