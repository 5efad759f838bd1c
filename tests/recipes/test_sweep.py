"""Sweeps: nothing is lost, repeated or left behind, whatever stops them."""

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest

from lightning_normtheory.recipes import registry
from lightning_normtheory.recipes.recipe import Recipe
from lightning_normtheory.recipes.sweeps import attempt, lifeline
from lightning_normtheory.recipes.sweeps.lock import lock
from lightning_normtheory.recipes.sweeps.plan import fingerprint
from lightning_normtheory.recipes.sweeps.sweep import sweep

COMMAND = [str(Path(sys.executable).with_name("normtheory"))]

linux = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="asks /proc which processes are alive")

# A fake run that takes no time; --do selects its fate.
CHILD = """
import importlib.util, json, os, signal, subprocess, sys, time
from pathlib import Path

spec = importlib.util.spec_from_file_location("lifeline", sys.argv[1])
lifeline = importlib.util.module_from_spec(spec)
spec.loader.exec_module(lifeline)
lifeline.watch()

options = dict(argument[2:].split("=", 1) for argument in sys.argv if argument.startswith("--"))
folder = Path(options["output"], "project", "run")
folder.mkdir(parents=True)
(folder / "environment").write_text(json.dumps(dict(os.environ)))
do = options.get("do", "finish")
if do.startswith("hang"):
    worker = subprocess.Popen(["sleep", "600"])
    (folder / "pids").write_text(f"{os.getpid()} {worker.pid}")
    if do == "hang-and-stop-the-sweep":
        os.kill(os.getppid(), int(options["signal"]))
    time.sleep(600)
if do == "fail":
    print("a progress bar\\rthe reason")
    sys.exit(3)
if do == "fail-once" and not Path("tried").exists():
    Path("tried").touch()
    sys.exit(1)
if do == "crash":
    os.kill(os.getpid(), signal.SIGKILL)
if do != "measure-nothing":
    (folder / "normtheory.jsonl").write_text(str(os.getpid()))
"""


@pytest.fixture
def child(tmp_path, monkeypatch):
    """Let sweeps in this process start fake runs, and draw nothing."""
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    start = [sys.executable, "-S", str(script), lifeline.__file__]
    monkeypatch.setattr(attempt, "command", lambda arguments, output: [*start, *arguments, f"--output={output}"])
    drawn = []
    monkeypatch.setattr(
        "lightning_normtheory.recipes.sweeps.sweep._draw", lambda name, finished, folder: drawn.append(finished) or True
    )
    return drawn


def place(*options):
    """Return the folder of sweeps of quickstart with these options."""
    return Path("out", "sweeps", f"quickstart-{fingerprint(['quickstart', *options])}")


def folders(output="out"):
    return {path.name[:-9]: path for path in Path(output, "sweeps").glob("quickstart-????????/*=*_????????")}


def marks(output="out"):
    """Return inode and time of each run, which a repetition would change."""
    return {
        name: (path.stat().st_ino, next(path.rglob("normtheory.jsonl")).stat().st_mtime_ns)
        for name, path in folders(output).items()
    }


def wait(condition, process=None, seconds=300):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "timed out"
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(0.05)
    return found


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def at_work_in(folder):
    """List the processes with this working directory, except this one."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if Path(os.readlink(path / "cwd")) == folder and int(path.name) != os.getpid():
                found.append(path.name)
    return found


def environment(name, output="out"):
    return json.loads(next(folders(output)[name].rglob("environment")).read_text())


def test_every_point_and_seed_runs_once(child, capsys):
    assert sweep("quickstart", {"a": [1, 2]}, 2, 2, ["--b=x y"], "out") == 0
    out = capsys.readouterr().out
    assert set(folders()) == {"a=1_seed=0", "a=1_seed=1", "a=2_seed=0", "a=2_seed=1"}
    assert "[4/4]" in out
    assert "reused" not in out
    by_hand = (folders()["a=2_seed=1"] / "command.txt").read_text()
    assert by_hand.endswith(" normtheory run quickstart '--b=x y' --a=2 --seed_everything=1\n")
    assert not (place("--b=x y") / "unfinished").exists()
    assert len(child[0]) == 4

    before = marks()
    assert sweep("quickstart", {"a": ["2", "1", "3"]}, 2, 1, ["--b=x y"], "out") == 0
    assert capsys.readouterr().out.count("reused") == 4
    assert {name: mark for name, mark in marks().items() if "a=3" not in name} == before
    assert len(child[1]) == 6

    assert sweep("quickstart", {"a": ["1"]}, 1, 1, ["--b=z"], "out") == 0
    assert "reused" not in capsys.readouterr().out
    assert len(child[2]) == 1


def test_the_grid_and_the_seeds_of_the_recipe(child, monkeypatch):
    recipe = Recipe("", "", "", "overview", grid={"a": [True, None]}, seeds=2)
    monkeypatch.setattr(registry, "recipe", lambda name: recipe)
    assert sweep("quickstart", {}, None, 1, [], "out") == 0
    assert set(folders()) == {"a=true_seed=0", "a=true_seed=1", "a=null_seed=0", "a=null_seed=1"}


def test_runs_are_grouped_and_share_the_cores(child, monkeypatch):
    for variable in ("WANDB_MODE", "WANDB_RUN_GROUP", "WANDB_NAME", "OMP_NUM_THREADS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("lightning_normtheory.recipes.sweeps.sweep._cores", lambda: 7)
    sweep("quickstart", {"a": ["1"]}, 1, 3, [], "out")
    sweep("quickstart", {"a": ["2"]}, 1, 9, [], "out")
    sweep("quickstart", {"a": ["3"]}, 1, 1, ["--b=1"], "out")
    one, two, three = (environment(f"a={a}_seed=0") for a in (1, 2, 3))
    assert one["WANDB_MODE"] == "offline"
    assert one["WANDB_NAME"] == "a=1 seed=0"
    assert one["WANDB_RUN_GROUP"] == two["WANDB_RUN_GROUP"]
    assert one["WANDB_RUN_GROUP"].startswith("quickstart-")
    assert three["WANDB_RUN_GROUP"] != one["WANDB_RUN_GROUP"]
    assert (one["OMP_NUM_THREADS"], two["OMP_NUM_THREADS"]) == ("2", "1")
    assert "OMP_NUM_THREADS" not in three


def test_what_the_user_has_set_stays(child, monkeypatch):
    own = {"WANDB_MODE": "disabled", "WANDB_RUN_GROUP": "mine", "WANDB_NAME": "me", "OMP_NUM_THREADS": "5"}
    for variable, value in own.items():
        monkeypatch.setenv(variable, value)
    sweep("quickstart", {"a": ["1"]}, 1, 2, [], "out")
    assert own.items() <= environment("a=1_seed=0").items()


def test_a_failed_run_does_not_stop_the_others(child, capsys):
    grid = {"do": ["fail", "crash", "measure-nothing", "fail-once", "finish"]}
    assert sweep("quickstart", grid, 1, 2, [], "out") == 1
    out, err = capsys.readouterr()
    assert set(folders()) == {"do=finish_seed=0"}
    assert out.count("failed after") == 4
    assert "[5/5]" in out
    assert "    the reason\n" in err
    assert "4 of 5 runs failed. The figure shows the rest." in err
    for reason in ("exit code 3", "signal 9", "no normtheory.jsonl"):
        assert reason in err
    logs = {path.name.split("_")[0]: path for path in (place() / "failed").iterdir()}
    assert set(logs) == {"do=fail", "do=crash", "do=measure-nothing", "do=fail-once"}
    assert "the reason" in logs["do=fail"].read_text()
    assert str(logs["do=fail"]) in err

    assert sweep("quickstart", {"do": ["fail-once", "finish"]}, 1, 1, [], "out") == 0
    assert set(folders()) == {"do=finish_seed=0", "do=fail-once_seed=0"}
    assert not logs["do=fail-once"].exists()
    assert logs["do=fail"].exists()


def test_without_a_finished_run_there_is_no_figure(child, capsys):
    assert sweep("quickstart", {"do": ["fail"]}, 1, 1, [], "out") == 1
    assert child == []
    assert "There is no figure." in capsys.readouterr().err


@linux
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_sweep_ends_its_runs_and_says_how_to_go_on(child, capsys, number):
    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    pids = []

    def end(process, original=lifeline.end):
        pids.extend(pid for path in Path("out").rglob("pids") for pid in path.read_text().split())
        original(process)

    with mock.patch.object(lifeline, "end", end):
        grid = {"do": ["finish", "hang-and-stop-the-sweep"]}
        assert sweep("quickstart", grid, 1, 1, [f"--signal={int(number)}"], "out") == 128 + number
    assert len(pids) == 2
    wait(lambda: not any(alive(pid) for pid in pids))  # the orphan's new parent may take its time
    assert "1 of 2 runs are finished. Repeat the command to run the rest." in capsys.readouterr().err
    assert child == []
    assert set(folders()) == {"do=finish_seed=0"}
    assert not list(Path("out").rglob("unfinished"))
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == handlers


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("quikstart", {}, 1, 1, []), "Did you mean 'quickstart'?"),
        (("quickstart", {}, 1, 0, []), "at least one job, got 0"),
        (("quickstart", {}, 0, 1, []), "at least one seed"),
        (("quickstart", {"a": ["1"]}, 1, 1, ["--a", "1"]), "in the grid and among the options"),
    ],
)
def test_a_wrong_sweep_starts_nothing(child, capsys, arguments, message):
    assert sweep(*arguments, "out") == 2
    assert message in capsys.readouterr().err
    assert not Path("out").exists()


def test_one_sweep_at_a_time(child, capsys):
    with lock(place()):
        attempts = place() / "unfinished" / "x"
        attempts.mkdir(parents=True)
        assert sweep("quickstart", {}, 1, 1, [], "out") == 2
        assert attempts.exists()
        err = capsys.readouterr().err
        assert f"Another sweep (process {os.getpid()} on " in err
        assert "--output" in err
    assert sweep("quickstart", {"a": ["1"]}, 1, 1, [], "out") == 0
    assert not attempts.exists()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK])
def test_a_file_system_without_locks_does_not_stop_a_sweep(child, number):
    """Nor does the next sweep find a lock, as it would if a file's existence were the lock."""
    with mock.patch("fcntl.flock", side_effect=OSError(number, "no locks")):
        lock(place())
        assert sweep("quickstart", {"a": ["1"]}, 1, 1, [], "out") == 0


@linux
def test_a_run_does_not_outlive_a_killed_sweep(child, tmp_path, capsys):
    """Nor do the processes that the run has started."""
    driver = tmp_path / "driver.py"
    driver.write_text(f"""
import sys
from lightning_normtheory.recipes.sweeps import attempt
from lightning_normtheory.recipes.sweeps.sweep import sweep
start = {attempt.command([], "")[:-1]}
attempt.command = lambda arguments, output: [*start, *arguments, f"--output={{output}}"]
sys.exit(sweep("quickstart", {{"do": ["finish", "hang"]}}, 2, 2, [], "out"))
""")
    process = subprocess.Popen([sys.executable, str(driver)], stdout=subprocess.DEVNULL)
    try:
        # Not below the others, whose folders move while one looks.
        hanging = "sweeps/*/unfinished/do=hang*/**/pids"
        found = wait(lambda: len(found := list(Path("out").glob(hanging))) == 2 and found, process)
        pids = wait(lambda: len(pids := [pid for path in found for pid in path.read_text().split()]) == 4 and pids)
        assert all(alive(pid) for pid in pids)
        assert sweep("quickstart", {}, 1, 1, [], "out") == 2
        assert f"process {process.pid} on" in capsys.readouterr().err
    finally:
        process.kill()
        process.wait()
    wait(lambda: not any(alive(pid) for pid in pids))
    before = marks()
    assert set(before) == {"do=finish_seed=0", "do=finish_seed=1"}
    assert sweep("quickstart", {"do": ["finish"], "a": ["1"]}, 1, 1, [], "out") == 0
    assert before.items() <= marks().items()
    assert not list(Path("out").rglob("unfinished"))


@linux
@pytest.mark.slow
def test_a_killed_sweep_of_a_recipe_goes_on(tmp_path):
    callbacks = "[{class_path: lightning_normtheory.callbacks.RSCRatio, init_args: {probe: 64}}]"
    arguments = ["sweep", "quickstart", "--grid", "model.width=8,16", "--seeds", "1", "--output", "out"]
    options = ["--trainer.max_epochs=1", "--data.limit=100", "--trainer.logger=false"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    start = [*COMMAND, *arguments, *options, f"--trainer.callbacks={callbacks}"]
    process = subprocess.Popen(start, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    logs = "sweeps/quickstart-*/unfinished/model.width=16_seed=0_*/log.txt"
    try:
        wait(lambda: folders() and list(Path("out").glob(logs)), process)
        pids = wait(lambda: len(found := at_work_in(tmp_path)) == 2 and found, process)
    finally:
        process.kill()
        process.communicate()
    before = marks()
    assert set(before) == {"model.width=8_seed=0"}
    wait(lambda: not any(alive(pid) for pid in pids))
    assert not list(Path("out").glob("sweeps/quickstart-*/unfinished/**/normtheory.jsonl"))  # it did not run to its end
    done = subprocess.run(start, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "model.width=8 seed=0    reused" in done.stdout
    after = marks()
    assert set(after) == {"model.width=8_seed=0", "model.width=16_seed=0"}
    assert before.items() <= after.items()
    assert not list(Path("out").rglob("unfinished"))
    for ending in ("png", "svg", "csv", "txt"):
        (figure,) = Path("out").glob(f"sweeps/quickstart-*/quickstart.{ending}")
        assert f"{figure}\n" in done.stdout
        assert figure.stat().st_size > 0
    (report,) = Path("out").glob("sweeps/quickstart-*/report.html")
    assert f"2 runs: {report.resolve().as_uri()}\n" in done.stdout
    assert "max_epochs=1" in (folders()["model.width=8_seed=0"] / "command.txt").read_text()
