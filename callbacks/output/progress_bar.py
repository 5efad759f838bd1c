"""Show on Lightning's progress bar which diagnostic is being measured; the bar's own text returns afterwards."""

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

from pytorch_lightning import Trainer

from lightning_normtheory.measuring.progress import listening

__all__ = ["MeasurementProgress", "bar_kind"]

# Seconds: a shorter measurement shows nothing, steps are not drawn more often, and without a display a measurement that
# takes longer than the last is reported.
_PATIENCE, _PAUSE, _LONG = 0.5, 0.1, 30.0


class MeasurementProgress:
    """Shows the diagnostic that is measured, and its number of steps (see `tick`), as the description of the bar.

    Shows nothing in a process other than the first, without one of Lightning's bars, or where a bar cannot be drawn
    over, as in a file. There, a message says when a measurement takes long. A failure of the display is reported, and
    ends the display only.

    Args:
        prefix: what the text begins with.
        report: takes the message about a display that failed.
        notify: takes the message about a long measurement without a display.

    Example:
        >>> trainer = Trainer(enable_progress_bar=False, logger=False, enable_checkpointing=False)
        >>> with MeasurementProgress(trainer, "normtheory", print, print) as progress:
        ...     progress.begin("Hessian")  # shows nothing: there is no bar
    """

    def __init__(
        self, trainer: Trainer, prefix: str, report: Callable[[str], None], notify: Callable[[str], None]
    ) -> None:
        self._trainer, self._prefix, self._report, self._notify = trainer, prefix, report, notify
        self._kind: Literal["tqdm", "rich"] | None = None
        self._line: _TqdmLine | _RichLine | None = None
        self._began = self._drawn = time.monotonic()
        self._title = ""
        self._steps: Counter[str] = Counter()
        self._exit = ExitStack()

    def __enter__(self) -> "MeasurementProgress":
        with self._reporting():
            kind = bar_kind(self._trainer)
            self._kind = kind if kind is not None and _can_redraw(kind, self._trainer.progress_bar_callback) else None
        self._exit.enter_context(listening(self._step))
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()
        if self._line is not None:
            with self._reporting():
                self._line.close()

    def begin(self, title: str) -> None:
        """Show the next diagnostic."""
        self._title = title
        self._steps.clear()
        self._show(title)

    def _step(self, step: str) -> None:
        self._steps[step] += 1
        if time.monotonic() - self._drawn >= _PAUSE:
            self._show(f"{self._title}, {step} {self._steps[step]}")

    def _show(self, text: str) -> None:
        now = time.monotonic()
        if self._kind is not None and now - self._began >= _PATIENCE:
            self._drawn = now
            with self._reporting():
                if self._line is None:
                    bar = self._trainer.progress_bar_callback
                    self._line = _TqdmLine(bar) if self._kind == "tqdm" else _RichLine(bar)
                self._line.draw(f"{self._prefix}: {text}")
        elif now - self._began >= _LONG and self._trainer.is_global_zero:
            self._drawn = now
            self._notify(f"{self._prefix}: this measurement has taken {now - self._began:.0f} s so far ({text}).")

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001  # a user's own bar may do anything
            self._kind = None
            self._report(f"The progress of a measurement is not shown: {type(error).__name__}: {error}")


def bar_kind(trainer: Trainer) -> Literal["tqdm", "rich"] | None:
    """Return which of Lightning's bars is on the screen; ``None`` also in a process other than the first."""
    bar: Any = trainer.progress_bar_callback
    if bar is None or not trainer.is_global_zero or not getattr(bar, "is_enabled", False):
        return None
    # By name: importing the other one of Lightning's two packages takes seconds.
    lightning = {c.__name__ for c in type(bar).__mro__ if c.__module__.startswith(("pytorch_lightning.", "lightning."))}
    if "TQDMProgressBar" in lightning:
        return "tqdm"
    live = "RichProgressBar" in lightning and bar.progress is not None and bar.progress.live.is_started
    return "rich" if live else None


def _can_redraw(kind: Literal["tqdm", "rich"], bar: Any) -> bool:
    """Return whether a line can be written over. In a file, tqdm begins a new one each time."""
    if kind == "rich":
        return bool(bar.progress.console.is_terminal or bar.progress.console.is_jupyter)
    is_terminal = getattr(sys.stdout, "isatty", bool)()  # an object in its place may have only `write` and `flush`
    return is_terminal or type(sys.stdout).__module__.startswith("ipykernel.")


class _TqdmLine:
    """The description of the training bar. A bar that is closed already shows nothing."""

    def __init__(self, bar: Any) -> None:
        self._bar = bar.train_progress_bar
        self._before: str = self._bar.desc

    def draw(self, text: str) -> None:
        self._bar.set_description(text)

    def close(self) -> None:
        self._bar.set_description_str(self._before)


class _RichLine:
    """The description of the training task."""

    def __init__(self, bar: Any) -> None:
        self._progress, self._task = bar.progress, bar.train_progress_bar_id
        self._before: str = next(task.description for task in self._progress.tasks if task.id == self._task)

    def draw(self, text: str) -> None:
        # Refresh now: what comes next may keep the display's own thread waiting.
        self._progress.update(self._task, description=text, refresh=True)

    def close(self) -> None:
        self.draw(self._before)
