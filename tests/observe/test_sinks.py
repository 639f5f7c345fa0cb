"""Sinks: the log of events, CSV, TensorBoard read back, and services, which fakes stand in for."""

import csv
import json
import math
import struct
import subprocess
import sys
import time
import types

import pytest

import flowrl as fl
from environments import Clockwork
from flowrl.cli.main import main
from flowrl.core import events
from flowrl.core.events import Dropped, Ended, Restarted, RowClosed, Started, Warned
from flowrl.core.items import Row
from flowrl.observe import sinks
from flowrl.observe.sinks import EventLog, columns, sink
from small_runs import small

TINY = fl.Policy(fl.networks.MLP, hidden=(4,))
PPO = fl.ppo(
    "CartPole-v1",
    fl.PPOSettings(
        envs_per_runner=2,
        rollout_length=16,
        batch_size=32,
        epochs=1,
        minibatch_size=None,
        policy=TINY,
    ),
)
SMALL = [
    "--set",
    "envs_per_runner=2",
    "--set",
    "rollout_length=16",
    "--set",
    "batch_size=32",
    "--set",
    "minibatch_size=None",
    "--untuned",
    "--steps",
    "100",
    "--json",
]


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


# -- the log


def test_a_saved_run_has_a_log_of_its_events(tmp_path, caplog):
    with fl.run(
        PPO.set("runners.env", lambda: Clockwork((5,))), steps=60, out=tmp_path / "run"
    ) as run:
        rows = list(run)
    warned, started, ended = lines(tmp_path / "run/events.jsonl")
    assert warned["event"] == "warned" and "graph.txt can't be read back" in warned["text"], (
        "from before the directory was there"
    )
    assert (started["graph"], started["plan"]) == ("ppo", "ppo: 1 stage, lag 0") and started[
        "per_row"
    ]["sampled_steps"] == 32
    assert (ended["event"], ended["reason"], ended["error"]) == ("ended", "steps", None)
    assert warned["time"] <= started["time"] <= ended["time"] and started["time"].endswith("+00:00")
    assert len(lines(tmp_path / "run/rows.jsonl")) == len(rows)
    fl.load(tmp_path / "run")
    assert [
        (r.name, r.levelname) for r in caplog.records if "graph.txt can't be read back" in r.message
    ] == [("flowrl", "WARNING")]


def test_the_log_of_a_failed_run_says_why(tmp_path):
    with (
        pytest.raises(KeyError),
        fl.run(PPO, out=tmp_path / "run", until=lambda row: row["nothing"]) as run,
    ):
        list(run)
    error = lines(tmp_path / "run/events.jsonl")[-1]["error"]
    assert error.startswith("KeyError: \"unknown column 'nothing'. Known: row, ")
    assert not (tmp_path / "run/rows.csv").exists()


@pytest.mark.parametrize(
    ("set_up", "printed"),
    [("", "flowrl: it is slow\n"), ("logging.basicConfig()", "WARNING:flowrl:it is slow\n")],
)
def test_a_warning_names_flowrl_once_whoever_prints_it(set_up, printed):
    code = (
        f"import logging\n{set_up}\n"
        "from flowrl.core.events import Warned, with_warnings\n"
        "with_warnings(())[-1](Warned('it is slow'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == printed


@pytest.mark.parametrize("before", [b"", b'{"event": "started"}\n'])
def test_half_a_line_of_events_is_cut_off_where_a_run_goes_on(before, tmp_path):
    (tmp_path / "events.jsonl").write_bytes(before + b'{"event": "war')
    log = EventLog()
    log.open(tmp_path)
    log(Ended("closed"))
    log.close()
    found = [t["event"] for t in lines(tmp_path / "events.jsonl")]
    assert found == ["started"] * bool(before) + ["ended"]


def test_drops_are_reported_in_sums_once_a_second(tmp_path, monkeypatch):
    now = [10.0]
    monkeypatch.setattr(sinks.time, "monotonic", lambda: now[0])
    log = EventLog()
    log.open(tmp_path)
    for i in range(1_000):
        now[0] = 10 + i / 400
        log(Dropped("queue" if i % 2 else "other", 8))
    log(Restarted("runners", 3, "it hung", 64))
    log(Ended("closed"))
    log.close()
    log(Warned("too late"))
    reported = lines(tmp_path / "events.jsonl")
    assert [t["event"] for t in reported] == [
        "dropped",
        "dropped",
        "dropped",
        "restarted",
        "dropped",
        "ended",
    ]
    assert [sum(t["items"].values()) for t in reported if "items" in t] == [1, 401, 801, 1_000]
    assert reported[4]["steps"] == {"other": 4_000, "queue": 4_000}
    assert (
        reported[3]["worker"] == 3
        and reported[3]["because"] == "it hung"
        and reported[3]["lost_steps"] == 64
    )


# -- files


def run_with(*observers, steps=100):
    with fl.run(PPO, steps=steps, observers=observers) as run:
        return list(run)


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_csv_has_the_columns_of_the_plan_and_every_row(tmp_path):
    rows = run_with(fl.Csv(tmp_path / "deep/rows.csv"))
    got = read(tmp_path / "deep/rows.csv")
    assert list(got[0]) == columns(PPO.compile())
    for row, line in zip(rows, got, strict=True):
        assert {k: float(v) for k, v in line.items() if v != "nan"} == {
            k: v for k, v in row.items() if v == v
        }


def test_csv_knows_of_evaluations_before_there_are_any(tmp_path):
    graph = PPO.insert(after="sync", play=fl.Evaluate(every=2, episodes=1))
    with fl.run(graph, steps=100, observers=[fl.Csv(tmp_path / "rows.csv")]) as run:
        list(run)
    got = [line["eval/return_mean"] for line in read(tmp_path / "rows.csv")]
    assert got[0] == "" and float(got[1]) > 0


def test_csv_is_written_again_for_new_columns_and_every_line_is_there_at_once(tmp_path):
    to = fl.Csv(tmp_path / "rows.csv")
    to(Started(PPO.compile(), None))
    first = Row({"row": 1, "env_steps": 5, "return_mean": math.nan})
    to(RowClosed(first))
    assert read(tmp_path / "rows.csv")[0]["return_mean"] == "nan"
    to(RowClosed(Row({**first, "row": 2, "restarts": 1.0})))
    to(RowClosed(Row({**first, "row": 3})))
    got = read(tmp_path / "rows.csv")
    assert [line["row"] for line in got] == ["1", "2", "3"] and [
        line["restarts"] for line in got
    ] == ["", "1.0", ""]
    to(Ended("closed"))
    assert [p.name for p in tmp_path.iterdir()] == ["rows.csv"]
    with pytest.raises(
        fl.errors.SettingError, match="exists already, and nothing is ever overwritten"
    ):
        fl.Csv(tmp_path / "rows.csv")


def scalars(path):
    """Every record of an event file, by the format's own rules."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    data, at, found = path.read_bytes(), 0, []
    while at < len(data):
        head = data[at : at + 8]
        (size,) = struct.unpack("<Q", head)
        body = data[at + 12 : at + 12 + size]
        sums = struct.unpack("<I", data[at + 8 : at + 12]) + struct.unpack(
            "<I", data[at + 12 + size : at + 16 + size]
        )
        assert sums == (masked_crc32c(head), masked_crc32c(body))
        found.append(Event.FromString(body))
        at += 16 + size
    return found


def test_tensorboard_reads_every_row_over_its_steps(tmp_path):
    rows = run_with(fl.TensorBoard(tmp_path / "tb"))
    (path,) = (tmp_path / "tb").iterdir()
    version, *reported = scalars(path)
    assert version.file_version == "brain.Event:2" and "tfevents" in path.name
    assert [e.step for e in reported] == [row["env_steps"] for row in rows]
    for event, row in zip(reported, rows, strict=True):
        assert {v.tag: v.simple_value for v in event.summary.value} == pytest.approx(
            {k: v for k, v in row.items() if math.isfinite(v)}, rel=1e-6
        )


def test_a_killed_run_has_its_rows(tmp_path):
    board = fl.TensorBoard(tmp_path)
    board(Started(PPO.compile(), None))
    board(RowClosed(Row({"env_steps": 7, "loss": math.inf, "return_mean": 2.0})))
    (path,) = tmp_path.iterdir()
    assert [(v.tag, v.simple_value) for v in scalars(path)[-1].summary.value] == [
        ("env_steps", 7.0),
        ("return_mean", 2.0),
    ]
    board(Ended("failed"))


# -- services


class Recorder:
    """Stands in for a module: notes every call, and gives itself."""

    def __init__(self, calls=None, name=""):
        self.__dict__.update(calls=[] if calls is None else calls, name=name)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Recorder(self.calls, f"{self.name}.{name}".lstrip("."))

    def __setitem__(self, key, value):
        self.calls.append((f"{self.name}[{key}]", value, {}))

    def __call__(self, *args, **named):
        self.calls.append((self.name, args, named))
        return Recorder(self.calls)

    def of(self, name):
        return [(args, named) for called, args, named in self.calls if called == name]


def test_wandb_is_reported_settings_rows_and_the_end(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", fake := Recorder())
    rows = run_with(fl.WandB("walks", mode="offline", config={"note": "mine"}))
    ((_, init),) = fake.of("init")
    assert (init["project"], init["mode"]) == ("walks", "offline")
    assert (
        init["config"]["graph"] == "ppo"
        and init["config"]["learner.loss.clip_ratio"] == 0.2
        and init["config"]["note"] == "mine"
    )
    assert [named["step"] for _, named in fake.of("log")] == [row["env_steps"] for row in rows]
    assert fake.of("log")[0][0][0] == {k: v for k, v in rows[0].items() if math.isfinite(v)}
    assert fake.of("finish") == [((), {"exit_code": 0})] and fake.calls[-2] == (
        "summary[reason]",
        "steps",
        {},
    )


def test_steps_never_go_back_where_sampling_begins_after_a_phase_without_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", fake := Recorder())
    made = [Row({"env_steps": s, "updates": u}) for s, u in ((0, 400), (0, 900), (32, 950))]
    plan = PPO.compile()
    to = fl.WandB("walks")
    for event in (Started(plan, None), *map(RowClosed, made), Ended("closed")):
        to(event)
    # A run that goes on in its second phase is counted like its first row.
    to = fl.WandB("walks")
    for event in (
        Started(plan, None, made[0]),
        RowClosed(Row({"env_steps": 99, "updates": 1_000})),
    ):
        to(event)
    assert [named["step"] for _, named in fake.of("log")] == [400, 900, 950, 1_000]


def test_mlflow_is_reported_settings_rows_and_the_end(monkeypatch):
    fake = Recorder()
    fake.__dict__["entities"] = types.SimpleNamespace(Param=lambda *x: x, Metric=lambda *x: x)
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    rows = run_with(fl.MLflow("walks", uri="http://there"))
    assert fake.of("MlflowClient") == [(("http://there",), {})] and fake.of(
        "get_experiment_by_name"
    ) == [(("walks",), {})]
    assert [named["run_name"] for _, named in fake.of("create_run")] == ["ppo"]
    batches = [named for _, named in fake.of("log_batch")]
    params = dict(param for batch in batches for param in batch.get("params", ()))
    assert (
        params["learner.loss.clip_ratio"] == "0.2"
        and max(len(batch.get("params", ())) for batch in batches) <= 100
    )
    metrics = [batch["metrics"] for batch in batches if "metrics" in batch]
    assert [[(name, value, step) for name, value, _, step in batch] for batch in metrics] == [
        [(k.replace("/", "."), v, row["env_steps"]) for k, v in row.items() if math.isfinite(v)]
        for row in rows
    ]
    assert fake.of("set_terminated")[0][0][1] == "FINISHED"


def test_a_service_that_fails_is_switched_off_and_the_run_goes_on(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda **_: 1 / 0))
    notes = []

    class Notes:
        kinds = (Warned,)

        def __call__(self, event):
            notes.append(event.text)

    assert len(run_with(fl.WandB("walks"), Notes())) == 4
    assert notes == [
        "observer WandB failed and is switched off: ZeroDivisionError: division by zero"
    ]


def test_one_that_fails_with_the_last_event_is_reported_of_too():
    notes = []

    class Notes:
        kinds = (Warned,)

        def __call__(self, event):
            notes.append(event.text)

    class Falls:
        kinds = (Ended,)

        def __call__(self, event):
            time.sleep(0.1)  # the stream is being closed already
            raise OSError("full")

    run_with(Notes(), Falls())
    assert notes == ["observer Falls failed and is switched off: OSError: full"]


def test_a_sink_with_patience_gets_the_end_however_late(monkeypatch):
    monkeypatch.setattr(events, "CLOSING_SECONDS", 0.01)
    got = []

    class Slow:
        kinds = (RowClosed, Ended)
        patience = 20.0

        def __call__(self, event):
            time.sleep(0.05)
            got.append(type(event))

    run_with(Slow())
    assert got[-1] is Ended


@pytest.mark.parametrize(
    ("make", "package", "extra"),
    [
        (lambda: fl.WandB("p"), "wandb", "wandb"),
        (lambda: fl.MLflow("p"), "mlflow", "mlflow"),
        (lambda: fl.TensorBoard("d"), "tensorboardX.proto.event_pb2", "tensorboard"),
    ],
)
def test_a_missing_package_is_named_before_anything_starts(make, package, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        fl.errors.SettingError,
        match=rf"{extra} needs a package that is not there .*: .* -m pip install "
        rf"'flowrl\[{extra}\]'",
    ):
        make()


# -- the command line


def test_to_names_sinks_and_files_are_in_the_runs_directory(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", fake := Recorder())
    wanted = ["--to", "csv", "--to", "tensorboard", "--to", "csv:mine.csv", "--to", "wandb:walks"]
    assert (
        main(["run", "ppo", *SMALL, "--out", "run", "--trace", "out.json", "--record", *wanted])
        == 0
    )
    out, err = capsys.readouterr()
    assert (
        "  rows    run/rows.jsonl, run/rows.csv, run/tensorboard, mine.csv, wandb:walks\n"
        "  trace   out.json\n  records flowrl rerun run\n" in err
    )
    rows = [json.loads(line) for line in out.splitlines()]
    assert (
        len(read(tmp_path / "run/rows.csv"))
        == len(read(tmp_path / "mine.csv"))
        == len(rows)
        == len(fake.of("log"))
    )
    assert len(list((tmp_path / "run/tensorboard").iterdir())) == 1
    fl.load(tmp_path / "run")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tensorbord", r"--to: unknown sink 'tensorbord'; did you mean 'tensorboard"),
        ("wandb", "--to wandb needs a name after it: --to wandb:PROJECT"),
        ("mlflow:", "--to mlflow needs a name after it: --to mlflow:EXPERIMENT"),
    ],
)
def test_a_wrong_sink_is_reported(text, says, tmp_path):
    with pytest.raises(fl.errors.SettingError, match=says):
        sink(text, tmp_path)


def test_whoever_changes_the_folder_meanwhile_finds_all_files_where_the_run_began(
    tmp_path, monkeypatch
):
    (tmp_path / "later").mkdir()
    monkeypatch.chdir(tmp_path)
    to = {"out": "run", "trace": "trace.json", "record": True, "observers": [fl.Csv("rows.csv")]}
    with fl.run(small(), steps=64, **to) as run:
        next(run)
        monkeypatch.chdir(tmp_path / "later")
        list(run)
    assert not list((tmp_path / "later").iterdir())
    assert {"run", "trace.json", "rows.csv"} == {
        path.name for path in tmp_path.iterdir() if path.name != "later"
    }
    assert len((tmp_path / "rows.csv").read_text().splitlines()) == 1 + len(run.rows)
    assert fl.load(tmp_path / "run") and (tmp_path / "run/explain.txt").exists()
    assert list((tmp_path / "run/records").iterdir())
