"""`fl.run`: rows, stopping, saving, loading, interrupts, observers."""

import gc
import json
import math
import os
import signal
import threading
from functools import partial
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

import flowrl as fl
from environments import Clockwork
from flowrl.core.clock import TRACE
from flowrl.core.events import Ended, OperatorRan, RowClosed, Started, Tap, Warned
from flowrl.core.garbage import rarely_collected
from flowrl.errors import LostError
from flowrl.graph.stages import Schedule
from flowrl.learner.learner import LearnerHandle
from flowrl.observe.saving import RunDir
from flowrl.runtime.closing import interrupts_come, interrupts_wait
from flowrl.runtime.rows import RowMaker

SETTINGS = fl.PPOSettings(
    envs_per_runner=4, rollout_length=16, batch_size=64, epochs=1, minibatch_size=32
)
PPO = fl.ppo("CartPole-v1", SETTINGS)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "one"
    with fl.run(
        PPO.set("runners.policy", _normed()).set("learner.policy", _normed()), out=path, steps=150
    ) as run:
        list(run)
    return path, run


def _normed():
    return fl.Policy(fl.networks.MLP, hidden=(8,), normalize=True)


def test_it_stops_at_a_number_of_steps_or_where_a_row_says_so():
    with pytest.raises(
        fl.errors.SettingError,
        match=r"run takes a graph, such as fl.ppo\('CartPole-v1'\), got 'ppo'",
    ):
        fl.run("ppo")
    with fl.run(PPO, steps=150) as run:
        rows = list(run)
    assert (run.reason, rows) == ("steps", run.rows)
    assert rows[-1]["env_steps"] >= 150 > rows[-2]["env_steps"]
    with fl.run(PPO, until=lambda row: row["updates"] == 2) as run:
        assert len(list(run)) == 2
    assert run.reason == "until"


def test_leaving_the_block_closes_the_run_and_policy_and_save_work_afterwards(tmp_path):
    with fl.run(PPO) as run:
        next(run)
    assert run.reason == "closed"
    obs = np.zeros(4, np.float32)
    run.save(tmp_path / "later")
    assert fl.load(tmp_path / "later").act(obs) == run.policy.act(obs)
    assert len((tmp_path / "later/rows.jsonl").read_text().splitlines()) == 1


def test_a_runs_directory_holds_what_it_should(saved):
    path, run = saved
    assert {p.name for p in path.iterdir()} == {
        "rows.jsonl",
        "events.jsonl",
        "graph.txt",
        "graph.json",
        "plan.txt",
        "audit.txt",
        "explain.txt",
        "profile.json",
        "profiles.jsonl",
        "command.txt",
        "run.json",
        "policy",
        "best",
        "snapshots",
        "manifest.json",
    }
    rows = [json.loads(line) for line in (path / "rows.jsonl").read_text().splitlines()]
    assert [r["env_steps"] for r in rows] == [r["env_steps"] for r in run.rows]
    assert rows[0]["lag_max"] == 0
    assert fl.Graph.from_text((path / "graph.txt").read_text()) == run.graph
    assert (path / "plan.txt").read_text() == str(run.plan)
    assert b"pickle" not in b"".join(
        p.read_bytes()
        for p in path.rglob("*")
        if p.is_file() and p.suffix in (".json", ".txt", ".jsonl")
    )


def test_nan_is_null_in_the_rows_file(tmp_path):
    graph = PPO.replace(
        runners=fl.Runners(
            _long, PPO.resources["runners"].policy, envs_per_runner=4, rollout_length=16
        )
    )
    with fl.run(graph, steps=60, out=tmp_path / "r") as run:
        list(run)
    assert math.isnan(run.rows[0]["return_mean"])
    assert (
        json.loads((tmp_path / "r/rows.jsonl").read_text().splitlines()[0])["return_mean"] is None
    )


def _long():
    return Clockwork((1000,))


def test_a_loaded_policy_acts_and_evaluates_like_the_one_that_was_saved(saved):
    path, run = saved
    loaded = fl.load(path)
    obs = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
    np.testing.assert_array_equal(loaded.act(obs), run.policy.act(obs))
    np.testing.assert_array_equal(
        loaded.act(obs, greedy=False, seed=3), run.policy.act(obs, greedy=False, seed=3)
    )
    draws = [loaded.act(obs, greedy=False) for _ in range(2)]
    assert (draws[0] != draws[1]).any(), "no draw is made twice"
    np.testing.assert_array_equal(draws[0], fl.load(path).act(obs, greedy=False))
    assert isinstance(int(loaded.act(obs[0])), int)
    np.testing.assert_array_equal(loaded.evaluate(3, seed=1), run.policy.evaluate(3, seed=1))
    assert set(loaded.weights.rest) == {
        "encoder/norm/mean",
        "encoder/norm/var",
        "encoder/norm/count",
    }
    assert loaded.weights.rest["encoder/norm/count"] > 100
    with pytest.raises(
        fl.errors.ContractError,
        match=r"an observation of shape \[4\], or several of them; got \[3\]",
    ):
        loaded.act(np.zeros(3))
    for obs, got in (
        ("hello", "a str, values of type <U5"),
        (None, "a NoneType, values of type object"),
        ([[1, 2], [3]], "a list"),
        ([0, 0, np.nan, 0], "a number that is not finite: nan"),
        (np.zeros(4, complex), "a ndarray, values of type complex128"),
    ):
        with pytest.raises(
            fl.errors.ContractError, match=rf"an observation of Box.*\(4,\).*; got {got}$"
        ):
            loaded.act(obs)
    with pytest.raises(fl.errors.ContractError, match=r"or several of them; got \[0, 4\]"):
        loaded.act(np.zeros((0, 4)))


@pytest.mark.parametrize(
    "where", ["policy/policy.json", "rows.jsonl", "graph.txt", "a weights file"]
)
def test_a_flipped_bit_anywhere_is_found_before_anything_is_loaded(saved, tmp_path, where):
    import shutil

    path = tmp_path / "copy"
    shutil.copytree(saved[0], path)
    largest = max(
        (p for p in (path / "policy/weights").rglob("*") if p.is_file()),
        key=lambda p: p.stat().st_size,
    )
    file = largest if where == "a weights file" else path / where
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(bytes(data))
    with pytest.raises(fl.errors.SaveError, match=f"{file.name} is not what was written"):
        fl.load(path)


def test_what_is_no_saved_run_is_refused_with_the_reason(saved, tmp_path):
    import shutil

    with pytest.raises(fl.errors.SaveError, match="there is no directory"):
        fl.load(tmp_path / "nothing")
    path = tmp_path / "copy"
    shutil.copytree(saved[0], path)
    (path / "plan.txt").unlink()
    with pytest.raises(
        fl.errors.SaveError, match=r"plan\.txt is missing, though manifest.json lists it"
    ):
        fl.load(path)
    (path / "manifest.json").write_text("{")
    with pytest.raises(fl.errors.SaveError, match=r"manifest\.json is damaged"):
        fl.load(path)
    (path / "manifest.json").unlink()
    with pytest.raises(
        fl.errors.SaveError,
        match=r"no manifest\.json: it is no run's directory, or its run was killed",
    ):
        fl.load(path)


def test_nothing_is_ever_overwritten(saved):
    path, run = saved
    before = (path / "rows.jsonl").read_bytes()
    with pytest.raises(
        fl.errors.SaveError, match="exists already, and nothing is ever overwritten"
    ):
        fl.run(PPO, out=path)
    with pytest.raises(fl.errors.SaveError, match="exists already"):
        run.save(path)
    assert (path / "rows.jsonl").read_bytes() == before


def test_a_policy_of_the_users_own_needs_leave_to_be_imported(tmp_path):
    import environments  # noqa: F401 - the package that is named below
    import own_policy

    policy = fl.Policy(own_policy.Tiny, width=4)
    graph = fl.ppo(
        "CartPole-v1",
        fl.PPOSettings(
            envs_per_runner=2, rollout_length=8, batch_size=16, minibatch_size=None, policy=policy
        ),
    )
    with fl.run(graph, steps=10, out=tmp_path / "r") as run:
        list(run)
    with pytest.raises(
        fl.errors.SaveError,
        match=r"needs code from 'own_policy'.*allow it with --import own_policy",
    ):
        fl.load(tmp_path / "r")
    assert fl.load(tmp_path / "r", allow=["own_policy"]).policy == policy


def test_a_lambda_runs_but_is_not_saved_and_a_policy_without_a_name_is_refused_at_the_start(
    tmp_path,
):
    reported = Notes()
    graph = PPO.set("runners.env", lambda: Clockwork((5,)))
    with fl.run(graph, steps=60, out=tmp_path / "r", observers=[reported]) as run:
        list(run)
    assert "graph.txt can't be read back" in reported.of(Warned)[0].text
    with pytest.raises(fl.errors.SaveError, match="the environment of this policy is not known"):
        fl.load(tmp_path / "r").evaluate(1)

    longer = partial(gym.wrappers.TimeLimit, max_episode_steps=3)
    with fl.run(graph.set("runners.wrappers", (longer,)), steps=60, out=tmp_path / "w") as run:
        list(run)
    named = fl.load(tmp_path / "w", allow=["gymnasium"], env=Clockwork)
    assert named.env is Clockwork and list(named.evaluate(4)) == [3, 4, 9, 4], (
        "within the wrapper that could be saved"
    )

    class Local(fl.networks.MLP):
        pass

    with pytest.raises(fl.errors.SaveError, match="Local.*can't be written to a file"):
        fl.run(fl.ppo("CartPole-v1", fl.PPOSettings(policy=fl.Policy(Local))), out=tmp_path / "s")


class Notes:
    kinds = (Started, OperatorRan, RowClosed, Warned, Ended)

    def __init__(self):
        self.events = []

    def __call__(self, event):
        self.events.append(event)

    def of(self, kind):
        return [e for e in self.events if isinstance(e, kind)]


def test_observers_are_reported_and_a_failing_one_is_switched_off():
    class Broken:
        kinds = (RowClosed,)
        calls = 0

        def __call__(self, event):
            Broken.calls += 1
            raise OSError("disk full")

    notes = Notes()
    with fl.run(PPO, steps=150, observers=[notes, Broken()]) as run:
        list(run)
    assert isinstance(notes.events[0], Started)
    assert notes.events[-1] == Ended("steps")
    assert [e.row for e in notes.of(RowClosed)] == run.rows
    assert {e.node for e in notes.of(OperatorRan)} == {n.name for n in PPO.nodes}
    assert sum(e.seconds for e in notes.of(OperatorRan)) < run.rows[-1]["seconds"]
    assert [e.text for e in notes.of(Warned)] == [
        "observer Broken failed and is switched off: OSError: disk full"
    ]
    assert Broken.calls == 1


def test_ctrl_c_is_raised_between_passes_and_a_second_one_at_once():

    done = []
    with interrupts_wait() as interrupted:
        assert not interrupted()
        signal.raise_signal(signal.SIGINT)
        done.append("the pass goes on")
    assert interrupted()
    with pytest.raises(KeyboardInterrupt), interrupts_wait():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        done.append("never")
    assert done == ["the pass goes on"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


class Presses:
    """Presses Ctrl-C at an event."""

    def __init__(self, kind):
        self.kinds = (kind,)
        self.live = True

    def __call__(self, event):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("how", ["in the last pass", "while it ends"])
def test_a_ctrl_c_at_the_end_is_not_lost_and_nothing_is(how, tmp_path):
    press = Presses(OperatorRan if how == "in the last pass" else Ended)
    with pytest.raises(KeyboardInterrupt):
        list(fl.run(PPO, steps=1, out=tmp_path / "run", observers=[press]))
    fl.load(tmp_path / "run")


def test_arrays_that_a_node_yields_are_not_written_to():
    def scales(batch):
        reward = batch["reward"]
        reward *= 0.1
        return batch

    run = fl.run(PPO.insert(after="sample", scale=fl.Map(scales)))
    with run, pytest.raises(ValueError, match="read-only"):
        next(run)


def test_a_run_takes_a_plan():
    plan = PPO.compile()
    with fl.run(plan, steps=1) as run:
        list(run)
    assert run.plan is plan


def test_a_run_works_outside_the_main_thread():
    rows = []

    def work():
        with fl.run(PPO, steps=60) as run:
            rows.extend(run)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(rows) == 1


def test_an_interrupted_run_is_saved(tmp_path):
    with pytest.raises(KeyboardInterrupt), fl.run(PPO, out=tmp_path / "r") as run:
        for row in run:
            if row["row"] == 2:
                signal.raise_signal(signal.SIGINT)
    assert run.reason == "interrupted"
    fl.load(tmp_path / "r")
    assert Path(tmp_path / "r/rows.jsonl").read_text().count("\n") == 2


def test_wrong_arguments_are_reported_before_anything_starts(tmp_path):
    with pytest.raises(
        fl.errors.SettingError,
        match=r"unknown runtime 'lokal'; did you mean 'local'\? Known: local, ray",
    ):
        fl.run(PPO, runtime="lokal", out=tmp_path / "r")
    with pytest.raises(fl.errors.CheckError, match=r"ppo\.report"):
        fl.run(PPO.then(again=fl.Report()), out=tmp_path / "r")
    assert not (tmp_path / "r").exists()


def test_an_error_in_until_or_in_closing_an_environment_still_shuts_down_and_saves(tmp_path):
    with pytest.raises(KeyError, match="retrun_mean"):
        list(fl.run(PPO, until=lambda row: row["retrun_mean"] > 3, out=tmp_path / "a"))
    fl.load(tmp_path / "a")
    graph = PPO.replace(
        runners=fl.Runners(
            BadEnd, PPO.resources["runners"].policy, envs_per_runner=4, rollout_length=16
        )
    )
    with (
        pytest.raises(RuntimeError, match="can't close"),
        fl.run(graph, steps=60, out=tmp_path / "b") as run,
    ):
        list(run)
    fl.load(tmp_path / "b", allow=["test_run"])


def test_an_until_that_raises_stop_iteration_does_not_look_like_the_end(tmp_path):
    goals = iter([False, False])
    with pytest.raises(RuntimeError, match="until raised StopIteration"):
        list(fl.run(PPO, until=lambda row: next(goals), out=tmp_path / "run"))
    assert json.loads((tmp_path / "run/run.json").read_text())["ended"]["reason"] == "failed"


class BadEnd(Clockwork):
    closes = 0

    def close(self):
        BadEnd.closes += 1
        if BadEnd.closes > 1:  # the first one only showed its spaces
            raise RuntimeError("can't close")


class Full:
    """A file on a disk that is full."""

    def __init__(self, file):
        self.file = file

    def write(self, text):
        return self.file.write(text)

    def flush(self):
        raise OSError(28, "No space left on device")

    def close(self):
        self.file.close()
        self.flush()


def test_events_that_can_not_be_written_cost_nothing_else(tmp_path):
    with pytest.raises(fl.errors.SaveError, match="could not be saved: .*No space left on device"):
        run = fl.run(PPO, steps=60, out=tmp_path / "run")
        run._saver.log._file = Full(run._saver.log._file)
        list(run)
    fl.load(tmp_path / "run")
    # Its lock is free.
    with fl.resume(tmp_path / "run", steps=600) as again:
        next(again)


def test_a_run_whose_learner_is_lost_notes_how_it_ended(tmp_path, monkeypatch):
    def lost(*args):
        raise LostError("the process of the learner ended")

    def at_the_third(self, *how, row=RowMaker.row):
        if self.totals["row"] == 2:
            monkeypatch.setattr(LearnerHandle, "weights", lost)
            lost()
        return row(self, *how)

    monkeypatch.setattr(RowMaker, "row", at_the_third)
    with pytest.raises(LostError):
        list(fl.run(PPO, steps=600, out=tmp_path / "run", snapshots=False))
    ended = json.loads((tmp_path / "run/run.json").read_text())["ended"]
    assert ended["reason"] == "failed" and ended["rows"] == 2
    assert "LostError" in (tmp_path / "run/failure.json").read_text()
    assert not (tmp_path / "run/manifest.json").exists()
    RunDir.again(tmp_path / "run").close()  # nobody is at work on it


def test_rows_that_come_again_after_a_loss_have_not_reached_the_goal_yet(tmp_path, monkeypatch):
    round_, row, made = Schedule.round, RowMaker.row, []

    def twice(self, most=np.inf):
        # Two rows close together.
        return round_(self, most) + round_(self, most)

    def lost_once(self, *how):
        made.append(1)
        if len(made) == 4:
            raise LostError("the process of the learner ended")
        return row(self, *how)

    monkeypatch.setattr(Schedule, "round", twice)
    monkeypatch.setattr(RowMaker, "row", lost_once)
    with fl.run(PPO, until=lambda row: row["row"] >= 3, out=tmp_path / "run") as run:
        # The goal is reached by the first of two rows, and the second is lost.
        list(run)
    assert run.reason == "until" and len(run.rows) == 4


def test_a_run_that_can_not_start_traces_nothing_afterwards(tmp_path, monkeypatch):
    monkeypatch.delenv(TRACE, raising=False)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/x").touch()
    trace = str(tmp_path / "trace.json")
    for wrong in ({"out": tmp_path / "run"}, {"snapshots": None}, {"init": "/nowhere"}):
        with pytest.raises(fl.errors.FlowrlError):
            fl.run(PPO, steps=60, trace=trace, **wrong)
        assert TRACE not in os.environ
    with fl.run(PPO, steps=60, trace=trace) as run:
        list(run)
    assert TRACE not in os.environ


def test_a_full_disk_ends_the_run_with_one_clear_error(tmp_path, monkeypatch):
    from flowrl.observe import saving

    def full(*args):
        raise OSError(28, "No space left on device")

    with pytest.raises(fl.errors.SaveError, match="could not be saved: .*No space left on device"):
        run = fl.run(PPO, steps=60, out=tmp_path / "a")
        monkeypatch.setattr(saving, "seal", full)
        list(run)
    assert len(run.rows) == 1


def test_a_row_that_can_not_be_written_is_reported_and_written_with_the_others_at_the_end(
    tmp_path, monkeypatch
):
    add, warnings = RunDir.add, []

    def full_at_first(self, row):
        if row["row"] == 2:
            raise OSError(28, "No space left on device")
        add(self, row)

    monkeypatch.setattr(RunDir, "add", full_at_first)
    tap = Tap(lambda event: warnings.append(event.text), Warned)
    with fl.run(PPO, out=tmp_path / "a", observers=(tap,)) as run:
        rows = [next(run) for _ in range(4)]
    assert len(warnings) == 2 and "switched off: OSError: [Errno 28] No space left" in warnings[0]
    assert "from now on there are no snapshots of this run, for a row could not be" in warnings[1]
    lines = (tmp_path / "a/rows.jsonl").read_text().splitlines()
    assert [json.loads(line)["row"] for line in lines] == [row["row"] for row in rows]


def test_seeds_and_steps_are_checked():
    for seed, shown in ((-1, "-1"), ("a", "'a'"), (1.5, "1.5"), (None, "None")):
        says = f"seed must be a whole number from 0 to .*, got {shown}"
        with pytest.raises(fl.errors.SettingError, match=says):
            fl.run(PPO, seed=seed)
    with pytest.raises(
        fl.errors.SettingError, match="steps must be a whole number of at least 1, got 0"
    ):
        fl.run(PPO, steps=0)
    with pytest.raises(fl.errors.SettingError, match="got 4294967296"):
        fl.run(PPO, seed=2**32)


@pytest.mark.parametrize(("steps", "late"), [(39, True), (64, True), (65, False), (None, False)])
def test_a_goal_before_the_first_update_is_warned_of(steps, late):
    graph = fl.dqn("CartPole-v1", hidden=(8,), learning_starts=40, batch_size=8, report_every=1)
    warnings = []
    tap = Tap(lambda event: warnings.append(event.text), Warned)
    with fl.run(graph, steps=steps, observers=(tap,)) as run:
        next(run)
    says = f"dqn: steps={steps} come before the first update, which waits for 64 environment steps"
    assert [says in text for text in warnings] == [True] * late


def test_the_first_error_is_the_one_to_see(tmp_path):
    graph = PPO.replace(
        runners=fl.Runners(
            TwiceBad, PPO.resources["runners"].policy, envs_per_runner=1, rollout_length=16
        )
    )
    with (
        pytest.raises(fl.errors.EnvError, match="ValueError: first") as caught,
        fl.run(graph.set("batch.batch_size", 16).set("train.minibatch_size", None)) as run,
    ):
        list(run)
    assert "and then RuntimeError: second" in caught.value.__notes__


class TwiceBad(Clockwork):
    stepped = False

    def step(self, action):
        self.stepped = True
        raise ValueError("first")

    def close(self):
        if self.stepped:  # not the one that only showed its spaces
            raise RuntimeError("second")


def test_a_loss_may_not_report_what_every_row_has():
    with pytest.raises(
        fl.errors.CheckError,
        match=r"ppo\.train: the loss reports env_steps, which every Row or update has already; "
        r"give it another name",
    ):
        fl.run(PPO.set("learner.loss", _boasting))


def _boasting(policy, params, batch):
    value = policy(params, batch["obs"])[1].mean()
    return value, {"env_steps": value * 1e9}


def test_a_run_without_a_learner_is_saved_without_a_policy(tmp_path):
    runners = PPO.resources["runners"]
    with fl.run(
        fl.Graph("look", runners=runners).then(sample=fl.ParallelSample(), report=fl.Report()),
        steps=50,
    ) as run:
        list(run)
    run.save(tmp_path / "a")
    assert (tmp_path / "a/manifest.json").exists()
    with pytest.raises(fl.errors.SaveError, match="holds no policy"):
        fl.load(tmp_path / "a")
    with pytest.raises(fl.errors.GraphError, match="look has 0 learners"):
        run.policy  # noqa: B018


def test_garbage_is_collected_as_often_as_before_once_a_run_has_begun():
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    try:
        with fl.run(PPO) as run:
            assert gc.get_threshold() == (700, 10, 10)
            next(run)
            assert gc.get_threshold() == (700, 10, 10)
        with rarely_collected():
            assert gc.get_threshold()[0] > 50_000
        gc.set_threshold(0)  # the user switched it off
        with rarely_collected():
            assert gc.get_threshold()[0] == 0
    finally:
        gc.set_threshold(*before)


def test_a_run_whose_rows_nobody_asked_for_says_so(caplog):
    with fl.run(PPO):
        pass
    (warning,) = [r.message for r in caplog.records if "before its first row" in r.message]
    assert "write `for row in run: ...`" in warning
    caplog.clear()
    with fl.run(PPO) as run:
        next(run)
    assert not caplog.records


def test_within_an_outer_wait_interrupts_are_the_outer_ones_and_come_at_once_where_it_only_waits():
    with interrupts_wait() as outer:
        with interrupts_wait() as inner:
            assert not inner()
        with interrupts_come(), pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert not outer()
        with interrupts_wait() as inner:
            signal.raise_signal(signal.SIGINT)
            assert inner() and outer()
        # What came before is raised as soon as the run only waits.
        with pytest.raises(KeyboardInterrupt), interrupts_come():
            pytest.fail("it went on to wait")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
