"""The list of recipes, and recipes by name."""

import pytest

from lightning_normtheory.recipes import figures, registry
from lightning_normtheory.recipes.cli import main
from lightning_normtheory.recipes.cli.commands.list import first_sentence

FILE = """\
# normtheory run small
# normtheory sweep small --data.root DIR
#
# A network, 2.5 wide. It
# learns [slowly].
recipe:
  paper: ours
  data: noise
  time: 1 s
  figure: overview
"""


@pytest.fixture
def small_recipe(monkeypatch, tmp_path):
    folder = tmp_path / "configs"
    folder.mkdir()
    (folder / "small.yaml").write_text(FILE)
    monkeypatch.setattr(registry, "_FOLDER", folder)


@pytest.mark.parametrize("width", [20, 40, 80, 139, 140, 300])
def test_the_list_has_everything_at_any_width(width, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    assert max(len(line) for line in out.splitlines()) <= width
    shown = "".join(out.split())
    for name in registry.names():
        recipe = registry.recipe(name)
        assert name in (out if width >= 60 else shown)
        assert recipe.time in out
        if width < 60:  # one column: all of a text is in a row
            sentence = first_sentence(registry.description(name))
            for text in (recipe.paper, recipe.data, sentence):
                assert "".join(text.split()) in shown


def test_the_list_shows_brackets_and_the_first_sentence(small_recipe, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    registry._FOLDER.joinpath("small.yaml").write_text(FILE.replace("2.5 wide", "[2.5] wide"))
    main(["list"])
    out = capsys.readouterr().out
    assert "A network, [2.5] wide." in out
    assert "It learns" not in out


def test_the_description_leaves_the_commands_out(small_recipe):
    assert registry.names() == ["small"]
    assert registry.description("small") == "A network, 2.5 wide. It learns [slowly]."


def test_every_file_has_the_section_recipe():
    for name in registry.names():
        recipe = registry.recipe(name)
        assert recipe.paper
        assert recipe.data
        assert recipe.time
        assert recipe.figure in figures.FIGURES, name
        assert registry.description(name), name


def test_a_file_without_the_section_is_named(small_recipe):
    registry._FOLDER.joinpath("small.yaml").write_text("seed_everything: 0\n")
    with pytest.raises(ValueError, match=r"small\.yaml has no section recipe"):
        registry.recipe("small")
