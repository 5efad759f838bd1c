"""The parameters that BatchNorm makes directions and lengths, against the pairs that the definition gives."""

import pytest
from torch import nn

from lightning_normtheory.model.layers import batch_norm_layers
from lightning_normtheory.scaling import BatchNormSplit, batch_norm_split, feeding_layers

from support.feeding.feeding_modules import NormalizesInline
from support.feeding.feeding_nets import NETS, found_pairs, make
from support.feeding.feeding_parts import bn, conv


@pytest.mark.slow
@pytest.mark.parametrize("net", NETS.values(), ids=NETS.keys())
def test_every_pair_is_a_direction_and_a_length(net):
    model = make(net)[0]
    found, pairs = batch_norm_split(model), found_pairs(model)
    batch_norms = batch_norm_layers(model)
    plain = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for position, names in enumerate((found.directions, found.lengths)):
        paths = {pair[position] for pair in pairs if pair[1] in batch_norms}
        assert names == {name for path in paths if (name := f"{path}.weight".lstrip(".")) in plain}
    assert len(found.unknown) == sum(
        bool(each.unknown) for path, each in feeding_layers(model).items() if path in batch_norms
    )


def test_without_batch_norm_nothing_is_traced(monkeypatch):
    monkeypatch.setattr("lightning_normtheory.scaling.split.feeding_layers", None)
    assert batch_norm_split(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))) == BatchNormSplit()


def test_a_function_call_has_no_scale_that_is_known():
    """`feeding_layers` lists a module that calls batch_norm itself; which of its parameters is γ is not known."""
    model = nn.Sequential(NormalizesInline(), bn(), conv(), bn())
    found = batch_norm_split(model)
    assert "0" in feeding_layers(model)
    assert found.directions == {"2.weight"}
    assert found.lengths == {"3.weight"}
