"""The passes through the network that one measurement makes, as a table."""

__all__ = ["FORWARD", "GRADIENT", "GRAPH", "PRODUCT", "TO_LAYERS", "Passes"]

FORWARD, GRADIENT, GRAPH = "forward", "backward", "backward with its graph"
TO_LAYERS = "backward to the layers"
PRODUCT = "product with the Hessian"
# Passes that the theory floor reports as steps (`tick`), on a number of samples that it does not say.
_STEPS = {"pass": TO_LAYERS}


class Passes:
    """Counts passes by the diagnostic that asks for them first; later ones share the result.

    Args:
        probe: the number of samples of the probe, in this process.

    Example:
        >>> passes = Passes(probe=512)
        >>> passes.begin("Hessian")
        >>> passes.add("forward", 512)
        >>> passes.add("product with the Hessian", 512, times=3)
        >>> print(passes)
                 pass                      times  samples  probes
        Hessian  forward                       1      512    1.00
        Hessian  product with the Hessian      3     1536    3.00
    """

    def __init__(self, probe: int = 0) -> None:
        self._probe = probe
        self._title = ""
        self._counts: dict[tuple[str, str], list[int]] = {}

    def begin(self, title: str) -> None:
        """Count what follows for this diagnostic."""
        self._title = title

    def add(self, kind: str, samples: int, times: int = 1) -> None:
        """Count passes on so many samples; 0: their number is unknown."""
        count = self._counts.setdefault((self._title, kind), [0, 0])
        count[0] += times
        count[1] += times * samples

    def step(self, step: str) -> None:
        """Count a step of the theory floor, if it is a pass."""
        if step in _STEPS:
            self.add(_STEPS[step], 0)

    def rows(self) -> list[tuple[str, str, int, int]]:
        """Return diagnostic, kind of pass, number of passes, and of samples in all of them."""
        return [(title, kind, times, samples) for (title, kind), (times, samples) in self._counts.items()]

    def __str__(self) -> str:
        cells = [("", "pass", "times", "samples", "probes")]
        for title, kind, times, samples in self.rows():
            share = f"{samples / self._probe:.2f}" if samples and self._probe else ""
            cells.append((title, kind, str(times), str(samples or ""), share))
        widths = [max(len(row[i]) for row in cells) for i in range(5)]
        padded = [[cell.rjust(width) for cell, width in zip(row, widths)] for row in cells]
        for row, into in zip(cells, padded):
            into[:2] = (row[0].ljust(widths[0]), row[1].ljust(widths[1]))
        return "\n".join("  ".join(row).rstrip() for row in padded)
