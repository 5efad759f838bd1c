"""Faults of the place where the JSON Lines file is: a full disk, a folder that vanishes, what lay there before."""

import os
import resource
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from unittest import mock

import pytorch_lightning as pl

from lightning_normtheory.callbacks import NormTheory
from lightning_normtheory.callbacks.output import run_file
from lightning_normtheory.record import jsonl

from reliability.faults.fault_runs import Comparison, fit, undisturbed
from reliability.outcome import Outcome
from support.lit import Classifier

MODULE = partial(Classifier, "bn")
FILE = Path("normtheory_logs", "version_0", "normtheory.jsonl")


class Meddles(pl.Callback):
    """Does something to the folder when an epoch begins."""

    def __init__(self, epoch, action):
        self.epoch, self.action = epoch, action

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == self.epoch:
            self.action()


def with_file(
    folder: Path,
    *,
    prepare: Callable[[Path], None] = lambda root: None,
    meddle: Callable[[Path], None] | None = None,
    during: Callable[[Path], AbstractContextManager] = lambda root: nullcontext(),
    epochs: tuple[int, ...] = (0, 1, 2),
    reports: tuple[str, ...] = (),
) -> Outcome:
    """The training is that of the bare run; the file has these epochs, with the numbers of an undisturbed run.

    Args:
        prepare: what is in the folder before the run.
        meddle: what happens to it when epoch 1 begins.
        during: holds while the run lasts.
    """
    check = Comparison()
    reference, bare = undisturbed("bn")
    root = folder / "watched"
    root.mkdir()
    prepare(root)
    users = [] if meddle is None else [Meddles(1, partial(meddle, root))]
    with during(root), mock.patch.object(run_file, "folder", return_value=root / FILE.parent):
        watched = fit(root, [NormTheory()], module=MODULE, users=users)
    check.training(watched, bare)
    expected = {epoch: reference.rows[epoch] for epoch in epochs}
    if (root / FILE).is_file():
        check.rows(watched.rows, expected)
    else:
        check.equal("the epochs that could be written", [], list(epochs))
    check.reports(watched, *reports)
    check.holds("the end says more than once that there is no file", len(_of_files(watched.messages)) == len(reports))
    check.resumed(watched, bare, lambda: [NormTheory()], module=MODULE)
    return check.outcome


def _of_files(messages: list[str]) -> list[str]:
    return [message for message in messages if "normtheory.jsonl" in message or "The table at the end" in message]


def linked_to_full_device(root: Path) -> None:
    (root / FILE).parent.mkdir(parents=True)
    (root / FILE).symlink_to("/dev/full")


def a_file_for_the_folder(root: Path) -> None:
    (root / "normtheory_logs").write_text("")


def a_folder_for_the_file(root: Path) -> None:
    (root / FILE).mkdir(parents=True)


def written_before(root: Path, content: bytes) -> None:
    (root / FILE).parent.mkdir(parents=True)
    (root / FILE).write_bytes(content)


def full_disk(root: Path, epoch: int, room: int) -> AbstractContextManager:
    """Let a file grow only by this number of bytes in one epoch, with the system's limit of file sizes."""
    original = jsonl.append

    def append(path: Path, header: dict, row: dict, first: bool = True) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        size = os.path.getsize(path) if path.exists() else 0
        if row["epoch"] == epoch:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + room, hard))
        try:
            original(path, header, row, first)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return mock.patch.object(jsonl, "append", append)


OLD = {
    "garbage": b"no json at all\n",
    "a line that was cut": b'{"schema": 1, "run": "x", "setti',
    "a row that was cut": b'{"epoch": 0, "step": 7, "metrics": {"normtheory/loss": 0.1',
    "an empty file": b"",
    "empty lines": b"\n\n\n",
    "invalid UTF-8": b"\xff\xfe\x80 \xc3\n",
    "NUL bytes": b"\0" * 4096,
    "a huge line": b"x" * 3_000_000,
    "a huge line of brackets": b"[" * 200_000 + b"\n",
    "other JSON": b'[1, 2]\n"epoch"\n5\nnull\n{}\n{"schema": 1, "settings": 5}\n',
    "rows with values of other kinds": b'{"epoch": null}\n{"epoch": "x", "metrics": {}}\n{"epoch": 0, "metrics": [1]}\n'
    b'{"epoch": 1e999}\n{"epoch": 0, "metrics": {"normtheory/loss": 1' + b"0" * 400 + b"}}\n",
}

CASES: dict[str, Callable[[Path], Outcome]] = {
    "the file is on a full device": partial(
        with_file, prepare=linked_to_full_device, epochs=(), reports=("could not be written",)
    ),
    "a file in the place of the folder": partial(
        with_file, prepare=a_file_for_the_folder, epochs=(), reports=("could not be written",)
    ),
    "a folder in the place of the file": partial(
        with_file, prepare=a_folder_for_the_file, epochs=(), reports=("could not be written",)
    ),
    "the folder is deleted in the middle": partial(
        with_file, meddle=lambda root: shutil.rmtree(root / "normtheory_logs"), epochs=(1, 2)
    ),
    "the file is deleted in the middle": partial(with_file, meddle=lambda root: (root / FILE).unlink(), epochs=(1, 2)),
    "the file is emptied in the middle": partial(
        with_file, meddle=lambda root: os.truncate(root / FILE, 0), epochs=(1, 2)
    ),
    **{
        f"the disk is full after {room} bytes in epoch {epoch}": partial(
            with_file,
            during=partial(full_disk, epoch=epoch, room=room),
            epochs=tuple(each for each in range(3) if each != epoch),
            reports=("could not be written",),
        )
        for epoch, room in ((0, 0), (0, 100), (0, 2000), (1, 0), (1, 1), (1, 500), (2, 500))
    },
    **{
        f"there was {name} before": partial(with_file, prepare=partial(written_before, content=old))
        for name, old in OLD.items()
    },
}
