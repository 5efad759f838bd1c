"""The command that runs all reliability tests: whatever happens to a case is in the table."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from reliability.__main__ import ABOUT, MARKERS, PAGE, Part, find_cases, main, parts, put_into
from reliability.outcome import Outcome


def fine(folder: Path) -> Outcome:
    assert list(folder.iterdir()) == [folder / "output.txt"]  # an empty folder
    print("words that nobody wants to read")
    return Outcome(5)


def differs(folder: Path) -> Outcome:
    return Outcome(7, ("2 is not 3",))


def raises(folder: Path) -> Outcome:
    raise KeyError("gone")


def dies(folder: Path) -> Outcome:
    print("last words", flush=True)
    os._exit(3)


def hangs(folder: Path) -> Outcome:
    time.sleep(1000)
    return Outcome(1)


def number(n: int, folder: Path) -> Outcome:
    return Outcome(n)


FINE = {"one": fine, "two": fine}
BROKEN = {"differs": differs, "raises": raises, "dies": dies, "fine after all": fine}
HANGING = {"hangs": hangs}


@pytest.fixture
def page(tmp_path):
    path = tmp_path / "page.md"
    path.write_text(f"Before.\n\n{MARKERS[0]}\nold\n{MARKERS[1]}\n\nAfter.\n")
    return path


def table_rows(text: str) -> dict[str, list[str]]:
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return {part: rest[:3] for part, *rest in cells[2:]}


def test_what_is_as_it_should_be_is_counted_and_the_page_keeps_its_prose(page, capfd):
    chosen = {"tables": Part(__name__, "FINE"), "numbers": Part(__name__, "number", [3, 4, 5])}
    assert main([], chosen, page) == 0
    text = page.read_text()
    assert table_rows(text) == {"tables": ["2", "10", "0"], "numbers": ["3", "12", "0"]}
    assert text.startswith("Before.\n\n")
    assert text.endswith("\n\nAfter.\n")
    assert "old" not in text
    assert "No differences." in text
    assert "nobody wants to read" not in capfd.readouterr().out


def test_a_difference_an_error_and_a_death_are_reported_and_the_rest_is_run(page):
    assert main(["--jobs", "1"], {"broken": Part(__name__, "BROKEN")}, page) == 1
    text = page.read_text()
    assert table_rows(text) == {"broken": ["4", "12", "3"]}
    assert "- broken, differs: 2 is not 3" in text
    assert "- broken, raises: KeyError: 'gone' (test_reliability.py:" in text
    assert "- broken, dies: the process died with 3: last words" in text


def test_a_case_that_hangs_is_reported_and_the_rest_is_run(page):
    chosen = {"hanging": Part(__name__, "HANGING", patience=0.1), "fine": Part(__name__, "FINE")}
    assert main(["--jobs", "1"], chosen, page) == 1
    text = page.read_text()
    assert table_rows(text) == {"hanging": ["1", "0", "1"], "fine": ["2", "10", "0"]}
    assert "- hanging, hangs: no end after 0.1 s" in text


def test_a_part_of_the_cases_leaves_the_page_as_it_is(page):
    before = page.read_text()
    chosen = {"numbers": Part(__name__, "number", range(100)), "broken": Part(__name__, "BROKEN")}
    assert main(["--quick", "--only", "numbers"], chosen, page) == 0
    assert page.read_text() == before


def test_one_part_writes_its_own_row_anew(page, monkeypatch):
    monkeypatch.setitem(ABOUT, "changing", lambda results: f"{len(results)} of them.")
    fixed, broken = Part(__name__, "FINE"), Part(__name__, "BROKEN")
    others = {"numbers": Part(__name__, "number", [3, 4])}
    assert main([], {"changing": broken, **others}, page) == 1
    assert main(["--only", "changing"], {"changing": fixed, **others}, page) == 0
    text = page.read_text()
    assert table_rows(text) == {"changing": ["2", "10", "0"], "numbers": ["2", "7", "0"]}
    assert text.count("No differences.") == 1
    assert "2 of them." in text
    assert "4 of them." not in text
    assert main(["--only", "changing"], {"changing": broken, **others}, page) == 1
    text = page.read_text()
    assert table_rows(text)["changing"] == ["4", "12", "3"]
    assert text.count("- changing, differs: 2 is not 3") == 1
    assert "No differences." not in text
    assert text.startswith("Before.\n\n")
    assert text.endswith("\n\nAfter.\n")


def test_a_few_cases_are_from_the_whole_range():
    cases = find_cases({"numbers": Part(__name__, "number", range(100))}, quick=True)
    assert [case.name for case in cases] == [0, 33, 66]


def test_an_unknown_part_is_refused_with_the_names_of_all(capsys):
    with pytest.raises(SystemExit):
        main(["--only", "nothing"])
    told = capsys.readouterr().err
    assert all(part in told for part in parts(models=1, epochs=1))


def test_the_page_has_a_place_for_the_table():
    page = PAGE.read_text(encoding="utf-8")
    assert [page.count(marker) for marker in MARKERS] == [1, 1]
    assert page.index(MARKERS[0]) < page.index(MARKERS[1])
    assert put_into(put_into(page, "a"), "b") == put_into(page, "b")


def test_an_ignored_interrupt_is_restored():
    """``nohup pytest &`` starts with SIGINT ignored, which every process of the tests would inherit."""
    code = "import signal, support; signal.raise_signal(signal.SIGINT)"
    ignore = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, **ignore)
    assert done.returncode == -signal.SIGINT
