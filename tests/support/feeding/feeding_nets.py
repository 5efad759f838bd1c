"""The table of small networks for `test_feeding`: who feeds which BatchNorm, from thinking."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torchvision.ops import FrozenBatchNorm2d

from support.feeding.feeding_parts import (
    ActivatedBatchNorm,
    AlwaysRunning,
    AnyShape,
    ArithmeticBatchNorm,
    BackwardSequential,
    BatchNormAct,
    BatchNormThenAct,
    CallsItsParent,
    FrozenBatchNorm,
    MyBlock,
    MySequential,
    NamedConv,
    Net,
    PaddingConv,
    Pairs,
    ScaledPaddingConv,
    SelfAttentionBefore,
    Squash,
    SquashingBatchNorm,
    SquashingIdentity,
    StandardizedConv,
    StandardizedInside,
    TwoInputs,
    batch_norm_again_on_one_branch,
    biased,
    bn,
    bn1d,
    conv,
    data_dependent,
    discarded_inplace,
    dynamic_slope,
    gated,
    half_squashed,
    hooked,
    image,
    images,
    last_hidden,
    outside_of_the_block,
    replaced_forward,
    residual,
    sequence,
    sequential,
    shared_batch_norm_under_branches,
    shared_twice,
    sliced_and_summed,
    through_a_view,
    tied_but_one_biased,
    tied_in_a_row,
    tied_layers,
    tokens,
    transposed,
    two_readers,
    untraceable_end,
    vector,
    weight_used_first,
    weight_used_outside,
    wrap,
)
from support.models import hook_weight_norm, parametrized_weight_norm

NETS = {
    # one layer, one BatchNorm
    "conv": Net(sequential(conv, bn), pairs="0>1"),
    "conv with bias": Net(sequential(biased, bn), pairs="0>1"),
    "linear": Net(sequential(lambda: nn.Linear(3, 4), bn1d), vector, "0>1"),
    "bilinear": Net(wrap(lambda m, x: m.bn(m.b(x, x)), b=lambda: nn.Bilinear(3, 3, 4), bn=bn1d), vector, "b>bn"),
    "embedding": Net(sequential(lambda: nn.Embedding(5, 4), bn1d), tokens(9), "0>1"),
    "embedding bag": Net(sequential(lambda: nn.EmbeddingBag(5, 4), bn1d), tokens(9, 3), "0>1"),
    "embedding that renormalizes itself": Net(
        sequential(lambda: nn.Embedding(5, 4, max_norm=0.1), bn1d), tokens(9), reasons={"1": "plain parameter"}
    ),
    "embedded sequence": Net(
        wrap(lambda m, x: m.bn(m.e(x).transpose(1, 2)), e=lambda: nn.Embedding(5, 4), bn=bn1d), tokens(9, 3), "e>bn"
    ),
    "grouped conv": Net(sequential(lambda: conv(4, 4, groups=2), bn), lambda: image(4), "0>1"),
    "transposed conv": Net(sequential(lambda: nn.ConvTranspose2d(4, 4, 2, groups=2), bn), lambda: image(4), "0>1"),
    "conv1d": Net(sequential(lambda: nn.Conv1d(7, 4, 1), bn1d), sequence, "0>1"),
    "weight norm, hook": Net(sequential(lambda: hook_weight_norm(conv()), bn), pairs="0>1"),
    "weight norm, parametrized": Net(sequential(lambda: parametrized_weight_norm(conv()), bn), pairs="0>1"),
    "batch norm without affine": Net(sequential(conv, lambda: nn.BatchNorm2d(4, affine=False)), pairs="0>1"),
    # operations that commute with scaling, and those that do not
    "relu after a bias": Net(sequential(biased, nn.ReLU, bn), reasons={"2": "bias"}),
    "relu": Net(sequential(conv, nn.ReLU, bn), pairs="0>2"),
    "leaky relu": Net(sequential(conv, nn.LeakyReLU, bn), pairs="0>2"),
    "prelu": Net(sequential(conv, nn.PReLU, bn), pairs="0>2"),
    "functional relu": Net(wrap(lambda m, x: m.bn(F.relu(m.conv(x))), conv=conv, bn=bn), pairs="conv>bn"),
    "method relu after a bias": Net(
        wrap(lambda m, x: m.bn(m.conv(x).relu()), conv=biased, bn=bn), reasons={"bn": "bias"}
    ),
    "functional abs": Net(wrap(lambda m, x: m.bn(m.conv(x).abs()), conv=conv, bn=bn), pairs="conv>bn"),
    "tanh": Net(sequential(conv, nn.Tanh, bn), reasons={"2": "Tanh"}),
    "sigmoid": Net(wrap(lambda m, x: m.bn(m.conv(x).sigmoid()), conv=conv, bn=bn), reasons={"bn": "sigmoid"}),
    "hardtanh": Net(sequential(lambda: conv(kernel=5), lambda: nn.Hardtanh(0, 0.5), bn)),
    "max pool after a bias": Net(sequential(biased, lambda: nn.MaxPool2d(2), bn), pairs="0>2"),
    "padded max pool after a bias": Net(sequential(biased, lambda: nn.MaxPool2d(3, 1, 1), bn), pairs="0>2"),
    "average pool after a bias": Net(sequential(biased, lambda: nn.AvgPool2d(2), bn), pairs="0>2"),
    "padded average pool": Net(sequential(conv, lambda: nn.AvgPool2d(3, 1, 1), bn), pairs="0>2"),
    "padded average pool after a bias": Net(sequential(biased, lambda: nn.AvgPool2d(3, 1, 1), bn)),
    "padded average pool that does not count": Net(
        sequential(biased, lambda: nn.AvgPool2d(3, 1, 1, count_include_pad=False), bn), pairs="0>2", complete=False
    ),
    "adaptive pool": Net(sequential(biased, lambda: nn.AdaptiveAvgPool2d(2), bn), pairs="0>2"),
    "functional pools": Net(
        wrap(lambda m, x: m.bn(F.avg_pool2d(F.max_pool2d(m.conv(x), 2), 3, 1, 1)), conv=conv, bn=bn), pairs="conv>bn"
    ),
    "functional padded average pool after a bias": Net(
        wrap(lambda m, x: m.bn(F.avg_pool2d(m.conv(x), 3, 1, 1)), conv=biased, bn=bn)
    ),
    "lp pool": Net(sequential(conv, lambda: nn.LPPool2d(2, 2), bn), pairs="0>2", complete=False),
    "upsample after a bias": Net(sequential(biased, lambda: nn.Upsample(scale_factor=2), bn), pairs="0>2"),
    "dropout": Net(sequential(conv, nn.Dropout, bn), pairs="0>2"),
    "dropout after a bias": Net(sequential(biased, nn.Dropout, bn)),
    "dropout2d": Net(sequential(conv, lambda: nn.Dropout2d(0.3), bn), pairs="0>2"),
    "functional dropout": Net(wrap(lambda m, x: m.bn(F.dropout(m.conv(x))), conv=conv, bn=bn), pairs="conv>bn"),
    "alpha dropout": Net(sequential(conv, nn.AlphaDropout, bn)),
    "times a number": Net(wrap(lambda m, x: m.bn(m.conv(x) * 3 / 2), conv=biased, bn=bn), pairs="conv>bn"),
    "a number times": Net(wrap(lambda m, x: m.bn(3 * m.conv(x)), conv=biased, bn=bn), pairs="conv>bn", complete=False),
    "times a negative number, then relu": Net(
        wrap(lambda m, x: m.bn((m.conv(x) * -1).relu()), conv=conv, bn=bn), pairs="conv>bn", complete=False
    ),
    "times zero": Net(wrap(lambda m, x: m.bn(m.conv(x) * 0), conv=biased, bn=bn)),
    "plus a number": Net(wrap(lambda m, x: m.bn(m.conv(x) + 1), conv=conv, bn=bn), pairs="conv>bn", complete=False),
    "plus a number, then relu": Net(wrap(lambda m, x: m.bn((m.conv(x) + 0.3).relu()), conv=conv, bn=bn)),
    "squared": Net(wrap(lambda m, x: m.bn(m.conv(x) ** 2), conv=conv, bn=bn), pairs="conv>bn", complete=False),
    "a constant divided by": Net(wrap(lambda m, x: m.bn(1 / (2 + m.conv(x).abs())), conv=conv, bn=bn)),
    "softmax over channels": Net(sequential(conv, lambda: nn.Softmax(1), bn)),
    "group norm": Net(sequential(conv, lambda: nn.GroupNorm(2, 4), bn)),
    "layer, then layer": Net(sequential(conv, lambda: conv(4, 4), bn), pairs="1>2"),
    "depthwise": Net(sequential(conv, lambda: conv(4, 4, groups=4), bn), pairs="0>2 1>2", complete=False),
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
    # BatchNorm after BatchNorm
    "two in a row": Net(sequential(conv, bn, bn), pairs="0>1", reasons={"2": "follows the BatchNorm '1'"}),
    "first of all": Net(sequential(lambda: bn(3), conv), reasons={"0": "argument"}),
    "the root": Net(lambda: bn(3)),
    "never called": Net(wrap(lambda m, x: m.conv(x), conv=conv, bn=bn), reasons={"bn": "no traceable forward pass"}),
    "chain": Net(
        sequential(conv, bn, nn.ReLU, lambda: conv(4, 4), bn, nn.ReLU, nn.Flatten, lambda: nn.Linear(144, 2)),
        pairs="0>1 3>4",
    ),
    # values that are changed in place, while the graph still shows the old one
    "in-place relu": Net(wrap(discarded_inplace(lambda m, y: F.relu(y, inplace=True)), conv=biased, bn=bn)),
    "in-place relu_": Net(wrap(discarded_inplace(lambda m, y: F.relu_(y)), conv=biased, bn=bn)),
    "in-place method": Net(wrap(discarded_inplace(lambda m, y: y.tanh_()), conv=biased, bn=bn)),
    "in-place sum": Net(
        wrap(lambda m, x: (lambda y: (y.add_(m.other(x)), m.bn(y))[1])(m.conv(x)), conv=biased, other=conv, bn=bn)
    ),
    "in-place module": Net(
        wrap(discarded_inplace(lambda m, y: m.relu(y)), conv=biased, relu=lambda: nn.ReLU(inplace=True), bn=bn)
    ),
    "in-place through a view": Net(wrap(through_a_view, conv=biased, bn=bn)),
    "in-place through cpu()": Net(
        wrap(discarded_inplace(lambda m, y: y.cpu().tanh_()), conv=biased, bn=bn)  # the value itself, where it is there
    ),
    "in-place through type_as()": Net(wrap(discarded_inplace(lambda m, y: y.type_as(y).tanh_()), conv=biased, bn=bn)),
    "in-place through a plus sign": Net(wrap(discarded_inplace(lambda m, y: (+y).tanh_()), conv=biased, bn=bn)),
    "in-place copy": Net(wrap(discarded_inplace(lambda m, y: y.copy_(y.tanh())), conv=biased, bn=bn)),
    "in-place by position": Net(
        wrap(discarded_inplace(lambda m, y: F.threshold(y, 0.1, 0.3, True)), conv=biased, bn=bn)
    ),
    "in-place, result used": Net(sequential(conv, lambda: nn.ReLU(inplace=True), bn), pairs="0>2"),
    # modules that are not torch's
    "user's block": Net(lambda: nn.Sequential(MyBlock(), MyBlock(4)), pairs="0.conv>0.bn 1.conv>1.bn"),
    "user's sequential": Net(lambda: MySequential(conv(), nn.ReLU(), bn()), pairs="0>2"),
    "user's sequential with a forward": Net(lambda: BackwardSequential(bn(), nn.Identity(), conv()), pairs="2>0"),
    "user's conv": Net(lambda: nn.Sequential(NamedConv(3, 4, 3), bn()), pairs="0>1"),
    "user's conv with a forward": Net(lambda: nn.Sequential(StandardizedConv(3, 4, 3), bn())),
    "user's conv with an inner forward": Net(lambda: nn.Sequential(StandardizedInside(3, 4, 3), bn())),
    "user's conv that calls its parent": Net(
        lambda: nn.Sequential(CallsItsParent(3, 4, 3), bn()), pairs="0>1", complete=False
    ),
    "hook that changes the output": Net(
        hooked(lambda net: net[0].register_forward_hook(lambda module, args, output: output.tanh()))
    ),
    "hook that changes the input": Net(
        hooked(
            lambda net: net[0].register_forward_pre_hook(lambda module, args: ((args[0] * module.weight.sum()).sin(),))
        )
    ),
    "hook that changes the identity": Net(
        hooked(lambda net: net[1].register_forward_hook(lambda module, args, output: output.tanh()))
    ),
    "hook that changes the input of the batch norm": Net(
        hooked(lambda net: net[2].register_forward_pre_hook(lambda module, args: (args[0].tanh(),)))
    ),
    "hook that changes the output of the batch norm": Net(
        hooked(lambda net: net[2].register_forward_hook(lambda module, args, output: output.relu())),
        pairs="0>2",
        complete=False,
    ),
    "hook that only looks": Net(
        hooked(lambda net: net[0].register_forward_hook(lambda module, args, output: None)), pairs="0>2", complete=False
    ),
    "forward of a layer replaced": Net(replaced_forward(0)),
    "forward of an identity replaced": Net(replaced_forward(1)),
    "forward of a batch norm replaced": Net(replaced_forward(2)),
    "backward hook": Net(
        hooked(lambda net: net.register_full_backward_hook(lambda *_: None)),
        lambda: (image()[0].requires_grad_(),),
        pairs="0>2",
    ),
    "checkpointed layer": Net(
        wrap(lambda m, x: m.bn(checkpoint(m.conv, x, use_reentrant=False)), conv=conv, bn=bn), pairs="conv>bn"
    ),
    "checkpointed block": Net(
        wrap(lambda m, x: checkpoint(m.block, x, use_reentrant=False), block=lambda: nn.Sequential(conv(), bn())),
        pairs="block.0>block.1",
    ),
    "lstm": Net(
        wrap(last_hidden, lstm=lambda: nn.LSTM(3, 4, batch_first=True), bn=bn1d),
        sequence,
        reasons={"bn": "it is fed by LSTM 'lstm'"},
    ),
    "attention": Net(SelfAttentionBefore, lambda: sequence(7, 4)),
    "tuple": Net(wrap(lambda m, x: m.bn(m.pairs(x)[0]), pairs=Pairs, bn=bn), pairs="pairs.conv>bn"),
    "several inputs": Net(TwoInputs, images, "first>bn second>bn", reasons={"other": "argument 'y'"}),
    "layer that pads": Net(lambda: nn.Sequential(PaddingConv(3, 4, 2), bn()), pairs="0>1"),
    "layer that holds its batch norm": Net(
        lambda: nn.Sequential(PaddingConv(3, 4, 2, norm=BatchNormAct())), pairs="0>0.norm"
    ),
    "layer that looks at its weight": Net(lambda: nn.Sequential(ScaledPaddingConv(3, 4, 2), bn())),
    # BatchNorms that are not torch's
    "batch norm with activation": Net(sequential(biased, BatchNormAct), pairs="0>1"),
    "batch norm with activation, chain": Net(
        sequential(conv, BatchNormAct, lambda: conv(4, 4), lambda: BatchNormAct(act=lambda: nn.ReLU(inplace=True))),
        pairs="0>1 2>3",
    ),
    "batch norm with activation, as root": Net(lambda: BatchNormAct(3), reasons={"": "argument"}),
    "batch norm with activation after itself": Net(
        sequential(conv, BatchNormAct, BatchNormAct), pairs="0>1", reasons={"2": "follows the BatchNorm '1'"}
    ),
    "batch norm with activation, two readers": Net(
        wrap(two_readers, conv=biased, first=BatchNormAct, second=lambda: BatchNormAct(7)),
        pairs="conv>first conv>second",
        reasons={"second": "argument"},
    ),
    "batch norm with activation below an untraceable root": Net(
        wrap(
            data_dependent,
            first=lambda: nn.Sequential(conv(), BatchNormAct()),
            second=lambda: nn.Sequential(conv(), BatchNormAct()),
        ),
        pairs="first.0>first.1 second.0>second.1",
    ),
    "batch norm with activation over another axis": Net(
        sequential(lambda: nn.Linear(3, 5), lambda: BatchNormAct(4)),
        lambda: (torch.randn(5, 4, 6, 3, dtype=torch.float64),),
        reasons={"1": "another axis"},
    ),
    "batch norm that calls its parent": Net(sequential(conv, lambda: BatchNormThenAct(4)), pairs="0>1"),
    "batch norm that squashes first": Net(sequential(conv, lambda: SquashingBatchNorm(4)), reasons={"1": "tanh"}),
    "batch norm for any shape": Net(sequential(conv, lambda: AnyShape(4)), pairs="0>1"),
    "batch norm by another class": Net(sequential(biased, ActivatedBatchNorm), pairs="0>1"),
    "batch norm by another class over another axis": Net(
        sequential(lambda: nn.Linear(3, 5), ActivatedBatchNorm),
        lambda: (torch.randn(5, 4, 6, 3, dtype=torch.float64),),
        reasons={"1": "another axis"},
    ),
    "batch norm by arithmetic": Net(
        sequential(conv, ArithmeticBatchNorm), pairs="0>1", complete=False, reasons={"1": "no batch_norm"}
    ),
    "fused with relu": Net(
        lambda: nn.Sequential(conv(), torch.ao.nn.intrinsic.BNReLU2d(bn(), nn.ReLU())), pairs="0>1.0"
    ),
    "fused with a conv": Net(lambda: nn.Sequential(torch.ao.nn.intrinsic.ConvBn2d(conv(), bn())), pairs="0.0>0.1"),
    "frozen": Net(sequential(conv, FrozenBatchNorm), reasons={"1": "constant"}),
    "torchvision's frozen": Net(sequential(conv, lambda: FrozenBatchNorm2d(4)), reasons={"1": "constant"}),
    "frozen, then batch norm": Net(
        sequential(conv, FrozenBatchNorm, bn), pairs="0>2", complete=False, reasons={"1": "constant", "2": "mixes"}
    ),
    "child of batch norm that never looks at the batch": Net(
        sequential(conv, lambda: AlwaysRunning(4)), reasons={"1": "constant"}
    ),
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
    # what cannot be traced
    "untraceable module between": Net(sequential(conv, Squash, bn), reasons={"2": "Squash"}),
    "untraceable module at the input": Net(sequential(Squash, Squash, lambda: bn(3)), reasons={"2": "Squash '1'"}),
    "untraceable identity": Net(sequential(conv, SquashingIdentity, bn)),
    "untraceable module beside": Net(sequential(conv, bn, Squash, lambda: conv(4, 4), bn), pairs="0>1 3>4"),
    "untraceable root": Net(
        wrap(data_dependent, first=lambda: nn.Sequential(conv(), bn()), second=lambda: nn.Sequential(conv(), bn())),
        pairs="first.0>first.1 second.0>second.1",
    ),
    "untraceable root, shared batch norm": Net(
        shared_batch_norm_under_branches, pairs="first.0>first.1 second.0>first.1", complete=False
    ),
    "untraceable end, block on its own output": Net(
        wrap(untraceable_end, block=lambda: nn.Sequential(conv(3, 3), bn(3)))
    ),
}

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
