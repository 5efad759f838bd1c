"""Sweeps: nothing is lost, repeated or left behind, whatever stops them."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from lightning_normtheory.recipes import attempt, lifeline, registry, wandb_sweep
from lightning_normtheory.recipes.cli import main
from lightning_normtheory.recipes.grid import complete, parse, points
from lightning_normtheory.recipes.planned_run import fingerprint, plan
from lightning_normtheory.recipes.recipe import Recipe
from lightning_normtheory.recipes.sweep import sweep
from lightning_normtheory.recipes.sweep_lock import lock

COMMAND = [str(Path(sys.executable).with_name("normtheory"))]

linux = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="asks /proc which processes are alive")

# A run that takes no time: --do says what becomes of it.
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
    """Sweeps in this process run the stand-in, and draw nothing."""
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    start = [sys.executable, "-S", str(script), lifeline.__file__]
    monkeypatch.setattr(attempt, "command", lambda arguments, output: [*start, *arguments, f"--output={output}"])
    drawn = []
    monkeypatch.setattr(
        "lightning_normtheory.recipes.sweep._draw", lambda name, finished, folder: drawn.append(finished) or True
    )
    return drawn


def place(*options):
    """The folder of the sweeps of quickstart with these options."""
    return Path("out", "sweeps", f"quickstart-{fingerprint(['quickstart', *options])}")


def folders(output="out"):
    return {path.name[:-9]: path for path in Path(output, "sweeps").glob("quickstart-????????/*=*_????????")}


def marks(output="out"):
    """What would be another after a repetition."""
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
    """The processes there, but for this one."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if Path(os.readlink(path / "cwd")) == folder and int(path.name) != os.getpid():
                found.append(path.name)
    return found


def environment(name, output="out"):
    return json.loads(next(folders(output)[name].rglob("environment")).read_text())


# --- the grid ---------------------------------------------------------------------------------------------------------


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
        (["a="], "empty value"),
        (["a=1,,2"], "empty value"),
        (["a=1,2,"], "empty value"),
        (["a=1,2,1"], "'1' comes twice"),
        (["a=1", "a=2"], "has a twice"),
        (["a=[1,2"], "The ] that closes"),
        (["a=1],2"], "nothing opens"),
        (["a=[1}"], "nothing opens"),
        (["a='x,y"], "The ' that closes"),
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


# --- names ------------------------------------------------------------------------------------------------------------


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


# --- sweeps of the stand-in -------------------------------------------------------------------------------------------


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
    monkeypatch.setattr("lightning_normtheory.recipes.sweep._cores", lambda: 7)
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
    assert "4 of 5 runs failed. The figure is of the others." in err
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
    assert "1 of 2 runs are finished. The same command goes on" in capsys.readouterr().err
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


@linux
def test_a_run_does_not_outlive_a_killed_sweep(child, tmp_path, capsys):
    """With the processes that the run itself has started."""
    driver = tmp_path / "driver.py"
    driver.write_text(f"""
import sys
from lightning_normtheory.recipes import attempt
from lightning_normtheory.recipes.sweep import sweep
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


# --- W&B --------------------------------------------------------------------------------------------------------------


def expanded(path, **chosen):
    """The command that W&B's agent starts."""
    from wandb import wandb_agent

    config = yaml.safe_load(Path(path).read_text())
    with mock.patch.dict(os.environ), mock.patch.object(wandb_agent, "AgentProcess") as process:
        agent = wandb_agent.Agent(mock.Mock(), mock.Mock(), sweep_id="s")
        agent._sweep_command = config["command"]
        given = {name: {"value": value} for name, value in chosen.items()}
        agent._command_run({"type": "run", "run_id": "1", "program": config["program"], "args": given})
    return process.call_args.kwargs["command"]


def test_the_grid_as_a_sweep_of_wandb(capsys):
    grid = parse(["model.width=8,16", "model.lr=1e-3", "trainer.barebones=true,false", "trainer.callbacks=[],null"])
    wandb_sweep.write("w.yaml", "quickstart", grid, 2, ["--trainer.max_epochs=1", "--data.limit", "100"])
    text = Path("w.yaml").read_text()
    assert text.startswith("# wandb sweep w.yaml\n# wandb agent ID")
    config = yaml.safe_load(text)
    assert config["method"] == "grid"
    assert config["project"] == "quickstart"
    assert {option: value["values"] for option, value in config["parameters"].items()} == {
        "model.width": [8, 16],
        "model.lr": [0.001],
        "trainer.barebones": [True, False],
        "trainer.callbacks": ["[]", "null"],
        "seed_everything": [0, 1],
    }
    last = {option: value["values"][-1] for option, value in config["parameters"].items()}
    for chosen in (last, {**last, "trainer.barebones": True, "trainer.callbacks": "[]"}):
        program, *arguments = expanded("w.yaml", **chosen)
        assert program == "normtheory"
        with pytest.raises(SystemExit) as caught:
            main([*arguments, "--print_config"])
        assert caught.value.code in (0, None)
        read = yaml.safe_load(capsys.readouterr().out)
        assert read["seed_everything"] == 1
        assert read["model"]["init_args"] | {"width": 16, "lr": 0.001} == read["model"]["init_args"]
        assert read["trainer"]["max_epochs"] == 1
        assert read["trainer"]["barebones"] is chosen["trainer.barebones"]
        assert read["trainer"]["callbacks"] == yaml.safe_load(chosen["trainer.callbacks"])
        assert read["data"]["init_args"]["limit"] == 100


# --- the command ------------------------------------------------------------------------------------------------------


@linux
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
    assert "max_epochs=1" in (folders()["model.width=8_seed=0"] / "command.txt").read_text()
