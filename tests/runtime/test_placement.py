"""Resources and stages with processes of their own: the same graph, the same results."""

import functools
import os
import pickle
import signal
import threading
from collections import deque

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flowrl as fl
from conftest import same
from flowrl.core.clock import by_kind
from flowrl.core.items import Batch
from flowrl.core.remote import RemoteArray, join, near
from flowrl.errors import RunError, SettingError
from flowrl.graph.stages import Schedule
from flowrl.runtime.base import Session
from flowrl.runtime.driver import DriverContext
from flowrl.runtime.homes import Home, Kept
from flowrl.runtime.keeper import Keeper
from flowrl.runtime.placement import (
    Actor,
    NearSite,
    Placed,
    check_amounts,
    group_lines,
    owners,
    process_options,
    requested_amounts,
)

SMALL = {"num_runners": 2, "envs_per_runner": 4, "rollout_length": 16}
PPO = fl.ppo("CartPole-v1", fl.PPOSettings(**SMALL, batch_size=256, epochs=2, minibatch_size=64))
IMPALA = fl.impala(
    "CartPole-v1",
    fl.IMPALASettings(
        **SMALL,
        batch_size=128,
        report_every=3,
        policy=fl.Policy(fl.networks.RNN, hidden=(8,), size=8, cell="lstm"),
    ),
)


class Copied:
    """A remote whose process is this one: whatever crosses is pickled."""

    def __init__(self, name="", actor=None, index=None):
        self.name = name
        self.keeper = Keeper(DriverContext())
        self.calls = []

    def submit(self, method, *args, sent=()):
        self.calls.append(method)
        try:
            return Answer(
                pickle.loads(
                    cloudpickle.dumps(
                        getattr(self.keeper, method)(
                            *pickle.loads(cloudpickle.dumps((*args, *sent)))
                        )
                    )
                )
            )
        except Exception as error:  # noqa: BLE001
            return Answer(error)

    def clocks(self):
        return {self.name: self.keeper.spent()}

    def end(self):
        self.keeper = None


class Answer:
    def __init__(self, ref):
        self.ref = ref

    def result(self):
        if isinstance(self.ref, Exception):
            raise self.ref
        return self.ref

    def wait(self):
        pass

    def done(self):
        return True


class CopiedRuntime:
    """Everything in this process, but for functions, which go over to a keeper."""

    def __init__(self, **place):
        self.wanted = place

    def open(self, plan, seed, stream=None):
        self.place = Placed(plan, seed, Copied, self.wanted, NearSite, stream=stream)
        return Session(plan, self.place, Schedule)


def rows_of(graph, runtime, count=3):
    with fl.run(graph, runtime=runtime, seed=2) as run:
        rows = [next(run) for _ in range(count)]
        assert run.audit().closed
        return [
            {k: v for k, v in row.items() if "second" not in k} for row in rows
        ], run.policy.weights


CASES = {
    "ppo, learner": (PPO, {"learner": Actor()}),
    "impala, learner and sampling": (IMPALA, {"learner": Actor(), "sample": Actor(count=2)}),
    "learning with a minibatch, only its stage": (PPO, {"sample": Actor()}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_results_are_those_of_one_process(name):
    graph, place = CASES[name]
    rows, weights = rows_of(graph, "local")
    there, placed = rows_of(graph, CopiedRuntime(**place))
    np.testing.assert_equal(there, rows)
    assert same(placed, weights)


def test_what_nobody_needs_any_more_is_dropped():
    runtime = CopiedRuntime(learner=Actor())
    with fl.run(PPO, runtime=runtime) as run:
        next(run)
        keeper = runtime.place.remotes[0].keeper
        programs, kept = len(keeper.programs), len(keeper.kept)
        for _ in range(5):
            next(run)
        assert len(keeper.programs) == programs and len(keeper.kept) <= kept + 2


def halved(batch):
    return batch.with_(reward=batch["reward"] / 2)


def rich(batch):
    return float(np.sum(batch["reward"])) > 0


def touches(batch):
    """Reaches for values: as NumPy, by an operator, by jax, by an index."""
    reward = batch["reward"]
    total = (
        np.sum(reward)
        + float(jnp.sum(jnp.asarray(reward)))
        + (reward * 2)[0, 0]
        + reward[0, 0]
        + len(reward)
    )
    assert np.isfinite(total)
    return batch


def test_users_functions_run_where_the_stage_is():
    graph = fl.impala(
        "CartPole-v1", fl.IMPALASettings(**SMALL, batch_size=128, report_every=3)
    ).insert(after="sample", half=fl.Map(halved), some=fl.Filter(rich), touch=fl.Map(touches))
    rows, weights = rows_of(graph, "local")
    for place in ({"learner": Actor()}, {"learner": Actor(), "sample": Actor()}):
        there, placed = rows_of(graph, CopiedRuntime(**place))
        np.testing.assert_equal(there, rows)
        assert same(placed, weights)


def test_values_of_arrays_in_other_processes_come_when_they_are_reached_for():
    home = Home(Copied())
    x = home.run(jnp.cumsum, (), {}, (np.ones(6, np.int32),))
    y = home.run(jnp.add, (), {}, (x, 1))
    assert (
        isinstance(y, RemoteArray)
        and y.shape == (6,)
        and y.is_ready()
        and y.block_until_ready() is y
    )
    assert home.remote.calls == ["run", "run"], "nothing came here yet"
    assert (y - x).tolist() == [1] * 6 and y[2] == 4 and len(y) == 6
    assert (
        np.sum(y) == 27 == jnp.sum(jnp.asarray(y)) and np.asarray(y, np.float32).dtype == np.float32
    )
    assert home.remote.calls.count("make") == 2, "each came once"
    both = join([x, y, np.ones(2, np.int32)], 0)
    assert (
        both.shape == (14,)
        and both.is_ready()
        and near(both).tolist() == [*range(1, 7), *range(2, 8), 1, 1]
    )
    assert near(home.run(jnp.sum, (), {}, (both,))) == 50
    assert pickle.loads(pickle.dumps(both)).sum() == 50
    other = Home(Copied())
    assert near(other.run(jnp.sum, (), {}, (y,))) == 27, "from one to another"
    joined = Batch.join([Batch({"x": home.run(jnp.zeros, (), {"shape": (2, 3)}, ())})] * 2)
    assert joined.steps == 12 and isinstance(joined["x"], RemoteArray)


def high_mean(batch):
    return batch["advantage"].mean() > -100


@pytest.mark.parametrize("shape", [(), (1,)])
def test_one_value_in_another_process_converts_as_an_array_does(shape):
    home = Home(Copied())
    zero = home.run(jnp.zeros, (), {"shape": shape}, ())
    one = home.run(jnp.ones, (), {"shape": shape}, ())
    assert not zero and one
    if not shape:
        assert (int(one), float(one)) == (1, 1.0)
    with pytest.raises(ValueError, match="truth value of an array"):
        bool(home.run(jnp.ones, (), {"shape": (2,)}, ()))


def test_a_filter_where_the_stage_is_may_answer_with_an_array():
    graph = PPO.insert(after="adv", some=fl.Filter(high_mean))
    rows, _ = rows_of(graph, "local", 1)
    there, _ = rows_of(graph, CopiedRuntime(sample=Actor()), 1)
    np.testing.assert_equal(there, rows)


class Hanging(Copied):
    def end(self):
        super().end()
        raise RunError("it does not end")


def test_every_process_is_ended_even_if_ending_one_of_them_fails():
    placed = Placed(PPO.compile(), 0, Hanging, {"sample": Actor(count=2)}, NearSite)
    placed.open()
    remotes = list(placed.remotes)
    with pytest.raises(RunError, match="it does not end"):
        placed.close()
    assert [remote.keeper for remote in remotes] == [None, None]


class Shrinking(deque):
    """A deque from which another thread takes all, once its length was asked for."""

    def __len__(self):
        length = super().__len__()
        self.clear()
        return length


def test_two_threads_may_take_what_is_dropped():
    home = Home(Copied())
    home.dropped = Shrinking([1, 2, 3])
    assert set(home._take_dropped()) <= {1, 2, 3} and not home._take_dropped()


def bad(x):
    raise ZeroDivisionError("no")


def test_an_error_there_is_raised_here_and_with_all_that_needs_its_result():
    home = Home(Copied())
    with pytest.raises(ZeroDivisionError):
        home.call(bad, (jnp.ones(2),))
    late = Kept(
        home,
        home._submit("call", [jnp.ones(2)], cloudpickle.dumps((bad, (0,)))).number,
        Answer(None),
    )
    with pytest.raises(ZeroDivisionError):
        np.asarray(home.run(jnp.add, (), {}, (RemoteArray((2,), np.float32, late, 0), 1)))


def test_what_can_not_be_sent_is_named():
    with pytest.raises(
        SettingError,
        match=r"bad can't be sent to another process: cannot pickle '_thread.lock' object",
    ):
        Home(Copied()).call(functools.partial(bad, threading.Lock()), (jnp.ones(2),))


@pytest.mark.parametrize(
    ("place", "text"),
    [
        (
            {"learnr": Actor()},
            "unknown resource or first node of a stage 'learnr'; did you mean 'learner'?",
        ),
        (
            {"train": Actor()},
            "train is in the stage of queue, which runs as one; write 'queue' in its place",
        ),
        (
            {"runners": Actor(count=2)},
            "runners can't be in 2 processes, which only a learner's updates can share; take",
        ),
        (
            {"learner": Actor(), "queue": Actor()},
            "the stage of queue runs where learner is, which it updates; leave queue out",
        ),
    ],
)
def test_places_that_there_are_not_are_reported(place, text):
    with pytest.raises(SettingError, match=text):
        owners(IMPALA, place)


NODES = [{"CPU": 4.0, "GPU": 1.0, "memory": 8e9}, {"CPU": 8.0, "GPU": 2.0, "big": 1.0}]


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        (
            {"learner": Actor(gpus=3)},
            (
                r"learner asks for 3 GPU in one process, but the cluster has 3, at most 2 on one "
                r"of its 2 nodes; ask for less in"
            ),
        ),
        (
            {"sample": Actor(options={"num_cpus": 9})},
            (
                r"sample asks for 9 CPU in one process, but the cluster has 12, at most 8 on one "
                r"of its 2 nodes"
            ),
        ),
        (
            {"sample": Actor(options={"resources": {"huge": 1}})},
            r"sample asks for 1 huge in one process, but the cluster has 0, at most 0 on one",
        ),
        (
            {"sample": Actor(options={"memory": 9e9})},
            r"sample asks for 9e\+09 memory in one process, but the cluster has 8e\+09",
        ),
        (
            {"sample": Actor(count=4, gpus=1)},
            r"sample \(4 x 1\) ask for 4 GPU together, but the cluster has 3, at most 2",
        ),
        (
            {"learner": Actor(), "sample": Actor(count=2, gpus=1.5)},
            r"learner \(1\) and sample \(2 x 1.5\) ask for 4 GPU together, but the cluster has 3",
        ),
        (
            {"learner": Actor(gpus=2, options={"resources": {"big": 1}, "memory": 8e9})},
            (
                r"learner asks for 2 GPU and 8e\+09 memory and 1 big in one process, but the "
                r"nodes can hold 0 of them: they have 1 GPU and 8e\+09 memory and 0 big; 2 GPU and"
            ),
        ),
        (
            {"sample": Actor(count=2, gpus=1.5)},
            (
                r"sample asks for 1.5 GPU in each of 2 processes, but the nodes can hold 1 of "
                r"them: they have 1 GPU; 2 GPU; ask for less"
            ),
        ),
        (
            {"learner": Actor(options={"accelerator_type": "H100"})},
            "learner asks for 0.001 accelerator_type:H100 in one process, but the cluster has 0",
        ),
    ],
)
def test_what_a_cluster_does_not_have_is_refused_with_both_numbers(wanted, text):
    with pytest.raises(SettingError, match=f"place: {text}"):
        check_amounts(wanted, ["learner", "runners"], NODES)


def test_what_a_cluster_has_may_be_asked_for():
    check_amounts(
        {"learner": Actor(), "sample": Actor(count=2, gpus=1, options={"num_cpus": 4})},
        ["learner"],
        NODES,
    )
    check_amounts({"sample": Actor(count=30, gpus=0.1)}, [], NODES)
    assert requested_amounts(Actor(), True, NODES) == {"GPU": 1} and requested_amounts(
        Actor(), False, NODES
    ) == {} == requested_amounts(Actor(), True, NODES[:0])
    assert requested_amounts(Actor(gpus=0), True, NODES) == {} and requested_amounts(
        Actor(gpus=1, options={"num_gpus": 2}), True, NODES
    ) == {"GPU": 2}


def test_environment_variables_of_an_actor_stand_beside_those_that_it_gets():
    mine = {"env_vars": {"X": "1", "NPROC": "2"}, "working_dir": "."}
    actor = Actor(options={"runtime_env": mine, "num_cpus": 3})
    assert process_options(actor, {"JAX_PLATFORMS": "cpu", "NPROC": "1"}, num_cpus=0) == {
        "num_cpus": 3,
        "runtime_env": {
            "env_vars": {"JAX_PLATFORMS": "cpu", "NPROC": "2", "X": "1"},
            "working_dir": ".",
        },
    }
    assert process_options(Actor(), {"NPROC": "1"}) == {"runtime_env": {"env_vars": {"NPROC": "1"}}}


def test_settings_are_checked():
    for wrong in (0, 1.5):
        with pytest.raises(SettingError, match="count must be a whole number, at least 1, got"):
            Actor(count=wrong)
        with pytest.raises(SettingError, match="processes must be a whole number, at least 1 or"):
            fl.RayRuntime(processes=wrong)
    with pytest.raises(SettingError, match="gpus must be None or not negative, got -1"):
        Actor(gpus=-1)
    with pytest.raises(SettingError, match="options must be a mapping, .*, got 2"):
        Actor(options=2)
    for place in ({"learner": True}, ["learner"]):
        with pytest.raises(SettingError, match=r"write place=\{'learner': fl.Actor\(\)\}"):
            fl.RayRuntime(place=place)
    with (
        pytest.raises(SettingError, match="runners has processes of its own already"),
        fl.run(PPO, runtime=CopiedRuntime(runners=Actor())),
    ):
        pass
    with (
        pytest.raises(SettingError, match="replay works in this process; leave it out of place"),
        fl.run(fl.dqn("CartPole-v1"), runtime=CopiedRuntime(replay=Actor())),
    ):
        pass


@pytest.mark.ray
@pytest.mark.system
@pytest.mark.usefixtures("ray_up")
def test_a_learner_in_an_actor_gives_the_same_and_no_batch_comes_here(monkeypatch):
    came, original = [], RemoteArray.__array__

    def fetch(self, *args, **settings):
        found = original(self, *args, **settings)
        came.append(found.nbytes)
        return found

    rows, weights = rows_of(PPO, "local")
    monkeypatch.setattr(RemoteArray, "__array__", fetch)
    there, placed = rows_of(PPO, fl.RayRuntime(place={"learner": fl.Actor()}))
    np.testing.assert_equal(there, rows)
    assert same(placed, weights)
    assert len(came) == 3 + 2 * len(jax.tree.leaves(weights)), (
        "the metrics of each row, and the weights when asked for and at the end"
    )


def mine(_):
    return os.getpid()


@pytest.mark.system
@pytest.mark.ray
@pytest.mark.usefixtures("ray_up")
def test_stages_and_learner_have_actors_and_a_learner_whose_process_ends_ends_the_run(monkeypatch):
    import ray

    put, original = [], ray.put
    monkeypatch.setattr(ray, "put", lambda value, **k: put.append(value) or original(value, **k))
    graph = fl.impala("CartPole-v1", fl.IMPALASettings(**SMALL, batch_size=128, report_every=3))
    runtime = fl.RayRuntime(place={"learner": fl.Actor(), "sample": fl.Actor(count=2)})
    with (
        pytest.raises(RunError, match=r"learner's process ended"),
        fl.run(graph, runtime=runtime) as run,
    ):
        for _ in range(4):
            row = next(run)
        spent = {name: by_kind(x) for name, x in run.profile().processes.items()}
        assert run.audit().closed and row["updates"] == 12
        assert spent["learner"]["update"] > 0 and all(
            spent[f"sample, {i}"]["concat"] > 0 for i in (0, 1)
        )
        assert not any(isinstance(value, tuple) for value in put), (
            "weights go from the learner to the runners"
        )
        home = run._session.place.sites["learner"].homes[0]
        os.kill(home.call(mine, (np.ones(1),)), signal.SIGKILL)
        for _ in range(50):
            next(run)
    assert ray.is_initialized()


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (
            2,
            (
                "  learner  2 processes, 32 of 64 rows of a minibatch each; 36.6 KB all-reduced a "
                "gradient step, 293 KB a row\n"
            ),
        ),
        (
            3,
            (
                "  learner  3 processes, each of which does the whole of its minibatches of 64 "
                "rows; take a multiple of 3\n"
            ),
        ),
    ],
)
def test_a_plan_says_what_the_processes_of_a_group_share(count, text):
    place = {"sample": Actor(count=2)}
    assert group_lines(PPO.compile(), place) == ""
    assert group_lines(PPO.compile(), {"learner": Actor(count=count)}) == text
