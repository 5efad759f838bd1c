"""Reads off a page of the report what people see: curves by the labels of the axes, tooltips."""

import math
import re

from support.view.report_cases import awkward_rows


def panel(page, title):
    """A panel by its title, drawn."""
    found = page.locator("article", has=page.locator("h3", has_text=re.compile(f"^{re.escape(title)}$")))
    for details in found.locator("xpath=ancestor::details").all():
        details.evaluate("element => element.open = true")
    found.scroll_into_view_if_needed()
    found.evaluate(
        """article => new Promise(done => {
            const plot = page.plots.find(plot => plot.article === article);
            const look = () => plot.stale ? setTimeout(look, 10) : done();
            look();
        })"""
    )
    return found


def axis(found, kind):
    """Turns places into numbers, from the labels of two ticks."""
    ticks = found.locator(f".tick.{kind}[data-value]").evaluate_all(
        "(all, at) => all.map(tick => [Number(tick.getAttribute(at)), Number(tick.dataset.value), tick.textContent])",
        "x" if kind == "horizontal" else "y",
    )
    (a, first, _), (b, last, _) = ticks[0], ticks[-1]
    if kind == "vertical" and found.locator(".log").get_attribute("aria-pressed") == "true":
        first, last = math.log10(first), math.log10(last)
        return lambda place: 10 ** (first + (place - a) / (b - a) * (last - first)), ticks
    return lambda place: first + (place - a) / (b - a) * (last - first), ticks


def points(found, run=0, curve=0):
    """The places of a curve's points, those of lone ones included."""
    group = found.locator(f"g[data-run='{run}'][data-curve='{curve}']")
    places = set()
    for path in group.locator("path").all():
        for part in path.get_attribute("d").replace("M", "L").split("L")[1:]:
            places.add(tuple(float(number) for number in part.split(",")))
    for dot in group.locator("circle").all():
        places.add((float(dot.get_attribute("cx")), float(dot.get_attribute("cy"))))
    return sorted(places)


def plotted(found, run=0, curve=0):
    """epoch → number, read off the axes."""
    (epoch, _), (value, _) = axis(found, "horizontal"), axis(found, "vertical")
    return {round(epoch(x)): value(y) for x, y in points(found, run, curve)}


def expected(name, rows=None):
    return {epoch: row[name] for epoch, row in (rows or awkward_rows()).items() if name in row}


def assert_within_a_pixel(found, numbers, run=0, curve=0):
    """A place is rounded to a hundredth of a pixel, in an axis of 208 pixels."""
    got = plotted(found, run, curve)
    assert got.keys() == numbers.keys()
    value, _ = axis(found, "vertical")
    for (_, y), epoch in zip(points(found, run, curve), sorted(numbers)):
        ends = sorted([value(y - 0.05), value(y + 0.05)])
        assert ends[0] <= numbers[epoch] <= ends[1]


def hover(page, found, epoch):
    """With the mouse, over an epoch."""
    place = found.locator(f".tick.horizontal[data-value='{epoch}']").get_attribute("x")
    box = found.locator(".canvas").bounding_box()
    page.mouse.move(box["x"] + float(place) + 1, box["y"] + 100)


def tip(page):
    return [tuple(row.split("\n")) for row in page.locator("#tip li").all_inner_texts()]


def drag(page, found, first, last):
    box = found.locator(".canvas").bounding_box()
    for epoch, action in ((first, page.mouse.down), (last, page.mouse.up)):
        place = found.locator(f".tick.horizontal[data-value='{epoch}']").get_attribute("x")
        page.mouse.move(box["x"] + float(place), box["y"] + 80, steps=4)
        action()


def drawn_runs(found):
    return sorted(
        {int(run) for run in found.locator("g[data-run]").evaluate_all("all => all.map(one => one.dataset.run)")}
    )
