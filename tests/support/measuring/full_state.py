"""The state of a model, to the last bit."""

import random

import numpy as np
import torch
from torch import nn


def full_state(model: nn.Module) -> dict:
    """The state of a model and of the process, by value and by identity."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        "values": {
            name: tensor.detach().clone().view(torch.uint8).tolist() for name, tensor in tensors.items() if tensor.dim()
        },
        "counts": {name: tensor.item() for name, tensor in tensors.items() if not tensor.dim()},
        "identities": {name: id(tensor) for name, tensor in tensors.items()},
        "gradients": {name: (id(p.grad), p.grad is None or p.grad.tolist()) for name, p in model.named_parameters()},
        "flags": [module.training for module in model.modules()],
        "trained": [parameter.requires_grad for parameter in model.parameters()],
        "attributes": [sorted(vars(module)) for module in model.modules()],
        "generators": (torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state())),
    }
