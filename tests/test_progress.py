"""Progress of a measurement: what long loops say, and what a terminal shows of it beside Lightning's own bars."""

import importlib
import io
import random
import re
import threading
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import pytorch_lightning as pl
import rich
import torch
from torch import nn

from lightning_normtheory import empirical_ntk, hessian_top_eigenvalue, predictor_hessian_norm
from lightning_normtheory.callbacks import HessianTopEigenvalue, NormTheory, progress
from lightning_normtheory.callbacks.base import DiagnosticCallback
from lightning_normtheory.callbacks.diagnostic import Diagnostic
from lightning_normtheory.callbacks.messages import say
from lightning_normtheory.callbacks.progress import MeasurementProgress, clear_line
from lightning_normtheory.ticks import listening, tick

from lit import Classifier, loader, nets, rows, trainer

BARS = [(package, bar) for package in ("pytorch_lightning", "lightning.pytorch") for bar in ("tqdm", "rich")]
each_bar = pytest.mark.parametrize(("package", "kind"), BARS)

# -- ticks -------------------------------------------------------------------------------------------------------------


def heard(action):
    steps = []
    with listening(steps.append):
        result = action()
    return steps, result


def test_nobody_hears_a_step_outside_of_the_block():
    steps, _ = heard(lambda: tick("product"))
    tick("product")
    assert steps == ["product"]


def test_an_error_ends_the_listening():
    steps = []
    with pytest.raises(RuntimeError), listening(steps.append):
        raise RuntimeError
    tick("product")
    assert steps == []


def test_the_inner_listener_hears_the_inner_steps():
    def both():
        inner, _ = heard(lambda: tick("pass"))
        tick("product")
        return inner

    outer, inner = heard(both)
    assert (inner, outer) == (["pass"], ["product"])


@pytest.mark.parametrize("which", ["algebraic", "smallest"])
@pytest.mark.parametrize("method", ["power", "lanczos"])
def test_every_product_with_the_hessian_is_a_step(method, which):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    batches = [(torch.randn(5, 3), torch.randn(5, 1)) for _ in range(2)]
    steps, pair = heard(
        lambda: hessian_top_eigenvalue(model, nn.functional.mse_loss, batches, method=method, which=which, tol=1e-2)
    )
    assert steps.count("product") == pair.hvps
    assert steps.count("batch") == len(batches)  # the gradient, which comes first


def test_every_backward_pass_of_the_kernel_is_a_step():
    n, k = 5, 3
    x = torch.randn(n, 2)
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, k))
    steps, _ = heard(lambda: empirical_ntk(model, x, batch_stats=True, dtype=x.dtype))
    assert steps.count("pass") == n * k
    independent, _ = heard(lambda: empirical_ntk(model, x, batch_stats=False, dtype=x.dtype))
    assert independent.count("pass") >= k
    assert independent.count("block") >= 3  # at least one for each layer


def test_the_predictors_hessian_is_heard():
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
    assert "product" in heard(lambda: predictor_hessian_norm(model, torch.randn(3, 2)))[0]


# -- a terminal --------------------------------------------------------------------------------------------------------


class Screen(io.TextIOBase):
    """What a terminal would show of all that was written to it, without colours, and without an end at the right."""

    encoding = "utf-8"

    def __init__(self):
        self._rows, self._row, self._column, self._lock = [""], 0, 0, threading.Lock()
        self.written = ""

    def isatty(self):
        return True

    def writable(self):
        return True

    def write(self, text):
        with self._lock:  # the display of rich has a thread of its own
            self.written += text
            for match in re.finditer(r"\x1b\[\??([\d;]*)([A-Za-z])|[^\x1b]", text):
                number, command = match.groups()
                self._control(number, command) if command else self._put(match[0])
        return len(text)

    def _control(self, number, command):
        if command == "A":
            self._row = max(0, self._row - int(number or 1))
        elif command == "K":
            assert number == "2", f"erase {number!r} is not emulated"
            self._rows[self._row] = ""
        else:
            assert command in "mhl", f"{command!r} is not emulated"

    def _put(self, character):
        if character == "\r":
            self._column = 0
        elif character == "\n":
            self._row, self._column = self._row + 1, 0
            self._rows += [""] * (self._row + 1 - len(self._rows))
        else:
            row = self._rows[self._row].ljust(self._column)
            self._rows[self._row] = row[: self._column] + character + row[self._column + 1 :]
            self._column += 1

    @property
    def rows(self):
        with self._lock:
            return [row.rstrip() for row in self._rows]

    @property
    def lines(self):
        return [row for row in self.rows if row]


@pytest.fixture
def screen(monkeypatch):
    """A terminal of 80 columns, on which every step is drawn at once."""
    for name, value in {"COLUMNS": "81", "LINES": "25", "TERM": "xterm-256color"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(progress, "_PATIENCE", 0.0)
    monkeypatch.setattr(progress, "_PAUSE", 0.0)
    monkeypatch.setattr("lightning_normtheory.callbacks.base.conclude", lambda run, warn: None)  # which prints a table
    screen = Screen()
    yield screen
    rich.reconfigure()  # Lightning has changed the console of all


def make_bar(package, kind, screen, **kwargs):
    callbacks = importlib.import_module(f"{package}.callbacks")
    if kind == "tqdm":
        return callbacks.TQDMProgressBar(**kwargs)
    return callbacks.RichProgressBar(
        console_kwargs={"file": screen, "force_terminal": True, "width": 80, "height": 24}, **kwargs
    )


class First(Diagnostic):
    title = "weight norms"
    names = ("first",)
    needs_loss = False

    def measure(self, view):
        return {"first": 1.0}


class Watched(Diagnostic):
    """Takes four steps, and calls ``look`` with what the screen shows after each."""

    title = "Hessian"
    names = ("watched",)
    needs_loss = False

    def __init__(self, look):
        self._look = look

    def start(self, view):
        tick("pass")
        self._look(view.trainer)

    def measure(self, view):
        for step in ("batch", "product", "product", "product"):
            tick(step)
            self._look(view.trainer)
        return {"watched": 1.0}


class Watching(DiagnosticCallback):
    def __init__(self, look, **kwargs):
        self._look = look
        super().__init__(**kwargs)

    def make_diagnostics(self):
        return [First(), Watched(self._look)]


def refresh(run):
    """Have it drawn: rich leaves that to its thread."""
    bar = run.progress_bar_callback
    if hasattr(bar, "progress"):
        bar.progress.refresh()


def make_module(host):
    class Module(host.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.lr = nets()["wn"](), 0.05

        def training_step(self, batch, batch_idx):
            loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
            self.log("train_loss", loss, prog_bar=True)
            return loss

        forward, configure_optimizers = Classifier.forward, Classifier.configure_optimizers
        validation_step = Classifier.validation_step

    torch.manual_seed(0)
    return Module()


def fit(monkeypatch, screen, package, callbacks):
    """With the screen for standard output; the progress bar is among the callbacks."""
    host = importlib.import_module(package)
    module = make_module(host)
    run = trainer(callbacks, host, enable_progress_bar=True, max_epochs=2)
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout", screen)
        run.fit(module, loader(), loader(16, shuffle=False))
    return run, module


def stable(lines):
    """Without times and rates, and without the length of a bar, which is what these leave."""
    return [re.sub(r"\d+:\d\d(:\d\d)?|-:--:--|\?|\d+\.\d+it/s|\d+\.\d+|[━█]+", "#", line) for line in lines]


@each_bar
def test_the_line_names_the_diagnostic_and_its_steps(monkeypatch, screen, package, kind):
    seen = []

    def look(run):
        refresh(run)
        seen.append((run.global_step, screen.lines[-2:]))

    fit(monkeypatch, screen, package, [Watching(look), make_bar(package, kind, screen)])
    lines = [(step, above.split("|")[0].split()[:2], below) for step, (above, below) in seen]
    wanted = ["Hessian, pass 1", *["Hessian, batch 1", *(f"Hessian, product {i}" for i in (1, 2, 3))] * 2]
    assert [below.partition(": ")[2][: len(text)] for (_, _, below), text in zip(lines, wanted)] == wanted
    assert len(lines) == len(wanted)
    for _, above, below in lines:
        assert above[0] == "Epoch"
        assert below.startswith("normtheory: ")
        assert " 1/2 " in below
        assert len(below) <= 80


@each_bar
@pytest.mark.parametrize("leave", [False, True])
def test_the_bar_looks_afterwards_as_if_nothing_had_happened(monkeypatch, screen, package, kind, leave):
    quiet = Screen()
    fit(monkeypatch, quiet, package, [make_bar(package, kind, quiet, leave=leave)])
    states = []

    class Before(pl.Callback):
        def on_train_epoch_end(self, run, module):
            refresh(run)
            states.append(stable(screen.lines))

    bar = make_bar(package, kind, screen, leave=leave)
    run, _ = fit(monkeypatch, screen, package, [Before(), Watching(refresh), Before(), bar])
    assert "normtheory: Hessian" in screen.written
    assert stable(screen.lines) == stable(quiet.lines)
    assert not [line for line in screen.lines if "normtheory" in line]
    for before, after in zip(states[::2], states[1::2]):
        assert before == after
    if kind == "rich":
        assert "get_renderables" not in vars(run.progress_bar_callback.progress)


@each_bar
def test_a_bar_that_was_closed_at_the_end_of_its_epoch_stays(monkeypatch, screen, package, kind):
    """With leave=True the bar of an epoch may be finished before the measurement begins."""
    seen = []

    def look(run):
        refresh(run)
        seen.append(screen.rows[:-1] if screen.rows[-1] == "" else screen.rows)

    fit(monkeypatch, screen, package, [make_bar(package, kind, screen, leave=True), Watching(look)])
    for *_, above, below in seen:
        assert above.startswith("Epoch")
        assert below.startswith("normtheory: Hessian")
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

    monkeypatch.setattr("lightning_normtheory.callbacks.base.conclude", talk)
    fit(monkeypatch, screen, package, [Watching(refresh), make_bar(package, kind, screen)])
    assert [line for line in screen.lines if line.startswith("line ")] == table


@each_bar
def test_a_short_measurement_shows_nothing(monkeypatch, screen, package, kind):
    monkeypatch.setattr(progress, "_PATIENCE", 1e9)
    fit(monkeypatch, screen, package, [Watching(refresh), make_bar(package, kind, screen)])
    assert "Epoch 1" in screen.written
    assert "normtheory" not in screen.written


@each_bar
def test_a_message_finds_no_line_and_the_next_step_brings_it_back(monkeypatch, screen, package, kind):
    seen = []

    def look(run):
        clear_line()
        seen.append([line for line in screen.lines if "normtheory" in line])

    fit(monkeypatch, screen, package, [Watching(look), make_bar(package, kind, screen)])
    assert not any(seen)
    assert len(seen) == 9
    assert screen.written.count("normtheory: Hessian, product 2") >= 2  # rich may draw it again


@each_bar
def test_an_error_takes_the_line_away(monkeypatch, screen, package, kind):
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

    monkeypatch.setattr({"tqdm": progress._TqdmLine, "rich": progress._RichLine}[kind], part, fail)
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
    """Whether a measurement in a run with this bar would show anything."""
    run = SimpleNamespace(progress_bar_callback=bar, is_global_zero=rank_zero)
    with MeasurementProgress(run, 1, "normtheory", pytest.fail) as shown:
        return shown._make is not None


class Own(pl.callbacks.ProgressBar):
    """A bar of the user's, with all that a bar of Lightning's has, save the class."""

    is_enabled = True
    refresh_rate = 1


class TQDMProgressBar(Own):
    """The name alone says nothing."""


class Derived(pl.callbacks.TQDMProgressBar):
    pass


def test_nothing_is_shown_without_a_bar_of_lightnings():
    assert display(pl.callbacks.TQDMProgressBar())
    assert display(Derived())
    assert not display(None)
    assert not display(pl.callbacks.TQDMProgressBar(), rank_zero=False)
    assert not display(pl.callbacks.TQDMProgressBar(refresh_rate=0))
    assert not display(Own())
    assert not display(TQDMProgressBar())
    assert not display(pl.callbacks.RichProgressBar())  # whose display has not begun
    assert not display(object())


def test_without_a_bar_a_fit_prints_nothing(monkeypatch, screen, capsys):
    monkeypatch.setattr("sys.stdout", screen)
    trainer([Watching(lambda _: None)], max_epochs=1).fit(Classifier("wn"), loader())
    assert screen.written == ""
    assert "normtheory" not in capsys.readouterr().err


def test_of_many_steps_every_nth_is_drawn_as_of_batches(monkeypatch, screen):
    bar = make_bar("pytorch_lightning", "tqdm", screen, refresh_rate=2)
    fit(monkeypatch, screen, "pytorch_lightning", [Watching(refresh), bar])
    assert set(re.findall(r"product \d", screen.written)) == {"product 2"}


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
    assert len(set(titles.values())) == len(titles) == 8
    assert Diagnostic.title not in titles.values()
