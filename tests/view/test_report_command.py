"""``normtheory report``: which files it takes, where it writes, what it prints."""

import os
import signal
import subprocess
import sys

import pytest

from lightning_normtheory.recipes.cli import main
from lightning_normtheory.record import jsonl
from lightning_normtheory.view.command import find_runs


def run_in(folder, loss=1.0, epochs=2, name=None):
    """The file of a run below a folder."""
    path = folder / "normtheory.jsonl"
    header = {
        "run": name or f"demo/{folder.name}",
        "settings": {"callback": "RSCRatio", "prefix": "normtheory", "probe": 8},
    }
    for epoch in range(epochs):
        metrics = {"normtheory/loss": loss / (epoch + 1)}
        row = {"epoch": epoch, "step": epoch, "time": 0.0, "metrics": metrics, "user_metrics": {"val_loss": 0.25}}
        jsonl.append(path, header, row)
    return path


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_one_run_has_its_report_beside_it(here, capsys):
    path = run_in(here / "runs" / "a")
    assert main(["report", str(path)]) == 0
    report = path.with_name("report.html")
    assert report.read_text().startswith("<!DOCTYPE html>")
    assert capsys.readouterr().out == f"1 run: {report.as_uri()}\n"


def test_a_folder_is_all_runs_below_it(here, capsys):
    for name in ("b", "a"):
        run_in(here / "runs" / name / "deep")
    assert main(["report", "runs"]) == 0
    assert (here / "runs" / "report.html").exists()
    assert capsys.readouterr().out.startswith("2 runs: file:///")


def test_several_places_have_their_report_here_and_a_run_counts_once(here, capsys):
    first, second = run_in(here / "a"), run_in(here / "b")
    assert main(["report", str(first), "a", str(second.parent)]) == 0
    assert (here / "report.html").exists()
    assert capsys.readouterr().out.startswith("2 runs: ")


def test_a_file_of_ones_own(here):
    run_in(here / "a")
    assert main(["report", "a", "--output", "new/folder/page.html"]) == 0
    assert (here / "new" / "folder" / "page.html").exists()
    assert not (here / "a" / "report.html").exists()


def test_a_place_without_a_run_names_one_that_has_some(here, capsys):
    run_in(here / "runs" / "a")
    (here / "empty").mkdir()
    assert main(["report", "empty"]) == 2
    err = capsys.readouterr().err
    assert "there is none in empty" in err
    assert "There are runs in runs/a." in err
    assert main(["report", "nowhere"]) == 2
    assert "there is no nowhere" in capsys.readouterr().err


def test_another_file_is_refused(here, capsys):
    (here / "notes.txt").write_text("nothing\n")
    assert main(["report", "notes.txt"]) == 2
    assert "has no line with its settings" in capsys.readouterr().err


def test_a_damaged_file_among_others_is_left_out(here, capsys):
    run_in(here / "runs" / "a")
    damaged = here / "runs" / "b" / "normtheory.jsonl"
    damaged.parent.mkdir()
    damaged.write_text("")
    assert main(["report", "runs"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("1 run: ")
    assert "skipped" in captured.err


def test_damaged_files_alone_are_an_error(here, capsys):
    for name in ("a", "b"):
        (here / name).mkdir()
        (here / name / "normtheory.jsonl").write_text("nothing\n")
    assert main(["report", "--text", "a", "b"]) == 2
    assert "has no line with its settings" in capsys.readouterr().err


def test_names_with_brackets_are_names(here, capsys):
    run_in(here / "a", name="[bold]demo[/x]")
    assert main(["report", "--text", "a"]) == 0
    assert "[bold]demo[/x], 2 epochs" in capsys.readouterr().out


def test_a_terminal_without_greek_letters(here):
    run_in(here / "a")
    command = [sys.executable, "-m", "lightning_normtheory.recipes.cli", "report", "--text", "a"]
    done = subprocess.run(command, env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Loss on the probe" in done.stdout


def test_a_place_that_cannot_be_written(here, capsys):
    run_in(here / "a")
    (here / "file").write_text("")
    assert main(["report", "a", "--output", "file/report.html"]) == 2
    assert "normtheory: " in capsys.readouterr().err


def test_text_says_what_was_measured_and_what_was_not(here, capsys):
    path = here / "a" / "normtheory.jsonl"
    header = {"run": "demo/a", "settings": {"prefix": "normtheory", "probe": 512}, "samples": 50}
    reasons = {"normtheory/ntk_lambda_min": "no predictor was found", "normtheory/rsc_ratio": "the loss is below zero"}
    metrics = {"normtheory/loss": -1.0, "normtheory/rsc_ratio": float("nan")}
    row = {"epoch": 0, "step": 1, "metrics": metrics, "user_metrics": {}, "reasons": reasons}
    jsonl.append(path, {**header, "measured": {"predictor": "the output of net"}}, row)
    assert main(["report", "--text", "a"]) == 0
    out = capsys.readouterr().out
    assert "· Restricted strong convexity: R is undefined in every epoch: the loss is below zero." in " ".join(
        out.split()
    )
    for text in (
        "samples: 50 (512 asked for)",
        "predictor: the output of net",
        "R = ‖∇L‖²/L, in every epoch: the loss",
    ):
        assert text in out
    assert "\nKernel\n– Not measured: λ_min of the kernel." in out


def test_text_is_printed(here, capsys):
    run_in(here / "a", loss=2.0)
    run_in(here / "b", loss=3.0)
    assert main(["report", "--text", "a", "b"]) == 0
    out = capsys.readouterr().out
    assert "demo/a, 2 epochs" in out
    assert "+ Loss on the probe: The loss of the probe has fallen from 3 to 1.5." in out
    assert not list(here.rglob("*.html"))
    with pytest.raises(SystemExit):
        main(["report", "a", "--text", "--output", "x.html"])
    assert "omit --text or --output" in capsys.readouterr().err


def test_text_of_a_run_by_steps_that_is_still_training(here, capsys):
    path = here / "a" / "normtheory.jsonl"
    header = {"run": "demo/a", "axis": "step", "max_steps": 200_000, "settings": {"prefix": "normtheory"}}
    for step in range(50, 100_001, 50):
        metrics = {"normtheory/loss": 1 / step, "normtheory/rsc_ratio": 1.0}
        row = {"epoch": 0, "step": step, "time": 0.0, "metrics": metrics, "user_metrics": {"train_loss": 0.25}}
        jsonl.append(path, header, row, first=step == 50)
    assert main(["report", "--text", "a"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("demo/a, 2000 measurements up to step 100000\n")
    table = [line.split() for line in out.split("train:")[0].splitlines()[1:] if line.strip(" ─")]
    assert table[0] == ["step", "train", "R"]
    assert [row[0] for row in table[1::19]] == ["50", "100000"]
    assert len(table) == 21
    assert "epoch" not in out


def test_a_run_without_an_epoch(here, capsys):
    path = here / "a" / "normtheory.jsonl"
    path.parent.mkdir()
    path.write_text('{"schema": 1, "run": "demo/a", "settings": {"prefix": "normtheory"}}\n')
    assert main(["report", "--text", "a"]) == 0
    assert "Nothing has been measured yet." in capsys.readouterr().out
    assert main(["report", "a"]) == 0


SCRIPT = """
import time
import pytorch_lightning as pl
from lightning_normtheory.callbacks import NormTheory
from support.lit import Classifier, loader, trainer

class Slow(Classifier):
    def on_train_epoch_start(self):
        if self.current_epoch == 3:
            print("ready", flush=True)
            time.sleep(60)

trainer([NormTheory(probe=16)], max_epochs=9, default_root_dir=".").fit(Slow("wn"), loader())
"""


@pytest.mark.slow
def test_a_killed_run_is_reported_to_its_last_epoch(here, capsys):
    environment = {"PYTHONPATH": os.environ["PYTHONPATH"], "PATH": "/usr/bin:/bin"}
    child = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True, env=environment)
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    (history,) = find_runs(["."])
    assert [row.epoch for row in history.rows] == [0, 1, 2]
    assert main(["report", "."]) == 0
    assert (here / "report.html").exists()
    assert main(["report", "--text", "."]) == 0
    assert ", 3 epochs" in capsys.readouterr().out
