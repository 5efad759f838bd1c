"""Build and save the W&B dashboard: a saved view of a project with the panels of the report, for every run in it."""

import importlib
import json
import math
import re
from collections.abc import Sequence
from typing import Any

from lightning_normtheory.record.history import Axis
from lightning_normtheory.record.metrics import find_metric
from lightning_normtheory.view.panels import HEADLINES, PANELS, SECTIONS, Panel

__all__ = ["DashboardError", "save", "specification", "workspace"]

_COLUMNS = 3
# Lightning sends both with every row.
_AXES: dict[Axis, str] = {"epoch": "epoch", "step": "trainer/global_step"}
# Usual names of losses and accuracies in training scripts: train_loss, val/loss, val_ce_loss, loss/train, test_acc,
# val/acc_top1. Not every engine supports lookahead, so the expressions exclude our metrics by how a name may begin.
_STAGE = "([Tt]rain(ing)?|[Vv]al(id(ation)?)?|[Tt]est|[Ee]val|[Dd]ev)"
_USER_METRIC = rf"^({_STAGE}[/_.-](\w+[/_.-])?)?%s([/_.-].+)?$"
_USER_PANELS = {
    "Loss, as the run logs it": _USER_METRIC % "[Ll]oss",
    "Accuracy, as the run logs it": _USER_METRIC % r"[Aa]cc(uracy)?\d*",
}
_NOT_LOGGED_IN = "Expected to be logged in to W&B, but there is no key on this machine: run wandb login"
# In characters; a longer title does not fit next to a panel.
_LONGEST_AXIS_TITLE = 40


class DashboardError(ValueError):
    """Raised if the dashboard cannot be built or saved; the message says why and what to do."""


def workspace(project: str, entity: str | None = None, prefix: str = "normtheory", axis: Axis = "epoch") -> Any:
    """Build the workspace with `wandb_workspaces`, without sending it.

    W&B sets the title and dashes of a line only for a run with a known id. Therefore all lines are solid and named by
    their metric; the symbols are in the title of the vertical axis if they fit.

    Args:
        project: the project whose runs are shown.
        entity: the user or team that owns the project; needed only to save the workspace.
        prefix: the prefix of the callbacks.
        axis: the horizontal axis of all panels. Steps suit every run; epochs only those that measure by epochs.

    Raises:
        DashboardError: if wandb-workspaces is not installed, or a name is empty or has a slash (a prefix: or a dot).
    """
    if not project or "/" in project:
        raise DashboardError(f"Expected the name of a project, but got {project!r}: give its owner by --entity.")
    if not prefix or "/" in prefix or "." in prefix:
        raise DashboardError(f"Expected the prefix of a callback, without slash and dot, but got {prefix!r}.")
    ws = _package("workspaces")
    return ws.Workspace(
        entity=entity or "",
        project=project,
        name=re.sub(r"[^\w -]", "_", prefix),  # W&B rejects some characters here
        sections=[_section(name, prefix, _AXES[axis]) for name in SECTIONS],
        settings=ws.WorkspaceSettings(x_axis=_AXES[axis]),
    )


def specification(workspace: Any) -> str:
    """Return what W&B would receive, as JSON."""
    model = workspace._to_model()  # no public function returns it
    return json.dumps(
        model.spec.model_dump(mode="json", by_alias=True, exclude_none=True), indent=2, ensure_ascii=False
    )


def save(project: str, entity: str | None = None, prefix: str = "normtheory", axis: Axis = "epoch") -> str:
    """Save the workspace as a view of the project, and return its address.

    The view has a fixed name: saving again replaces it, including changes made by hand. In a terminal, W&B asks for a
    key if nobody is logged in.

    Args:
        project: an existing project.
        entity: the user or team that owns the project; ``None`` is the default of W&B for new runs.
        prefix: the prefix of the callbacks.
        axis: the horizontal axis, as in `workspace`.

    Raises:
        DashboardError: if wandb-workspaces is not installed, nobody is logged in, W&B cannot be reached or refuses, or
            the project does not exist.
    """
    made = workspace(project, entity, prefix, axis)
    import wandb

    try:
        api = wandb.Api()
        made.entity = entity or api.settings["entity"] or api.default_entity or ""
        _find_saved(made, prefix)
        made.save()
        return made.url
    except DashboardError:
        raise
    except (KeyboardInterrupt, EOFError):  # while W&B asks for a key
        raise DashboardError(_NOT_LOGGED_IN) from None
    except Exception as error:  # W&B's client, service and GraphQL share no base class
        raise DashboardError(_explained(error)) from error


# -- sections and panels -----------------------------------------------------------------------------------------------


def _section(name: str, prefix: str, x: str) -> Any:
    """Build a section: first the panels that are not details, all on its first page, then the details."""
    ws = _package("workspaces")
    ours = [panel for panel in PANELS if panel.section == name]
    first = [_plot(panel, prefix, x) for panel in ours if not panel.detail]
    if name == "Overview":
        first = [*_user_plots(x), *_headlines(prefix), *first]
    if name == "Layers":
        first.append(_reports().WeavePanelSummaryTable(table_name=f"{prefix}_layers/table"))
    return ws.Section(
        name=name,
        panels=[*first, *(_plot(panel, prefix, x) for panel in ours if panel.detail)],
        is_open=bool(first) and name not in ("WeightNorm", "BatchNorm"),  # most networks have one of them at most
        layout_settings=ws.SectionLayoutSettings(columns=_COLUMNS, rows=max(1, math.ceil(len(first) / _COLUMNS))),
        panel_settings=ws.SectionPanelSettings(x_axis=x),
    )


def _plot(panel: Panel, prefix: str, x: str) -> Any:
    """Build a panel; a metric with a star matches names known only to the run, so one expression selects all lines."""
    names = [_full_name(line.metric, prefix) for line in panel.lines]
    starred = any("*" in name for name in names)
    symbols = " · ".join(dict.fromkeys(find_metric(line.metric).symbol for line in panel.lines))
    return _reports().LinePlot(
        title=panel.title,
        x=x,
        y=[] if starred else names,
        metric_regex=_expression(names) if starred else None,
        log_y=panel.scale == "log",
        title_y=symbols if len(symbols) <= _LONGEST_AXIS_TITLE else None,
    )


def _user_plots(x: str) -> list[Any]:
    return [
        _reports().LinePlot(title=title, x=x, metric_regex=expression) for title, expression in _USER_PANELS.items()
    ]


def _headlines(prefix: str) -> list[Any]:
    """Show the last value; the summary of the run also has an extreme."""
    return [
        _reports().ScalarChart(title=find_metric(name).symbol, metric=f"{_full_name(name, prefix)}.last")
        for name in HEADLINES
    ]


def _full_name(metric: str, prefix: str) -> str:
    """
    Example:
        >>> _full_name("loss", "demo"), _full_name("layers/weight_norm__*", "demo")
        ('demo/loss', 'demo_layers/weight_norm__*')
    """
    layer = metric.removeprefix("layers/")
    return f"{prefix}_layers/{layer}" if layer != metric else f"{prefix}/{metric}"


def _expression(names: Sequence[str]) -> str:
    """
    Example:
        >>> _expression(["a/edge", "a/edge__*"])
        '^(a/edge|a/edge__.+)$'
    """
    return "^(" + "|".join(re.escape(name).replace(r"\*", ".+") for name in names) + ")$"


def _reports() -> Any:
    return _package("reports.v2")


def _package(name: str) -> Any:
    try:
        return importlib.import_module(f"wandb_workspaces.{name}")
    except ImportError as error:
        raise DashboardError(
            f"Expected wandb-workspaces for the dashboard, but it cannot be imported ({error}): "
            'pip install "lightning-normtheory[wandb]"'
        ) from error


# -- the server --------------------------------------------------------------------------------------------------------


def _find_saved(made: Any, prefix: str) -> None:
    """Give the workspace the id of the view saved earlier, if any.

    Raises:
        DashboardError: if the project does not exist.
    """
    internal = _package("workspaces.internal")
    # The address of a view shows only its name: readable for the default prefix, unique for any other.
    address = "normtheory" + ("" if prefix == "normtheory" else prefix.encode().hex())
    made._internal_name = internal._url_query_str_to_internal_name(address)
    try:
        made._internal_id = internal.get_view_dict(made.entity, made.project, address)["id"]
    except ValueError as error:
        if str(error).startswith("Project"):
            raise DashboardError(
                f"Expected a project of W&B, but {made.entity}/{made.project} does not exist or you may not see it: "
                "run once with a WandbLogger, which creates it, or give --entity."
            ) from error


def _explained(error: Exception) -> str:
    from wandb.errors import AuthenticationError, UsageError

    if isinstance(error, UsageError):  # raised here only without a login
        return _NOT_LOGGED_IN
    reason = " ".join(str(error).split()).rstrip(".")
    if isinstance(error, AuthenticationError):
        return f"W&B cannot be reached or rejects the key ({reason}): check the network, or run wandb login --relogin"
    return f"W&B did not save the dashboard ({reason}): check the network, and your write access to the project."
