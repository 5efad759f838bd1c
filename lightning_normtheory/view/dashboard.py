"""The panels as a workspace of W&B: a saved view of a project, the same for every run in it."""

import importlib
import json
import math
import re
from collections.abc import Sequence
from typing import Any

from lightning_normtheory.record.metrics import find_metric
from lightning_normtheory.view.panels import HEADLINES, PANELS, SECTIONS, Panel

__all__ = ["DashboardError", "save", "specification", "workspace"]

_COLUMNS = 3
# What people call the metrics of their own: train_loss, val/loss, val_ce_loss, loss/train, test_acc, val/acc_top1. The
# expressions do without looking ahead, which not every engine can, so they say how a name begins to leave out ours.
_STAGE = "([Tt]rain(ing)?|[Vv]al(id(ation)?)?|[Tt]est|[Ee]val|[Dd]ev)"
_OWN = rf"^({_STAGE}[/_.-](\w+[/_.-])?)?%s([/_.-].+)?$"
_OWN_PANELS = {
    "Loss, as the run logs it": _OWN % "[Ll]oss",
    "Accuracy, as the run logs it": _OWN % r"[Aa]cc(uracy)?\d*",
}
_NOT_LOGGED_IN = "Expected to be logged in to W&B, but there is no key on this machine: run wandb login"
# More letters do not fit beside a panel.
_LONGEST_AXIS_TITLE = 40


class DashboardError(ValueError):
    """The dashboard cannot be made; the message says why, in a sentence, and what to do."""


def workspace(project: str, entity: str | None = None, prefix: str = "normtheory") -> Any:
    """The workspace, as `wandb_workspaces` has it; nothing is sent.

    W&B can give a line a title and dashes only for a run that is known by its id, so all lines are solid and have the
    names of metrics; their symbols are at the vertical axis, where they fit.

    Args:
        project: whose runs it shows.
        entity: the user or team that owns the project; ``None`` is for those who do not save it.
        prefix: of the callbacks.

    Raises:
        DashboardError: if wandb-workspaces is not installed, or a name is empty.
    """
    if not project or "/" in project:
        raise DashboardError(f"Expected the name of a project, but got {project!r}: give its entity by --entity.")
    if not prefix or "/" in prefix or "." in prefix:
        raise DashboardError(f"Expected the prefix of a callback, which has no slash or dot, but got {prefix!r}.")
    ws = _package("workspaces")
    return ws.Workspace(
        entity=entity or "",
        project=project,
        name=re.sub(r"[^\w -]", "_", prefix),  # W&B refuses some signs here
        sections=[_section(name, prefix) for name in SECTIONS],
        settings=ws.WorkspaceSettings(x_axis="epoch"),
    )


def specification(workspace: Any) -> str:
    """What W&B would receive, as JSON."""
    model = workspace._to_model()  # there is no public way to it
    return json.dumps(
        model.spec.model_dump(mode="json", by_alias=True, exclude_none=True), indent=2, ensure_ascii=False
    )


def save(project: str, entity: str | None = None, prefix: str = "normtheory") -> str:
    """Save the workspace as a view of the project, and return its address.

    The view has a name of its own: saving again replaces it, with what was changed in it by hand, and makes no second
    one. In a terminal, W&B asks who is not logged in for a key.

    Args:
        project: an existing one.
        entity: ``None``: the one that W&B takes for new runs.
        prefix: of the callbacks.

    Raises:
        DashboardError: if wandb-workspaces is not installed, nobody is logged in, W&B cannot be reached or refuses, or
            there is no such project.
    """
    made = workspace(project, entity, prefix)
    import wandb

    try:
        api = wandb.Api()
        made.entity = entity or api.settings["entity"] or api.default_entity or ""
        _find_saved(made, prefix)
        made.save()
        return made.url
    except DashboardError:
        raise
    except (KeyboardInterrupt, EOFError):  # at the client's question for an account
        raise DashboardError(_NOT_LOGGED_IN) from None
    except Exception as error:  # of W&B's client, its service, GraphQL: they have no class in common
        raise DashboardError(_explained(error)) from error


# -- sections and panels -----------------------------------------------------------------------------------------------


def _section(name: str, prefix: str) -> Any:
    """Those panels first that are no details, all of them on the first page."""
    ws = _package("workspaces")
    ours = [panel for panel in PANELS if panel.section == name]
    first = [_plot(panel, prefix) for panel in ours if not panel.detail]
    if name == "Overview":
        first = [*_own_plots(), *_headlines(prefix), *first]
    if name == "Layers":
        first.append(_reports().WeavePanelSummaryTable(table_name=f"{prefix}_layers/table"))
    return ws.Section(
        name=name,
        panels=[*first, *(_plot(panel, prefix) for panel in ours if panel.detail)],
        is_open=bool(first) and name != "BatchNorm",  # of which most networks have nothing
        layout_settings=ws.SectionLayoutSettings(columns=_COLUMNS, rows=max(1, math.ceil(len(first) / _COLUMNS))),
        panel_settings=ws.SectionPanelSettings(x_axis="epoch"),
    )


def _plot(panel: Panel, prefix: str) -> Any:
    """A starred metric stands for names that only a run knows; its panel has one expression for all its lines."""
    names = [_full_name(line.metric, prefix) for line in panel.lines]
    starred = any("*" in name for name in names)
    symbols = " · ".join(dict.fromkeys(find_metric(line.metric).symbol for line in panel.lines))
    return _reports().LinePlot(
        title=panel.title,
        x="epoch",
        y=[] if starred else names,
        metric_regex=_expression(names) if starred else None,
        log_y=panel.scale == "log",
        title_y=symbols if len(symbols) <= _LONGEST_AXIS_TITLE else None,
    )


def _own_plots() -> list[Any]:
    return [
        _reports().LinePlot(title=title, x="epoch", metric_regex=expression)
        for title, expression in _OWN_PANELS.items()
    ]


def _headlines(prefix: str) -> list[Any]:
    """The last value of each: the summary also has an extreme."""
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
    """Give the workspace the id of the view that was saved before, if there is one.

    Raises:
        DashboardError: if there is no such project.
    """
    internal = _package("workspaces.internal")
    # In the address of a view only its name shows, so the usual one is readable, and any other prefix has its own.
    address = "normtheory" + ("" if prefix == "normtheory" else prefix.encode().hex())
    made._internal_name = internal._url_query_str_to_internal_name(address)
    try:
        made._internal_id = internal.get_view_dict(made.entity, made.project, address)["id"]
    except ValueError as error:
        if str(error).startswith("Project"):
            raise DashboardError(
                f"Expected a project of W&B, but {made.entity}/{made.project} is not there or not yours to see: "
                "run once with a WandbLogger, which creates it, or give --entity."
            ) from error


def _explained(error: Exception) -> str:
    from wandb.errors import AuthenticationError, UsageError

    if isinstance(error, UsageError):  # the client has no other use for it here
        return _NOT_LOGGED_IN
    reason = " ".join(str(error).split()).rstrip(".")
    if isinstance(error, AuthenticationError):
        return f"W&B is out of reach, or does not know the key ({reason}): check the network, or wandb login --relogin"
    return f"W&B did not save the dashboard ({reason}): check the network, and that you may write to the project."
