"""The table printed at the end of a fit."""

import warnings

import pytest

from lightning_normtheory.callbacks import ConvergenceCertificate, MinWeightNorm, NormTheory, RSCRatio
from lightning_normtheory.callbacks.output import fit_end

from support.lit import Classifier, loader, trainer


@pytest.fixture
def said(monkeypatch):
    """The tables, which begin with an empty line."""
    tables = []

    def hear(text):
        if text.startswith("\n"):
            tables.append(text)

    monkeypatch.setattr("lightning_normtheory.callbacks.output.messages.rank_zero_info", hear)
    return tables


def test_the_last_callback_speaks_for_all(tmp_path, said):
    run = trainer([MinWeightNorm(), RSCRatio(probe=16)], default_root_dir=tmp_path, max_epochs=2)
    run.fit(Classifier("wn"), loader())
    (table,) = said
    assert "w_min" in table
    assert "R" in table


def test_who_stops_a_run_sees_how_far_it_came(tmp_path, said):
    class Stopped(Classifier):
        def on_train_epoch_start(self):
            if self.current_epoch == 2:
                raise KeyboardInterrupt

    run = trainer([RSCRatio(probe=16)], default_root_dir=tmp_path, max_epochs=5)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        run.fit(Stopped("wn"), loader())
    assert "2 epochs measured" in said[0]


def test_a_run_that_fails_has_no_table(tmp_path, said):
    class Failing(Classifier):
        def on_train_epoch_start(self):
            if self.current_epoch == 1:
                raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        trainer([RSCRatio(probe=16)], default_root_dir=tmp_path, max_epochs=5).fit(Failing("wn"), loader())
    assert not said


@pytest.mark.parametrize("net", ["wn", "plain"])
def test_a_trial_run_says_no_more_than_its_table(tmp_path, monkeypatch, said, capfd, net):
    monkeypatch.setattr("lightning_normtheory.callbacks.output.messages.rank_zero_info", said.append)

    def fit(callbacks):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer(callbacks, default_root_dir=tmp_path, fast_dev_run=True).fit(Classifier(net), loader(), loader(8))
        return {str(each.message) for each in caught}, capfd.readouterr()

    assert fit([]) == fit([NormTheory(probe=16)])
    (table,) = said
    assert table.startswith("\nnormtheory: 1 epoch measured")
    assert ("– w_min: Expected layers with WeightNorm" in table) == (net == "plain")
    assert not list(tmp_path.rglob("*"))


def test_warnings_return_after_a_trial_run(tmp_path):
    trainer([NormTheory(probe=16)], default_root_dir=tmp_path, fast_dev_run=True).fit(Classifier("plain"), loader())
    with pytest.warns(UserWarning, match="leaves out min_weight_norm"):
        trainer([NormTheory(probe=16)], default_root_dir=tmp_path, max_epochs=1).fit(Classifier("plain"), loader())


def test_a_table_that_fails_does_not_fail_the_run(tmp_path, monkeypatch):
    def broken(history):
        raise ZeroDivisionError("in the table")

    monkeypatch.setattr(fit_end, "end_table", broken)
    run = trainer([RSCRatio(probe=16)], default_root_dir=tmp_path, max_epochs=1)
    with pytest.warns(UserWarning, match="table at the end could not be printed.*ZeroDivisionError: in the table"):
        run.fit(Classifier("wn"), loader())
    assert run.state.finished
    with pytest.raises(ZeroDivisionError):
        trainer([RSCRatio(probe=16, on_error="raise")], default_root_dir=tmp_path, max_epochs=1).fit(
            Classifier("wn"), loader()
        )


def test_a_file_that_cannot_be_read_does_not_fail_the_run(tmp_path):
    class Vandal(Classifier):
        def on_train_end(self):
            (path,) = tmp_path.rglob("normtheory.jsonl")
            path.write_text("nothing\n")

    run = trainer([NormTheory(probe=16)], default_root_dir=tmp_path, max_epochs=1)
    with pytest.warns(UserWarning, match="table at the end could not be printed"):
        run.fit(Vandal("wn"), loader())


def test_what_wandb_refuses_does_not_take_the_table_away(tmp_path, monkeypatch, said):
    def refuse(*args, **kwargs):
        raise ConnectionError("no W&B")

    monkeypatch.setattr("lightning_normtheory.callbacks.output.wandb.log_layer_table", refuse)
    callbacks = [RSCRatio(probe=16), RSCRatio(probe=16, prefix="more")]
    with pytest.warns(UserWarning, match="table of the layers could not be logged to W&B.*no W&B"):
        trainer(callbacks, default_root_dir=tmp_path, max_epochs=1).fit(Classifier("wn"), loader())
    assert len(said) == 2


def test_a_bar_that_cannot_print_costs_no_measurement(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr("lightning_normtheory.callbacks.output.messages.rank_zero_info", said.append)

    def broken(run):
        raise OSError("no terminal")

    monkeypatch.setattr("lightning_normtheory.callbacks.output.messages.bar_kind", broken)
    callback = ConvergenceCertificate(probe=16, on_error="raise")
    run = trainer([callback], default_root_dir=tmp_path, max_epochs=1)
    run.fit(Classifier("plain"), loader())
    assert any("WN, Theorem 5.1" in text for text in said)
    assert {"normtheory/rho_1", "normtheory/certificate_rate_measured"} <= run.callback_metrics.keys()
