"""Derivatives that autograd alone computes wrongly or cannot compute.

* ``graph``: walk the autograd graph
* ``weight_norm``: WeightNorm that can be differentiated twice
* ``composed``: recurrent layers and max pooling out of operations that every device differentiates twice
* ``second_derivatives``: refuse losses without second derivatives, and explain why
"""
