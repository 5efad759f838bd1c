"""Write docs/glossary.md: ``python docs/tools/glossary.py``."""

from pathlib import Path

from lightning_normtheory.view.glossary import GLOSSARY

PAGE = Path(__file__).resolve().parent.parent / "glossary.md"
HEAD = """# Glossary

Short names of papers, terms and symbols in the report, the metrics and the docs. [theorems.md](theorems.md) states the
theorems, [metrics.md](metrics.md) lists all metrics.

`python docs/tools/glossary.py` writes this page from `lightning_normtheory/view/glossary.py`.

| term | meaning |
|---|---|
"""


def page() -> str:
    """Return the text of the page."""
    return HEAD + "".join(f"| {term} | {meaning} |\n" for term, meaning in GLOSSARY)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
