"""A run as its file tells it."""

import json

import pytest

from lightning_normtheory.callbacks import ConvergenceCertificate, MinWeightNorm, NormTheory, RSCRatio
from lightning_normtheory.callbacks.output import run_file
from lightning_normtheory.callbacks.output.fit_end import layers
from lightning_normtheory.record import jsonl
from lightning_normtheory.record.history import History, on_one_axis, read_histories

from support.lit import Classifier, loader, trainer


def line(epoch, **metrics):
    named = {f"normtheory/{name}": value for name, value in metrics.items()}
    return {"epoch": epoch, "step": 10 * epoch, "time": 0.5, "metrics": named, "user_metrics": {}}


def head(**settings):
    return {"run": "demo/1", "versions": {"torch": "2"}, "settings": {"prefix": "normtheory", **settings}}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "normtheory.jsonl"


def test_every_callback_has_its_header_and_rows_of_an_epoch_are_one(tmp_path, path):
    callbacks = [MinWeightNorm(), RSCRatio(probe=20), ConvergenceCertificate(probe=30)]
    run = trainer(callbacks, default_root_dir=tmp_path, max_epochs=3)
    run.fit(Classifier("wn"), loader())
    (history,) = read_histories(run_file.folder(run) / "normtheory.jsonl")
    assert [settings["callback"] for settings in history.settings] == [
        "MinWeightNorm",
        "RSCRatio",
        "ConvergenceCertificate",
    ]
    assert [settings["probe"] for settings in history.settings][1:] == [20, 30]
    assert [row.epoch for row in history.rows] == [0, 1, 2]
    assert all(
        {"min_weight_norm", "rsc_ratio", "certificate_rate_measured"} <= row.metrics.keys() for row in history.rows
    )
    assert {status.verdict for status in history.theorems}
    assert "train_loss" in history.rows[0].users
    assert not any(name.startswith("normtheory") for row in history.rows for name in row.users)


def test_two_prefixes_are_two_histories(tmp_path):
    callbacks = [RSCRatio(probe=20), RSCRatio(probe=40, prefix="more")]
    run = trainer(callbacks, default_root_dir=tmp_path, max_epochs=1)
    run.fit(Classifier("wn"), loader())
    first, second = read_histories(run_file.folder(run) / "normtheory.jsonl")
    assert (first.prefix, second.prefix) == ("normtheory", "more")
    assert first.settings[0]["probe"] == 20
    assert second.settings[0]["probe"] == 40
    assert first.last("loss") != second.last("loss")


def test_a_header_is_written_once_and_again_when_it_changes(path):
    for epoch in range(3):
        jsonl.append(path, head(probe=8), line(epoch), first=epoch == 0)
    jsonl.append(path, head(probe=8), line(3))  # a resumed run
    jsonl.append(path, head(probe=16), line(4))  # and one with other settings
    kinds = ["schema" if "schema" in json.loads(text) else "row" for text in path.read_text().splitlines()]
    assert kinds == ["schema", "row", "row", "row", "row", "schema", "row"]
    (history,) = read_histories(path)
    assert history.settings == [head(probe=16)["settings"]]


def test_a_file_that_was_deleted_begins_with_a_header_again(path):
    jsonl.append(path, head(), line(0))
    path.unlink()
    jsonl.append(path, head(), line(1), first=False)
    assert "schema" in json.loads(path.read_text().splitlines()[0])


def test_a_row_that_a_kill_cut_short_is_lost_alone(path):
    jsonl.append(path, head(), line(0, loss=1.0))
    jsonl.append(path, head(), line(1, loss=0.5))
    path.write_bytes(path.read_bytes()[:-20])
    assert read_histories(path)[0].series("loss") == {0: 1.0}
    jsonl.append(path, head(), line(1, loss=0.25))
    assert read_histories(path)[0].series("loss") == {0: 1.0, 1: 0.25}


def test_the_last_value_of_an_epoch_counts(path):
    for value in (1.0, 2.0):
        jsonl.append(path, head(), line(0, loss=value))
    assert read_histories(path)[0].series("loss") == {0: 2.0}
    assert read_histories(path)[0].last("loss") == 2.0


def step_line(step, prefix="normtheory", epoch=0, **metrics):
    named = {f"{prefix}/{name}": value for name, value in metrics.items()}
    return {"epoch": epoch, "step": step, "time": 0.5, "metrics": named, "user_metrics": {"train_loss": step / 10}}


def by_steps(**settings):
    return {**head(**settings), "axis": "step", "max_steps": 400, "max_epochs": -1}


def test_a_run_by_steps_has_a_row_for_each_step(path):
    for step in (100, 200, 300):
        jsonl.append(path, by_steps(), step_line(step, loss=1 / step, seconds=1.0))
        jsonl.append(path, by_steps(callback="Other"), step_line(step, rsc_ratio=2.0, seconds=2.0))
    (history,) = read_histories(path)
    assert (history.axis, history.max_steps, history.max_epochs) == ("step", 400, None)
    assert history.positions == [100, 200, 300]
    assert history.series("loss") == {step: 1 / step for step in history.positions}
    assert history.series("seconds") == dict.fromkeys(history.positions, 3.0)
    assert history.series("users/train_loss") == {100: 10.0, 200: 20.0, 300: 30.0}


def test_a_file_of_an_older_version_is_by_epochs(path):
    jsonl.append(path, head(), line(3, loss=1.0))
    (history,) = read_histories(path)
    assert (history.axis, history.max_steps, history.positions) == ("epoch", None, [3])


def test_the_steps_that_a_resumed_run_repeats_replace_those_of_the_run_before(path):
    for step in (100, 200, 300, 400):
        jsonl.append(path, by_steps(every_n_steps=100), step_line(step, loss=1.0, seconds=1.0))
        jsonl.append(path, by_steps(callback="Gone"), step_line(step, rsc_ratio=1.0, seconds=5.0))
    for step in (200, 250):  # from a checkpoint of step 150, with another schedule and without a callback
        jsonl.append(path, by_steps(every_n_steps=50), step_line(step, loss=2.0, seconds=2.0))
    (history,) = read_histories(path)
    assert history.series("loss") == {100: 1.0, 200: 2.0, 250: 2.0}
    assert history.series("rsc_ratio") == {100: 1.0}
    assert history.series("seconds") == {100: 6.0, 200: 2.0, 250: 2.0}


def test_a_row_without_its_step_harms_no_row_by_steps(path):
    jsonl.append(path, by_steps(), step_line(100, loss=1.0))
    with path.open("a") as file:
        file.write('{"epoch": 0}\n{"epoch": 0, "step": "x"}\n')
    assert read_histories(path)[0].series("loss") == {100: 1.0}


def test_callbacks_of_one_prefix_by_epochs_and_by_steps_are_a_run_by_steps(path):
    for epoch in (0, 1):
        for step in (epoch * 200 + 100, epoch * 200 + 200):
            jsonl.append(path, by_steps(callback="A"), step_line(step, epoch=epoch, loss=1.0))
        jsonl.append(path, head(callback="B"), step_line(epoch * 200 + 200, epoch=epoch, rsc_ratio=2.0))
    (history,) = read_histories(path)
    assert list(history.series("loss")) == [100, 200, 300, 400]
    assert list(history.series("rsc_ratio")) == [200, 400]


def test_each_prefix_of_a_file_has_its_own_axis(path):
    for epoch in (0, 1):
        for step in (epoch * 200 + 100, epoch * 200 + 200):
            jsonl.append(path, by_steps(), step_line(step, epoch=epoch, loss=1.0))
        jsonl.append(path, head(prefix="more"), step_line(epoch * 200 + 200, "more", epoch=epoch, loss=2.0))
    first, second = read_histories(path)
    assert list(first.series("loss")) == [100, 200, 300, 400]
    assert second.series("loss") == {0: 2.0, 1: 2.0}
    assert [list(run.series("loss")) for run in on_one_axis([first, second])] == [[100, 200, 300, 400], [200, 400]]


def test_epochs_without_a_step_are_one_row_among_runs_by_steps(path, tmp_path):
    for epoch in (0, 1, 2):
        jsonl.append(path, head(), {**line(epoch, loss=1.0 + epoch), "step": 0})
    jsonl.append(tmp_path / "steps", by_steps(), step_line(100, loss=1.0))
    still, _ = on_one_axis([*read_histories(path), *read_histories(tmp_path / "steps")])
    assert still.series("loss") == {0: 3.0}


def test_a_reason_is_replaced_when_its_metric_is_measured_again(path):
    why = {"normtheory/rsc_ratio": "the loss is below zero", "other/rsc_ratio": "no memory"}
    row = {**line(0, rsc_ratio=float("nan")), "reasons": why}
    jsonl.append(path, head(), row)
    jsonl.append(path, head(), {**line(1, loss=1.0), "reasons": {"normtheory/ntk_lambda_min": "left out"}})
    (history,) = read_histories(path)
    assert history.rows[0].reasons == {"rsc_ratio": "the loss is below zero"}
    assert [history.reason(name) for name in ("rsc_ratio", "ntk_lambda_min", "ntk_change")] == [
        "the loss is below zero",
        "left out",
        "left out",
    ]
    jsonl.append(path, head(), line(0, rsc_ratio=2.0))  # a resumed run
    (history,) = read_histories(path)
    assert not history.rows[0].reasons
    assert not history.reason("rsc_ratio")


def test_a_reason_is_told_for_the_epochs_asked_for(path):
    for epoch, why in enumerate(("the loss is below zero", "the loss is below zero", "no memory")):
        jsonl.append(path, head(), {**line(epoch, rsc_ratio=float("nan")), "reasons": {"normtheory/rsc_ratio": why}})
    (history,) = read_histories(path)
    assert history.reason("rsc_ratio") == "the loss is below zero; then no memory"
    assert history.reason("rsc_ratio", since=2) == "no memory"


def test_what_was_measured_and_on_how_many_samples(path):
    measured = {"loss": "training_step", "predictor": "forward", "parameters": "all"}
    header = {**head(callback="NormTheory", probe=512, ntk_samples=128), "samples": 90, "measured": measured}
    jsonl.append(path, header, line(0, ntk_samples=90.0))
    (history,) = read_histories(path)
    assert history.measured == measured
    (used,) = history.used_settings
    assert (used["probe"], used["ntk_samples"]) == ("90 (512 asked for)", "90 (128 asked for)")


def test_lines_of_something_else_are_passed_over(path):
    path.write_text('[1, 2]\n"text"\n17\nnot json\n')
    jsonl.append(path, head(), line(0, loss=1.0))
    assert read_histories(path)[0].series("loss") == {0: 1.0}


def test_another_file_is_refused(path):
    path.write_text('{"a": 1}\n')
    with pytest.raises(ValueError, match=r"Expected the normtheory\.jsonl of a run"):
        read_histories(path)


def test_a_layer_is_a_row(tmp_path):
    run = trainer([NormTheory(probe=16)], default_root_dir=tmp_path, max_epochs=1)
    run.fit(Classifier("wn"), loader())
    (history,) = read_histories(run_file.folder(run) / "normtheory.jsonl")
    found = layers(history)
    assert set(found["net_0"]) >= {"weight_norm", "ntk_share", "ntk_direction_share", "ntk_length_share"}
    assert found["net_0"]["weight_norm"] == history.last("min_weight_norm")


def test_a_history_of_nothing(path):
    empty = History(path, "demo", "normtheory")
    assert empty.names() == []
    assert empty.series("loss") == {}


def test_what_several_callbacks_took_is_the_sum_and_a_repetition_is_not_added(path):
    for value in (1.0, 2.0):  # the second time after a resume
        jsonl.append(path, head(), line(0, rsc_ratio=1.0, seconds=value))
        jsonl.append(path, head(), line(0, min_weight_norm=1.0, seconds=10 * value))
    assert read_histories(path)[0].last("seconds") == 22.0


@pytest.mark.parametrize(
    "row",
    [
        '{"epoch": 0}',
        '{"epoch": 1, "metrics": {"normtheory/loss": null}}',
        '{"epoch": "x"}',
        '{"epoch": 1, "metrics": 3}',
    ],
)
def test_a_row_of_another_form_harms_no_other(path, row):
    jsonl.append(path, head(), line(0, loss=1.0))
    with path.open("a") as file:
        file.write(row + "\n")
    jsonl.append(path, head(), line(2, loss=0.5))
    assert read_histories(path)[0].series("loss") == {0: 1.0, 2: 0.5}


@pytest.mark.parametrize("name", ["config.yaml", "source.txt"])
@pytest.mark.parametrize("content", [b"a: &a {b: *a}", b"\xff\xfe", None], ids=["endless", "not UTF-8", "a folder"])
def test_files_next_to_a_run_that_cannot_be_read_do_not_hide_it(tmp_path, name, content):
    path = tmp_path / "normtheory.jsonl"
    jsonl.append(path, {"settings": {"prefix": "normtheory"}}, {"epoch": 0, "metrics": {"normtheory/loss": 0.5}})
    if content is None:
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).write_bytes(content)
    (history,) = read_histories(path)
    assert history.series("loss") == {0: 0.5}
