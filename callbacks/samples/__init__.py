"""The samples that are measured on.

* `probe`: the training samples; `validation_probe`: the validation samples.
* `batch_contents`: the tensors and the number of samples in a batch of any form.
* `reading`: read them from a loader's dataset, at given indices.
* `population`: what they are drawn from: the samples that are trained on.
"""
