"""Pictures of a report: ``python docs/figures/report.py RUN [NAME]``, with the extra ``browser`` and Chromium.

Those in the documentation are of ``normtheory run quickstart`` and, with the name ``gan_vocoder``, of
``examples/gan_vocoder.py``.
"""

import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from lightning_normtheory.view.command import find_runs
from lightning_normtheory.view.html.report import write_report

FOLDER = Path(__file__).parent
# picture: the section it begins with, and its size
VIEWS = {
    "quickstart": {"report.png": ("Curvature", 1280, 1150), "report_overview.png": ("", 1280, 920)},
    "gan_vocoder": {"report_steps.png": ("Overview", 1280, 900)},
}


def main(run: str, name: str = "quickstart") -> None:
    page_file = write_report(find_runs([run]), Path(tempfile.mkdtemp(), "report.html"))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for picture, (section, width, height) in VIEWS[name].items():
            page = browser.new_page(viewport={"width": width, "height": height}, color_scheme="light")
            page.goto(page_file.as_uri())
            if section:
                page.get_by_role("navigation").get_by_role("link", name=section).click()
            page.wait_for_timeout(1000)  # panels are drawn when they come into view
            page.screenshot(path=FOLDER / picture)
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
