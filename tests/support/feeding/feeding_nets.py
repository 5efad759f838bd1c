"""The table of small networks for `test_feeding`: who feeds which BatchNorm, from thinking."""

import torch
from torch import nn

from lightning_normtheory.norms import feeding_layers

from support.feeding.feeding_parts import (
    Net,
    batch_norm_again_on_one_branch,
    bn,
    bn1d,
    conv,
    outside_of_the_block,
    sequence,
    sequential,
    wrap,
)
from support.feeding.nets_of_modules import MODULES
from support.feeding.nets_of_operations import OPERATIONS
from support.feeding.nets_of_values import VALUES
from support.oracles import layer_names

NETS = {**OPERATIONS, **VALUES, **MODULES}

# What decides lies in the data, or in the part that cannot be traced: known limits, where a pair is invented.
UNDECIDABLE = {
    "sequence as long as wide": Net(sequential(lambda: nn.Linear(3, 4), bn1d), lambda: sequence(4)),
    "untraceable root that uses a block's layer elsewhere": Net(
        wrap(outside_of_the_block, block=lambda: nn.Sequential(conv(3, 3), bn(3)))
    ),
    "untraceable end that uses the batch norm again": Net(wrap(batch_norm_again_on_one_branch, conv=conv, bn=bn)),
}


def make(net: Net) -> tuple[nn.Module, tuple]:
    torch.manual_seed(0)
    return net.build(), net.inputs()


def found_pairs(model: nn.Module) -> set[tuple[str, str]]:
    """By the first name of each weight, as the oracle names them."""
    first = layer_names(model)
    return {(first[layer], name) for name, feeding in feeding_layers(model).items() for layer in feeding.layers}
