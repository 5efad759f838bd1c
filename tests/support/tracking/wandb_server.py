"""A stand-in for W&B's server: as much of it as the real client asks for, in memory, from the standard library.

    with WandbServer() as server:
        subprocess.run(command, env={**os.environ, **server.environment()})
    server.run.history, server.run.metrics, server.run.config

Requests of GraphQL are answered by `WandbServer.operations`, a dict from the operation's name to a function of its
variables that returns the data. Add further calls with ``server.operations["Name"] = lambda variables: {…}``.
"""

import base64
import gzip
import json
import re
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from typing import Any
from urllib.parse import quote, unquote

ENTITY = "tester"
# Whether the client is as new as the newest that was tried when this was written; older ones ask for less.
TODAYS_CLIENT = tuple(int(part) for part in version("wandb").split(".")[:2]) >= (0, 31)
HISTORY, SUMMARY, EVENTS, OUTPUT = "wandb-history.jsonl", "wandb-summary.json", "wandb-events.jsonl", "output.log"
# How wandb_internal.proto numbers the flags of `MetricSummary`.
SUMMARIES = {1: "min", 2: "max", 3: "mean", 4: "best", 5: "last", 6: "none", 7: "copy", 8: "first"}


@dataclass
class StoredRun:
    """What has arrived of one run."""

    name: str
    project: str
    display_name: str = "stand-in"
    config_json: dict[str, Any] = field(default_factory=dict)
    # The lines of each streamed file.
    lines: dict[str, list[str]] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    # One for each process that has finished it: a resumed run has two.
    exit_codes: list[int] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return bool(self.exit_codes)

    @property
    def history(self) -> list[dict]:
        """The logged rows, in order."""
        return [_numbers(json.loads(line)) for line in self.lines.get(HISTORY, [])]

    @property
    def summary(self) -> dict:
        return _numbers(json.loads("".join(self.lines.get(SUMMARY, ["{}"]))))

    @property
    def config(self) -> dict:
        """Without the client's own part."""
        return {key: item["value"] for key, item in self.config_json.items() if key != "_wandb"}

    @property
    def metrics(self) -> dict[str, dict]:
        """The definitions: ``{name: {"step_metric": …, "summary": […]}}``, a glob under its pattern.

        The client writes a `MetricRecord` of wandb_internal.proto as ``{number of the field: value}``: 1 the name, 2
        the glob, 5 the place of the step metric in the list, from 1 on, 7 the flags of the summary. What a glob
        matches, and an axis that nobody has defined, stands in the list as well.
        """
        records = self.config_json.get("_wandb", {}).get("value", {}).get("m", [])
        return {
            record.get("1") or record["2"]: {
                "step_metric": records[record["5"] - 1]["1"] if record.get("5") else None,
                "summary": [SUMMARIES[flag] for flag in record.get("7", [])],
            }
            for record in records
        }

    @property
    def tables(self) -> dict[str, list[dict]]:
        """Each logged table, as ``{"columns": …, "data": …}``; the same key may be logged several times."""
        found: dict[str, list[dict]] = {}
        for row in self.history:
            for key, value in row.items():
                if isinstance(value, dict) and value.get("_type") == "table-file":
                    found.setdefault(key, []).append(json.loads(self.files[value["path"]]))
        return found

    def receive(self, update: dict) -> None:
        """A post to the file stream. Lines have places, so that one which is sent twice is stored once."""
        for name, chunk in update.get("files", {}).items():
            lines, start = self.lines.setdefault(name, []), chunk["offset"]
            lines[start : start + len(chunk["content"])] = chunk["content"]
        if update.get("complete"):
            self.exit_codes.append(update.get("exitcode", 0))


def _numbers(row: dict) -> dict:
    """JSON has neither NaN nor infinity: the client sends them as words."""
    words = {"NaN", "Infinity", "-Infinity"}
    return {key: float(value) if isinstance(value, str) and value in words else value for key, value in row.items()}


class WandbServer:
    """Listens while it is entered; what has arrived remains.

    Attributes:
        runs: by id.
        operations: the answers to GraphQL, by the name of the operation.
        requests: everything that was asked and the status of the answer, in order: ``("POST /graphql UpsertBucket",
            200)``.
        unknown: names of operations that nothing answers; the client got an error of GraphQL.
    """

    def __init__(self) -> None:
        self.runs: dict[str, StoredRun] = {}
        self.requests: list[tuple[str, int]] = []
        self.unknown: list[str] = []
        self.operations: dict[str, Callable[[dict], dict]] = {
            "Viewer": self._viewer,
            "ServerFeaturesQuery": lambda variables: {"serverInfo": {"features": []}},
            # Older clients ask which fields and mutations there are.
            "ProbeServerCapabilities": lambda variables: {
                "QueryType": {"fields": []},
                "MutationType": {"fields": [{"name": "createRunFiles"}]},
                "ServerInfoType": {"fields": []},
            },
            "ProbeServerSettings": lambda variables: {"ServerSettingsType": {"fields": []}},
            "ProbeServerArtifact": lambda variables: {"ArtifactInfoType": {"fields": []}},
            "ProbeServerCreateArtifactInput": lambda variables: {"CreateArtifactInputInfoType": {"inputFields": []}},
            "ProbeServerCreateArtifactFileSpecInput": lambda variables: {
                "CreateArtifactFileSpecInputInfoType": {"inputFields": []}
            },
            "InputFields": lambda variables: {"TypeInfo": {"inputFields": []}},
            # Older clients ask again and again whether somebody has stopped the run in the browser.
            "RunStoppedStatus": lambda variables: {"project": {"run": {"stopped": False}}},
            "OrganizationCoreWeaveOrganizationID": lambda variables: {"entity": {"organization": None}},
            "RunResumeStatus": self._run_resume_status,
            "UpsertBucket": self._upsert_bucket,
            "CreateRunFiles": self._create_run_files,
            "ArtifactType": lambda variables: {"project": {"artifact": None}},
            "CreateArtifact": self._create_artifact,
            "CreateArtifactManifest": self._create_artifact_manifest,
            "CreateArtifactFiles": self._create_artifact_files,
            "ArtifactByIDShort": self._artifact,
            "CommitArtifact": lambda variables: {"commitArtifact": {"artifact": {"id": "artifact", "digest": ""}}},
        }
        self._faults: list[tuple[str, int]] = []
        self._lock = threading.RLock()
        self._http = _Http(("127.0.0.1", 0), _Handler)
        self._http.wandb = self

    def __enter__(self) -> "WandbServer":
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_port}"

    @property
    def run(self) -> StoredRun:
        """The only one."""
        (run,) = self.runs.values()
        return run

    def environment(self) -> dict[str, str]:
        """What a process needs in its environment to talk to this server, quietly and without long waits."""
        return {
            "WANDB_BASE_URL": self.url,
            "WANDB_API_KEY": "0" * 40,
            "WANDB_MODE": "online",
            "WANDB_SILENT": "true",
            "WANDB_ERROR_REPORTING": "false",
            # Whole seconds: the client takes a fraction for "not set".
            "WANDB_X_FILE_STREAM_TRANSMIT_INTERVAL": "1",
            **{
                f"WANDB_X_{channel}_RETRY_WAIT_{end}_SECONDS": "1"
                for channel in ("FILE_STREAM", "FILE_TRANSFER", "GRAPHQL")
                for end in ("MIN", "MAX")
            },
        }

    def fail_next(self, n: int, status: int = 500, path_contains: str = "") -> None:
        """Answer the next ``n`` requests with ``status``, of those with this text in them (as in `requests`)."""
        with self._lock:
            self._faults += [(path_contains, status)] * n

    def answer(self, command: str, path: str, body: bytes) -> tuple[int, dict]:
        """The status and the JSON for a request."""
        asked = json.loads(body) if path == "/graphql" else {}
        # The client's Go part names the operation, its python part only writes it.
        name = asked and (asked.get("operationName") or re.search(r"(?:query|mutation)\s+(\w+)", asked["query"])[1])
        line = " ".join(filter(None, (command, path, name)))
        with self._lock:
            fault = next((fault for fault in self._faults if fault[0] in line), None)
            if fault:
                self._faults.remove(fault)
            self.requests.append((line, fault[1] if fault else 200))
            if fault:
                return fault[1], {"error": "injected"}
            if asked:
                return 200, self._query(name, asked.get("variables") or {})
            return 200, self._fetch(path) if command == "GET" else self._store(path, body)

    def _query(self, name: str, variables: dict) -> dict:
        if name not in self.operations:
            self.unknown.append(name)
            return {"data": None, "errors": [{"message": f"the stand-in server has no operation {name}"}]}
        return {"data": self.operations[name](variables)}

    def _store(self, path: str, body: bytes) -> dict:
        if stream := re.fullmatch(r"/files/[^/]+/[^/]+/([^/]+)/file_stream", path):
            self.runs[stream[1]].receive(json.loads(body))
        elif upload := re.fullmatch(r"/upload/([^/]+)/(.+)", path):
            self.runs[upload[1]].files[unquote(upload[2])] = body
        return {}

    def _fetch(self, path: str) -> dict:
        """Of what was uploaded, a manifest; it is JSON."""
        upload = re.fullmatch(r"/upload/([^/]+)/(.+)", path)
        return json.loads(self.runs[upload[1]].files[unquote(upload[2])]) if upload else {}

    # -- the operations ------------------------------------------------------------------------------------------------

    def _viewer(self, variables: dict) -> dict:
        known = {"id": "user", "entity": ENTITY, "username": ENTITY, "email": "", "flags": "{}"}
        return {"viewer": {**known, "teams": {"edges": []}}}

    def _run_resume_status(self, variables: dict) -> dict:
        run = self.runs.get(variables["name"])
        return {"model": {"id": "project", "name": variables["project"], "bucket": run and self._bucket(run)}}

    def _bucket(self, run: StoredRun) -> dict:
        project = {"id": "project", "name": run.project, "entity": {"id": "entity", "name": ENTITY}}
        return {
            "id": run.name,
            "name": run.name,
            "displayName": run.display_name,
            "description": "",
            "project": project,
            "sweepName": None,
            "config": json.dumps(run.config_json),
            "wandbConfig": json.dumps(run.config_json.get("_wandb", {}).get("value", {})),
            "summaryMetrics": "".join(run.lines.get(SUMMARY, ["{}"])),
            "historyLineCount": len(run.lines.get(HISTORY, [])),
            "eventsLineCount": len(run.lines.get(EVENTS, [])),
            "logLineCount": len(run.lines.get(OUTPUT, [])),
            "historyTail": json.dumps(run.lines.get(HISTORY, [])[-1:]),
            "eventsTail": json.dumps(run.lines.get(EVENTS, [])[-1:]),
            "tags": [],
        }

    def _upsert_bucket(self, variables: dict) -> dict:
        name, new = variables["name"], variables["name"] not in self.runs
        run = self.runs.setdefault(name, StoredRun(name, variables["project"]))
        run.config_json = json.loads(variables.get("config") or "null") or run.config_json
        run.display_name = variables.get("displayName") or run.display_name
        return {"upsertBucket": {"bucket": self._bucket(run), "inserted": new}}

    def _create_run_files(self, variables: dict) -> dict:
        run = variables["run"]
        files = [{"name": name, "uploadUrl": self._upload_url(run, name)} for name in variables["files"]]
        return {"createRunFiles": {"runID": run, "uploadHeaders": [], "files": files}}

    def _upload_url(self, run: str, name: str) -> str:
        return f"{self.url}/upload/{run}/{quote(name)}"

    def _create_artifact(self, variables: dict) -> dict:
        # The run is the id: requests about the artifact's files do not name it. Older clients decode ids.
        run = _input(variables)["runName"]
        artifact = {
            "id": base64.b64encode(run.encode()).decode(),
            "state": "PENDING",
            "artifactSequence": {"latestArtifact": None},
        }
        return {"createArtifact": {"artifact": artifact}}

    def _create_artifact_manifest(self, variables: dict) -> dict:
        url = self._upload_url(variables["runName"], "artifact/" + variables["name"])
        return {
            "createArtifactManifest": {
                "artifactManifest": {"id": "manifest", "file": {"id": "file", "uploadUrl": url, "uploadHeaders": []}}
            }
        }

    def _create_artifact_files(self, variables: dict) -> dict:
        nodes = [
            {
                "displayName": wanted["name"],
                "storagePath": f"artifact/{wanted['name']}",
                "uploadUrl": self._upload_url(_run_of(wanted["artifactID"]), f"artifact/{wanted['name']}"),
                "uploadHeaders": [],
                "uploadMultipartUrls": None,
                "artifact": {"id": wanted["artifactID"]},
            }
            for wanted in _input(variables)["artifactFiles"]
        ]
        return {"createArtifactFiles": {"files": {"edges": [{"node": node} for node in nodes]}}}

    def _artifact(self, variables: dict) -> dict:
        """Older clients read it back after they have saved it."""
        manifest = self._upload_url(_run_of(variables["id"]), "artifact/wandb_manifest.json")
        empty = ("description", "metadata", "ttlDurationSeconds", "ttlIsInherited", "historyStep", "commitHash")
        artifact = {
            "id": variables["id"],
            "artifactSequence": {"project": {"entityName": ENTITY, "name": "project"}, "name": "table"},
            "versionIndex": 0,
            "artifactType": {"name": "run_table"},
            "aliases": [],
            "tags": [],
            "state": "COMMITTED",
            "currentManifest": {"file": {"directUrl": manifest}},
            "fileCount": 1,
            "createdAt": "2020-01-01T00:00:00",
            "updatedAt": None,
        }
        return {"artifact": {**dict.fromkeys(empty), **artifact}}


def _input(variables: dict) -> dict:
    """Older clients send its parts."""
    return variables.get("input", variables)


def _run_of(artifact: str) -> str:
    return base64.b64decode(artifact).decode()


class _Http(ThreadingHTTPServer):
    wandb: WandbServer
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that ends resets its connections; anything else is a mistake in here."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _respond(self) -> None:
        body = self._body()
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        status, answer = self.server.wandb.answer(self.command, self.path, body)
        text = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_POST = do_PUT = _respond

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def log_message(self, *arguments: object) -> None:
        """Quiet."""
