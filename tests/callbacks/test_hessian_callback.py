"""`HessianTopEigenvalue`: logged metrics, warm starts, arguments, memory."""

import gc
import math
import warnings

import pytest
import torch
from torch import nn

from lightning_normtheory import hessian_top_eigenvalue
from lightning_normtheory.callbacks import HessianTopEigenvalue, NormTheory, Probe

from support.hessian_fits import LAMBDA, Descent
from support.lit import fit, loader, rows, tensors, trainer


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


def test_lanczos_keeps_five_bytes_per_parameter(tmp_path):
    run = trainer([HessianTopEigenvalue(method="lanczos", on_error="raise")], max_epochs=1)
    module = Descent()
    run.fit(module, loader())
    run.save_checkpoint(tmp_path / "one.ckpt")
    callbacks = torch.load(tmp_path / "one.ckpt", weights_only=True)["callbacks"]
    (state,) = [value for key, value in callbacks.items() if key.startswith("HessianTopEigenvalue")]
    vector = state["diagnostics"]["hessian_lambda_max"]["vectors"]
    assert {name: (v.shape, v.dtype) for name, v in vector.items()} == {
        name: ((5, *p.shape), torch.uint8) for name, p in module.named_parameters()
    }


def resume(tmp_path, module, **arguments):
    callback = HessianTopEigenvalue(on_error="raise", **arguments)
    first = trainer([callback], max_epochs=2, default_root_dir=tmp_path / "first")
    first.fit(Descent(), loader(shuffle=False))
    first.save_checkpoint(tmp_path / "two.ckpt")
    callback = HessianTopEigenvalue(on_error="raise", **arguments)
    second = trainer([callback], max_epochs=4, default_root_dir=tmp_path / "second")
    second.fit(module, loader(shuffle=False), ckpt_path=tmp_path / "two.ckpt")
    return rows(tmp_path / "second")


@pytest.mark.parametrize("method", ["power", "lanczos"])
def test_a_resumed_run_gives_the_numbers_and_the_products_of_an_uninterrupted_one(tmp_path, method):
    callback = HessianTopEigenvalue(method=method, on_error="raise")
    whole = fit(callback, Descent(), epochs=4, default_root_dir=tmp_path / "whole")
    resumed = resume(tmp_path, Descent(), method=method)
    for epoch in (2, 3):
        expected = {name: value for name, value in whole[epoch].items() if "seconds" not in name}
        assert {name: value for name, value in resumed[epoch].items() if "seconds" not in name} == expected


@pytest.mark.parametrize("method", ["power", "lanczos"])
def test_parameters_that_are_frozen_on_the_way(tmp_path, method):
    """The last vector covers all remaining parameters; new ones start from the gradient and noise."""

    class Thaws(Descent):
        def on_train_epoch_start(self):
            self.net[0].requires_grad_(self.current_epoch % 2 == 1)

    measured = fit(HessianTopEigenvalue(method=method, on_error="raise"), Thaws("plain"), epochs=4)
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


# --- Arguments and memory ---------------------------------------------------------------------------------------------


def test_a_loss_without_a_graph_is_found_at_the_start():
    callback = HessianTopEigenvalue(loss=lambda module, batch: module(batch[0]).mean().detach())
    with pytest.raises(ValueError, match=r"passed as loss= failed on a probe batch.*no graph. Look for detach\(\)"):
        fit(callback, Descent())


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
