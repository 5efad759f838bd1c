"""The fake W&B server of the tests stores what the client sends."""

import gzip
import json
import math
import urllib.error
import urllib.request

import pytest
from wandb.proto import wandb_internal_pb2

from support.tracking.wandb_server import SUMMARIES, TODAYS_CLIENT, WandbServer


@pytest.fixture
def server():
    with WandbServer() as server:
        ask(server, "mutation UpsertBucket { x }", name="r", project="p", config="{}")
        yield server


def post(server, path, content, method="POST", **headers):
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    request = urllib.request.Request(server.url + path, body, headers, method=method)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def ask(server, query, **variables):
    return post(server, "/graphql", {"query": query, "variables": variables})


def stream(server, offset, *lines, **more):
    files = {"wandb-history.jsonl": {"offset": offset, "content": [json.dumps(line) for line in lines]}}
    return post(server, "/files/e/p/r/file_stream", {"files": files, **more})


def test_the_numbers_of_the_summaries_are_those_of_the_client():
    fields = wandb_internal_pb2.MetricSummary.DESCRIPTOR.fields
    known = {field.number: field.name for field in fields}
    if TODAYS_CLIENT:
        assert known == SUMMARIES
    assert {**SUMMARIES, **known} == SUMMARIES  # older clients do not have them all
    assert {"min", "max", "last"} <= set(known.values())


def test_the_numbers_of_a_definition_are_those_of_the_client():
    fields = wandb_internal_pb2.MetricRecord.DESCRIPTOR.fields_by_name
    wanted = ("name", "glob_name", "step_metric_index", "summary")
    assert [fields[name].number for name in wanted] == [1, 2, 5, 7]


def test_definitions_are_read_from_the_config(server):
    records = [{"1": "a", "5": 2, "6": [1, 3], "7": [1, 5]}, {"1": "epoch", "7": []}, {"2": "*", "5": 2}]
    config = json.dumps({"lr": {"value": 0.1}, "_wandb": {"value": {"m": records}}})
    ask(server, "mutation UpsertBucket { x }", name="r", project="p", config=config)
    assert server.run.metrics == {
        "a": {"step_metric": "epoch", "summary": ["min", "last"]},
        "epoch": {"step_metric": None, "summary": []},
        "*": {"step_metric": "epoch", "summary": []},
    }
    assert server.run.config == {"lr": 0.1}


def test_a_line_that_is_sent_twice_is_stored_once(server):
    stream(server, 0, {"a": 1}, {"a": 2})
    stream(server, 1, {"a": 2}, {"a": "NaN"}, {"a": "-Infinity"})
    assert [row["a"] for row in server.run.history][:2] == [1, 2]
    assert math.isnan(server.run.history[2]["a"])
    assert server.run.history[3]["a"] == -math.inf
    assert not server.run.finished
    stream(server, 4, complete=True, exitcode=3)
    assert server.run.exit_codes == [3]


def test_a_compressed_body_is_read(server):
    body = gzip.compress(json.dumps({"complete": True, "exitcode": 0}).encode())
    post(server, "/files/e/p/r/file_stream", body, **{"Content-Encoding": "gzip"})
    assert server.run.finished


def test_faults_hit_the_requests_that_they_are_meant_for_and_store_nothing(server):
    server.fail_next(1, status=503, path_contains="file_stream")
    ask(server, "query Viewer { x }")
    with pytest.raises(urllib.error.HTTPError, match="503"):
        stream(server, 0, {"a": 1})
    assert server.run.history == []
    stream(server, 0, {"a": 1})
    assert server.run.history == [{"a": 1}]
    assert [status for _, status in server.requests] == [200, 200, 503, 200]


def test_a_resumed_client_is_told_what_is_there(server):
    stream(server, 0, {"a": 1}, {"a": 2})
    bucket = ask(server, "query RunResumeStatus { x }", name="r", project="p")["data"]["model"]["bucket"]
    assert bucket["historyLineCount"] == 2
    assert json.loads(json.loads(bucket["historyTail"])[0]) == {"a": 2}
    assert ask(server, "query RunResumeStatus { x }", name="new", project="p")["data"]["model"]["bucket"] is None


def test_further_operations_can_be_added_and_unknown_ones_are_errors(server):
    assert "errors" in ask(server, "query Mine($a: String) { x }", a="1")
    assert server.unknown == ["Mine"]
    server.operations["Mine"] = lambda variables: {"x": variables["a"]}
    assert ask(server, "query Mine($a: String) { x }", a="1") == {"data": {"x": "1"}}


def test_a_file_is_kept_under_its_name(server):
    answer = ask(server, "mutation CreateRunFiles { x }", run="r", files=["a b/c.json"])
    (file,) = answer["data"]["createRunFiles"]["files"]
    post(server, file["uploadUrl"].removeprefix(server.url), b"content", method="PUT")
    assert server.run.files == {"a b/c.json": b"content"}
