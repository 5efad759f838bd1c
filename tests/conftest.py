"""Shared settings of the tests."""

import importlib.util
import logging
import os
import shutil
import sys
import warnings

import pytest
import torch

import support  # noqa: F401  scripts of the tests find it through PYTHONPATH

if importlib.util.find_spec("lightning_normtheory") is None or not importlib.util.find_spec(
    "lightning_normtheory.callbacks"
):
    raise pytest.UsageError(
        "lightning_normtheory.callbacks cannot be imported: the folders callbacks/ and recipes/ are part of the package"
        ' only once it is installed. Run: pip install -e ".[test]"'
    )

# The models are tiny: a second thread costs more than it brings, also in the processes that tests start.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"
# Tests of the recipes never talk to a server, whatever the environment says.
os.environ["WANDB_MODE"] = "offline"
os.environ["WANDB_SILENT"] = "true"
os.environ.pop("WANDB_SERVICE", None)


@pytest.fixture(autouse=True)
def _end_wandb_service():
    """End the service that a test's W&B client started, and forget its address.

    Later tests and the processes they start would find the address in the environment. The service has the settings of
    the first test, and may be gone: ``monkeypatch`` puts back addresses that it removed.
    """
    yield
    if client := sys.modules.get("wandb"):
        client.finish()
        client.teardown()
    os.environ.pop("WANDB_SERVICE", None)


@pytest.fixture(autouse=True)
def _quiet(_end_wandb_service, tmp_path, monkeypatch):
    """Run every test in its own folder, without Lightning's advice about workers and logging intervals."""
    monkeypatch.chdir(tmp_path)
    for name in ("pytorch_lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*smaller than the logging interval.*")
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")


@pytest.fixture
def swept(monkeypatch):
    """Record calls of the sweep instead of running it."""
    calls = []
    monkeypatch.setattr(
        "lightning_normtheory.recipes.sweeps.sweep.sweep", lambda *arguments: calls.append(arguments) or 0
    )
    return calls


# -- the report in a browser: pytest -m browser ------------------------------------------------------------------------

CHROMIUM = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    place = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if place is None:
        pytest.fail("Expected Chromium on the PATH, but there is none: install it, on Debian with apt install chromium")
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=place, args=CHROMIUM)
        yield running
        running.close()


@pytest.fixture
def visit(browser):
    """Open a file in the browser; at the end, check for no console messages and no requests but for the file."""
    pages, complaints, requests = [], [], []

    def visit(path, width=1400, height=900, **context):
        page = browser.new_context(viewport={"width": width, "height": height}, **context).new_page()
        page.set_default_timeout(5000)
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(path.as_uri())
        pages.append((page, path))
        return page

    yield visit
    for page, _ in pages:
        page.context.close()
    assert complaints == []
    assert sorted(url for url in requests if url != "data:,") == sorted(path.as_uri() for _, path in pages)


@pytest.fixture
def one(tmp_path):
    """The page of one run, with numbers of every kind."""
    from support.view.report_cases import awkward_rows, report, write_run

    return report(tmp_path / "report.html", write_run(tmp_path / "run", awkward_rows()))


@pytest.fixture
def four(tmp_path):
    """The page of a small sweep."""
    from support.view.report_cases import report, sweep

    return report(tmp_path / "report.html", *sweep(tmp_path))
