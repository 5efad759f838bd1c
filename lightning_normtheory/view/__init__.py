"""Report, dashboard and terminal tables of a run. Loads neither torch nor Lightning."""

from lightning_normtheory.view.html.report import write_report

__all__ = ["write_report"]
