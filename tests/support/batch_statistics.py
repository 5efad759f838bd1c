"""A reference for the statistics that BatchNorm has in the kernel: read from the inputs of each layer."""

import copy

import torch
from torch.nn.modules.batchnorm import _BatchNorm


def with_statistics_of(net, batches):
    """Return a copy of a net in eval mode, whose layers in training mode have the statistics of these batches."""
    net = copy.deepcopy(net)
    held = {layer: [] for layer in net.modules() if isinstance(layer, _BatchNorm) and layer.training}

    def see(layer, args):
        values = args[0].detach().transpose(0, 1).flatten(1)
        held[layer].append(torch.stack([values.mean(1), values.var(1)]))

    hooks = [layer.register_forward_pre_hook(see) for layer in held]
    with torch.no_grad():
        for batch in batches:
            net(batch)
    for hook in hooks:
        hook.remove()
    weights = torch.tensor([len(batch) for batch in batches]).to(batches[0].dtype)
    for layer, seen in held.items():
        mean, variance = torch.einsum("b,bij->ij", weights / weights.sum(), torch.stack(seen))
        layer.running_mean.copy_(mean)
        layer.running_var.copy_(variance)
    return net.eval()


def inputs_of(probe):
    return [batch.data[0] for batch in probe.batches(0, 1)]
