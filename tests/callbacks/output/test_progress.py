"""The progress of a measurement on Lightning's bars, as a terminal shows it."""

import random
import re
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import pytorch_lightning as pl
import rich
import torch

from lightning_normtheory.callbacks import HessianTopEigenvalue, NormTheory
from lightning_normtheory.callbacks.engine.diagnostic import Diagnostic
from lightning_normtheory.callbacks.engine.host import HostCallback
from lightning_normtheory.callbacks.output import progress_bar
from lightning_normtheory.callbacks.output.messages import say
from lightning_normtheory.callbacks.output.progress_bar import MeasurementProgress

from support.lit import Classifier, loader, rows, trainer
from support.terminal import Screen, Watching, fit, make_bar, refresh, stable

BARS = [(package, bar) for package in ("pytorch_lightning", "lightning.pytorch") for bar in ("tqdm", "rich")]
each_bar = pytest.mark.parametrize(("package", "kind"), BARS)


@pytest.fixture
def screen(monkeypatch):
    """Return a terminal of 80 columns on which every step is drawn at once."""
    for name, value in {"COLUMNS": "81", "LINES": "25", "TERM": "xterm-256color"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(progress_bar, "_PATIENCE", 0.0)
    monkeypatch.setattr(progress_bar, "_PAUSE", 0.0)
    monkeypatch.setattr(
        "lightning_normtheory.callbacks.engine.reporting.conclude", lambda run, warn: None
    )  # which prints a table
    screen = Screen()
    yield screen
    rich.reconfigure()  # Lightning has changed the global console


@each_bar
def test_the_bar_names_the_diagnostic_and_its_steps(monkeypatch, screen, package, kind):
    seen = []

    def look(run):
        refresh(run)
        seen.append(next(line for line in reversed(screen.lines) if "normtheory" in line))

    fit(monkeypatch, screen, package, [Watching(look), make_bar(package, kind, screen)])
    wanted = ["Hessian, pass 1", *["Hessian, batch 1", *(f"Hessian, product {i}" for i in (1, 2, 3))] * 2]
    assert [line[: len(f"normtheory: {text}")] for line, text in zip(seen, wanted)] == [
        f"normtheory: {text}" for text in wanted
    ]
    assert len(seen) == len(wanted)
    assert all("7/7" in line or "0/7" in line for line in seen)


@each_bar
@pytest.mark.parametrize("leave", [False, True])
def test_the_bar_looks_afterwards_as_if_nothing_had_happened(monkeypatch, screen, package, kind, leave):
    quiet = Screen()
    fit(monkeypatch, quiet, package, [make_bar(package, kind, quiet, leave=leave)])
    states = []

    class Before(HostCallback):  # Lightning 2.4 refuses callbacks of the other package
        def on_train_epoch_end(self, run, module):
            refresh(run)
            states.append(stable(screen.lines))

    bar = make_bar(package, kind, screen, leave=leave)
    fit(monkeypatch, screen, package, [Before(), Watching(refresh), Before(), bar])
    assert "normtheory: Hessian" in screen.written
    assert stable(screen.lines) == stable(quiet.lines)
    assert not [line for line in screen.lines if "normtheory" in line]
    for before, after in zip(states[::2], states[1::2]):
        assert before == after


@each_bar
def test_a_bar_that_was_closed_at_the_end_of_its_epoch_stays(monkeypatch, screen, package, kind):
    """With leave=True the bar of an epoch may be finished before the measurement begins."""
    fit(monkeypatch, screen, package, [make_bar(package, kind, screen, leave=True), Watching(refresh)])
    assert [line.split()[1][0] for line in screen.lines if line.startswith("Epoch")] == ["0", "1"]
    assert not [line for line in screen.lines if "normtheory" in line]


@each_bar
def test_a_real_hessian_is_shown(monkeypatch, screen, package, kind):
    hessian = HessianTopEigenvalue(predictor_samples=2, on_error="raise")
    fit(monkeypatch, screen, package, [hessian, make_bar(package, kind, screen)])
    shown = re.findall(r"normtheory: ([a-zA-Z' ]+)", screen.written)
    assert {"Hessian", "predictor's Hessian"} <= {each.strip() for each in shown}


@each_bar
def test_tables_stand_above_the_bar_and_nothing_of_them_is_lost(monkeypatch, screen, package, kind):
    table = [f"line {i}" for i in range(30)]

    def talk(run, warn):
        say(run, "\n".join(table))

    monkeypatch.setattr("lightning_normtheory.callbacks.engine.reporting.conclude", talk)
    fit(monkeypatch, screen, package, [Watching(refresh), make_bar(package, kind, screen)])
    assert [line for line in screen.lines if line.startswith("line ")] == table


@each_bar
def test_a_short_measurement_shows_nothing(monkeypatch, screen, package, kind):
    monkeypatch.setattr(progress_bar, "_PATIENCE", 1e9)
    fit(monkeypatch, screen, package, [Watching(refresh), make_bar(package, kind, screen)])
    assert "Epoch 1" in screen.written
    assert "normtheory" not in screen.written


@each_bar
def test_an_error_takes_the_text_away(monkeypatch, screen, package, kind):
    def look(run):
        if run.global_step:
            raise RuntimeError("of a diagnostic")

    callbacks = [Watching(look, on_error="raise"), make_bar(package, kind, screen)]
    with pytest.raises(RuntimeError, match="of a diagnostic"):
        fit(monkeypatch, screen, package, callbacks)
    assert "normtheory" in screen.written
    assert not [line for line in screen.lines if "normtheory" in line]


@each_bar
@pytest.mark.parametrize("part", ["__init__", "draw", "close"])
def test_a_display_that_fails_is_reported_once_and_stops_nothing(monkeypatch, screen, package, kind, part):
    def fail(*args):
        raise OSError("the terminal is gone")

    monkeypatch.setattr({"tqdm": progress_bar._TqdmLine, "rich": progress_bar._RichLine}[kind], part, fail)
    callbacks = [Watching(refresh, on_error="raise"), make_bar(package, kind, screen)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(monkeypatch, screen, package, callbacks)
    assert [str(w.message) for w in caught if "the terminal is gone" in str(w.message)] == [
        "The progress of a measurement is not shown: OSError: the terminal is gone"
    ]
    assert [row["normtheory/watched"] for row in rows().values()] == [1.0, 1.0]


# -- where nothing is shown --------------------------------------------------------------------------------------------


def display(bar, rank_zero=True):
    """Return whether a measurement in a run with this bar would show anything."""
    run = SimpleNamespace(progress_bar_callback=bar, is_global_zero=rank_zero)
    with MeasurementProgress(run, "normtheory", pytest.fail, pytest.fail) as shown:
        return shown._kind is not None


class Own(pl.callbacks.ProgressBar):
    """A custom bar that has the attributes of Lightning's bars, but not their class."""

    is_enabled = True
    refresh_rate = 1


class TQDMProgressBar(Own):
    """A custom bar with the name of Lightning's."""


class Derived(pl.callbacks.TQDMProgressBar):
    pass


def test_nothing_is_shown_without_a_bar_of_lightnings(monkeypatch):
    monkeypatch.setattr("sys.stdout", Screen())
    assert display(pl.callbacks.TQDMProgressBar())
    assert display(Derived())
    assert not display(None)
    assert not display(pl.callbacks.TQDMProgressBar(), rank_zero=False)
    assert not display(pl.callbacks.TQDMProgressBar(refresh_rate=0))
    assert not display(Own())
    assert not display(TQDMProgressBar())
    assert not display(pl.callbacks.RichProgressBar())  # its display has not started
    assert not display(object())


def test_without_a_bar_a_fit_prints_nothing(monkeypatch, screen, capsys):
    monkeypatch.setattr("sys.stdout", screen)
    trainer([Watching(lambda _: None)], max_epochs=1).fit(Classifier("wn"), loader())
    assert screen.written == ""
    assert "normtheory" not in capsys.readouterr().err


class File(Screen):
    """A file, or the output of a batch job."""

    def isatty(self):
        return False


class Notebook(File):
    """The output of a notebook's cell, where a line can be written over."""


Notebook.__module__ = "ipykernel.iostream"


@pytest.mark.parametrize(("stream", "shown"), [(File, False), (Notebook, True)])
def test_a_bar_that_cannot_be_drawn_over_is_left_alone(monkeypatch, screen, stream, shown):
    """In a file, every drawing of tqdm is a new line."""
    file = stream()
    fit(monkeypatch, file, "pytorch_lightning", [Watching(refresh), make_bar("pytorch_lightning", "tqdm", file)])
    assert "Epoch 1" in file.written
    assert ("normtheory: Hessian" in file.written) == shown


def test_a_rich_bar_in_a_file_is_left_alone(monkeypatch, screen):
    bar = pl.callbacks.RichProgressBar(console_kwargs={"file": File()})
    monkeypatch.setattr(progress_bar, "_LONG", 0.0)
    fit(monkeypatch, screen, "pytorch_lightning", [Watching(lambda run: None), bar])
    assert re.findall("normtheory.*", screen.written) == [
        "normtheory: this measurement has taken 0 s so far (weight norms)."
    ]


@pytest.mark.parametrize("steps", [None, 2])
def test_a_long_measurement_without_a_terminal_is_announced_once(monkeypatch, screen, steps):
    monkeypatch.setattr(progress_bar, "_LONG", 0.0)
    file = File()
    watching = Watching(lambda run: None, every_n_steps=steps)
    fit(monkeypatch, file, "pytorch_lightning", [watching, make_bar("pytorch_lightning", "tqdm", file)])
    assert file.written.count("normtheory") == 1
    assert "normtheory: this measurement has taken 0 s so far (weight norms)." in file.written


# -- neutral -----------------------------------------------------------------------------------------------------------


@each_bar
def test_the_run_stays_bitwise_the_same(monkeypatch, screen, package, kind):
    def outcome(callbacks):
        random.seed(0)
        np.random.seed(0)
        run, module = fit(monkeypatch, screen, package, [*callbacks, make_bar(package, kind, screen)])
        draws = random.random(), np.random.rand(), torch.rand(1).item()
        weights = torch.cat([p.detach().flatten() for p in module.parameters()])
        return weights, draws, dict(run.progress_bar_metrics)

    plain, measured = outcome([]), outcome([NormTheory(probe=16, ntk_samples=8, on_error="raise")])
    assert "normtheory: tangent kernel" in screen.written
    assert plain[2]
    assert torch.equal(plain[0], measured[0])
    assert plain[1:] == measured[1:]


def test_every_diagnostic_has_a_title_of_its_own():
    made = [*NormTheory().make_diagnostics(), *HessianTopEigenvalue(predictor_samples=1).make_diagnostics()]
    titles = {type(diagnostic): diagnostic.title for diagnostic in made}
    assert len(set(titles.values())) == len(titles) == 14
    assert Diagnostic.title not in titles.values()


@pytest.mark.parametrize("stdout", [None, SimpleNamespace(write=lambda text: None, flush=lambda: None)])
def test_an_output_that_cannot_say_whether_it_is_a_terminal_is_none(stdout, monkeypatch):
    monkeypatch.setattr("sys.stdout", stdout)
    assert not progress_bar._can_redraw("tqdm", None)
