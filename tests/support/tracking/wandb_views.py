"""The saved views of W&B's projects, for the stand-in server: what ``Workspace.save`` and ``from_url`` ask for.

with WandbServer() as server:
    views = SavedViews(server, projects={"demo"})
    …
views.only.spec["section"]["panelBankConfig"]["sections"]
"""

import json
from dataclasses import dataclass

from support.tracking.wandb_server import ENTITY, WandbServer


@dataclass
class View:
    """A view as the server has received it."""

    id: str
    entity: str
    project: str
    name: str
    display_name: str
    spec_json: str
    # How often it was replaced.
    updates: int = 0

    @property
    def spec(self) -> dict:
        return json.loads(self.spec_json)

    @property
    def sections(self) -> dict[str, dict]:
        """By their names, in order."""
        return {section["name"]: section for section in self.spec["section"]["panelBankConfig"]["sections"]}

    @property
    def panels(self) -> dict[tuple[str, str], dict]:
        """What every panel is configured to be, by its section and title; those without a title by their kind."""
        return {
            (name, panel["config"].get("chartTitle") or panel["viewType"]): panel["config"]
            for name, section in self.sections.items()
            for panel in section["panels"]
        }


class SavedViews:
    """Answers for the views of some projects of the server's only user.

    Attributes:
        views: by id.
    """

    def __init__(self, server: WandbServer, projects: set[str]) -> None:
        self.views: dict[str, View] = {}
        self._projects = projects
        server.operations |= {
            "GetDefaultEntity": lambda variables: {"viewer": {"id": "user", "entity": ENTITY}},
            "View": self._view,
            "UpsertView2": self._upsert_view,
        }

    @property
    def only(self) -> View:
        (view,) = self.views.values()
        return view

    def _view(self, variables: dict) -> dict:
        if not self._has(variables["entityName"], variables["name"]):
            return {"project": None}
        edges = [
            {"node": {"id": view.id, "displayName": view.display_name, "spec": view.spec_json}}
            for view in self.views.values()
            if (view.project, view.name) == (variables["name"], variables["viewName"])
        ]
        return {"project": {"allViews": {"edges": edges}}}

    def _upsert_view(self, variables: dict) -> dict:
        """Without an id a new one, whatever its name, as the real one may do."""
        assert self._has(variables["entityName"], variables["projectName"]), variables
        assert variables["type"] == "project-view"
        inserted = "id" not in variables
        view = View(
            id=variables.get("id") or f"view-{len(self.views)}",
            entity=variables["entityName"],
            project=variables["projectName"],
            name=variables["name"],
            display_name=variables["displayName"],
            spec_json=variables["spec"],
            updates=0 if inserted else self.views[variables["id"]].updates + 1,
        )
        self.views[view.id] = view
        return {"upsertView": {"view": {"id": view.id, "name": view.name}, "inserted": inserted}}

    def _has(self, entity: str, project: str) -> bool:
        return entity == ENTITY and project in self._projects
