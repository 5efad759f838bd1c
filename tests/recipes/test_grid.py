"""Grids, and the names of the runs that they make."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_normtheory.recipes import registry
from lightning_normtheory.recipes.recipe import Recipe
from lightning_normtheory.recipes.sweeps.grid import complete, parse, points
from lightning_normtheory.recipes.sweeps.plan import plan


@pytest.mark.parametrize(
    ("item", "values"),
    [
        ("a=1", ["1"]),
        ("a= 1 , 2", ["1", "2"]),
        ("a=[1,2],[3]", ["[1,2]", "[3]"]),
        ("a={x: [1,2], y: 'p,q'},null", ["{x: [1,2], y: 'p,q'}", "null"]),
        ("a='x,y',z", ["x,y", "z"]),
        ('a="x\\",y",z', ['x",y', "z"]),
        ("a='it''s, so',z", ["it's, so", "z"]),
        ("a=it's,that's", ["it's", "that's"]),
        ("a='',b", ["", "b"]),
        ("a=k=v,1e-3", ["k=v", "1e-3"]),
        ("a=[']',x],y", ["[']',x]", "y"]),
    ],
)
def test_values_of_a_grid(item, values):
    assert parse([item]) == {"a": values}


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (["model.width"], "Expected OPTION=VALUE"),
        (["=1,2"], "Expected OPTION=VALUE"),
        (["--model.width=1"], "such as model.width=64,256, got '--model.width=1'"),
        (["a="], "Empty value"),
        (["a=1,,2"], "Empty value"),
        (["a=1,2,"], "Empty value"),
        (["a=1,2,1"], "the value '1' twice"),
        (["a=1", "a=2"], "has a twice"),
        (["a=[1,2"], "Missing ]"),
        (["a=1],2"], "Unmatched ]"),
        (["a=[1}"], "Unmatched }"),
        (["a='x,y"], "Missing '"),
        (["a='x'y"], "do not enclose"),
        (["a='x': 1"], "do not enclose"),
    ],
)
def test_what_is_no_grid_is_refused(items, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        parse(items)


plain = st.text("a0.-'/ ", min_size=1, max_size=5).map(lambda text: f"x{text}x")


@given(st.dictionaries(st.sampled_from(["a", "b.c_d"]), st.lists(plain, min_size=1, max_size=3, unique=True)))
def test_a_grid_that_is_written_is_read_back(grid):
    assert parse([f"{option}={','.join(values)}" for option, values in grid.items()]) == grid
    quoted = {option: [f'"{value},"' for value in values] for option, values in grid.items()}
    with_commas = {option: [f"{value}," for value in values] for option, values in grid.items()}
    assert parse([f"{option}={','.join(values)}" for option, values in quoted.items()]) == with_commas


@given(st.dictionaries(st.sampled_from("abcd"), st.lists(st.integers().map(str), min_size=1, max_size=3, unique=True)))
def test_points_are_all_choices_in_order(grid):
    found = [tuple(point.values()) for point in points(grid)]
    assert len(set(found)) == len(found)
    assert all(list(point) == list(grid) for point in points(grid))
    ranks = [tuple(values.index(value) for values, value in zip(grid.values(), point)) for point in found]
    assert ranks == sorted(ranks)
    product = 1
    for values in grid.values():
        product *= len(values)
    assert len(found) == product


@pytest.mark.parametrize(
    ("grid", "seeds", "options", "message"),
    [
        ({}, 0, [], "at least one seed, got 0"),
        ({"seed_everything": ["1"]}, 1, [], "--seeds N"),
        ({}, 1, ["--seed_everything", "5"], "--seeds N"),
        ({"output": ["x"]}, 1, [], "use --output"),
        ({"model.width": ["1"]}, 1, ["--model.width=2"], "in the grid and among the options"),
    ],
)
def test_an_option_is_set_once(grid, seeds, options, message):
    with pytest.raises(ValueError, match=message):
        complete(Recipe("", "", "", ""), grid, seeds, options)


def names(*options, seeds=1, **grid):
    return [run.folder.name for run in plan("quickstart", grid, seeds, options, Path())]


def test_a_larger_grid_has_the_folders_of_the_smaller():
    assert set(names(a=["1"], b=["2"])) < set(names(b=["1", "2"], a=["1", "3"], seeds=2))


def test_other_options_have_other_folders(tmp_path, monkeypatch):
    assert not set(names(a=["1", "2"])) & set(names("--data.limit=10", a=["1", "2"]))
    Path("my.yaml").write_text("model: {width: 1}")
    forms = (["--config=my.yaml"], ["--config", "my.yaml"])
    before = [names(*options) for options in forms]
    Path("my.yaml").write_text("model: {width: 2}")
    assert all(names(*options) != those for options, those in zip(forms, before))
    before = names()
    text = registry.config_path("quickstart").read_text()
    changed = tmp_path / "quickstart.yaml"
    monkeypatch.setattr(registry, "config_path", lambda name: changed)
    changed.write_text(text.replace("figure: overview", "figure: practice") + "# changed")
    assert names() == before  # that changes no run
    changed.write_text(text.replace("width: 256", "width: 257"))
    assert names() != before


def test_names_suit_every_file_system():
    found = names(a=['{x: "y/z"}', "C:\\ü*?<>|", "x" * 500, "x" * 501])
    assert len(set(found)) == 4
    for name in found:
        assert len(name) < 100
        assert name.isascii()
        assert not set(name) & set('/\\:*?"<>| ')
