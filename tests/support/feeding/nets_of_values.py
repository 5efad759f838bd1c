"""Networks for `test_feeding`: several values and layers, parts of a value, and where the channels are."""

import torch
from torch import nn
from torch.nn import functional as F

from support.feeding.feeding_parts import (
    Net,
    biased,
    bn,
    bn1d,
    conv,
    dynamic_slope,
    gated,
    half_squashed,
    image,
    residual,
    sequence,
    sequential,
    shared_twice,
    sliced_and_summed,
    tied_but_one_biased,
    tied_in_a_row,
    tied_layers,
    transposed,
    vector,
    weight_used_first,
    weight_used_outside,
    wrap,
)
from support.models import hook_weight_norm, parametrized_weight_norm

VALUES = {
    # several values
    "cat": Net(
        wrap(lambda m, x: m.bn(torch.cat([m.a(x), m.b(x)], 1)), a=conv, b=biased, bn=lambda: bn(8)), pairs="a>bn b>bn"
    ),
    "cat with the input": Net(
        wrap(lambda m, x: m.bn(torch.cat((m.a(x), x), dim=1)), a=conv, bn=lambda: bn(7)),
        pairs="a>bn",
        reasons={"bn": "argument"},
    ),
    "cat, then relu": Net(
        wrap(lambda m, x: m.bn(torch.cat([m.a(x), m.b(x)], 1).relu()), a=conv, b=biased, bn=lambda: bn(8)),
        pairs="a>bn",
        reasons={"bn": "bias"},
    ),
    "cat of a value and its tanh": Net(
        wrap(lambda m, x: m.bn(torch.cat([m.a(x), m.a(x).tanh()], 1)), a=conv, bn=lambda: bn(8))
    ),
    "cat of a value and its tanh, reversed": Net(
        wrap(lambda m, x: m.bn(torch.cat([m.a(x).tanh(), m.a(x)], 1)), a=conv, bn=lambda: bn(8))
    ),
    "cat of a value with itself": Net(
        wrap(lambda m, x: (lambda y: m.bn(torch.cat([y, y], 1)))(m.a(x)), a=conv, bn=lambda: bn(8)),
        pairs="a>bn",
        complete=False,
    ),
    "cat along the batch": Net(wrap(lambda m, x: m.bn(torch.cat([m.a(x), m.b(x)], 0)), a=conv, b=conv, bn=bn)),
    "cat along space": Net(wrap(lambda m, x: m.bn(torch.cat([m.a(x), m.b(x)], 2)), a=conv, b=conv, bn=bn)),
    "cat with the input along space": Net(
        wrap(lambda m, x: m.bn(torch.cat([m.a(x), x], 2)), a=lambda: conv(4, 4), bn=bn), lambda: image(4)
    ),
    "cat with the input along the batch": Net(
        wrap(lambda m, x: m.bn(torch.cat([m.a(x), x])), a=lambda: conv(4, 4), bn=bn), lambda: image(4)
    ),
    **{
        name: Net(
            wrap(
                lambda m, x, axis=axis: m.bn(torch.cat([m.a(x), m.b(x)], axis)),
                a=lambda: nn.Linear(3, 4),
                b=lambda: nn.Linear(3, 2),
                bn=lambda: bn1d(6),
            ),
            vector,
            "a>bn b>bn",
        )
        for name, axis in (("cat of linear layers", -1), ("cat of linear layers along axis 1", 1))
    },
    "stack": Net(
        wrap(lambda m, x: m.bn(torch.stack([m.a(x), m.a(x)], 1)), a=lambda: nn.Linear(3, 4), bn=lambda: bn1d(2)), vector
    ),
    "sum": Net(wrap(residual, first=conv, second=conv, bn=bn), reasons={"bn": "mixes"}),
    "sum with the input": Net(wrap(lambda m, x: m.bn(x + m.a(x)), a=lambda: conv(3, 3), bn=lambda: bn(3))),
    "pre-activation residual": Net(
        wrap(
            lambda m, x: (lambda y: m.b(y + m.second(m.a(y).relu())))(m.first(x)),
            first=conv,
            second=lambda: conv(4, 4),
            a=bn,
            b=bn,
        ),
        pairs="first>a",
    ),
    "one layer, two batch norms": Net(
        wrap(lambda m, x: (lambda y: m.a(y) + m.b(y.relu()))(m.conv(x)), conv=biased, a=bn, b=bn), pairs="conv>a"
    ),
    "shared layer, applied twice": Net(wrap(shared_twice, conv=conv, bn=lambda: bn(8)), pairs="conv>bn"),
    "shared layer, applied to itself": Net(
        wrap(lambda m, x: m.bn(m.conv(m.conv(x))), conv=lambda: conv(3, 3), bn=lambda: bn(3)),
        reasons={"bn": "own weight"},
    ),
    "shared layer behind batch norms": Net(
        wrap(
            lambda m, x: m.b(m.conv(m.a(m.conv(x)).relu())), conv=lambda: conv(3, 3), a=lambda: bn(3), b=lambda: bn(3)
        ),
        pairs="conv>a conv>b",
    ),
    "shared layer behind the batch norm of its tanh": Net(
        wrap(lambda m, x: m.b(m.conv(m.a(m.conv(x).tanh()))), conv=lambda: conv(3, 3), a=lambda: bn(3), b=lambda: bn(3))
    ),
    "shared batch norm": Net(wrap(lambda m, x: m.bn(m.a(x)) + m.bn(m.b(x)), a=conv, b=conv, bn=bn), pairs="a>bn b>bn"),
    "shared batch norm, once on a tanh": Net(
        wrap(lambda m, x: m.bn(m.a(x)) + m.bn(m.b(x).tanh()), a=conv, b=conv, bn=bn), pairs="a>bn"
    ),
    "shared batch norm, on a value and its tanh": Net(
        wrap(lambda m, x: m.bn(m.a(x)) + m.bn(m.a(x).tanh()), a=conv, bn=bn)
    ),
    "tied layers": Net(tied_layers, lambda: vector(4), "first>a first>b"),
    "tied layers in a row": Net(tied_in_a_row, lambda: vector(4)),
    "tied, one with a bias before a relu": Net(tied_but_one_biased(["plain", "with_bias"])),
    "tied, one with a bias before a relu, reversed": Net(tied_but_one_biased(["with_bias", "plain"])),
    "weight used outside": Net(wrap(weight_used_outside, layer=lambda: nn.Linear(3, 4), bn=lambda: bn1d(8)), vector),
    "weight-normed weight used outside": Net(
        wrap(weight_used_outside, layer=lambda: parametrized_weight_norm(nn.Linear(3, 4)), bn=lambda: bn1d(8)), vector
    ),
    "hook-normed weight used outside": Net(
        wrap(weight_used_outside, layer=lambda: hook_weight_norm(nn.Linear(3, 4)), bn=lambda: bn1d(8)), vector
    ),
    "hook-normed weight used outside first": Net(
        wrap(weight_used_first, layer=lambda: hook_weight_norm(nn.Linear(3, 4)), bn=lambda: bn1d(8)), vector
    ),
    "gate": Net(wrap(gated, conv=conv, gate=lambda: biased(4, 4, 1), bn=bn)),
    "slope that depends on the value": Net(wrap(dynamic_slope, conv=conv, bn=bn)),
    "slope that is a parameter": Net(
        wrap(lambda m, x: m.bn(F.prelu(m.conv(x), m.prelu.weight)), conv=conv, prelu=nn.PReLU, bn=bn), pairs="conv>bn"
    ),
    "chunk": Net(
        wrap(lambda m, x: m.bn(m.conv(x).chunk(2, 1)[0]), conv=conv, bn=lambda: bn(2)), pairs="conv>bn", complete=False
    ),
    "split, one half squashed": Net(wrap(half_squashed, conv=conv, bn=bn)),
    # parts of a value
    "slice of the channels": Net(
        wrap(lambda m, x: m.bn(m.conv(x)[:, 1:3]), conv=biased, bn=lambda: bn(2)), pairs="conv>bn"
    ),
    "slice of the rows": Net(wrap(lambda m, x: m.bn(m.conv(x)[..., 1:3, :]), conv=biased, bn=bn), pairs="conv>bn"),
    "slice that drops an axis": Net(
        wrap(lambda m, x: m.bn(m.conv(x)[:, 0]), conv=conv, bn=lambda: bn1d(6)), pairs="conv>bn", complete=False
    ),
    "slices, one of them in a sum": Net(
        wrap(sliced_and_summed, conv=conv, other=conv, bn=bn), reasons={"bn": "mixes it with another value"}
    ),
    "shape of another value": Net(
        wrap(lambda m, x: m.bn(m.conv(x).view_as(m.other(x))), conv=conv, other=conv, bn=bn),
        pairs="conv>bn",
        complete=False,
        reasons={"bn": "view_as does not commute"},
    ),
    # where the channels are
    "sequence, wrong axis": Net(
        sequential(lambda: nn.Linear(3, 4), lambda: bn1d(7)), sequence, reasons={"1": "another axis"}
    ),
    "sequence, transposed": Net(transposed(1, 2), sequence, "layer>bn"),
    "sequence, transposed by keyword": Net(transposed(dim0=1, dim1=2), sequence, "layer>bn"),
    "sequence, transposed the other way round": Net(transposed(2, 1), sequence, "layer>bn"),
    "sequence, transposed from behind": Net(transposed(-1, -2), sequence, "layer>bn", complete=False),
    "sequence, permuted": Net(
        wrap(lambda m, x: m.bn(m.layer(x).permute(0, 2, 1)), layer=lambda: nn.Linear(3, 4), bn=bn1d),
        sequence,
        "layer>bn",
    ),
    "sequence, permuted by a tuple": Net(
        wrap(lambda m, x: m.bn(m.layer(x).permute((0, 2, 1))), layer=lambda: nn.Linear(3, 4), bn=bn1d),
        sequence,
        "layer>bn",
    ),
    "sequence, permuted by keyword": Net(
        wrap(lambda m, x: m.bn(m.layer(x).permute(dims=(0, 2, 1))), layer=lambda: nn.Linear(3, 4), bn=bn1d),
        sequence,
        "layer>bn",
    ),
    "sequence, permuted by an axis that is computed": Net(
        wrap(lambda m, x: m.bn(m.layer(x).permute(0, x.dim() - 1, 1)), layer=lambda: nn.Linear(3, 4), bn=bn1d),
        sequence,
        "layer>bn",
        complete=False,
    ),
    "sequence, flattened": Net(
        wrap(lambda m, x: m.bn(m.layer(x).flatten(0, 1)), layer=lambda: nn.Linear(3, 4), bn=bn1d), sequence, "layer>bn"
    ),
    "sequence, every position a channel": Net(
        wrap(lambda m, x: m.bn(m.layer(x).flatten(1)), layer=lambda: nn.Linear(3, 4), bn=lambda: bn1d(28)),
        sequence,
        "layer>bn",
    ),
    "sequence, mean over positions": Net(
        wrap(lambda m, x: m.bn(m.layer(x).mean(1)), layer=lambda: nn.Linear(3, 4), bn=bn1d),
        sequence,
        "layer>bn",
        complete=False,
    ),
    "sequence, conv": Net(
        wrap(lambda m, x: m.bn(m.conv(x.transpose(1, 2))), conv=lambda: nn.Conv1d(3, 4, 3), bn=bn1d),
        sequence,
        "conv>bn",
    ),
    "sequence, max pool over the features": Net(
        wrap(lambda m, x: m.bn(F.max_pool1d(m.layer(x), 3, 1, 1)), layer=lambda: nn.Linear(3, 4), bn=lambda: bn1d(7)),
        sequence,
    ),
    "four axes, transposed": Net(
        # (5, 6, 4, features): the swap puts the axis of length 4 in front, and the 4 features stay behind.
        wrap(lambda m, x: m.bn(m.layer(x).transpose(1, 2)), layer=lambda: nn.Linear(3, 4), bn=bn),
        lambda: (torch.randn(5, 6, 4, 3, dtype=torch.float64),),
    ),
    "sequences, cat along positions, transposed": Net(
        wrap(
            lambda m, x: m.bn(torch.cat([m.a(x), m.b(x)], 1).transpose(1, 2)),
            a=lambda: nn.Linear(3, 4),
            b=lambda: nn.Linear(3, 4),
            bn=bn1d,
        ),
        sequence,
    ),
    "channels last": Net(
        wrap(lambda m, x: m.bn(m.layer(x).permute(0, 3, 1, 2)), layer=lambda: nn.Linear(3, 4), bn=bn),
        lambda: (torch.randn(5, 6, 6, 3, dtype=torch.float64),),
        "layer>bn",
    ),
    "channels last, permuted back": Net(
        wrap(lambda m, x: m.bn(m.conv(x).permute(0, 2, 3, 1).permute(0, 3, 1, 2)), conv=biased, bn=bn), pairs="conv>bn"
    ),
    "transposed by an axis that is computed": Net(
        wrap(lambda m, x: m.bn(m.conv(x).transpose(1, x.dim() - 1)), conv=conv, bn=lambda: bn(6))
    ),
    "flatten": Net(sequential(biased, nn.Flatten, lambda: bn1d(144)), pairs="0>2"),
    "functional flatten": Net(
        wrap(lambda m, x: m.bn(torch.flatten(m.conv(x), 1)), conv=biased, bn=lambda: bn1d(144)), pairs="conv>bn"
    ),
    "flatten space": Net(sequential(biased, lambda: nn.Flatten(2), bn1d), pairs="0>2"),
    "flatten from an axis that is computed": Net(
        wrap(lambda m, x: m.bn(m.conv(x).flatten(x.dim() - 3)), conv=biased, bn=lambda: bn1d(144)),
        pairs="conv>bn",
        complete=False,
    ),
    "flatten everything but the end": Net(
        wrap(lambda m, x: m.bn(m.conv(x).flatten(0, 2)), conv=conv, bn=lambda: bn1d(6))
    ),
    "view": Net(
        wrap(lambda m, x: m.bn(m.conv(x).reshape(5, -1)), conv=biased, bn=lambda: bn1d(144)),
        pairs="conv>bn",
        complete=False,
    ),
    "mean over space": Net(wrap(lambda m, x: m.bn(m.conv(x).mean((2, 3))), conv=biased, bn=bn1d), pairs="conv>bn"),
    "mean over space, kept": Net(
        wrap(lambda m, x: m.bn(torch.mean(m.conv(x), dim=[-1, -2], keepdim=True)), conv=biased, bn=bn), pairs="conv>bn"
    ),
    "mean over an axis that is computed": Net(
        wrap(lambda m, x: m.bn(m.conv(x).mean(x.dim() - 1)), conv=biased, bn=bn1d), pairs="conv>bn", complete=False
    ),
    "mean over channels": Net(wrap(lambda m, x: m.bn(m.conv(x).mean(1)), conv=conv, bn=lambda: bn1d(6))),
    # With as many rows as channels only the axis is left to tell.
    "mean over channels, as many rows": Net(
        wrap(lambda m, x: m.bn(m.conv(x).mean(1)), conv=conv, bn=bn1d), lambda: image(3, 4)
    ),
    "mean over the batch, as many rows": Net(
        wrap(lambda m, x: m.bn(m.conv(x).mean(0)), conv=conv, bn=bn1d), lambda: image(3, 4)
    ),
    "flatten channels and rows": Net(
        wrap(lambda m, x: m.bn(m.conv(x).flatten(1, 2)), conv=biased, bn=lambda: bn1d(24)),
        pairs="conv>bn",
        complete=False,
    ),
    "channels last, flatten rows and columns": Net(
        wrap(lambda m, x: m.bn(m.layer(x).flatten(1, 2)), layer=lambda: nn.Linear(3, 4), bn=lambda: bn1d(36)),
        lambda: (torch.randn(5, 6, 6, 3, dtype=torch.float64),),
    ),
    "linear over the width of an image": Net(
        wrap(lambda m, x: m.bn(m.layer(m.conv(x))), conv=conv, layer=lambda: nn.Linear(6, 4), bn=bn)
    ),
    "pool over features behind a flatten": Net(
        sequential(conv, nn.Flatten, lambda: nn.MaxPool1d(3, 1, 1), lambda: bn1d(144))
    ),
    "image pool on a sequence": Net(
        sequential(lambda: nn.Conv1d(7, 4, 1), lambda: nn.MaxPool2d(3, 1, 1), bn1d), sequence
    ),
}
