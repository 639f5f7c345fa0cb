"""Gradients in the debugger, in texts, in traces and beside records."""

import io
import json

import numpy as np
import pytest

import flowrl as fl
from flowrl.core.items import Gradients, Metrics
from flowrl.observe.looking import brief, number, plain, whole

A3C = fl.a3c(
    "CartPole-v1",
    num_runners=2,
    envs_per_runner=2,
    rollout_length=4,
    report_every=2,
    policy=fl.Policy(fl.networks.MLP, hidden=(4,)),
)
ITEM = Gradients(
    8,
    {"w": np.float32([1.0, np.nan])},
    Metrics.pack({"loss": 0.5}),
    np.float32(6),
    {"before": {}, "after": {}, "moments": {}},
    {"version": np.int32([4, 4]), "lag": np.int32([0, 1])},
)


def test_gradients_as_text_and_their_numbers_by_name():
    assert brief(ITEM) == "Gradients of 1 batch, 8 steps"
    lines = whole(ITEM).splitlines()
    assert lines[1:4] == ["  batches  1", "  valid    6", "  loss     0.5"]
    assert lines[4].split()[0] == "parameter" and lines[5].split()[:2] == ["w", "[2]"]
    assert lines[6].split()[0] == "column" and lines[-1].split()[0] == "lag"
    names = ("loss", "steps", "valid", "w.nan", "lag.max", "kl")
    assert [number(ITEM, name) for name in names] == [0.5, 8, 6, 1, 1, None]
    assert plain(ITEM)["numbers"]["valid"] == 6 and plain(ITEM)["text"] == ""


def debugged(*commands):
    out = io.StringIO()
    typed = io.StringIO("".join(f"{command}\n" for command in commands))
    return fl.debug(A3C, seed=0, stdin=typed, stdout=out), out.getvalue()


def test_the_debugger_shows_the_nodes_and_what_goes_between_them():
    _, text = debugged("n", "show", "break apply when loss>0", "c", "n", "w")
    assert "sample -> apply: Gradients of 1 batch, 8 steps" in text
    assert "  heads/action/kernel" in text and "loss>0; loss is" in text
    assert "-> sync    SyncWeights" in text and "adv" not in text.split("w\n")[-1]


def test_a_loss_whose_gradients_runners_compute_needs_a_new_run_but_its_optimiser_does_not():
    run, text = debugged("set learner.optimizer.lr 0", "set learner.loss.ent_coef 0.5", "u row 3")
    assert "lr was 0.0007 and is 0 from here on" in text.replace("0.0 from", "0 from")
    assert "a3c.learner.loss.ent_coef: runners get this before the first pass, so a change" in text
    first, _ = debugged("q")
    for name, x in first.policy.weights.params.items():
        np.testing.assert_array_equal(x, run.policy.weights.params[name])


def test_a_record_of_updates_that_have_no_batch_is_refused(tmp_path):
    with pytest.raises(
        fl.errors.SettingError, match="a3c: record keeps the batch of an update, and each update"
    ):
        fl.run(A3C, steps=64, out=tmp_path / "run", record=fl.Record(every=1))
    assert not (tmp_path / "run").exists()


def test_a_trace_has_a_track_for_each_node(tmp_path):
    with fl.run(A3C, steps=64, trace=tmp_path / "trace.json") as run:
        list(run)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    tracks = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"sample", "apply", "sync"} <= tracks
