"""The samples that are measured on.

* `probe`: the training samples; `validation_probe`: the validation samples.
* `population`: what they are drawn from: the samples that are trained on.
"""
