"""Derivatives that autograd alone computes wrongly or cannot compute.

* ``graph``: walk the autograd graph
* ``weight_norm``: WeightNorm that can be differentiated twice
* ``second_derivatives``: refuse losses without second derivatives, and explain why
"""
