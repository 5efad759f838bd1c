"""Every file of `examples/` runs, prints its table and measures everything that its model has."""

import math
import runpy
from pathlib import Path

import pytest

from lightning_normtheory.record import jsonl

EXAMPLES = Path(__file__).parent.parent / "examples"
EVERYWHERE = {
    *("loss", "grad_norm_sq", "rsc_ratio", "mean_predictor_grad_norm_sq", "hessian_lambda_max", "hessian_edge"),
    *("ntk_lambda_min", "ntk_change", "min_weight_norm"),
}
SHARES = {"ntk_direction_share", "ntk_length_share"}
# What each file must log: the rows, the predictor that is found, and metrics that the others need not have.
EXPECTED = {
    "contrastive": {"normtheory": (3, "forward", {"batchnorm_epsilon"})},
    "dict_batch": {"normtheory": (3, "forward", {"batchnorm_epsilon"})},
    "finetuning": {"normtheory": (4, "forward", {"batchnorm_epsilon", "ntk_label_alignment"})},
    "gan": {"generator": (3, "forward", set()), "discriminator": (3, "discriminator", set())},
    "gan_vocoder": {"generator": (20, "forward", SHARES), "discriminator": (20, "discriminator", SHARES)},
    "graph_network": {"normtheory": (3, "forward", {"batchnorm_epsilon"})},
    "vae": {"normtheory": (3, "decoder", {"batchnorm_epsilon"})},
    "vocoder": {"normtheory": (3, "forward", SHARES)},
}
BY_STEPS = {"gan_vocoder": "measurements up to step 400"}
SLOW = ("gan_vocoder", "vae", "vocoder")


def test_every_example_is_listed_and_tested():
    files = {path.stem for path in EXAMPLES.glob("*.py")}
    assert files == EXPECTED.keys()
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert all(f"[{name}.py]({name}.py)" in listed for name in files)


@pytest.fixture(autouse=True)
def _examples_import_each_other(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)  # as python does with the folder of a script


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in EXPECTED])
def test_an_example_runs_and_measures(name, capsys):
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    printed = capsys.readouterr().out
    (path,) = Path().rglob("normtheory.jsonl")
    lines = list(jsonl.read(path))
    for prefix, (count, predictor, own) in EXPECTED[name].items():
        assert f"{prefix}: {count} {BY_STEPS.get(name, 'epochs measured')}" in printed
        (header,) = [line for line in lines if line.get("settings", {}).get("prefix") == prefix]
        assert predictor in header["measured"]["predictor"]
        rows = [line["metrics"] for line in lines if "metrics" in line and f"{prefix}/loss" in line["metrics"]]
        assert len(rows) == count
        last = {key.partition("/")[2]: value for key, value in rows[-1].items()}
        assert EVERYWHERE | own <= last.keys()
        assert [key for key in EVERYWHERE | own if not math.isfinite(last[key])] == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_steps_of_the_gan_vocoder_can_be_chosen():
    runpy.run_path(str(EXAMPLES / "gan_vocoder.py"))["main"](every_n_steps=150)
    (path,) = Path().rglob("normtheory.jsonl")
    rows = [(line["step"], min(line["metrics"]).split("/")[0]) for line in jsonl.read(path) if "metrics" in line]
    assert rows == [(step, player) for step in (150, 300) for player in ("generator", "discriminator")]
