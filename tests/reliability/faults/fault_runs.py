"""Runs with a fault and the same runs without our callbacks, and comparisons that list differences as text."""

import math
import random
import tempfile
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch

from lightning_normtheory.callbacks import NormTheory
from lightning_normtheory.record import jsonl
from lightning_normtheory.record.history import read_histories

from reliability.outcome import Outcome
from support.lit import Classifier, loader, trainer
from support.neutral_cases import Recorder, generators, state

EPOCHS, SAMPLES = 3, 24
Rows = dict[int, dict[str, float]]


class Comparison:
    """Count comparisons and collect differences."""

    def __init__(self) -> None:
        self.compared = 0
        self.differences: list[str] = []

    def equal(self, what: str, found: Any, expected: Any) -> None:
        self.holds(
            what if found == expected else f"{what}: expected {expected!r}, but got {found!r}"[:300], found == expected
        )

    def holds(self, what: str, condition: bool) -> None:
        self.compared += 1
        if not condition:
            self.differences.append(what)

    def close(self, what: str, found: float, expected: float, rel: float) -> None:
        same = math.isclose(found, expected, rel_tol=rel) or (math.isnan(found) and math.isnan(expected))
        self.holds(f"{what}: expected {expected:.9g}, but got {found:.9g}", same)

    def training(self, watched: "Run", bare: "Run") -> None:
        """Every batch, every step, the end: bit by bit."""
        self.equal("the end of the fit", repr(watched.error), repr(bare.error))
        self.equal("the number of records of the training", len(watched.seen), len(bare.seen))
        for position, (found, expected) in enumerate(zip(watched.seen, bare.seen)):
            self.holds(f"record {position} of {len(bare.seen)} of the training differs", found == expected)
        self.equal("the epochs trained", watched.trainer.current_epoch, bare.trainer.current_epoch)

    def readable(self, path: Path) -> None:
        """Check that a checkpoint loads without executing code."""
        try:
            torch.load(path, weights_only=True)
        except Exception as error:  # noqa: BLE001  # the comparison tells
            self.holds(f"{path.name} cannot be read with weights_only=True: {error}"[:300], False)

    def resumed(self, watched: "Run", bare: "Run", ours: Callable[[], Iterable], **arguments: Any) -> Rows:
        """The checkpoints made now can be read without executing code, and the runs go on from them alike."""
        epochs = watched.trainer.current_epoch + 1
        path = watched.save()
        self.readable(path)
        again = fit(watched.folder / "resumed", list(ours()), epochs=epochs, checkpoint=path, **arguments)
        other = fit(bare.folder / "resumed", epochs=epochs, checkpoint=bare.save(), **arguments)
        self.training(again, other)
        self.equal("the epochs of the file of the resumed run", sorted(again.rows), [epochs - 1])
        return again.rows

    def rows(self, found: Rows, expected: Rows, without: Iterable[str] = ()) -> None:
        """All digits of all numbers; ``without`` those whose names begin so."""
        self.equal("the epochs in the file", sorted(found), sorted(expected))
        for epoch in sorted(found.keys() & expected.keys()):
            for name, value in expected[epoch].items():
                if not name.startswith(tuple(without)):
                    self.equal(f"epoch {epoch}, {name}", repr(found[epoch].get(name)), repr(value))

    def reports(self, watched: "Run", *parts: str) -> None:
        """Check that each part is in exactly one warning, and that no warning of this package is repeated."""
        for part in parts:
            self.equal(f"warnings with {part!r}", sum(part in message for message in watched.messages), 1)
        own = [message for message in watched.messages if "normtheory" in message]
        self.equal("repeated warnings of this package", len(own) - len(set(own)), 0)

    @property
    def outcome(self) -> Outcome:
        return Outcome(self.compared, tuple(self.differences))


class Run(NamedTuple):
    """What is left of a fit.

    Attributes:
        seen: everything that must not differ, from every batch and epoch and the end.
        messages: its warnings.
        error: what it ended with, if it did not end by itself.
        folder: where its files are.
    """

    trainer: pl.Trainer
    model: pl.LightningModule
    seen: list
    messages: list[str]
    error: BaseException | None
    folder: Path

    @property
    def rows(self) -> Rows:
        """The numbers of the file by epoch, without the prefix and without times."""
        found: Rows = {}
        for path in self.folder.rglob("normtheory.jsonl"):
            for history in read_histories(path):
                found.update({row.epoch: timeless(row.metrics) for row in history.rows})
        return found

    def save(self) -> Path:
        path = self.folder / "saved.ckpt"
        self.trainer.save_checkpoint(path)
        return path


def timeless(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.endswith("seconds")}


def batches() -> Any:
    return loader(SAMPLES)


def fit(
    folder: Path,
    ours: Sequence[pl.Callback] = (),
    *,
    module: Callable[[], pl.LightningModule] = lambda: Classifier("wn"),
    users: Sequence[pl.Callback] = (),
    data: Callable[[], Any] = batches,
    epochs: int = EPOCHS,
    checkpoint: Path | None = None,
    **arguments: Any,
) -> Run:
    """A short fit; whatever it raises is part of the result."""
    folder.mkdir(parents=True, exist_ok=True)
    pl.seed_everything(1, verbose=False)
    recorder = Recorder()
    run = trainer(
        [*users, *ours, recorder], max_epochs=epochs, default_root_dir=folder, num_sanity_val_steps=0, **arguments
    )
    model, error = module(), None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            run.fit(model, data(), loader(8, shuffle=False), ckpt_path=checkpoint)
        except (Exception, KeyboardInterrupt, SystemExit) as raised:  # noqa: BLE001  # the comparison tells
            error = raised
        recorder.note(state(run, model), generators())
    return Run(run, model, recorder.seen, [str(w.message) for w in caught], error, folder)


@cache
def undisturbed(net: str) -> tuple[Run, Run]:
    """A run with all diagnostics and no fault, and the bare one."""
    folder = Path(tempfile.mkdtemp())
    keep = random.getstate(), torch.random.get_rng_state()
    try:
        module = lambda: Classifier(net)  # noqa: E731
        return fit(folder / "watched", [NormTheory(on_error="raise")], module=module), fit(
            folder / "bare", module=module
        )
    finally:
        random.setstate(keep[0])
        torch.random.set_rng_state(keep[1])


def lines(folder: Path) -> list[dict]:
    """Whatever can be read of the files below a folder."""
    return [line for path in sorted(folder.rglob("normtheory.jsonl")) for line in jsonl.read(path)]
