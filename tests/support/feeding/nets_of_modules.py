"""Networks for `test_feeding`: modules that are not torch's, and what cannot be traced."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torchvision.ops import FrozenBatchNorm2d

from support.feeding.feeding_modules import (
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
)
from support.feeding.feeding_parts import (
    Net,
    biased,
    bn,
    bn1d,
    conv,
    data_dependent,
    hooked,
    image,
    images,
    last_hidden,
    replaced_forward,
    sequence,
    sequential,
    shared_batch_norm_under_branches,
    two_readers,
    untraceable_end,
    wrap,
)

MODULES = {
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
