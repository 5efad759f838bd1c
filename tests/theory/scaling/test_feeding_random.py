"""Which layer feeds which BatchNorm, in random graphs of operations."""

import random

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, find, given, reject, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from lightning_normtheory.norms import feeding_layers

from support.feeding.feeding_modules import BatchNormAct
from support.feeding.feeding_nets import found_pairs
from support.oracles import UndecidedError, scale_invariant_pairs

ELEMENTWISE = {
    "relu": F.relu,
    "tanh": torch.tanh,
    "abs": torch.abs,
    "dropout": F.dropout,
    "twice": lambda value: value * 2.0,
    "minus": lambda value: value * -1.0,
    "plus": lambda value: value + 0.3,
}


POOLS = {
    "max pool": lambda nd: (nn.MaxPool1d, nn.MaxPool2d)[nd - 1](3, 1, 1),
    "average pool": lambda nd: (nn.AvgPool1d, nn.AvgPool2d)[nd - 1](1),
    "padded average pool": lambda nd: (nn.AvgPool1d, nn.AvgPool2d)[nd - 1](3, 1, 1),
}


# Lengths of the axes. Positions, a convolution's channels and a Linear's features are never equally many: without data
# only that tells the (n, positions, features) of a BatchNorm1d from its (n, channels, positions).
POSITIONS, CHANNELS, FEATURES = 17, 3, 20


class Program(nn.Module):
    """Applies each step to earlier values: a function of the layers and of the values at some positions."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict()
        self.steps = []
        self.shapes = []

    def add(self, function, positions, shape):
        self.steps.append((function, positions))
        self.shapes.append(tuple(shape))

    def add_layer(self, layer, position, shape):
        name = str(len(self.layers))
        self.layers[name] = layer
        self.apply_layer(name, position, shape)

    def apply_layer(self, name, position, shape):
        self.add(lambda layers, value: layers[name](value), [position], shape)

    def forward(self, x):
        values = [x]
        for function, positions in self.steps:
            values.append(function(self.layers, *(values[position] for position in positions)))
        return values[-1]


def add_conv(draw, program, position, shape):
    kind = (nn.Conv1d, nn.Conv2d)[len(shape) - 2]
    outputs = draw(st.integers(2, CHANNELS + 1))
    program.add_layer(kind(shape[0], outputs, 3, padding=1, bias=draw(st.booleans())), position, (outputs, *shape[1:]))


def add_linear(draw, program, position, shape):
    outputs = FEATURES + len(program.layers)
    program.add_layer(nn.Linear(shape[-1], outputs, bias=draw(st.booleans())), position, (*shape[:-1], outputs))


def add_batch_norm(draw, program, position, shape):
    kind = (nn.BatchNorm1d, nn.BatchNorm1d, draw(st.sampled_from([nn.BatchNorm2d, BatchNormAct])))[len(shape) - 1]
    program.add_layer(kind(shape[0]), position, shape)


def add_elementwise(draw, program, position, shape):
    function = ELEMENTWISE[draw(st.sampled_from(sorted(ELEMENTWISE)))]
    program.add(lambda layers, value: function(value), [position], shape)


def add_pool(draw, program, position, shape):
    program.add_layer(POOLS[draw(st.sampled_from(sorted(POOLS)))](len(shape) - 1), position, shape)


def add_reuse(draw, program, position, shape):
    """Apply some earlier layer again, if one fits."""
    fitting = []
    for name, layer in program.layers.items():
        if isinstance(layer, nn.Linear) and layer.in_features == shape[-1]:
            fitting.append((name, (*shape[:-1], layer.out_features)))
        if isinstance(layer, (nn.Conv1d, nn.Conv2d)) and (layer.in_channels, layer.weight.dim()) == (
            shape[0],
            len(shape) + 1,
        ):
            fitting.append((name, (layer.out_channels, *shape[1:])))
    if fitting:
        name, result = draw(st.sampled_from(fitting))
        program.apply_layer(name, position, result)


def add_mixture(draw, program, position, shape):
    partners = [other for other, candidate in enumerate(program.shapes) if candidate == shape]
    mix = draw(st.sampled_from([torch.add, torch.mul]))
    program.add(lambda layers, a, b: mix(a, b), [position, draw(st.sampled_from(partners))], shape)


def add_cat(draw, program, position, shape):
    partners = [other for other, candidate in enumerate(program.shapes) if candidate[1:] == shape[1:]]
    other = draw(st.sampled_from(partners))
    total = shape[0] + program.shapes[other][0]
    program.add(lambda layers, a, b: torch.cat([a, b], 1), [position, other], (total, *shape[1:]))


def add_chunk(draw, program, position, shape):
    program.add(lambda layers, value: value.chunk(2, 1)[0], [position], ((shape[0] + 1) // 2, *shape[1:]))


def add_slice(draw, program, position, shape):
    if shape[0] > 1:
        program.add(lambda layers, value: value[:, 1:], [position], (shape[0] - 1, *shape[1:]))


def add_reshaping(draw, program, position, shape):
    flat = [((1,), (int(np.prod(shape)),)), ((2,), (shape[0], int(np.prod(shape[1:]))))]
    start, result = draw(st.sampled_from(flat))
    program.add(lambda layers, value: value.flatten(*start), [position], result)


def add_mean(draw, program, position, shape):
    axes = tuple(range(2, len(shape) + 1))
    program.add(lambda layers, value: value.mean(axes), [position], shape[:1])


def add_permutation(draw, program, position, shape):
    if len(shape) == 2:
        program.add(lambda layers, value: value.transpose(1, 2), [position], shape[::-1])
    else:
        program.add(lambda layers, value: value.permute(0, 3, 1, 2), [position], (shape[2], *shape[:2]))


ON_VECTORS = [
    add_linear,
    add_batch_norm,
    add_batch_norm,
    add_elementwise,
    add_elementwise,
    add_reuse,
    add_mixture,
    add_cat,
    add_chunk,
    add_slice,
]


ON_SPACE = [add_conv, add_conv, add_conv, add_pool, add_reshaping, add_mean, add_permutation]


@st.composite
def programs(draw) -> Program:
    torch.manual_seed(0)
    program = Program()
    program.shapes.append(draw(st.sampled_from([(CHANNELS, 5, 5), (CHANNELS, POSITIONS), (POSITIONS, CHANNELS)])))
    for _ in range(draw(st.integers(2, 9))):
        # Mostly one after the other: depth is where scalings meet.
        position = draw(st.sampled_from([len(program.shapes) - 1] * 3 + list(range(len(program.shapes)))))
        shape = program.shapes[position]
        draw(st.sampled_from(ON_VECTORS + ON_SPACE * (len(shape) > 1)))(draw, program, position, shape)
    add_batch_norm(draw, program, len(program.shapes) - 1, program.shapes[-1])
    return program


@pytest.mark.slow
@settings(max_examples=400, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(program=programs())
def test_no_pair_is_invented_in_random_graphs(program):
    found = found_pairs(program)
    inputs = (torch.randn(8, *program.shapes[0], dtype=torch.float64),)
    try:
        truth = scale_invariant_pairs(program, inputs, every_unit=False)
    except UndecidedError:
        reject()
    assert found <= truth


def test_random_graphs_do_have_pairs():
    program = find(
        programs(),
        lambda program: len(found_pairs(program)) >= 2,
        random=random.Random(0),
        settings=settings(max_examples=1000, phases=[Phase.generate]),
    )
    assert any(feeding.layers for feeding in feeding_layers(program).values())
