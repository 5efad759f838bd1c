"""The glossary of the report and of the docs."""

import re

import glossary

from lightning_normtheory.view.glossary import GLOSSARY

from support.view.report_cases import Page, report, write_run


def test_the_page_of_the_docs_is_up_to_date():
    assert glossary.PAGE.read_text(encoding="utf-8") == glossary.page(), "run: python docs/tools/glossary.py"


def test_terms_are_unique_and_cells_of_a_table():
    terms = [term for term, _ in GLOSSARY]
    assert len(set(terms)) == len(terms)
    assert not [text for pair in GLOSSARY for text in pair if re.search(r"[|\n]", text) or not text]


def test_the_report_has_it_behind_a_click(tmp_path):
    page = Page(report(tmp_path / "report.html", write_run(tmp_path / "run", {0: {"loss": 1.0}})))
    section = page.text_of("section", id="glossary")
    for term, meaning in GLOSSARY:
        assert term + meaning in section
