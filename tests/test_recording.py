"""Updates that are recorded, run again, and explained."""

import json
import math
import os
import signal
import subprocess
import sys
import textwrap
from collections import deque
from pathlib import Path

import gymnasium as gym
import jax
import numpy as np
import pytest

import flowrl as fl
from environments import Corridor, Planted
from flowrl.cli.main import main
from flowrl.core.events import Tap, Updated, Updating, Warned
from flowrl.observe.outliers import outlier
from flowrl.observe.record import Record, Recorder, find, listed, read, records
from flowrl.observe.rerun import rerun
from flowrl.observe.why import why
from flowrl.rollout.sample import seed_of

POLICY = fl.Policy(fl.networks.MLP, hidden=(4,))
TINY = {"num_runners": 2, "envs_per_runner": 2, "rollout_length": 8}
PPO = fl.ppo(
    "CartPole-v1", fl.PPOSettings(**TINY, batch_size=32, epochs=2, minibatch_size=16, policy=POLICY)
)
IMPALA = fl.impala(
    "CartPole-v1", fl.IMPALASettings(**TINY, batch_size=32, report_every=2, policy=POLICY)
)
SMALL = fl.PPOSettings(**TINY, batch_size=32, epochs=1, minibatch_size=None, policy=POLICY)
ENV = {**os.environ, "PYTHONPATH": f"{Path(__file__).parents[1]}:{Path(__file__).parent}"}


EVERY = Record(every=1)


def recorded(graph, out, rows=3, runtime="local", record=EVERY, **more):
    with fl.run(graph, runtime=runtime, out=out, record=record, **more) as run:
        for _ in range(rows):
            next(run)
    return run


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """A run of which three updates are recorded."""
    out = tmp_path_factory.mktemp("runs") / "three"
    return recorded(PPO, out), out


# -- replay


@pytest.mark.parametrize(
    "runtime", ["local", pytest.param("ray", marks=pytest.mark.ray)], indirect=True
)
@pytest.mark.parametrize("graph", [PPO, IMPALA], ids=lambda g: g.name)
def test_a_replay_reports_the_same_to_the_bit(graph, runtime, tmp_path):
    run = recorded(graph, tmp_path / "run", runtime=runtime)
    every = [rerun(tmp_path / "run", r.number) for r in records(tmp_path / "run")]
    assert len(every) >= 3
    assert all(r.equal for r in every), "\n".join(map(str, every))
    assert [float(r.again["loss"]) for r in every][: len(run.rows)] == [
        row["loss"] for row in run.rows
    ] or graph is IMPALA


@pytest.mark.system
@pytest.mark.parametrize("name", ["recurrent", "dqn"])
def test_so_does_one_of_sequences_and_one_of_a_replay(name, tmp_path):
    if name == "recurrent":
        graph = fl.impala(
            "CartPole-v1",
            fl.IMPALASettings(
                **TINY,
                batch_size=32,
                policy=fl.Policy(fl.networks.RNN, hidden=(4,), size=4, cell="lstm"),
            ),
        )
    else:
        settings = fl.ApexSettings(
            **TINY,
            batch_size=16,
            learning_starts=32,
            report_every=2,
            policy=fl.Policy(fl.networks.QNetwork),
        )
        graph = fl.apex("CartPole-v1", settings).set("replay.shards", 1)
    recorded(graph, tmp_path / "run", rows=1)
    (*_, last) = records(tmp_path / "run")
    assert rerun(tmp_path / "run", last.number).equal
    text = why(tmp_path / "run", last.number)
    assert ("sampled from a replay: slot" in text) == (name == "dqn"), text
    assert "runner " in text


def test_what_is_set_is_shown_beside_both(three, capsys):
    run, out = three
    assert (
        main(
            [
                "rerun",
                str(out),
                "--update",
                "2",
                "--set",
                "learner.loss.clip_ratio=0.3",
                "--set",
                "train.epochs=4",
                "--set",
                "train.minibatch_size=None",
            ]
        )
        == 0
    )
    said = capsys.readouterr().out
    assert said.startswith("update 2 of learner, recorded because: every 1\n")
    assert "with learner.loss.clip_ratio=0.3, train.epochs=4, train.minibatch_size=None" in said
    loss, steps = (
        next(line for line in said.splitlines() if line.startswith(name)).split()
        for name in ("loss ", "gradient_steps")
    )
    assert loss[1] == loss[2] == f"{run.rows[1]['loss']:.8g}" != loss[3]
    assert steps[1:] == ["4", "4", "4"]
    assert said.endswith("the rerun is equal to the record to the bit\n")


def test_what_a_single_step_of_the_optimiser_does_is_seen_by_the_weights(three):
    _, out = three
    done = rerun(out, 3, [("learner.optimizer.lr", 3e-3)])
    assert done.moved[1] > 2 * done.moved[0] > 0
    assert [
        line.split()[:3] for line in str(done).splitlines() if line.startswith("weights moved")
    ] == [["weights", "moved", "-"]]


def test_what_can_not_be_set_is_reported(three):
    _, out = three
    for change, says in {
        (
            "learner.loss.clip_ratoi",
            0.3,
        ): r"unknown setting 'learner.loss.clip_ratoi'; did you mean 'learner.loss.clip_ratio'\?",
        ("adv.gamma", 0.9): "A rerun begins with the batch, so only what trains on it can be set",
        ("train.epochs", 1.5): "train.epochs: takes a whole number, got 1.5",
        ("train.minibatch_size", 7): "minibatch_size=7 does not divide the batch of 32 steps",
        (
            "learner.policy.hidden",
            (8,),
        ): (
            r"learner: \S+ is float32\[8\], but float32\[4\] was recorded; only what leaves the "
            r"tree structure"
        ),
    }.items():
        with pytest.raises(fl.errors.FlowrlError, match=says):
            rerun(out, 2, [change])


@pytest.mark.system
def test_a_replay_needs_neither_ray_nor_the_environment(tmp_path):
    gym.register("Gone-v0", "gymnasium.envs.classic_control:CartPoleEnv")
    recorded(fl.ppo("Gone-v0", SMALL), tmp_path / "out", 1)
    del gym.registry["Gone-v0"]
    code = """
        import sys
        from flowrl.cli.main import main
        status = main(["rerun", "out", "--update", "1"])
        print(status, "ray" in sys.modules, "gymnasium.envs.classic_control" in sys.modules)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    said = subprocess.run(
        command, cwd=tmp_path, env=ENV, check=True, capture_output=True, text=True
    ).stdout
    assert said.endswith("the rerun is equal to the record to the bit\n0 False False\n")


def test_records_are_listed_and_one_that_is_not_there_names_the_nearest(three, capsys):
    _, out = three
    assert main(["rerun", str(out)]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        "update",
        "1",
        "2",
        "3",
    ]
    assert main(["rerun", str(out), "--set", "learner.loss.clip_ratio=0.3"]) == 2
    assert (
        "--set changes an update that is run again; name it: --update N" in capsys.readouterr().err
    )
    assert main(["rerun", str(out), "--learner", "learner"]) == 2
    assert "--learner says whose is an update that is run again" in capsys.readouterr().err
    assert "(2 before; flowrl rerun" in listed(out, 1) and len(listed(out, 1).splitlines()) == 3
    assert main(["rerun", str(out), "--update", "812"]) == 2
    assert (
        "update 812 was not recorded; the nearest that were are 1, 2, 3" in capsys.readouterr().err
    )
    with pytest.raises(fl.errors.SaveError, match="holds no records of critic; it does of learner"):
        find(out, 1, "critic")


# -- why


def test_why_reports_runners_versions_episodes_and_seeds(three, capsys):
    _, out = three
    assert main(["why", str(out), "--update", "3"]) == 0
    said = capsys.readouterr().out
    for runner in (0, 1):
        line = next(x.split() for x in said.splitlines() if x.split()[:1] == [str(runner)])
        assert line[1:4] == [str(2 * runner), "to", str(2 * runner + 1)]
        assert line[4:9] == ["2", "0", "17", "to", "24"]
        assert line[9] == str(seed_of(0, "runners", runner))
    batch = find(out, 3).part("data")
    ended = int((batch["terminated"] | batch["truncated"]).sum())
    assert f"{ended}, here" in said if ended else "none" in said
    assert "advantage" in said


AT = 20


def planted(**more):
    env = {"at": AT, "seed": seed_of(0, "runners", 1) + 1}
    return fl.ppo("CartPole-v1", SMALL).replace(
        runners=fl.Runners(
            Planted,
            POLICY,
            num_runners=2,
            envs_per_runner=2,
            rollout_length=8,
            env_settings=env,
            **more,
        )
    )


@pytest.mark.parametrize(
    "runtime", ["local", pytest.param("ray", marks=pytest.mark.ray)], indirect=True
)
def test_a_planted_nan_is_traced_to_its_runner_environment_and_step(runtime, tmp_path, capsys):
    with pytest.raises(
        fl.errors.EnvError, match=f"nan, at its step {AT} since it was made"
    ) as failed:
        recorded(planted(), tmp_path / "run", 9, runtime)
    facts = json.loads((tmp_path / "run/failure.json").read_text())["facts"]
    assert facts == failed.value.facts
    wanted = {
        "resource": "runners",
        "runner": 1,
        "within": 1,
        "env": 3,
        "step": AT,
        "field": "reward",
        "value": "nan",
    }
    assert {k: facts[k] for k in wanted} == wanted
    seed = seed_of(0, "runners", 1) + 1
    assert main(["why", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert (
        f"environment 3 of runners, number 1 of runner 1, gave reward nan at its step {AT} since "
        f"it was made, {AT - sum((3, 2, 5, 1, 3, 2))} of its" in said
    )
    assert f"make Planted, call reset(seed={seed}), and step it {AT} times" in said
    env = Planted(AT, seed)
    env.reset(seed=seed)
    rewards = []
    for _ in range(AT):
        _, reward, terminated, truncated, _ = env.step(0)
        rewards.append(reward)
        if terminated or truncated:
            env.reset()
    assert np.isnan(rewards[-1])
    assert np.isfinite(rewards[:-1]).all()
    fl.load(tmp_path / "run", allow=["environments"])


def test_a_runner_that_is_restarted_lets_the_run_go_on_and_why_knows_its_new_seed(tmp_path):
    recorded(planted(on_error="restart"), tmp_path / "run", 5)
    said = why(tmp_path / "run", 5)
    assert "restarted by then: runner 1 (1 time)" in said
    assert str(seed_of(0, "runners", 1, 1)) in said
    assert why(tmp_path / "run").startswith("no error ended this run; --update N")


def test_a_nan_of_an_environment_in_jax_is_traced_too(tmp_path):
    graph = fl.ppo(Corridor, SMALL).set("runners.env_settings", {"nan_at": 3})
    with pytest.raises(
        fl.errors.EnvError,
        match="environment 0, counted over all runners, which is one of runner 0, at its step 3 "
        "with its resets",
    ):
        recorded(graph, tmp_path / "run")
    assert (
        "environment 0 of the runners, one of runner 0, gave what is not finite at its step 3 "
        "since it was made" in why(tmp_path / "run")
    )


def poisoned(batch):
    """Makes one reward NaN: of environment 2, in its row 21."""
    if not isinstance(batch["reward"], np.ndarray):
        return batch
    reward, step = (
        batch["reward"].copy(),
        batch.columns["first"] + np.arange(len(batch["reward"]))[:, None] + 1,
    )
    reward[(batch.columns["env"] == 2) & (step == 21)] = np.nan
    return batch.with_(reward=reward)


def test_a_nan_that_an_operator_makes_is_traced_by_the_record_of_its_update(tmp_path, capsys):
    graph = fl.ppo("CartPole-v1", SMALL).insert(after="batch", poison=fl.Map(poisoned))
    with pytest.raises(fl.errors.NotFiniteError, match="update 3"):
        recorded(graph, tmp_path / "run", 9, record=True)
    assert {r.number: r.header["why"] for r in records(tmp_path / "run")} == {
        1: ["first", "2 before update 3"], 2: ["1 before update 3"], 3: ["not finite"],
    }  # fmt: skip
    assert main(["why", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert (
        "reward is not finite in 1 place:\n"
        "  nan of runner 1, environment 2, step 21, row 4, column 2\n" in said
    )
    assert said.index("reward is not finite") < said.index("advantage is not finite")
    assert rerun(tmp_path / "run", 3).equal
    # A run that went on after it, and failed again, was ended by another update.
    failure = tmp_path / "run/failure.json"
    failure.write_text(failure.read_text().replace('"update": 3', '"update": 5'))
    assert "what update 5 was made of is not known" in why(tmp_path / "run")
    with pytest.raises(fl.errors.NotFiniteError):
        recorded(graph, tmp_path / "unknown", 9, record=False)
    assert "was not recorded. Run it again with --record, then ask why again" in why(
        tmp_path / "unknown"
    )


def wild(policy, params, batch):
    """A loss that is not finite, whatever it is given."""
    loss, metrics = fl.losses.PPOLoss()(policy, params, batch)
    return loss + jax.numpy.log(-1.0 - loss**2), metrics


def test_a_nan_that_the_loss_makes_is_reported_so(tmp_path):
    with pytest.raises(fl.errors.NotFiniteError):
        recorded(
            fl.ppo("CartPole-v1", SMALL).set("learner.loss", wild), tmp_path / "run", record=True
        )
    assert (
        "all of the batch and of the learner before it is finite: the update itself made what is "
        "not" in why(tmp_path / "run")
    )
    with pytest.raises(
        fl.errors.SaveError,
        match="needs code from 'test_recording'.* allow it with --import test_recording",
    ):
        rerun(tmp_path / "run", 1)
    assert rerun(tmp_path / "run", 1, allow=["test_recording"]).equal


# -- what is kept


def large_once(batch):
    large = isinstance(batch["reward"], np.ndarray) and batch.columns["version"].max() == 23
    return batch.with_(reward=batch["reward"] * (1e4 if large else 1.0))


def test_the_first_and_outliers_are_kept_with_those_before_and_nothing_else(tmp_path):
    recorded(
        fl.ppo("CartPole-v1", SMALL).insert(after="batch", large=fl.Map(large_once)),
        tmp_path / "run",
        28,
        record=True,
    )
    kept = {r.number: r.header["why"][0] for r in records(tmp_path / "run")}
    assert {1, 22, 23, 24} <= kept.keys()
    assert (kept[1], kept[22], kept[23]) == ("first", "2 before update 24", "1 before update 24")
    assert kept[24].startswith("outlier: the loss is ")
    assert not [n for n, because in kept.items() if because.startswith("every")]
    assert "kept because" in listed(tmp_path / "run")


def test_where_large_losses_are_common_few_are_outliers():
    losses = np.random.default_rng(0).pareto(1.0, 4_000)
    recent, found = deque(maxlen=200), []
    for i, loss in enumerate(losses):
        if i >= 200 and outlier(loss, recent):
            found.append(i)
        recent.append(loss)
    assert 0 < len(found) < 0.015 * len(losses)
    assert outlier(1e9, recent).startswith(
        "outlier: the loss is 1e+09, the median before it "
    ) and not outlier(1.0, [1.0] * 20)


def test_disk_and_memory_are_bounded(three, tmp_path, monkeypatch):
    size = max(p.stat().st_size for p in (three[1] / "records").iterdir())
    most = 4 * size + 100_000
    recorded(PPO, tmp_path / "run", 30, record=Record(every=1, most_bytes=most))
    files = list((tmp_path / "run/records").iterdir())
    numbers = [r.number for r in records(tmp_path / "run")]
    assert sum(p.stat().st_size for p in files) <= most
    assert {1, 30} <= {*numbers} and len(numbers) < 30
    monkeypatch.setattr("flowrl.observe.record.HELD", 1)
    held, recorder = [], Recorder(tmp_path / "held", Record(around=5))
    with fl.run(
        PPO,
        observers=[recorder, Tap(lambda e: held.append(len(recorder.held["learner"])), Updated)],
        steps=200,
    ) as run:
        list(run)
    assert set(held) == {1}


def test_records_that_would_be_larger_than_all_may_be_switch_it_off_and_the_run_goes_on(tmp_path):
    reported = []
    run = recorded(
        PPO,
        tmp_path / "run",
        2,
        record=Record(most_bytes=1000),
        observers=[Tap(reported.append, Warned)],
    )
    assert len(run.rows) == 2
    assert "but records may take most_bytes=1 KB; allow more" in reported[0].text


@pytest.mark.system
def test_a_killed_run_leaves_whole_records(tmp_path):
    code = """
        import sys, flowrl as fl
        s = fl.PPOSettings(
            num_runners=2, envs_per_runner=2, rollout_length=8, batch_size=32, epochs=1,
            minibatch_size=None, policy=fl.Policy(fl.networks.MLP, hidden=(4,)),
        )
        with fl.run(fl.ppo("CartPole-v1", s), out=sys.argv[1], record=fl.Record(every=1)) as run:
            for row in run:
                print(row["row"], flush=True)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=ENV, text=True) as process:
        while process.stdout.readline() != "20\n":
            pass
        os.kill(process.pid, signal.SIGKILL)
    every = records(tmp_path / "run")
    assert len(every) >= 19
    assert [read(r.path).number for r in every] == list(range(1, len(every) + 1))
    assert rerun(tmp_path / "run", every[-1].number).equal
    assert why(tmp_path / "run").startswith("this run goes on, or was killed")


def test_nothing_is_recorded_nor_copied_where_nobody_asks_and_records_may_be_removed(
    three, tmp_path
):
    fl.run(PPO, out=tmp_path / "plain", steps=32).close()
    assert not (tmp_path / "plain/records").exists()
    recorded(PPO, tmp_path / "run", 1)
    for path in (tmp_path / "run/records").iterdir():
        path.unlink()
    fl.load(tmp_path / "run")
    seen = []
    with fl.run(PPO, observers=[Tap(seen.append, Updating, Updated)]) as run:
        next(run)
        next(run)
    assert [(type(e), e.version) for e in seen] == [
        (Updating, 0),
        (Updated, 0),
        (Updating, 1),
        (Updated, 1),
    ]
    assert all(not x.is_deleted() for x in jax.tree.leaves(seen[0].state))


def test_wrong_inputs_are_reported(three, tmp_path, capsys):
    _, out = three
    with pytest.raises(
        fl.errors.SettingError,
        match=r"record keeps updates in the run's directory; give out='runs/mine' too",
    ):
        fl.run(PPO, record=True)
    with pytest.raises(
        fl.errors.SettingError,
        match="an update is a part of the program, so that it can't be recorded; take the local "
        "runtime",
    ):
        fl.run(fl.ppo(Corridor, SMALL), runtime="xla", record=True, out=tmp_path / "xla")
    for settings in ({"every": 0}, {"around": -1}, {"most_bytes": 0}):
        with pytest.raises(
            fl.errors.SettingError, match=f"{next(iter(settings))}.* at least 1|around must"
        ):
            Record(**settings)
    assert main(["why", str(tmp_path / "nowhere")]) == 2
    assert "there is no directory" in capsys.readouterr().err
    assert main(["why", str(tmp_path)]) == 2
    assert "is no run's directory: it has no graph.txt" in capsys.readouterr().err
    (tmp_path / "graph.txt").write_text("")
    assert why(tmp_path) == (
        f"this run goes on, or was killed: it left no error\n"
        f"{tmp_path} holds no records of updates; run it with --record"
    )
    for wrong in (100, "yes", Record):
        with pytest.raises(
            fl.errors.SettingError,
            match=r"record must be True, False or one such as fl.Record\(every=100\), got",
        ):
            fl.run(PPO, record=wrong, out=tmp_path / "run")
    with pytest.raises(fl.errors.SettingError, match="observers must be a list of them, got"):
        fl.run(PPO, observers=print)
    for wrong in (print, fl.Csv, "csv"):
        with pytest.raises(
            fl.errors.SettingError,
            match=r"observers: .* is none; it needs `kinds`, a tuple of the events that it takes",
        ):
            fl.run(PPO, observers=[wrong])
    (tmp_path / "records").mkdir()
    whole = (out / "records/update-000002.npz").read_bytes()
    (tmp_path / "records/update-000002.npz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(fl.errors.SaveError, match=r"update-000002.npz is damaged or no record"):
        find(tmp_path, 2)
    (tmp_path / "records/update-000002.npz").write_bytes(whole[:3000] + bytes(200) + whole[3200:])
    with pytest.raises(fl.errors.SaveError, match=r"update-000002.npz is damaged or no record"):
        find(tmp_path, 2)
    (tmp_path / "failure.json").write_text("{}")
    with pytest.raises(fl.errors.SaveError, match="failure.json is damaged"):
        why(tmp_path)


@pytest.mark.parametrize(
    ("address", "value", "says"),
    [
        ("learner.policy.hidden", (4,), "was recorded, but the changed learner has no such array"),
        ("train.epochs", 0, "train.epochs must be at least 1, got 0"),
        ("train.minibatch_size", 0, "train.minibatch_size must be at least 1, got 0"),
    ],
)
def test_a_rerun_with_what_does_not_fit_its_record_is_refused(address, value, says, tmp_path):
    policy = fl.Policy(fl.networks.MLP, hidden=(4, 4))
    graph = PPO.set("runners.policy", policy).set("learner.policy", policy)
    recorded(graph, tmp_path / "run", rows=1)
    with pytest.raises(fl.errors.SettingError, match=says):
        rerun(tmp_path / "run", 1, [(address, value)])


@pytest.mark.parametrize("settings", [{"every": 2.5}, {"around": "2"}, {"most_bytes": math.nan}])
def test_settings_of_records_of_a_wrong_type_are_refused(settings):
    with pytest.raises(fl.errors.SettingError, match=rf"Record\.{next(iter(settings))}"):
        Record(**settings)
