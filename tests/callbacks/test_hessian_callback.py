"""`HessianTopEigenvalue`: logged metrics, warm starts, arguments, memory."""

import gc
import math
import warnings

import pytest
import torch
from torch import nn

from lightning_normtheory import hessian_top_eigenvalue, predictor_hessian_norm
from lightning_normtheory.callbacks import DiagnosticCallback, HessianTopEigenvalue, NormTheory, Probe
from lightning_normtheory.callbacks.engine.diagnostic import Diagnostic
from lightning_normtheory.callbacks.measurement.curvature import HessianRequest

from support.batch_statistics import inputs_of, with_statistics_of
from support.lit import Classifier, loader, rows, tensors, trainer

LAMBDA = "normtheory/hessian_lambda_max"


class Descent(Classifier):
    """Trains with SGD, whose edge of stability is known."""

    def __init__(self, net="wn", optimizer=None, **options):
        torch.manual_seed(0)
        super().__init__(net)
        self.optimizer = optimizer or (lambda module: torch.optim.SGD(module.parameters(), **{"lr": 0.1, **options}))

    def configure_optimizers(self):
        return self.optimizer(self)


def fit(callback, module, epochs=2, data=None, **options):
    run = trainer([callback], max_epochs=epochs, **options)
    run.fit(module, data or loader(shuffle=False))
    return rows(run.default_root_dir)


def probe_batches(n=50, batch_size=8):
    """Return the dataset in batches; the probe has it in a different order, on which a mean does not depend."""
    x, y = tensors(n)
    return list(zip(x.split(batch_size), y.split(batch_size)))


@pytest.mark.parametrize("method", ["power", "lanczos"])
@pytest.mark.parametrize("net", ["wn", "wn-hook", "plain"])
def test_logged_numbers_are_those_of_the_theory_floor(net, method):
    module = Descent(net)
    measured = fit(HessianTopEigenvalue(method=method, tol=1e-3, on_error="raise"), module)[1]
    exact = hessian_top_eigenvalue(
        module.net.double(),
        nn.functional.cross_entropy,
        [(x.double(), y) for x, y in probe_batches()],
        method="lanczos",
    )
    assert measured[LAMBDA] == pytest.approx(exact.value, rel=1e-4)
    assert measured[f"{LAMBDA}_residual"] <= 1e-3 * measured[LAMBDA]
    assert measured[f"{LAMBDA}_converged"] == 1.0
    assert measured[f"{LAMBDA}_hvps"] >= 1
    assert measured[f"{LAMBDA}_seconds"] > 0


@pytest.mark.parametrize("batch_stats", [True, False])
def test_batch_statistics(batch_stats):
    module = Descent("bn")
    callback = HessianTopEigenvalue(tol=1e-3, batch_stats=batch_stats, on_error="raise")
    measured = fit(callback, module, data=loader(48, 48, shuffle=False))[1]
    exact = hessian_top_eigenvalue(
        module.net, nn.functional.cross_entropy, probe_batches(48, 48), tol=1e-3, batch_stats=batch_stats
    )
    assert measured[LAMBDA] == pytest.approx(exact.value, rel=1e-3)


def test_low_memory_and_norm_theory_log_the_same(tmp_path):
    folders = {name: tmp_path / name for name in ("high", "low", "all")}
    high = fit(HessianTopEigenvalue(on_error="raise"), Descent(), default_root_dir=folders["high"])
    low = fit(HessianTopEigenvalue(memory="low", on_error="raise"), Descent(), default_root_dir=folders["low"])
    everything = fit(NormTheory(on_error="raise", hessian_method="power"), Descent(), default_root_dir=folders["all"])
    for epoch, row in high.items():
        for name, value in row.items():
            if "seconds" not in name:
                assert low[epoch][name] == pytest.approx(value, rel=1e-4), name
                assert everything[epoch][name] == value, name


# --- Warm start -------------------------------------------------------------------------------------------------------


def test_later_epochs_begin_with_the_last_vector():
    measured = fit(HessianTopEigenvalue(tol=1e-3, on_error="raise"), Descent(lr=1e-3), epochs=5)
    products = [row[f"{LAMBDA}_hvps"] for _, row in sorted(measured.items())]
    assert max(products[1:]) < products[0]


def test_the_vector_is_in_the_checkpoint_in_one_byte_per_parameter(tmp_path):
    run = trainer([HessianTopEigenvalue(on_error="raise")], max_epochs=1)
    module = Descent()
    run.fit(module, loader())
    run.save_checkpoint(tmp_path / "one.ckpt")
    callbacks = torch.load(tmp_path / "one.ckpt", weights_only=True)["callbacks"]
    (state,) = [value for key, value in callbacks.items() if key.startswith("HessianTopEigenvalue")]
    vector = state["diagnostics"]["hessian_lambda_max"]["vector"]
    assert {name: (v.shape, v.dtype) for name, v in vector.items()} == {
        name: (p.shape, torch.uint8) for name, p in module.named_parameters()
    }


def resume(tmp_path, module, **arguments):
    first = trainer([HessianTopEigenvalue(on_error="raise")], max_epochs=2, default_root_dir=tmp_path / "first")
    first.fit(Descent(), loader(shuffle=False))
    first.save_checkpoint(tmp_path / "two.ckpt")
    callback = HessianTopEigenvalue(on_error="raise", **arguments)
    second = trainer([callback], max_epochs=4, default_root_dir=tmp_path / "second")
    second.fit(module, loader(shuffle=False), ckpt_path=tmp_path / "two.ckpt")
    return rows(tmp_path / "second")


def test_a_resumed_run_gives_the_numbers_and_the_products_of_an_uninterrupted_one(tmp_path):
    whole = fit(HessianTopEigenvalue(on_error="raise"), Descent(), epochs=4, default_root_dir=tmp_path / "whole")
    resumed = resume(tmp_path, Descent())
    for epoch in (2, 3):
        expected = {name: value for name, value in whole[epoch].items() if "seconds" not in name}
        assert {name: value for name, value in resumed[epoch].items() if "seconds" not in name} == expected


def test_parameters_that_are_frozen_on_the_way(tmp_path):
    """The last vector covers all remaining parameters; new ones start from the gradient and noise."""

    class Thaws(Descent):
        def on_train_epoch_start(self):
            self.net[0].requires_grad_(self.current_epoch % 2 == 1)

    measured = fit(HessianTopEigenvalue(on_error="raise"), Thaws("plain"), epochs=4)
    assert all(row[f"{LAMBDA}_converged"] == 1.0 for row in measured.values())


def test_non_convergence_is_logged_and_said_once():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        measured = fit(HessianTopEigenvalue(tol=1e-6, max_hvps=2), Descent(), epochs=3)
    assert [row[f"{LAMBDA}_converged"] for row in measured.values()] == [0.0] * 3
    assert all(row[f"{LAMBDA}_residual"] > 1e-6 * row[LAMBDA] for row in measured.values())
    messages = [str(w.message) for w in caught if "not converged" in str(w.message)]
    assert len(messages) == 1
    assert "max_hvps=2 products" in messages[0]
    assert messages[0].endswith("Raise max_hvps, or use method='lanczos'.")


@pytest.mark.parametrize(
    ("method", "remedy"),
    [
        ("power", "Raise max_hvps, or use hessian_method='lanczos'."),
        ("lanczos", "Raise max_hvps or hessian_tol."),  # used to say "use method='lanczos'"
    ],
)
def test_non_convergence_names_the_arguments_of_norm_theory(method, remedy):
    with pytest.warns(UserWarning, match="not converged") as caught:
        fit(NormTheory(hessian_method=method, hessian_tol=1e-6, max_hvps=2), Descent(), epochs=1)
    (message,) = (str(each.message) for each in caught if "not converged" in str(each.message))
    assert "above hessian_tol=1e-06 times" in message
    assert message.endswith(remedy)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"hessian_method": "qr"}, "hessian_method to be one of 'power', 'lanczos', but got 'qr'"),
        ({"hessian_tol": 2.0}, "hessian_tol.*between 0 and 1, but got 2.0"),
        ({"ntk_outputs": "all"}, "ntk_outputs to be 'full', 'trace' or 'sum', but got 'all'"),
    ],
)
def test_bad_arguments_have_the_names_of_norm_theory(arguments, match):
    with pytest.raises(ValueError, match=f"Expected {match}"):
        NormTheory(**arguments)


# --- The edge of stability --------------------------------------------------------------------------------------------


def test_two_over_the_learning_rate_and_the_distance_to_it():
    row = fit(HessianTopEigenvalue(on_error="raise"), Descent(lr=0.1), epochs=1)[0]
    assert row["normtheory/hessian_edge"] == pytest.approx(20.0)
    assert row["normtheory/hessian_edge_distance"] == pytest.approx(20.0 - row[LAMBDA])
    assert "normtheory/hessian_stability_limit" not in row


def test_momentum_has_a_limit_of_its_own():
    row = fit(HessianTopEigenvalue(on_error="raise"), Descent(lr=0.1, momentum=0.9), epochs=1)[0]
    assert row["normtheory/hessian_edge"] == pytest.approx(20.0)
    assert row["normtheory/hessian_stability_limit"] == pytest.approx(38.0)
    assert row["normtheory/hessian_stability_limit_distance"] == pytest.approx(38.0 - row[LAMBDA])


def test_parameter_groups_have_an_edge_each():
    def groups(module):
        first, last = module.net[0].parameters(), module.net[2].parameters()
        return torch.optim.SGD([{"params": first, "name": "back.bone"}, {"params": last, "lr": 0.5}], lr=0.1)

    row = fit(HessianTopEigenvalue(on_error="raise"), Descent("plain", groups), epochs=1)[0]
    edges = {name.split("/")[1]: value for name, value in row.items() if "edge" in name}
    assert edges == {
        "hessian_edge": 4.0,
        "hessian_edge_distance": pytest.approx(4.0 - row[LAMBDA]),
        "hessian_edge__back_bone": 20.0,
        "hessian_edge_distance__back_bone": pytest.approx(20.0 - row[LAMBDA]),
        "hessian_edge__SGD1": 4.0,
        "hessian_edge_distance__SGD1": pytest.approx(4.0 - row[LAMBDA]),
    }


def test_the_edge_is_that_of_the_step_to_come():
    """Lightning has stepped the scheduler before: this is the rate of the next step from the measured weights."""

    def scheduled(module):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    measured = fit(HessianTopEigenvalue(on_error="raise"), Descent("wn", scheduled), epochs=3)
    assert [row["normtheory/hessian_edge"] for row in measured.values()] == pytest.approx([40.0, 80.0, 160.0])


def test_the_limit_is_the_smallest_of_all_groups():
    def groups(module):
        first, last = module.net[0].parameters(), module.net[2].parameters()
        return torch.optim.SGD([{"params": first, "weight_decay": 1e-4}, {"params": last, "lr": 0.5}], lr=0.1)

    row = fit(HessianTopEigenvalue(on_error="raise"), Descent("plain", groups), epochs=1)[0]
    assert row["normtheory/hessian_stability_limit"] == 4.0


def test_when_a_measurement_fails_nothing_of_the_last_one_stays():
    class Fails(Descent):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss * float("nan") if self.current_epoch == 1 else loss

    run = trainer([HessianTopEigenvalue()], max_epochs=2)
    with pytest.warns(UserWarning, match="finite loss"):
        run.fit(Fails(momentum=0.9), loader())
    ours = {name: float(value) for name, value in run.callback_metrics.items() if "hessian" in name}
    assert ours.pop("normtheory/hessian_edge") == pytest.approx(20.0)
    assert ours.pop("normtheory/hessian_stability_limit") == pytest.approx(38.0)
    assert "normtheory/hessian_stability_limit_distance" in ours
    assert all(math.isnan(value) for value in ours.values())


# --- The predictor ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("net", ["wn", "bn"])
def test_the_predictor_on_request(net):
    module = Descent(net)
    callback = HessianTopEigenvalue(tol=1e-3, predictor_samples=50, on_error="raise")
    row = fit(callback, module, epochs=1)[0]
    net = with_statistics_of(module.net.train(), inputs_of(callback.probe))
    expected = predictor_hessian_norm(net, tensors()[0], tol=1e-3).max()
    assert row["normtheory/predictor_hessian_norm"] == pytest.approx(float(expected), rel=1e-3)
    assert row["normtheory/predictor_hessian_norm_residual"] <= 1e-3 * row["normtheory/predictor_hessian_norm"]
    assert row["normtheory/predictor_hessian_norm_converged"] == 1.0


def test_the_predictor_of_dict_batches_on_some_samples():
    class Dicts(Descent):
        def training_step(self, batch, batch_idx):
            return nn.functional.cross_entropy(self(batch["x"]), batch["y"])

    def collate(samples):
        x, y = zip(*samples)
        return {"x": torch.stack(x), "y": torch.stack(y), "names": ["a"] * len(x)}

    module = Dicts("plain")
    callback = HessianTopEigenvalue(
        probe=20, predictor_samples=10, tol=1e-3, predict=lambda module, batch: module(batch["x"]), on_error="raise"
    )
    row = fit(callback, module, epochs=1, data=loader(20, collate_fn=collate, shuffle=False))[0]
    norms = predictor_hessian_norm(module.net, tensors(20)[0], tol=1e-3)
    assert float(norms.min()) <= row["normtheory/predictor_hessian_norm"] <= float(norms.max()) * (1 + 1e-3)


def test_nothing_of_the_predictor_without_a_request():
    row = fit(NormTheory(on_error="raise"), Descent(), epochs=1)[0]
    assert not any("predictor_hessian" in name for name in row)


def test_a_predictor_that_fails_leaves_the_eigenvalue_alone():
    class FailsLater:
        calls = 0

        def __call__(self, module, batch):
            self.calls += 1
            if self.calls > 1:
                raise RuntimeError("no such kernel")
            return module(batch[0])

    callback = HessianTopEigenvalue(predictor_samples=4, predict=FailsLater())
    with pytest.warns(UserWarning, match="predictor_hessian_norm failed and is logged as NaN.*no such kernel"):
        row = fit(callback, Descent(), epochs=1)[0]
    assert math.isfinite(row[LAMBDA])
    assert math.isnan(row["normtheory/predictor_hessian_norm"])
    assert math.isnan(row["normtheory/predictor_hessian_norm_converged"])


def test_the_eigenvalue_asks_for_no_outputs():
    class NoForward(Descent):
        def forward(self, first, second):
            raise NotImplementedError

        def training_step(self, batch, batch_idx):
            return nn.functional.cross_entropy(self.net(batch["x"]), batch["y"])

    def collate(samples):
        x, y = zip(*samples)
        return {"x": torch.stack(x), "y": torch.stack(y)}

    row = fit(HessianTopEigenvalue(on_error="raise"), NoForward(), epochs=1, data=loader(collate_fn=collate))[0]
    assert row[f"{LAMBDA}_converged"] == 1.0


def test_a_loss_without_a_graph_is_found_at_the_start():
    callback = HessianTopEigenvalue(loss=lambda module, batch: module(batch[0]).mean().detach())
    with pytest.raises(ValueError, match=r"passed as loss= failed on a probe batch.*no graph. Look for detach\(\)"):
        fit(callback, Descent())


# --- Arguments and memory ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"method": "qr"}, "method to be one of 'power', 'lanczos', but got 'qr'"),
        ({"tol": 2.0}, "tol.*between 0 and 1, but got 2.0"),
        ({"max_hvps": 0}, "max_hvps to be a positive integer, but got 0"),
        ({"memory": "some"}, "memory to be one of 'high', 'low', but got 'some'"),
        ({"predictor_samples": -1}, "predictor_samples to be a number of samples, 0 for none, but got -1"),
    ],
)
def test_bad_arguments_are_refused_when_the_callback_is_made(arguments, match):
    with pytest.raises(ValueError, match=match):
        HessianTopEigenvalue(**arguments)
    with pytest.raises(TypeError, match=r"no argument 'max_hvp'\. Did you mean 'max_hvps'?"):
        HessianTopEigenvalue(max_hvp=3)


def test_the_file_says_how_it_was_measured():
    from pathlib import Path

    from lightning_normtheory.record import jsonl

    fit(NormTheory(hessian_method="lanczos", max_hvps=7, on_error="raise"), Descent(), epochs=1)
    (path,) = Path().rglob("normtheory.jsonl")
    settings = next(iter(jsonl.read(path)))["settings"]
    assert (settings["hessian_method"], settings["hessian_tol"], settings["hessian_max_hvps"]) == ("lanczos", 1e-2, 7)


def test_an_operation_without_a_second_derivative_is_named_and_training_goes_on():
    class Bag(Descent):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.EmbeddingBag(10, 4), nn.Linear(4, 3))

    data = torch.utils.data.TensorDataset(torch.randint(0, 10, (20, 3)), torch.arange(20) % 3)
    with pytest.warns(UserWarning, match="hessian_lambda_max failed and is logged as NaN.*embedding_bag"):
        measured = fit(NormTheory(), Bag(), data=torch.utils.data.DataLoader(data, 5))
    for row in measured.values():
        assert math.isfinite(row["normtheory/rsc_ratio"])
        assert math.isnan(row[LAMBDA])
        assert math.isnan(row["normtheory/hessian_edge_distance"])
        assert row["normtheory/hessian_edge"] == pytest.approx(20.0)  # used to be NaN: it needs no Hessian


@pytest.mark.slow
def test_memory_after_fifty_epochs_is_that_after_five():
    """Count live tensors in Python; the benchmark measures the memory of the process."""
    counts = {}

    class Count(HessianTopEigenvalue):
        def on_train_epoch_end(self, trainer, pl_module):
            super().on_train_epoch_end(trainer, pl_module)
            if trainer.current_epoch not in (5, 20, 49):
                return
            gc.collect()
            live = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
            counts[trainer.current_epoch] = (len(live), sum(t.numel() for t in live))

    fit(Count(probe=Probe(24), predictor_samples=4, on_error="raise"), Descent("wn-hook"), epochs=50)
    assert counts[5] == counts[20] == counts[49]


# -- several quantities of one Hessian ---------------------------------------------------------------------------------


class Asking(Diagnostic):
    """Requests a quantity of the Hessian; can be told to fail."""

    metrics = ()

    def __init__(self, key, fails=False):
        self.key, self.fails, self.operators = key, fails, []

    def hessian_request(self):
        return HessianRequest(self.evaluate)

    def evaluate(self, hessian):
        self.operators.append(id(hessian.gradient))
        if self.fails:
            raise ValueError("on purpose")
        return float((hessian @ hessian.gradient).norm())

    def measure(self, measurement):
        answer = measurement.curvature.answer(self.key)
        assert measurement.curvature.answer(self.key) is answer
        return {self.key: answer.value}


def asked(*diagnostics):
    callback = DiagnosticCallback(probe=16)
    callback.make_diagnostics = lambda: list(diagnostics)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer([callback], max_epochs=1).fit(Classifier("wn"), loader())
    return rows()[0]


def test_requests_of_several_diagnostics_share_one_gradient_graph():
    first, second = Asking("first"), Asking("second")
    row = asked(first, second)
    assert row["normtheory/first"] == row["normtheory/second"] > 0
    assert first.operators == second.operators
    assert len(first.operators) == 1


@pytest.mark.parametrize("failing", [0, 1])
def test_a_request_that_fails_leaves_the_other_ones_their_answers(failing):
    row = asked(Asking("first", failing == 0), Asking("second", failing == 1))
    names = ["normtheory/first", "normtheory/second"]
    assert math.isfinite(row[names[1 - failing]])
    assert math.isnan(row.get(names[failing], math.nan))
