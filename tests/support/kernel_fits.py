"""Fits that measure a tangent kernel."""

import torch

from lightning_normtheory import empirical_ntk

from support import lit
from support.lit import Classifier, loader, tensors

NTK = "normtheory/ntk_"


class Seeded(Classifier):
    def __init__(self, net="wn"):
        torch.manual_seed(0)
        super().__init__(net)


def fit(callback, module, epochs=2, data=None, **options):
    return lit.fit(callback, module, epochs, loader(20, shuffle=False) if data is None else data, **options)


def kernel_of(module, n=20, **options):
    """Return the kernel of the whole dataset. The probe has a different order, on which spectra do not depend."""
    return empirical_ntk(module.net, tensors(n)[0], **options)
