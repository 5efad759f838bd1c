"""Networks for `test_feeding`: one layer, and operations between it and its BatchNorm."""

from torch import nn
from torch.nn import functional as F

from support.feeding.feeding_parts import (
    Net,
    biased,
    bn,
    bn1d,
    conv,
    discarded_inplace,
    image,
    sequence,
    sequential,
    through_a_view,
    tokens,
    vector,
    wrap,
)
from support.models import hook_weight_norm, parametrized_weight_norm

OPERATIONS = {
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
}
