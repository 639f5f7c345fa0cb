"""What is compiled: once for equal settings, whatever the seed.

It is released again when newer settings come.
"""

import gc
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flowrl as fl
from conftest import RAY, close, forget_compiled, timeless
from environments import Corridor
from flowrl.core import compiled
from flowrl.core.xla_threads import clients
from flowrl.graph.site import HereSite, Place
from flowrl.rl.policies import network

SMALL = {
    "envs_per_runner": 2,
    "rollout_length": 4,
    "policy": fl.Policy(fl.networks.MLP, hidden=(4,)),
}
WIDE = {**SMALL, "num_runners": 2}
DRAWN = {
    "envs_per_runner": 2,
    "rollout_length": 4,
    "learning_starts": 16,
    "batch_size": 4,
    "report_every": 1,
}


PAIRS = {"pairs": 2, "max_steps": 5}


def stock(name, env="CartPole-v1"):
    """A stock graph, as small as it may be."""
    settings = {
        "ppo": lambda: fl.PPOSettings(**SMALL, batch_size=8, epochs=2, minibatch_size=4),
        "a2c": lambda: fl.A2CSettings(**SMALL, batch_size=8, report_every=1),
        "a3c": lambda: fl.A3CSettings(**SMALL, num_runners=2, report_every=1),
        "pg": lambda: fl.PGSettings(**SMALL, batch_size=8),
        "impala": lambda: fl.IMPALASettings(**WIDE, batch_size=16, report_every=1),
        "appo": lambda: fl.APPOSettings(**WIDE, batch_size=16, report_every=1),
        "dqn": lambda: fl.DQNSettings(**DRAWN, prioritized=True),
        "rainbow": lambda: fl.RainbowSettings(**DRAWN),
        "apex": lambda: fl.ApexSettings(**DRAWN, num_runners=2),
        "r2d2": lambda: fl.R2D2Settings(**DRAWN, sequence_length=4, burn_in=2),
        "sac": lambda: fl.SACSettings(**DRAWN),
        "td3": lambda: fl.TD3Settings(**DRAWN, hidden=(8,)),
        "es": lambda: fl.ESSettings(**PAIRS),
        "ars": lambda: fl.ARSSettings(**PAIRS, top=1),
    }
    return getattr(fl, name)("Pendulum-v1" if name in ("sac", "td3") else env, settings[name]())


def trained(graph, seed, runtime="local", more=1):
    """The parameters so many rows after a first update or a few."""
    with fl.run(graph, seed=seed, runtime=runtime) as run:
        while not next(run)["updates"]:
            pass
        for _ in range(more):
            next(run)
    assert run.audit().closed
    return jax.tree.leaves(run.policy.weights.params)


def test_networks_that_the_cache_forgot_are_the_same_as_long_as_they_are_used(compilations):
    forget_compiled()
    trained(stock("ppo"), 0)
    # As if there had been as many others as it keeps.
    network.cache_clear()
    compilations.clear()
    # Another learning rate makes another learner, whose network the cache is asked for.
    trained(stock("ppo").set("learner.optimizer.lr", 0.00123), 7)
    assert compilations == []


def compiles_once(make, runtime, compilations, *names, more=1, **others):
    """A second run with another seed, and with other numbers in its settings, compiles nothing."""
    first = trained(make(), 0, runtime, more)
    # Or the listener hears nothing, and what follows shows nothing.
    assert compilations and {*names} <= {*compilations}
    compilations.clear()
    graph = make()
    for path, value in others.items():
        graph = graph.set(path, value)
    second = trained(graph, 7, runtime, more)
    assert compilations == []
    assert not all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    "name",
    [
        *("ppo", "impala", "dqn", "es"),
        # These share with the others what they are made of.
        *(
            pytest.param(name, marks=pytest.mark.system)
            for name in ("a2c", "a3c", "pg", "appo", "apex", "sac", "rainbow", "r2d2", "td3", "ars")
        ),
    ],
)
def test_a_second_run_with_another_seed_and_learning_rate_compiles_nothing(name, compilations):
    forget_compiled()
    group = ".actor" if name == "td3" else ""
    other = {f"learner.optimizer{group}.lr": 0.00123}
    compiles_once(lambda: stock(name), "local", compilations, **other)


@pytest.mark.system
@pytest.mark.parametrize(
    ("name", "seeds"),
    [
        ("dqn", None),
        pytest.param("impala", 2, marks=pytest.mark.system),
        pytest.param("rainbow", None, marks=pytest.mark.system),
    ],
)
def test_a_second_program_with_another_seed_and_learning_rate_compiles_nothing(
    name, seeds, compilations, monkeypatch
):
    monkeypatch.setattr(compiled, "programs", compiled.Recent(1))
    compiles_once(
        lambda: stock(name, "gymnax:CartPole-v1"),
        fl.XlaRuntime(chunk=2, seeds=seeds),
        compilations,
        "jit(chunk)",
        more=3,
        **{"learner.optimizer.lr": 0.00123},
    )


@pytest.mark.system
def test_a_program_of_another_seed_does_what_it_does_alone(monkeypatch):
    monkeypatch.setattr(compiled, "programs", compiled.Recent(1))
    graph = stock("ppo", "gymnax:CartPole-v1").insert(
        after="sync", play=fl.Evaluate(every=1, episodes=2)
    )
    trained(graph, 0, fl.XlaRuntime(chunk=2))
    for got, alone in zip(
        trained(graph, 7, fl.XlaRuntime(chunk=2)), trained(graph, 7), strict=True
    ):
        np.testing.assert_allclose(got, alone, atol=1e-5)


OTHERS = {
    "learner.optimizer.lr": 0.00123,
    "learner.loss.clip_ratio": 0.05,
    "learner.loss.ent_coef": 0.3,
    "adv.gamma": 0.5,
}


def test_a_program_with_other_numbers_compiles_nothing_and_does_what_it_does_alone(
    compilations, monkeypatch, tmp_path
):
    monkeypatch.setattr(compiled, "programs", compiled.Recent(1))
    monkeypatch.setattr(compiled, "signatures", compiled.Recent(1))
    graph = stock("ppo", Corridor).set("learner.loss.ent_coef", 0.01)
    other = graph
    for path, value in OTHERS.items():
        other = other.set(path, value)

    def rows_of(graph, **settings):
        with fl.run(graph, runtime=fl.XlaRuntime(chunk=2), **settings) as run:
            rows = [next(run) for _ in range(4)]
        return timeless(rows), run.policy

    first, _ = rows_of(graph)
    compilations.clear()
    second, policy = rows_of(other, seed=7, out=tmp_path / "run")
    assert [name for name in compilations if "chunk" in name] == []
    assert first[-1]["loss"] != second[-1]["loss"]
    # What Python reads of a run is its own.
    assert (tmp_path / "run/graph.txt").read_text() == other.text()
    assert policy.policy == other.resources["learner"].policy
    compiled.programs._kept.clear()
    compiled.signatures._kept.clear()
    assert rows_of(other, seed=7)[0] == second
    assert [name for name in compilations if "chunk" in name] != []
    with fl.run(other, seed=7) as run:
        close(timeless([next(run) for _ in range(4)]), second)


@dataclass(frozen=True)
class Uses(fl.extend.Stateless):
    """Changes rewards by a number, of which Python makes use as well."""

    coef: float
    how: str
    other: float = 1.5

    def step(self, held, batch, ctx):
        reward = ctx.run(getattr(self, self.how), batch["reward"])
        # Python reads it here, and what it computes with it is an argument.
        by = 1.0 if self.coef > 0.5 else 3.0
        yield batch.with_(reward=ctx.run(jnp.add, ctx.run(of_two, reward, (by, self.coef)), by))

    def scaled(self, reward):
        # As a number of Python it takes on the type of what it meets.
        half = reward.astype(jnp.bfloat16) * self.coef
        return reward * self.coef * (1 if half.dtype == jnp.bfloat16 else -1)

    def scaled_otherwise(self, reward):
        half = reward.astype(jnp.bfloat16) * self.other
        return reward * self.other * (1 if half.dtype == jnp.bfloat16 else -1)

    def decided(self, reward):
        return reward * self.coef if self.coef > 0.3 else reward

    def called(self, reward):
        def of_python(x):
            return np.float32(x * round(self.coef, 1))

        shape = jax.ShapeDtypeStruct(reward.shape, np.float32)
        return jax.pure_callback(of_python, shape, reward)


def of_two(x, numbers):
    return x * numbers[0] - numbers[1]


@pytest.mark.system
@pytest.mark.parametrize(
    "uses",
    [
        [Uses(0.4, "scaled"), Uses(0.4, "scaled_otherwise"), Uses(0.9, "scaled")],
        [Uses(0.4, "decided")],
        [Uses(0.4, "called"), Uses(0.9, "called")],
    ],
    ids=["reads", "decides", "is called"],
)
def test_a_program_in_which_python_uses_a_number_has_its_own_number(uses):
    for op in uses:
        graph = stock("pg", Corridor).insert(after="sample", uses=op)
        program, local = (trained(graph, 0, name) for name in (fl.XlaRuntime(chunk=1), "local"))
        close(program, local)


TRACED = []


def noted(reward, by):
    TRACED.append(by)
    return reward * by


@dataclass(frozen=True)
class Notes(fl.extend.Stateless):
    """Changes rewards by a function that Python runs only where it is traced."""

    by: float

    def step(self, held, batch, ctx):
        yield batch.with_(reward=ctx.run(noted, batch["reward"], by=self.by))


def test_the_plan_its_program_and_the_local_runtime_trace_a_function_once():
    TRACED.clear()
    graph = stock("pg", Corridor).insert(after="sample", notes=Notes(0.75))
    for runtime in (fl.XlaRuntime(chunk=1), "local"):
        trained(graph, 0, runtime)
    assert len(TRACED) == 1


@pytest.mark.system
def test_on_ray_a_second_run_with_another_seed_compiles_nothing_here(compilations, ray_up):
    forget_compiled()
    other = {"learner.optimizer.lr": 0.00123}
    compiles_once(lambda: stock("impala"), RAY, compilations, **other)


# -- what is released


def by(x, *, factor):
    return x * factor


def crowded_out():
    """As many functions with other settings as are kept, with numbers as arguments or without."""
    for number in range(compiled.FUNCTIONS):
        compiled.jitted(by, (), ("factor", number))
        compiled.jitted(by, (), ("factor", 0.5), (f"other{number}", 0))


def executables():
    gc.collect()
    return sum(len(client.live_executables()) for client in clients())


@pytest.mark.system
def test_what_runs_with_other_settings_compiled_is_released():
    def one(number):
        trained(stock("ppo").set("train.epochs", number), 0)

    one(1)
    crowded_out()
    before = executables()
    one(2)
    assert executables() > before
    one(3)
    crowded_out()
    assert executables() <= before


def test_programs_are_released():
    kept = compiled.Recent(2)
    made = [kept.get((f"program {i % 3}",), object) for i in range(3)]
    assert len(kept) == 2
    assert (
        kept.get(("program 2",), object) is made[2] and kept.get(("program 1",), object) is made[1]
    )
    assert kept.get(("program 0",), object) is not made[0]
    assert kept.get([], dict) == {}  # what can't be hashed is made, and not kept
    assert len(kept) == 2


@dataclass
class Text:
    """What stands for a lowered program, and notes when it is compiled."""

    text: str
    out_tree: str = "tree"
    compiled: int = 0

    def as_text(self):
        return self.text

    def compile(self):
        self.compiled += 1
        return object()


def test_programs_of_one_text_are_one_and_equal_settings_need_no_text(monkeypatch):
    monkeypatch.setattr(compiled, "programs", compiled.Recent(4))
    monkeypatch.setattr(compiled, "signatures", compiled.Recent(4))

    def made(key, *texts):
        with_numbers, constant = ([*map(Text, texts)] + [None] * 2)[:2]
        program = compiled.program_of(
            key, "layout", lambda numbers: with_numbers if numbers else constant
        )
        return *program, [x.compiled for x in (with_numbers, constant) if x]

    first, takes, counts = made("lr=1", "mul")
    assert takes and counts == [1]
    assert made("lr=1") == (first, True, [])
    assert made("lr=2", "mul") == (first, True, [0]) == made([], "mul")
    assert made("lr=3", "add")[0] is not first
    # What Python is called for is not in the text.
    calls, takes, counts = made("lr=4", "callback", "callback")
    assert not takes and counts == [0, 1]
    assert made("lr=5", "callback", "callback")[0] is not calls
    assert made("lr=4")[0] is calls
    assert made([], "callback", "callback")[2] == made([], "callback", "callback")[2] == [0, 1]


def test_graphs_that_can_not_be_compared_have_a_program_each():
    """Graphs have the same hash if their nodes have the same names; what is in their operators may
    be arrays."""
    kept = compiled.Recent(4)
    graphs = [stock("pg").insert(after="sample", scales=Adds(np.full(2, i))) for i in range(2)]
    assert kept.get(graphs[0], list) is not kept.get(graphs[1], list)


@dataclass(frozen=True)
class Adds(fl.extend.Stateless):
    by: object

    def step(self, held, batch, ctx):
        yield batch


def test_a_run_holds_its_own_functions_however_many_they_are():
    place = Place("g", {}, 0, HereSite)
    mine = place.jitted(by, (), ("factor", 1.5))
    crowded_out()
    assert place.jitted(by, (), ("factor", 1.5)) is mine
    assert compiled.jitted(by, (), ("factor", 1.5)) is not mine


class Scales(fl.extend.Operator):
    """An operator of a user who does not know that it should be a frozen value."""

    def __init__(self, by):
        self.by = by

    def init(self):
        return None

    def step(self, held, batch, ctx):
        yield batch.with_(reward=ctx.run(jnp.add, batch["reward"], self.by))


@pytest.mark.system
def test_what_changes_in_an_operator_between_two_runs_changes_the_program():
    runtime, scales = fl.XlaRuntime(chunk=2), Scales(0.0)
    graph = stock("pg", "gymnax:CartPole-v1").insert(after="sample", scales=scales)
    before = trained(graph, 0, runtime)
    scales.by = np.full(
        1, 3.0, np.float32
    )  # an array can't be compared, and each run has a program of its own
    after = trained(graph, 0, runtime)
    assert not all(np.allclose(x, y) for x, y in zip(before, after, strict=True))


def test_settings_that_are_equal_but_of_another_type_are_another_function():
    whole, fraction = (
        compiled.jitted(by, (), ("factor", factor))(np.arange(3)) for factor in (2, 2.0)
    )
    assert (whole.dtype, fraction.dtype) == (np.int32, np.float32)


def test_a_function_that_is_made_again_with_each_item_is_reported(monkeypatch):
    monkeypatch.setattr(compiled, "MOST", 20)
    place = Place("g", {}, 0, HereSite)
    for _ in range(20):
        place.jitted(lambda x: x, ())
    with pytest.raises(
        fl.errors.ContractError,
        match=r"<lambda> would be function number 21 that this run compiles: .* Define it once, "
        r"at the top",
    ):
        place.jitted(lambda x: x, ())
