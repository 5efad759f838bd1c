"""The report as a page: colors, texts for those who cannot see it, and nothing from or to the outside."""

import base64
import hashlib
import re
from importlib.resources import files

import pytest

from lightning_normtheory.record.history import History, Row
from lightning_normtheory.view.html.data import color
from lightning_normtheory.view.html.report import write_report

from support.view.report_cases import HOSTILE, Page, one, report, sweep, write_run

# -- for those without eyes or without JavaScript ----------------------------------------------------------------------


def test_every_plot_has_an_alternative_text_with_first_and_last_values(tmp_path):
    page = one(tmp_path)
    texts = [found["aria-label"] for _, found in page.elements if found.get("role") == "img"]
    assert len(texts) == len(page.data["plots"])
    (text,) = [text for text in texts if text.startswith("Sharpness")]
    assert text.endswith("over the epochs 0 to 8, log axis. λ_max from 3 to 11; 2/η from 10 to 10.")


def test_the_alternative_text_of_several_runs_has_ranges(tmp_path):
    page = Page(report(tmp_path / "report.html", *sweep(tmp_path)))
    labels = [found["aria-label"] for _, found in page.elements if found.get("role") == "img"]
    assert any("λ_max of 4 runs from 1…4.01 to 4…16.01;" in label for label in labels)


def test_without_javascript_there_are_first_and_last_values(tmp_path):
    page = one(tmp_path)
    assert any("λ_max311" in text and "2/η1010" in text for text in page.all("noscript"))


# -- nothing from outside, and nothing to outside ----------------------------------------------------------------------


def hostile(tmp_path):
    name = HOSTILE.replace("/", "∕")  # a metric's name ends where the next section begins
    rows = {0: {f"layers/weight_norm__{name}": 1.0, "Loss" + HOSTILE: 2.0, "X" + HOSTILE: 3.0, "loss": 1.0}}
    theorems = [{"theorem": HOSTILE, "verdict": "applies", "reasons": [HOSTILE]}]
    settings = {"loss": HOSTILE, "callback": HOSTILE}
    return [
        write_run(tmp_path / str(i), rows, run=f"{i}{HOSTILE}{i}", theorems=theorems, settings=settings)
        for i in range(2)
    ]


def test_names_cannot_become_markup(tmp_path):
    paths = hostile(tmp_path)
    for some in (paths[:1], paths):
        page = Page(report(tmp_path / "report.html", *some))
        assert page._open == []
        assert page.all("img") == []
        assert len(page.all("script")) == 2
        assert not [name for _, found in page.elements for name in found if name.startswith("on")]
        assert page.data["plots"][-1]["title"] == "X" + HOSTILE
        assert HOSTILE in page.all("li")
        assert [run["name"] for run in page.data["runs"]] == [f"{i}{HOSTILE}{i}" for i in range(len(some))]
    assert Page(report(tmp_path / "report.html", paths[0])).text_of("h1") == f"0{HOSTILE}0"


def test_half_a_character_in_a_name_does_not_stop_the_report(tmp_path):
    history = History(
        tmp_path / "normtheory.jsonl", "demo/\ud83d", "normtheory", rows=[Row(0, 0, 0.0, {"loss": 1.0}, {})]
    )
    assert Page(write_report([history], tmp_path / "report.html")).text_of("h1") == "demo/?"


def test_nothing_in_the_file_makes_a_request(tmp_path):
    source = Page(report(tmp_path / "report.html", *sweep(tmp_path))).source
    assert "http" not in source.replace('http-equiv="Content-Security-Policy"', "")
    for word in ("src=", "url(", "@import", "fetch(", "XMLHttpRequest", "WebSocket", "sendBeacon", "import("):
        assert word not in source
    assert re.findall(r"<link[^>]*>", source) == ['<link rel="icon" href="data:,">']


def test_the_policy_allows_this_script_and_this_style_and_nothing_else(tmp_path):
    source = Page(report(tmp_path / "report.html", *sweep(tmp_path))).source
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', source)
    script, style = re.findall(r"<script>(.*?)</script>", source, re.S) + re.findall(
        r"<style>(.*?)</style>", source, re.S
    )
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (script, style)]
    assert policy.startswith("default-src 'none'; ")
    assert f"script-src 'sha256-{hashes[0]}'; style-src 'sha256-{hashes[1]}'" in policy
    assert "unsafe" not in policy


# -- colors -----------------------------------------------------------------------------------------------------------


def luminance(color):
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a, b):
    low, high = sorted([luminance(a), luminance(b)])
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_colors_stand_out_from_the_ground(theme):
    css = files("lightning_normtheory.view.html").joinpath("page/page.css").read_text()
    found = {name: pair[theme] for name, *pair in re.findall(r"--(\w+): light-dark\((#\w{6}), (#\w{6})\)", css)}
    lines = [name for name in found if re.fullmatch(r"[cs]\d+", name)]
    assert {color(i, of) for of in range(1, 60) for i in range(of)} == set(lines)
    for name in lines:
        assert contrast(found[name], found["paper"]) >= 3, name
        assert f".{name} {{ --color: var(--{name}); }}" in css
    for name in ("ink", "faint", "link", "good", "bad"):
        for ground in ("paper", "ground"):
            assert contrast(found[name], found[ground]) >= 4.5, (name, ground)


def test_two_lines_of_one_kind_have_different_dashes_where_colors_tell_runs_apart(tmp_path):
    rows = {0: {"ntk_direction_share": 0.1, "ntk_length_share": 0.2, "ntk_rest_share": 0.7}}
    paths = [write_run(tmp_path / name, rows, run=f"demo/{name}") for name in "ab"]
    css = files("lightning_normtheory.view.html").joinpath("page/page.css").read_text()
    (plot,) = Page(report(tmp_path / "report.html", *paths)).data["plots"]
    assert [(curve["dashes"], curve["color"]) for curve in plot["curves"]] == [(f"measured-{i}", "") for i in range(3)]
    (plot,) = Page(report(tmp_path / "report.html", paths[0])).data["plots"]
    assert [(curve["dashes"], curve["color"]) for curve in plot["curves"]] == [
        ("measured-0", f"c{i}") for i in range(3)
    ]
    styles = re.findall(r"\.(?:measured|bound|limit|floor)-\d \{ stroke-dasharray: ([\d. ]+); \}", css)
    assert len(set(styles)) == 11  # all but measured-0, which is solid
