"""How far a measurement is, in a line of its own below the trainer's progress bar, which is left as it was."""

import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from contextvars import ContextVar
from datetime import timedelta
from functools import partial
from importlib import import_module
from typing import Any, Literal, Protocol

from pytorch_lightning import Trainer

from lightning_normtheory.measuring.progress import listening

__all__ = ["MeasurementProgress", "bar_kind", "clear_line"]

# Seconds: a measurement that is shorter shows nothing, and steps inside of it are not drawn more often.
_PATIENCE, _PAUSE = 0.5, 0.1


class _Line(Protocol):
    """A line on the screen, from when it is made until it is closed.

    Attributes:
        steps: how many steps make it worth drawing again.
    """

    steps: int

    def draw(self, text: str, done: int) -> None: ...

    def hide(self) -> None: ...

    def close(self) -> None: ...


class MeasurementProgress:
    """Shows which diagnostic is at work, and how many steps (see `tick`) it has made.

    Nothing is shown in a process other than the first, without a progress bar, or beside one that is not Lightning's.
    Whatever goes wrong with a display is reported, and ends the display only.

    Args:
        total: the number of diagnostics.
        prefix: what the line begins with.
        report: takes the message about a display that failed.

    Example:
        >>> trainer = Trainer(enable_progress_bar=False, logger=False, enable_checkpointing=False)
        >>> with MeasurementProgress(trainer, 1, "normtheory", print) as progress:
        ...     progress.begin("Hessian")  # shows nothing: there is no bar
    """

    def __init__(self, trainer: Trainer, total: int, prefix: str, report: Callable[[str], None]) -> None:
        self._trainer, self._total, self._prefix, self._report = trainer, total, prefix, report
        self._make: Callable[[int], _Line] | None = None
        self._line: _Line | None = None
        self._began = self._drawn = time.monotonic()
        self._title, self._done = "", -1
        self._steps: Counter[str] = Counter()
        self._exit = ExitStack()

    def __enter__(self) -> "MeasurementProgress":
        self._try(self._find)
        if self._make is not None:
            self._exit.enter_context(listening(self._step))
            self._exit.callback(_current.reset, _current.set(self))
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()
        if self._line is not None:
            self._try(self._line.close)

    def begin(self, title: str) -> None:
        """The next diagnostic is at work."""
        self._title, self._done = title, self._done + 1
        self._steps.clear()
        self._draw(f"{self._prefix}: {title}")

    def hide(self) -> None:
        """Until the next step."""
        if self._line is not None:
            self._try(self._line.hide)

    def _find(self) -> None:
        kind = bar_kind(self._trainer)
        if kind is not None:
            line = _TqdmLine if kind == "tqdm" else _RichLine
            self._make = partial(line, self._trainer.progress_bar_callback)

    def _step(self, step: str) -> None:
        self._steps[step] += 1
        worth = self._line is None or self._steps[step] % self._line.steps == 0
        if worth and time.monotonic() - self._drawn >= _PAUSE:
            self._draw(f"{self._prefix}: {self._title}, {step} {self._steps[step]}")

    def _draw(self, text: str) -> None:
        now = time.monotonic()
        if self._make is not None and now - self._began >= _PATIENCE:
            self._drawn = now
            self._try(lambda: self._shown().draw(text, self._done))

    def _shown(self) -> _Line:
        if self._line is None:
            assert self._make is not None
            self._line = self._make(self._total)
        return self._line

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001  # a user's own bar may do anything
            self._make = None
            self._report(f"The progress of a measurement is not shown: {type(error).__name__}: {error}")


_current: ContextVar[MeasurementProgress | None] = ContextVar("current", default=None)


def clear_line() -> None:
    """Before something is printed during a measurement: nothing of the line shall stand among it."""
    progress = _current.get()
    if progress is not None:
        progress.hide()


def bar_kind(trainer: Trainer) -> Literal["tqdm", "rich"] | None:
    """Which of Lightning's bars is on the screen; ``None`` in a process other than the first, too."""
    bar: Any = trainer.progress_bar_callback
    if bar is None or not trainer.is_global_zero or not getattr(bar, "is_enabled", False):
        return None
    # By name: importing the other one of Lightning's two packages takes seconds.
    lightning = {c.__name__ for c in type(bar).__mro__ if c.__module__.startswith(("pytorch_lightning.", "lightning."))}
    if "TQDMProgressBar" in lightning:
        return "tqdm"
    live = "RichProgressBar" in lightning and bar.progress is not None and bar.progress.live.is_started
    return "rich" if live else None


class _TqdmLine:
    """A bar where the validation's would be."""

    def __init__(self, bar: Any, total: int) -> None:
        main = bar.train_progress_bar
        self.steps: int = bar.refresh_rate
        self._tqdm = type(main)(
            total=total,
            # A bar that is to stay on the screen may have been closed at the end of its epoch.
            position=2 * bar.process_position + (not main.disable),
            leave=False,
            dynamic_ncols=True,
            file=main.fp,
            # Neither a rate nor a remaining time: diagnostics are not alike.
            bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}]",
        )

    def draw(self, text: str, done: int) -> None:
        self._tqdm.n = done
        self._tqdm.set_description(text)

    def hide(self) -> None:
        self._tqdm.clear()

    def close(self) -> None:
        self._tqdm.close()


class _RichLine:
    """A line at the end of the live display that is there.

    Not one of its tasks: they share their columns, which a long description would make narrow, and Lightning finds them
    in a list by their numbers.
    """

    steps = 1

    def __init__(self, bar: Any, total: int) -> None:
        self._theme, self._progress, self._total = bar.theme, bar.progress, total
        self._began = self._progress.get_time()
        self._lines: list[Any] = []
        tasks = self._progress.get_renderables
        self._progress.get_renderables = lambda: [*tasks(), *self._lines]

    def draw(self, text: str, done: int) -> None:
        theme, rich = self._theme, import_module
        words = partial(rich("rich.text").Text, no_wrap=True, overflow="ellipsis")
        bar = rich("rich.progress_bar").ProgressBar(self._total, done, 10, complete_style=theme.progress_bar)
        elapsed = timedelta(seconds=int(self._progress.get_time() - self._began))
        line = rich("rich.table").Table.grid(padding=(0, 1))
        line.add_row(
            words(text, style=theme.description),
            bar,
            words(f"{done}/{self._total}", style=theme.batch_progress),
            words(str(elapsed), style=theme.time),
        )
        self._lines = [line]
        self._progress.refresh()  # now: what comes next may keep the display's own thread waiting

    def hide(self) -> None:
        self._lines = []
        self._progress.refresh()

    def close(self) -> None:
        del self._progress.get_renderables
        self._progress.refresh()
