"""HTML builder that escapes all text."""

import html
import math
from collections.abc import Iterable

__all__ = ["Html", "element", "joined", "number"]


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


def element(name: str, *children: str, **attributes: str | bool | None) -> Html:
    """An element; children that are not markup are escaped, and so is every attribute.

    Args:
        attributes: ``class_`` for ``class``, ``aria_label`` for ``aria-label``; true for one without a value; one that
            is false or ``None`` is left out.

    Example:
        >>> element("p", "a < b", element("br"), class_="x", hidden=True, title=None)
        '<p class="x" hidden>a &lt; b<br></p>'
    """
    names = {key: key.rstrip("_").replace("_", "-") for key in attributes}
    written = "".join(
        f" {names[key]}" if value is True else f' {names[key]}="{html.escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    return Html(f"<{name}{written}>" if name in ("br", "input") else f"<{name}{written}>{joined(children)}</{name}>")


def joined(parts: Iterable[str]) -> Html:
    """Parts in a row; those that are not markup are escaped.

    Example:
        >>> joined(["1 < 2 ", Html("<br>")])
        '1 &lt; 2 <br>'
    """
    return Html("".join(part if isinstance(part, Html) else html.escape(part) for part in parts))


def number(value: float) -> str:
    """Four significant digits, as everywhere in the report.

    Example:
        >>> [number(value) for value in (0.000123456, 12.0, 1234567.0, math.inf, math.nan)]
        ['0.0001235', '12', '1.235e+06', '+∞', 'not a number']
    """
    if math.isfinite(value):
        return f"{value:.4g}"
    return "not a number" if math.isnan(value) else "+∞" if value > 0 else "−∞"
