"""Fits that measure the Hessian."""

import torch

from support.lit import Classifier

LAMBDA = "normtheory/hessian_lambda_max"


class Descent(Classifier):
    """Trains with SGD, whose edge of stability is known."""

    def __init__(self, net="wn", optimizer=None, **options):
        torch.manual_seed(0)
        super().__init__(net)
        self.optimizer = optimizer or (lambda module: torch.optim.SGD(module.parameters(), **{"lr": 0.1, **options}))

    def configure_optimizers(self):
        return self.optimizer(self)
