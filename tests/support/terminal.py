"""A terminal for the tests, and fits with Lightning's progress bars in it."""

import importlib
import io
import re
import threading

import torch
from torch import nn

from lightning_normtheory.callbacks.engine.base import DiagnosticCallback
from lightning_normtheory.callbacks.engine.diagnostic import Diagnostic
from lightning_normtheory.measuring.progress import tick

from support.lit import Classifier, loader, nets, trainer


class Screen(io.TextIOBase):
    """What a terminal would show of all that was written to it, without colors, and without an end at the right."""

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


def make_bar(package, kind, screen, **kwargs):
    callbacks = importlib.import_module(f"{package}.callbacks")
    if kind == "tqdm":
        return callbacks.TQDMProgressBar(**kwargs)
    return callbacks.RichProgressBar(
        console_kwargs={"file": screen, "force_terminal": True, "width": 80, "height": 24}, **kwargs
    )


class First(Diagnostic):
    title = "weight norms"
    key = "first"
    metrics = (key,)
    needs_loss = False

    def measure(self, view):
        return {"first": 1.0}


class Watched(Diagnostic):
    """Takes four steps, and calls ``look`` with what the screen shows after each."""

    title = "Hessian"
    key = "watched"
    metrics = (key,)
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
