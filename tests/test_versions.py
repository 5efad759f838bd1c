"""The oldest tested versions are the lower limits; and no file that is read back runs code, in any version."""

import copy
import pickle
import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import EpsImagePlugin
from pytorch_lightning.plugins.io import TorchCheckpointIO

from lightning_normtheory.callbacks import NormTheory
from lightning_normtheory.recipes.cli import main
from lightning_normtheory.recipes.datasets import source
from lightning_normtheory.record import jsonl
from lightning_normtheory.record.history import read_history

from support.lit import Classifier, loader, trainer
from support.recipes.image_files import ready, write_cifar10, write_folder, write_mnist
from support.view.report_cases import awkward_rows, write_run

ROOT = Path(__file__).parent.parent

# -- .ci/versions ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(ROOT / ".ci" / "versions"))


def test_the_oldest_pins_are_the_lower_limits(script):
    """Read setup.cfg as text, line by line; the script reads it as pip does, with extras within extras."""
    text = (ROOT / "setup.cfg").read_text(encoding="utf-8")
    limits = re.findall(r"^    ([\w-]+)(?:\[\w+\])?>=([\d.]+)", text, re.MULTILINE)
    browser = re.search(r"^browser =\n    ([\w-]+)>=", text, re.MULTILINE)[1]  # asks for a Chromium beside it
    expected = [f"{name}=={lowest}" for name, lowest in limits if name != browser]
    assert sorted(script["pins"]("oldest").splitlines()) == sorted(expected)
    assert {"torch", "pytorch-lightning", "wandb"} < {name for name, _ in limits}


def test_the_newest_have_no_pins(script):
    assert script["pins"]("newest") == ""


def test_a_requirement_without_a_lower_limit_stops_the_script(script, tmp_path, monkeypatch):
    text = "[options]\ninstall_requires =\n    torch<3\n[options.extras_require]\ntest =\n"
    (tmp_path / "setup.cfg").write_text(text)
    monkeypatch.setitem(script["lowest"].__globals__, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match=r"Expected a lower limit in setup\.cfg, but got 'torch<3'"):
        script["lowest"]()


# -- no file that is read back runs code -------------------------------------------------------------------------------

EXPRESSION = "open('harm', 'w')"
TAG = "!!python/object/apply:builtins.open [harm, w]"


class Harm:
    """Creates a file when unpickled."""

    def __reduce__(self):
        return (open, ("harm", "w"))


@pytest.fixture(autouse=True)
def _no_harm(tmp_path):
    """Every test works in its own folder, where the file would be."""
    yield
    assert not Path("harm").exists()


def test_the_harm_would_be_seen():
    """Each of the three runs in a reader that allows it."""
    for read, hostile in ((pickle.loads, pickle.dumps(Harm())), (eval, EXPRESSION), (yaml.unsafe_load, TAG)):
        read(hostile)
        assert Path("harm").exists()
        Path("harm").unlink()


class Careful(TorchCheckpointIO):
    """In older versions of Lightning, `fit` has no argument `weights_only`."""

    def load_checkpoint(self, path, *arguments, **options):
        return torch.load(path, weights_only=True)


def resume(path):
    run = trainer([NormTheory(probe=20, on_error="raise")], max_epochs=2, plugins=[Careful()])
    run.fit(Classifier("wn"), loader(), ckpt_path=path)
    return run.current_epoch


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    run = trainer([NormTheory(probe=20, on_error="raise")], max_epochs=1, default_root_dir=folder)
    run.fit(Classifier("wn"), loader())
    run.save_checkpoint(folder / "one.ckpt")
    return torch.load(folder / "one.ckpt", weights_only=True)


def our_state(checkpoint):
    (state,) = checkpoint["callbacks"].values()
    return state


def test_a_checkpoint_with_our_state_is_resumed_where_only_weights_are_read(checkpoint):
    torch.save(checkpoint, "harmless.ckpt")
    assert resume("harmless.ckpt") == 2


def test_a_pickle_in_our_state_is_refused_where_only_weights_are_read(checkpoint):
    hostile = copy.deepcopy(checkpoint)
    our_state(hostile)["budget"] = Harm()
    torch.save(hostile, "hostile.ckpt")
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        resume("hostile.ckpt")


def test_text_in_our_state_is_only_text(checkpoint):
    """Names of functions in settings, and of diagnostics, are never looked up."""
    state = our_state(checkpoint)
    settings = dict.fromkeys(state["settings"], EXPRESSION)
    diagnostics = {EXPRESSION: {EXPRESSION: EXPRESSION}, **state["diagnostics"]}
    with pytest.warns(UserWarning, match="loss was .*open.* in the checkpoint and is 'training_step' now"):
        NormTheory(probe=20).load_state_dict({**state, "settings": settings, "diagnostics": diagnostics})


HOSTILE_LINES = [
    EXPRESSION,
    TAG,
    f'{{"py/reduce": [{{"py/function": "builtins.eval"}}, {{"py/tuple": ["{EXPRESSION}"]}}]}}',
    f'{{"epoch": "{EXPRESSION}", "metrics": {{}}}}',
    f'{{"epoch": 1, "metrics": {{"normtheory/loss": {EXPRESSION}}}}}',
    f'{{"epoch": 1, "metrics": {{"normtheory/loss": "{EXPRESSION}"}}}}',
    pickle.dumps(Harm(), protocol=0).decode().replace("\n", " "),
]


@pytest.fixture
def hostile_run(tmp_path):
    """A run with hostile lines, names and settings."""
    path = write_run(tmp_path / "run", awkward_rows(), run=EXPRESSION, settings={"loss": EXPRESSION, "callback": TAG})
    with path.open("a", encoding="utf-8") as file:
        file.write("\n".join(HOSTILE_LINES) + "\n")
    path.with_name("source.txt").write_text(TAG, encoding="utf-8")
    return path


def test_hostile_lines_are_passed_over(hostile_run):
    lines = list(jsonl.read(hostile_run))
    assert [line["epoch"] for line in lines if "epoch" in line] == list(awkward_rows())


@pytest.mark.parametrize("options", [[], ["--text"]], ids=["html", "text"])
def test_a_report_of_hostile_files_shows_them(hostile_run, options, capsys):
    hostile_run.with_name("config.yaml").write_text(f"model: {TAG}\n")
    assert main(["report", str(hostile_run.parent), *options]) == 0
    assert "harm" in capsys.readouterr().out or "harm" in hostile_run.with_name("report.html").read_text()


def test_hostile_settings_of_a_run_are_refused_and_its_source_is_text(hostile_run):
    config = hostile_run.with_name("config.yaml")
    config.write_text("seed_everything: 3\n")
    run = read_history(hostile_run.parent)
    assert (run.options, run.source) == ({"seed_everything": 3}, TAG)
    config.write_text(f"seed_everything: {TAG}\n")
    with pytest.raises(ValueError, match=r"options of a run in .*config\.yaml, but it cannot be read"):
        read_history(hostile_run.parent)


def test_a_hostile_file_of_options_is_refused(capsys):
    Path("options.yaml").write_text(f"seed_everything: {TAG}\n")
    assert main(["run", "quickstart", "--config", "options.yaml"]) == 2
    assert "python/object" in capsys.readouterr().err


# -- images ------------------------------------------------------------------------------------------------------------


def test_pickled_objects_in_the_place_of_the_embedded_images_are_refused(tmp_path, monkeypatch):
    (tmp_path / "embedded").mkdir()
    arrays = {f"{kind}_{part}": np.array([Harm()], dtype=object) for kind in "xy" for part in ("train", "test")}
    np.savez(tmp_path / "embedded" / "fashion_mnist_slice.npz", **arrays)
    monkeypatch.setattr(source, "files", lambda package: tmp_path)
    with pytest.raises(ValueError, match="allow_pickle=False"):
        source.embedded_images("train")


def test_a_pickle_beside_the_files_of_mnist_is_not_run(tmp_path):
    """torchvision prefers files of its early versions."""
    write_mnist(tmp_path)
    old = tmp_path / "MNIST" / "processed"
    old.mkdir()
    for name in ("training.pt", "test.pt"):
        torch.save(Harm(), old / name)
    with pytest.raises(ValueError, match="training files cannot be read"):
        ready(dataset="mnist", root=tmp_path)


def test_a_pickle_of_cifar10_imports_no_program_of_numpy(tmp_path):
    write_cifar10(tmp_path)
    (tmp_path / "cifar-10-batches-py" / "test_batch").write_bytes(b"cnumpy.f2py.__main__\ndtype\n.")
    with pytest.raises(ValueError, match=r"asks for numpy\.f2py\.__main__\.dtype"):
        ready(dataset="cifar10", root=tmp_path)
    assert "numpy.f2py.__main__" not in sys.modules


def test_a_program_in_postscript_is_not_taken_for_an_image(tmp_path, monkeypatch):
    """Pillow recognizes a file by its content, and passes PostScript to an interpreter."""
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *arguments: Path("harm").touch())
    program = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n"
    (write_folder(tmp_path) / "test" / "bird" / "0000.png").write_bytes(program)
    with pytest.raises(ValueError, match=r"image of 8 bits per channel in .*0000\.png"):
        ready(dataset="folder", root=tmp_path)
