"""A run that is resumed goes on as if it had never been ended, bit for bit."""

import dataclasses
import fcntl
import inspect
import json
import shutil
import signal
import sys
from functools import partial

import gymnasium as gym
import jax
import numpy as np
import pytest
from gymnasium.wrappers import FrameStackObservation

import environments
import flowrl as fl
import flowrl.running
import flowrl.runtime.base
import flowrl.runtime.closing
from conftest import same, timeless, with_system
from flowrl.core.events import Tap, Warned
from flowrl.errors import SaveError, SettingError
from flowrl.observe.initial import init_of
from flowrl.observe.saving import RunDir
from flowrl.observe.snapshots import _naming
from flowrl.resuming import resumable
from flowrl.runtime.rows import RowMaker

SMALL = {"num_runners": 2, "envs_per_runner": 2, "rollout_length": 16, "batch_size": 64}
MLP = fl.Policy(fl.networks.MLP, hidden=(8,))
PPO = fl.PPOSettings(**SMALL, minibatch_size=32, epochs=2, policy=MLP)
JAX = "gymnax:CartPole-v1"
EVERY = fl.Snapshots(every=0, keep=99)


def values(tree):
    """Return the arrays of a tree as lists of NumPy arrays, random keys as their numbers."""

    def plain(x):
        is_key = jax.numpy.issubdtype(getattr(x, "dtype", float), jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if is_key else x)

    return [plain(x) for x in jax.tree.leaves(tree)]


def rows_of(path):
    return timeless([json.loads(x) for x in (path / "rows.jsonl").read_text().splitlines()])


def whole(graph, path, count=5, runtime="local", seed=1):
    """Make a run with a snapshot after each of its rows."""
    with fl.run(graph, out=path, seed=seed, snapshots=EVERY, runtime=runtime) as run:
        for _ in run:
            if len(run.rows) == count:
                break
    return run


def cut(path, row, to):
    """Make a copy of a run's directory as a kill -9 after a row leaves it."""
    shutil.copytree(path, to)
    (to / "manifest.json").unlink()
    # A round may close several rows, and a snapshot is made after the last of them.
    files = sorted((to / "snapshots").glob("row-*.json"))
    newest = [file for file in files if int(file.stem[4:]) <= row][-1]
    for file in files[files.index(newest) + 1 :]:
        file.unlink()
    (to / "snapshots" / "newest.txt").write_bytes(_naming(newest.name))
    with (to / "rows.jsonl").open("a") as file:
        file.write('{"row": 6, "env_st')
    return to


def resumed(path, graph, count=5, **how):
    with fl.resume(path, graph, until=lambda row: row["row"] >= count, **how) as run:
        new = list(run)
    assert len(run.rows) == len(rows_of(path))
    return run, new


def small(kind, **settings):
    """Return small settings of a stock graph."""
    names = {f.name for f in dataclasses.fields(kind)}
    network = fl.networks.QNetwork if "double" in names else fl.networks.MLP
    given = {
        "num_runners": 2, "envs_per_runner": 2, "rollout_length": 8, "batch_size": 32,
        "policy": fl.Policy(network, hidden=(8,)), "report_every": 3, "minibatch_size": None,
        **settings,
    }  # fmt: skip
    return kind(**{name: x for name, x in given.items() if name in names})


Q = {"learning_starts": 40, "buffer_size": 300, "rollout_length": 4, "batch_size": 16}
SEQUENCES = {
    **Q, "batch_size": 4, "sequence_length": 5, "burn_in": 3, "updates_per_step": 1 / 8,
    "policy": None, "hidden": (8,), "size": 8,
}  # fmt: skip
RNN = fl.Policy(fl.networks.RNN, cell="lstm")
POPULATION = {"pairs": 3, "max_steps": 20, "report_every": 1}
SAC = fl.Policy(fl.networks.SACNetwork, hidden=(8,))


def moments(env):
    changed = {"policy": None, "normalize": True, "normalize_rewards": True}
    return fl.ppo(env, dataclasses.replace(PPO, **changed, lr=fl.Linear(1e-3, 0.0, 20)))


def vector(mode):
    """PPO over a vector of Gymnasium's own kind that resets in one of its modes."""
    settings = dataclasses.replace(PPO, envs_per_runner=8)
    return fl.ppo(partial(environments.cut_short, mode), settings)


CASES = {
    "ppo": lambda: fl.ppo("CartPole-v1", PPO),
    "ppo over moments, with a schedule": lambda: moments("Pendulum-v1"),
    "ppo, SAME_STEP": lambda: vector("SameStep"),
    "ppo, DISABLED": lambda: vector("Disabled"),
    "a2c with an evaluation": lambda: fl.a2c("CartPole-v1", small(fl.A2CSettings)).insert(
        after="train", check=fl.Evaluate(every=2, episodes=2, max_steps=50)
    ),
    "a2c with micro-batches": lambda: (
        fl.a2c("CartPole-v1", small(fl.A2CSettings, batch_size=16, normalize=True, policy=None))
        .remove("train")
        .insert(
            after="adv",
            grads=fl.ComputeGradients(),
            mean=fl.AverageGradients(4),
            apply=fl.ApplyGradients(),
        )
    ),
    "a3c": lambda: fl.a3c("CartPole-v1", small(fl.A3CSettings)),
    "impala, recurrent": lambda: fl.impala("CartPole-v1", small(fl.IMPALASettings, policy=RNN)),
    "impala with MixIn": lambda: fl.impala("CartPole-v1", small(fl.IMPALASettings)).insert(
        after="batch", mix=fl.MixIn(3, 2)
    ),
    "appo over frames": lambda: fl.appo("Pendulum-v1", small(fl.APPOSettings)).set(
        "runners.wrappers", (partial(FrameStackObservation, stack_size=2),)
    ),
    "dqn": lambda: fl.dqn("CartPole-v1", small(fl.DQNSettings, **Q, prioritized=True, n_step=2)),
    "rainbow": lambda: fl.rainbow(
        "CartPole-v1", small(fl.RainbowSettings, **{**Q, "policy": None}, hidden=(8,), atoms=5)
    ),
    "apex": lambda: fl.apex("CartPole-v1", small(fl.ApexSettings, **Q)),
    # Its generators are within the wrappers of PettingZoo's parallel environments.
    "qmix": lambda: fl.qmix(
        settings=small(fl.QMIXSettings, **Q, policy=None, hidden=(8,), mixing=4, n_step=2)
    ),
    "td3": lambda: fl.td3(
        "Pendulum-v1",
        small(fl.TD3Settings, **{**Q, "policy": None}, hidden=(8,), updates_per_step=0.1),
    ),
    "r2d2": lambda: fl.r2d2("CartPole-v1", small(fl.R2D2Settings, **SEQUENCES)),
    "r2d2, SAME_STEP, uniform": lambda: fl.r2d2(
        partial(environments.cut_short, "SameStep"),
        small(
            fl.R2D2Settings,
            **SEQUENCES | {"learning_starts": 200, "envs_per_runner": 8, "prioritized": False},
        ),
    ),
    "es": lambda: fl.es("CartPole-v1", small(fl.ESSettings, **POPULATION)),
    "ars": lambda: fl.ars("Pendulum-v1", small(fl.ARSSettings, **POPULATION, top=2, policy=None)),
    "sac": lambda: fl.sac(
        "Pendulum-v1", small(fl.SACSettings, **Q, policy=SAC, updates_per_step=0.1)
    ),
}


SLOW = (
    *("rainbow", "r2d2, SAME_STEP, uniform", "td3", "ars", "noisy quantiles", "appo over frames"),
    *("a2c with micro-batches", "ppo, SAME_STEP", "ppo, DISABLED", "impala with MixIn", "qmix"),
    *("impala, recurrent", "apex", "r2d2", "es", "a3c", "ppo over moments, with a schedule"),
)
"""What compiles for long, and shares with others what it is made of."""


@pytest.mark.parametrize("name", with_system(CASES, SLOW))
def test_a_run_that_is_cut_goes_on_bit_for_bit(name, tmp_path):
    graph, schedule = CASES[name](), "random" if "impala" in name else "lockstep"
    runtime = fl.LocalRuntime(schedule=schedule)
    run = whole(graph, tmp_path / "whole", runtime=runtime)
    again, new = resumed(cut(tmp_path / "whole", 3, tmp_path / "cut"), graph)
    assert 2 <= len(new) < len(run.rows)
    assert rows_of(tmp_path / "cut") == rows_of(tmp_path / "whole")
    assert same(values(again.policy.weights), values(run.policy.weights))
    assert again.counts() == run.counts() and again.audit().closed
    assert str(again.audit()) == str(run.audit())


def evaluated(every):
    play = fl.Evaluate(every=every, episodes=2, max_steps=20)
    return fl.ppo(JAX, PPO).insert(after="sync", play=play)


PROGRAMS = {
    "ppo": (lambda: fl.ppo(JAX, PPO), {}),
    "ppo with many seeds": (lambda: fl.ppo(JAX, PPO), {"seeds": 2}),
    # The row after which it is cut lies between two evaluations.
    "ppo with evaluations": (lambda: evaluated(4), {"seeds": 2}),
    "ppo with a sweep": (lambda: fl.ppo(JAX, PPO), {"sweep": fl.Sweep(lr=[1e-3, 1e-4])}),
    "a3c": (lambda: fl.a3c(JAX, small(fl.A3CSettings)), {}),
    "es": (lambda: fl.es(JAX, small(fl.ESSettings, **POPULATION)), {}),
    "impala": (lambda: fl.impala(JAX, small(fl.IMPALASettings, num_runners=1)), {}),
    "dqn": (lambda: fl.dqn(JAX, small(fl.DQNSettings, **Q, num_runners=1)), {}),
    "noisy quantiles": (
        lambda: fl.dqn(
            JAX,
            small(fl.DQNSettings, **{**Q, "policy": None}, num_runners=1, hidden=(8,)),
            noisy=True,
            distribution="quantile",
            atoms=5,
        ),
        {},
    ),
    "r2d2": (lambda: fl.r2d2(JAX, small(fl.R2D2Settings, **SEQUENCES, num_runners=1)), {}),
}


@pytest.mark.system
@pytest.mark.parametrize(
    "name", with_system(PROGRAMS, {*SLOW, "r2d2", "a3c", "impala", "dqn", "ppo with a sweep"})
)
def test_a_program_that_is_cut_goes_on_bit_for_bit(name, tmp_path):
    make, settings = PROGRAMS[name]
    run = whole(make(), tmp_path / "whole", runtime=fl.XlaRuntime(chunk=1, **settings))
    again, _ = resumed(cut(tmp_path / "whole", 2, tmp_path / "cut"), None)
    assert rows_of(tmp_path / "cut") == rows_of(tmp_path / "whole")
    assert same(values(again.policy.weights), values(run.policy.weights))
    if settings:
        assert [timeless(rows) for rows in again.curves().rows] == [
            timeless(rows) for rows in run.curves().rows
        ]


def test_snapshots_change_nothing(tmp_path):
    graph = CASES["dqn"]()
    whole(graph, tmp_path / "kept", count=3)
    with fl.run(graph, out=tmp_path / "not", seed=1, snapshots=False) as run:
        for _ in range(3):
            next(run)
    assert rows_of(tmp_path / "kept") == rows_of(tmp_path / "not")
    assert not (tmp_path / "not" / "snapshots").exists()


class Counting(gym.Wrapper):
    """Adds to each observation what it counted since it was made."""

    def __init__(self, env):
        super().__init__(env)
        self.steps = 0

    def step(self, action):
        self.steps += 1
        obs, *rest = self.env.step(action)
        return obs + np.float32(1e-3 * self.steps), *rest


class Hidden(Counting):
    """Counts where nobody looks."""

    @property
    def steps(self):
        return self.counted[0]

    @steps.setter
    def steps(self, steps):
        self.counted = [steps]


def normalized(env):
    return gym.wrappers.NormalizeReward(gym.wrappers.NormalizeObservation(Counting(env)))


def test_what_an_environment_holds_beyond_its_episodes_is_brought_back(tmp_path):
    graph = fl.ppo("CartPole-v1", PPO).set("runners.wrappers", (normalized,))
    whole(graph, tmp_path / "whole", count=3)
    warned = []
    watch = Tap(lambda event: warned.append(event.text), Warned)
    path = cut(tmp_path / "whole", 1, tmp_path / "cut")
    resumed(path, graph, 3, observers=[watch])
    assert rows_of(path) == rows_of(tmp_path / "whole")
    assert not [text for text in warned if "could not be brought back" in text]


def test_what_can_not_be_brought_back_begins_a_new_episode(tmp_path):
    graph = fl.ppo("CartPole-v1", PPO).set("runners.wrappers", (Hidden,))
    whole(graph, tmp_path / "whole", count=2)
    warned = []
    path = cut(tmp_path / "whole", 1, tmp_path / "cut")
    watch = Tap(lambda event: warned.append(event.text), Warned)
    run, _ = resumed(path, graph, 2, observers=[watch])
    said = "could not be brought back to where they were, and began a new episode"
    # Those whose first episode still went on came out as they were.
    assert len([text for text in warned if said in text]) == 2
    assert run.audit().closed and rows_of(path)[0] == rows_of(tmp_path / "whole")[0]


@pytest.mark.parametrize("when", ["before", "after", "taken"])
def test_a_second_ctrl_c_while_a_row_is_made_leaves_no_wrong_snapshot(when, tmp_path, monkeypatch):
    graph, make = CASES["ppo"](), RowMaker.row

    def twice():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    def row(self, *how):
        third = self.totals["row"] == 2
        if third and when == "before":
            twice()
        made = make(self, *how)
        if third and when == "after":
            twice()
        return made

    def add(self, row, add=fl.Run._add_row):
        if row["row"] == 3 and when == "taken":
            twice()
        add(self, row)

    whole(graph, tmp_path / "whole", count=5)
    monkeypatch.setattr(RowMaker, "row", row)
    monkeypatch.setattr(fl.Run, "_add_row", add)
    with (
        pytest.raises(KeyboardInterrupt),
        fl.run(graph, seed=1, out=tmp_path / "cut", snapshots=fl.Snapshots(every=1e6)) as run,
    ):
        run.controls.snapshot()  # after the first row
        list(run)
    monkeypatch.undo()
    resumed(tmp_path / "cut", None, 5)
    assert rows_of(tmp_path / "cut") == rows_of(tmp_path / "whole")


def test_an_until_that_raises_at_once_leaves_nothing_open(tmp_path):
    whole(CASES["ppo"](), tmp_path / "whole", count=2)
    path = cut(tmp_path / "whole", 2, tmp_path / "cut")
    with pytest.raises(KeyError, match="no_such"):
        fl.resume(path, until=lambda row: row["no_such"] > 1)
    # Its lock is free, and it goes on.
    resumed(path, None, 3)


def test_a_run_of_another_machine_goes_on(tmp_path):
    graph = CASES["ppo"]()
    run = whole(graph, tmp_path / "whole")
    there = cut(tmp_path / "whole", 3, tmp_path / "cut")
    plan = there / "plan.txt"
    assert " one thread\n" in plan.read_text()
    plan.write_text(plan.read_text().replace(" one thread\n", " on the GPU\n"))
    again, _ = resumed(there, graph)
    assert len(again.rows) == len(run.rows)


def test_what_a_user_gets_wrong(tmp_path):
    graph = CASES["ppo"]()
    with pytest.raises(SaveError, match="there is no directory"):
        fl.resume(tmp_path / "nothing")
    with fl.run(graph, steps=64, out=tmp_path / "run") as run:
        list(run)
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    with pytest.raises(
        SettingError, match=r"has reached its goal after \d+ steps; name a later one"
    ):
        fl.resume(tmp_path / "run", graph)
    other = graph.set("learner.optimizer.lr", 0.5)
    with pytest.raises(SaveError, match=r"its graph is another one now:\n(.*\n)*.*lr=0.5"):
        fl.resume(tmp_path / "run", other, steps=200)
    with fl.run(graph, steps=64, out=tmp_path / "unkept", snapshots=False) as run:
        list(run)
    with pytest.raises(SaveError, match="was kept without snapshots"):
        fl.resume(tmp_path / "unkept", steps=200)
    with pytest.raises(SettingError, match="snapshots must be True, False or some such as"):
        fl.run(graph, snapshots=60)
    assert {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()} == before
    with pytest.raises(SaveError, match=r"rows\.jsonl is a file; name its directory, .*run$"):
        fl.resume(tmp_path / "run" / "rows.jsonl")
    with fl.resume(tmp_path / "run", steps=200) as run:
        with pytest.raises(SaveError, match="another process is still at work on this run"):
            fl.resume(tmp_path / "run", steps=200)
        first = len(run.rows) + 1
        assert [row["row"] for row in run] == list(range(first, len(run.rows) + 1))
    assert fl.load(tmp_path / "run")


def test_who_only_looks_at_a_directory_keeps_nobody_from_resuming_it(tmp_path, monkeypatch):
    path = tmp_path / "run"
    RunDir(path, {}).close()
    with (path / "rows.jsonl").open() as looking:
        # As the page does it, which closes the file a moment later.
        fcntl.flock(looking, fcntl.LOCK_SH | fcntl.LOCK_NB)
        monkeypatch.setattr("flowrl.observe.saving.time.sleep", lambda _: looking.close())
        again = RunDir.again(path)
    monkeypatch.setattr("flowrl.observe.saving.time.sleep", lambda _: None)
    with pytest.raises(SaveError, match="another process is still at work on this run"):
        RunDir.again(path)
    again.close()


def test_a_goal_as_text_is_that_of_the_command_line_and_is_remembered(tmp_path):
    with fl.run(fl.ppo("CartPole-v1", PPO), until="updates>=3", out=tmp_path / "run") as run:
        rows = list(run)
    assert (run.reason, run.goal, rows[-1]["updates"]) == ("until", "updates>=3", 3)
    # A function would have to be given again.
    with pytest.raises(fl.errors.SettingError, match="has reached its goal after .* steps"):
        fl.resume(tmp_path / "run")
    with fl.resume(tmp_path / "run", until="updates>=5") as run:
        assert [row["updates"] for row in run] == [4, 5]


def test_a_goal_that_a_killed_run_is_beyond_does_not_take_the_place_of_its_own(tmp_path):
    graph = CASES["ppo"]()
    whole(graph, tmp_path / "whole", count=3)
    path = cut(tmp_path / "whole", 2, tmp_path / "cut")
    facts = (path / "run.json").read_bytes()
    for goal in ({"steps": 8}, {"until": "env_steps>=8"}):
        with pytest.raises(
            SettingError,
            match=r"this goal \(its own is to go on without end\) after \d+ steps; name a later",
        ):
            resumable(path, graph, **goal)
    assert (path / "run.json").read_bytes() == facts
    resumable(path, graph, steps=10_000).close()
    # It was killed before it was saved, so a goal that may be its own leads to its end.
    resumable(path, graph, until=lambda row: row["env_steps"] >= 8).close()


@pytest.mark.parametrize("schedules", [("random", "lockstep"), ("lockstep", "random")])
def test_a_run_goes_on_where_its_stages_get_their_turns_in_another_way(schedules, tmp_path):
    first, then = map(fl.LocalRuntime, schedules)
    settings = fl.IMPALASettings(
        num_runners=2, envs_per_runner=2, rollout_length=8, batch_size=32, report_every=1
    )
    graph, out = fl.impala("CartPole-v1", settings), tmp_path / "run"
    with fl.run(graph, runtime=first, out=out, snapshots=fl.Snapshots(every=0), steps=200) as run:
        rows = list(run)
    goal = rows[-1]["env_steps"] + 200
    with fl.resume(out, runtime=then, steps=goal) as run:
        assert list(run) and run.audit().closed


class Breaking(gym.vector.SyncVectorEnv):
    """A vector whose reset raises, if `breaks` says so."""

    breaks = False

    def reset(self, **how):
        if self.breaks:
            raise OSError("no such level")
        return super().reset(**how)


def breaking():
    return Breaking([environments.Clockwork, environments.Clockwork])


def test_what_raises_while_it_is_brought_back_is_named(tmp_path, monkeypatch):
    out = tmp_path / "run"
    small = {"num_runners": 1, "envs_per_runner": 2, "rollout_length": 4, "batch_size": 8}
    graph = fl.pg(breaking, **small)
    with fl.run(graph, out=out, snapshots=fl.Snapshots(every=0), steps=16) as run:
        list(run)
    monkeypatch.setattr(Breaking, "breaks", True)
    with pytest.raises(fl.errors.EnvError, match="breaking raised in reset: OSError: no such l"):
        list(fl.resume(out, steps=64, allow=[__name__]))


def test_a_run_without_snapshots_that_began_with_a_policy_of_python_names_the_way_out(tmp_path):
    out = tmp_path / "run"
    graph = fl.pg("CartPole-v1", num_runners=1, envs_per_runner=2, rollout_length=8, batch_size=16)
    with fl.run(graph, steps=16) as run:
        list(run)
    started = fl.run(
        graph, steps=64, out=out, init=fl.Init(run.policy), snapshots=fl.Snapshots(every=0)
    )
    with started as begun:
        list(begun)
    with fl.resume(out, steps=128) as again:
        list(again)
    # What a run says of itself stays true when it goes on.
    facts = json.loads((out / "run.json").read_text())
    assert facts["init"]["policy"] == "a policy of Python"
    with pytest.raises(fl.errors.SaveError, match="start it again from its beginning, with the po"):
        init_of(facts["init"]).weights()


@pytest.mark.system
def test_an_interrupt_at_any_line_leaves_rows_and_a_snapshot_of_the_same_moment(tmp_path):
    graph = fl.pg("CartPole-v1", num_runners=1, envs_per_runner=2, rollout_length=8, batch_size=16)
    traced = {
        inspect.getsourcefile(module)
        for module in (flowrl.running, flowrl.runtime.base, flowrl.runtime.closing)
    }

    def interrupted(at):
        """Interrupt a run at a line that it executes for its second row; return how many it has."""
        seen = 0

        def trace(frame, event, _):
            nonlocal seen
            if frame.f_code.co_filename not in traced:
                return None
            if event == "line":
                seen += 1
                if seen == at:
                    signal.raise_signal(signal.SIGINT)
            return trace

        out = tmp_path / str(at)
        try:
            with fl.run(graph, out=out, steps=10_000, seed=0) as run:
                next(run)
                sys.settrace(trace)
                next(run)
                sys.settrace(None)
                next(run)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        kept = [json.loads(line)["row"] for line in (out / "rows.jsonl").read_text().splitlines()]
        newest = max(int(path.stem[4:]) for path in (out / "snapshots").glob("row-*.json"))
        assert kept == list(range(1, newest + 1)) and len(run.rows) == newest, at
        return seen

    lines = interrupted(0)
    assert lines > 40
    # Ending a run takes a moment, so it is not every line.
    for at in range(1, lines + 1, 3):
        interrupted(at)
