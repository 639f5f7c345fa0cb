"""Traces: slices that add up, arrows along the edges, and spans that an OTLP server takes."""

import csv
import http.server
import io
import itertools
import json
import re
import threading
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
from rich.console import Console

import flowrl as fl
from flowrl.core.spans import Mark, Span
from flowrl.errors import RunError
from flowrl.observe import table
from flowrl.observe.progress import Progress
from flowrl.observe.trace import Trace

SMALL = {
    "policy": fl.Policy(fl.networks.MLP, hidden=(8,)),
    "envs_per_runner": 4,
    "rollout_length": 16,
}
GRAPHS = {
    "ppo": lambda: fl.ppo(
        "CartPole-v1", fl.PPOSettings(**SMALL, batch_size=128, minibatch_size=64, epochs=3)
    ),
    "impala": lambda: fl.impala(
        "CartPole-v1", fl.IMPALASettings(**SMALL, num_runners=2, batch_size=128, report_every=2)
    ),
}
CASES = [
    ("ppo", "local"),
    ("impala", "local"),
    pytest.param(("ppo", "ray"), marks=(pytest.mark.ray, pytest.mark.system)),
    pytest.param(("impala", "ray"), marks=(pytest.mark.ray, pytest.mark.system)),
]


def traced(graph, runtime, steps=1_024, **to):
    with fl.run(graph, runtime=runtime, steps=steps, **to) as run:
        list(run)
    return run


class Collector(http.server.BaseHTTPRequestHandler):
    got: list
    status = 200

    def do_POST(self):
        import gzip

        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
            ExportTraceServiceRequest,
        )

        body = self.rfile.read(int(self.headers["Content-Length"]))
        body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
        type(self).got.append((self.path, ExportTraceServiceRequest.FromString(body)))
        self.send_response(self.status)
        self.end_headers()

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def collector():
    kind = type("Mine", (Collector,), {"got": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", kind
        server.shutdown()


class Seen(NamedTuple):
    name: str
    runtime: str
    run: fl.Run
    events: list
    """Of the trace for Perfetto."""
    spans: list
    """Requests that came to the collector."""
    shown: str
    """On the terminal."""
    folder: Path


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def seen(request, collector, tmp_path_factory):
    """One run with all of it on."""
    name, runtime = request.param
    if runtime == "ray":
        request.getfixturevalue("ray_up")
    address, kind = collector
    kind.got.clear()
    folder, shown = tmp_path_factory.mktemp("seen"), io.StringIO()
    table.SECONDS = 0.02
    observers = [
        Progress(Console(file=shown, force_terminal=True, width=120)),
        fl.Csv(folder / "rows.csv"),
        fl.TensorBoard(folder / "board"),
    ]
    to = {
        "trace": folder / "out.json",
        "otlp": address,
        "out": folder / "run",
        "record": fl.Record(every=2),
    }
    run = traced(GRAPHS[name](), runtime, 3_072, observers=observers, **to)
    table.SECONDS = 1.0
    return Seen(
        name,
        runtime,
        run,
        json.loads((folder / "out.json").read_text())["traceEvents"],
        list(kind.got),
        shown.getvalue(),
        folder,
    )


def test_every_process_and_node_has_a_track_and_arrows_go_along_the_edges(seen):
    name, runtime, run, events, *_ = seen
    graph = run.graph
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert set(processes.values()) - {"within updates"} == set(run.profile().processes)
    assert {n.name for n in graph.nodes} <= set(tracks.values())
    slices = [e for e in events if e["ph"] == "X"]
    for track in tracks:
        mine = sorted((e["ts"], e["ts"] + e["dur"]) for e in slices if e["tid"] == track)
        assert all(a[1] <= b[0] + 0.01 for a, b in itertools.pairwise(mine)), (
            f"two slices of {tracks[track]} at once"
        )
    starts, ends = ({e["id"]: e for e in events if e["ph"] == phase} for phase in "sf")
    arrows = Counter((tracks[starts[i]["tid"]], tracks[ends[i]["tid"]]) for i in starts)
    for edge in run.audit().edges:
        assert arrows[edge.before, edge.after] == edge.got.items, edge
    assert all(starts[i]["ts"] <= ends[i]["ts"] for i in starts)
    within = {(tracks[e["tid"]], e["name"]) for e in slices}
    sampler = "sample" if runtime == "local" else "runners, 0"
    assert {(sampler, kind) for kind in ("reset", "step", "inference")} <= within
    if runtime == "ray":
        assert (
            sum(n for (a, b), n in arrows.items() if a.startswith("runners") and b == "sample")
            == run.counts()["requests"]
        )
    if name == "ppo":
        assert {e["name"] for e in slices if tracks[e["tid"]] == "within updates"} == {
            "epoch 1",
            "epoch 2",
            "epoch 3",
        }


def test_the_table_the_log_the_sinks_and_the_record_are_there_too(seen):
    name, runtime, run, *_ = seen
    for node in (*run.graph.nodes, *([] if runtime == "local" else [run.graph.nodes[0]])):
        assert re.search(
            rf"{node.name}\S*( <- bottleneck)?\S* +\S*{type(node.op).__name__}", seen.shown
        ), node.name
    assert "bottleneck" in seen.shown and ("2 workers" in seen.shown) == (
        runtime == "ray" and name == "impala"
    )
    log = [json.loads(line) for line in (seen.folder / "run/events.jsonl").read_text().splitlines()]
    assert [log[0]["event"], log[-1]["event"], log[-1]["reason"]] == ["started", "ended", "steps"]
    with (seen.folder / "rows.csv").open() as file:
        assert [int(row["updates"]) for row in csv.DictReader(file)] == [
            row["updates"] for row in run.rows
        ]
    assert list((seen.folder / "board").iterdir()) and list((seen.folder / "run/records").iterdir())
    assert (
        run.explain().bottleneck is not None
        and str(run.explain()) == (seen.folder / "run/explain.txt").read_text()
    )


def test_one_trace_over_all_processes_with_parents_and_children_right(seen):
    name, runtime, run, _, got, *_ = seen
    assert {path for path, _ in got} == {"/v1/traces"}
    spans, process = {}, {}
    for _, request in got:
        for of in request.resource_spans:
            about = {a.key: a.value.string_value for a in of.resource.attributes}
            assert about["service.name"] == "flowrl"
            for scope in of.scope_spans:
                for span in scope.spans:
                    spans[span.span_id] = span
                    process[span.span_id] = about["service.instance.id"]
    assert len({span.trace_id for span in spans.values()}) == 1
    roots = [s for s in spans.values() if not s.parent_span_id]
    assert [s.name for s in roots] == [f"run {name}"]
    assert set(process.values()) - {"within updates"} == set(run.profile().processes)
    for span in spans.values():
        if span.parent_span_id:
            parent = spans[span.parent_span_id]
            assert span.start_time_unix_nano <= span.end_time_unix_nano
            if process[span.span_id] == process[parent.span_id]:
                assert (
                    parent.start_time_unix_nano
                    <= span.start_time_unix_nano
                    <= span.end_time_unix_nano
                    <= parent.end_time_unix_nano
                ), span.name
    kinds = Counter(
        (spans[s.parent_span_id].name, s.name) for s in spans.values() if s.parent_span_id
    )
    assert kinds["train", "update"] and kinds["sync", "weight sync"]
    if runtime == "ray":
        calls = [
            s for i, s in spans.items() if process[i].startswith("runners") and s.name == "runners"
        ]
        taken = [s for s in calls if spans[s.parent_span_id].name == "sample"]
        assert len(taken) >= 0.9 * run.counts()["requests"]
        assert kinds["runners", "step"] and kinds["runners", "inference"]
    links = Counter((spans[link.span_id].name, s.name) for s in spans.values() for link in s.links)
    assert {("sample", "batch"), ("train", "sync")} <= set(links)


def test_a_trace_changes_no_result(tmp_path):
    with fl.run(GRAPHS["ppo"](), steps=512) as plain:
        rows = [row["loss"] for row in plain]
    assert [
        row["loss"]
        for row in traced(GRAPHS["ppo"](), "local", 512, trace=tmp_path / "trace.json").rows
    ] == rows


def test_a_collector_that_is_not_there_is_reported(monkeypatch):
    # The exporter tries again for as long.
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with pytest.raises(
        RunError, match=r"the collector at http://127.0.0.1:9 did not take the trace"
    ):
        traced(GRAPHS["ppo"](), "local", 128, otlp="http://127.0.0.1:9")


def test_where_no_trace_can_go_is_reported_before_the_run(tmp_path):
    (tmp_path / "folder.json").mkdir()
    for wrong in ("folder.json", "trace.txt"):
        with pytest.raises(
            fl.errors.SettingError,
            match=rf"trace: .*{wrong} must be a file whose name ends in .json \(Perfetto opens "
            rf"it\) or .svg",
        ):
            fl.run(GRAPHS["ppo"](), trace=tmp_path / wrong)
    with pytest.raises(
        fl.errors.SettingError, match=r"trace: there is no folder .*nowhere for out.json"
    ):
        fl.run(GRAPHS["ppo"](), trace=tmp_path / "nowhere/out.json")
    (tmp_path / "mine.svg").write_text("mine")
    with pytest.raises(fl.errors.SaveError, match="mine.svg exists already.* for the trace"):
        fl.run(GRAPHS["ppo"](), trace=tmp_path / "mine.svg")


def test_what_was_lost_on_the_way_has_no_arrow():
    reported = {
        "a": [
            Span("x", "other", 0.0, 1.0),
            Mark("x", "put", "q", 0.5, 1),
            Mark("x", "put", "q", 0.6, 2),
        ],
        "b": [Span("q", "other", 2.0, 3.0), Mark("", "taken", "q", 2.0, 2)],
    }
    (arrow,) = Trace.of("g", [("x", "q")], reported).arrows
    assert arrow.before == ("a", "x", 0.6) and arrow.after == ("b", "q", 2.0)
