"""The abstract trace: periods and warm-ups, the form of what flows on each edge, and lag.

And functions that can't be traced.
"""

import itertools
import math
import time
import tracemalloc
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import (
    AnyAgeLoss,
    Counter,
    Delay,
    Pass,
    SyncEvery,
    halves,
    learner,
    recipe,
    runners,
    same,
)

import flowrl as fl
from flowrl.core.events import OperatorRan, Stream, Tap
from flowrl.graph import trace as module
from flowrl.graph.period import ROUNDS
from flowrl.graph.plan import Plan
from flowrl.graph.trace import Trace, trace


def loose():
    """The recipe with a loss for data of any age, and little to compile."""
    return (
        recipe(learner=learner(AnyAgeLoss()))
        .set("train.minibatch_size", None)
        .set("train.epochs", 1)
    )


def traced(graph):
    found = trace(graph)
    assert found.problems == []
    return found


# -- periods


def test_a_row_a_round_is_a_period_of_one_row():
    found = traced(recipe())
    assert (found.exact, found.rows, found.warmup_rows) == (True, 1, 0)
    assert {name: (t.taken, t.given, t.given_steps) for name, t in found.steady.items()} == {
        "sample": (0, 1, 128),
        "batch": (1, 1, 128),
        "adv": (1, 1, 128),
        "norm": (1, 1, 128),
        "train": (1, 1, 128),
        "sync": (1, 1, 128),
        "report": (1, 1, 0),
    }
    assert dict(found.steady["train"].counts["learner"]) == {
        "updates": 1,
        "trained_steps": 128,
        "used_steps": 256,
        "gradient_steps": 4,
    }
    assert dict(found.steady["sample"].counts["runners"]) == {
        "requests": 2,
        "sampled_steps": 128,
        "outstanding": 0,
    }


def test_two_rounds_a_batch_and_three_batches_a_row_are_six_rounds_a_row():
    found = traced(recipe().set("batch.batch_size", 200).set("report.every", 3))
    assert (found.exact, found.rows, found.warmup_rows) == (True, 1, 0)
    assert {name: (t.taken, t.given) for name, t in found.steady.items()} == {
        "sample": (0, 6),
        "batch": (6, 3),
        "adv": (3, 3),
        "norm": (3, 3),
        "train": (3, 3),
        "sync": (3, 3),
        "report": (3, 1),
    }
    assert found.steady["batch"].given_steps == 3 * 256


def test_a_counter_that_goes_round_more_slowly_than_rows_come_is_part_of_the_period():
    found = traced(recipe().insert(after="sync", own=Counter(lambda n: (n + 1) % 5)))
    assert (found.exact, found.rows, found.warmup_rows) == (True, 5, 0)
    assert found.steady["train"].counts["learner"]["updates"] == 5


def test_two_counters_meet_again_after_their_least_common_multiple():
    graph = recipe().insert(
        after="sync", two=Counter(lambda n: (n + 1) % 2), three=Counter(lambda n: (n + 1) % 3)
    )
    assert traced(graph.set("report.every", 1)).rows == 6
    assert traced(graph.set("report.every", 4)).rows == 3
    assert traced(graph.set("report.every", 6)).rows == 1


def test_a_counter_that_saturates_is_a_warm_up():
    found = traced(recipe().insert(after="sync", own=Counter(lambda n: min(n + 1, 3))))
    assert (found.exact, found.rows, found.warmup_rows) == (True, 1, 3)
    assert found.steady["train"].taken == 1


def test_warm_up_and_a_longer_period_are_distinguished():
    found = traced(recipe().insert(after="sync", own=Counter(lambda n: n + 1 if n < 6 else 4)))
    assert (found.rows, found.warmup_rows) == (3, 4)
    plan = recipe().insert(after="sync", own=Counter(lambda n: n + 1 if n < 6 else 4)).compile()
    assert "repeats every 3 rows after 4 of warm-up" in str(plan)


def test_steps_and_seconds_make_rows_too():
    assert traced(recipe().set("report.every_steps", 1000)).steady["report"].taken == 8
    assert traced(recipe().set("report.every_seconds", 60.0)).steady["report"].taken == 1


def test_several_rows_in_one_pass_are_counted():
    found = traced(loose().insert(after="batch", halves=fl.FlatMap(halves)))
    assert found.steady["report"].given == found.rows and found.steady["train"].taken == found.rows
    assert found.steady["sample"].given == found.rows / 2


def test_a_total_that_never_comes_back_gives_means(monkeypatch):
    graph = recipe().insert(after="sync", own=Counter(lambda n: n + 1))
    trace(recipe())
    monkeypatch.setattr(module, "PATIENCE", 50 * len(graph.nodes))
    monkeypatch.setattr(module, "LONG_ROWS", 0)
    plan = graph.compile()
    assert not plan.found.exact and plan.found.rows == 50, "each row is a step of each node"
    assert (
        f"means over {plan.found.rows:,} rows, no period found (the state of own never repeats "
        "itself)" in str(plan)
    )
    assert plan.per_row("updates") == 1.0 and plan.per_row("sampled_steps") == 128.0


def test_a_plan_is_the_same_on_a_slow_machine(monkeypatch):
    graph = recipe().insert(after="sync", own=Counter(lambda n: n + 1))
    monkeypatch.setattr(module, "PATIENCE", 1_000)
    quick = str(graph.compile())
    ticks = itertools.count(step=10.0)
    for clock in ("perf_counter", "monotonic", "time", "thread_time", "process_time"):
        monkeypatch.setattr(time, clock, lambda: next(ticks))
    assert str(graph.compile()) == quick


def test_the_longer_no_row_closes_the_more_seldom_states_are_compared(monkeypatch):
    monkeypatch.setattr(module, "PATIENCE", 4_000)
    compared, signature = [], module.Tracer.signature

    def counted(self, schedule, reporting=True):
        found = signature(self, schedule, reporting)
        compared.append(len(found[0].facts))
        return found

    monkeypatch.setattr(module.Tracer, "signature", counted)
    with pytest.raises(fl.errors.GraphError, match="items and yielded none, so no Row closes"):
        recipe().set("batch.batch_size", 10**9).compile()
    # The batch that never fills holds more at each look, so looks at equal distances would compare
    # the square of that.
    assert len(compared) > 8 and sum(compared) < 10 * compared[-1]


def test_patience_is_short():
    assert module.PATIENCE <= 10_000


# -- forms


def test_every_edge_has_the_fields_shapes_and_types_that_a_real_pass_has():
    graph = loose().set("batch.batch_size", 256)
    real, forms = {}, traced(graph).first_items
    stream = Stream(
        [
            Tap(
                lambda event: (
                    real.setdefault(event.node, event.item) if event.item is not None else None
                ),
                OperatorRan,
            )
        ]
    )
    session = fl.LocalRuntime().open(Plan(graph, Trace()), 0, stream)
    next(iter(session))
    session.close()
    for name in ("sample", "batch", "adv", "norm"):
        for part in ("data", "columns"):
            got, wanted = (
                {k: (tuple(x.shape), str(x.dtype)) for k, x in getattr(form[name], part).items()}
                for form in (forms, real)
            )
            assert got == wanted, name
    assert forms["sample"]["obs"].shape == (16, 8, 4) and forms["batch"]["obs"].shape == (16, 16, 4)
    assert set(forms["adv"].data) - set(forms["batch"].data) == {"advantage", "target"}
    assert (
        forms["train"].metrics.names == real["train"].metrics.names
        and forms["train"].steps == real["train"].steps == 256
    )
    assert forms["train"].metrics.values.shape == real["train"].metrics.values.shape
    assert forms["sync"] is forms["train"] and type(forms["report"]) is type(real["report"])
    assert forms["report"].episodes.keys() == real["report"].episodes.keys()


def test_no_form_holds_an_array_of_observations():
    found = traced(recipe())
    for name in ("sample", "batch", "adv", "norm"):
        assert all(
            isinstance(x, jax.ShapeDtypeStruct) for x in found.first_items[name].data.values()
        )


def test_an_operator_that_drops_a_field_shows_in_the_form_after_it():
    slim = recipe().insert(after="train", x=Pass()).insert(after="adv", slim=fl.Map(without_reward))
    found = traced(slim)
    assert (
        "reward" in found.first_items["adv"].data and "reward" not in found.first_items["slim"].data
    )
    assert "reward" not in found.first_items["norm"].data


def without_reward(batch):
    return fl.extend.Batch({k: x for k, x in batch.data.items() if k != "reward"}, batch.columns)


# -- functions of the user's own


def only_real(batch):
    if not np.asarray(batch["obs"]).any():
        raise ValueError("all observations are 0")
    return batch


def by_numpy(batch):
    obs = np.asarray(batch["obs"])
    return batch.with_(obs=np.concatenate([obs, obs], axis=2), more=np.zeros(batch.shape, np.int16))


def by_jax(batch):
    return batch.with_(norm=jnp.linalg.norm(batch["obs"], axis=-1))


def test_a_map_in_jax_is_traced():
    form = traced(recipe().insert(after="batch", own=fl.Map(by_jax))).first_items["own"]
    assert (form["norm"].shape, form["norm"].dtype) == ((16, 8), jnp.float32)


def test_a_map_in_numpy_is_run_once_on_zeros():
    calls = []

    def counted(batch):
        calls.append(type(batch["reward"]))
        return by_numpy(batch)

    form = traced(
        loose().remove("train", "norm", "adv").insert(after="batch", own=fl.Map(counted))
    ).first_items["own"]
    assert (form["obs"].shape, form["more"].shape, form["more"].dtype) == (
        (16, 8, 8),
        (16, 8),
        np.int16,
    )
    assert np.ndarray in calls


def test_a_map_that_works_only_on_real_data_is_reported_of_and_the_graph_still_compiles_and_runs():
    graph = loose().insert(after="batch", own=fl.Map(only_real))
    plan = graph.compile()
    assert list(plan.found.opaque) == ["own"]
    assert "not traced after own, whose function works only on real data" in str(plan)
    with fl.run(graph) as run:
        assert next(run)["updates"] == 1


@pytest.mark.parametrize(
    "keep",
    [lambda b: b["reward"].mean() > 0, lambda b: bool(b["reward"].mean() > 0)],
    ids=["an array", "a bool"],
)
def test_a_filter_that_looks_at_values_is_not_judged_by_zeros(keep):
    """What it keeps is known only in the run; the plan must say so and not count on one answer."""
    assert "not traced after own" in str(
        recipe().insert(after="batch", own=fl.Filter(keep)).compile()
    )


def test_a_filters_own_mistake_is_no_decision_by_values():
    misspelt = fl.Filter(lambda b: b.shpae[0] > 1)
    with pytest.raises(fl.errors.CheckError, match=r"own: .*AttributeError.*'shpae'"):
        recipe().insert(after="batch", own=misspelt).compile()


def positive(batch):
    return [batch] if batch["reward"].mean() > 0 else []


def rewarded(batch):
    return batch.with_(best=np.asarray(batch["reward"])[np.asarray(batch["reward"]) > 0])


@pytest.mark.parametrize("own", [fl.FlatMap(positive), fl.Map(rewarded)])
def test_nor_is_a_function_whose_items_or_shapes_values_decide(own):
    assert "not traced after own" in str(recipe().insert(after="batch", own=own).compile())


@dataclass
class Tally:
    """Compares by identity, and prints what it is but not what it holds."""

    seen: int = 0
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __repr__(self):
        return "Tally"


@dataclass(frozen=True)
class Listed:
    """Frozen, so that it has a hash, which fails for a list."""

    seen: Any = ()


@dataclass(frozen=True)
class Third(fl.extend.Operator):
    """Lets every third item pass."""

    def init(self):
        return {"tally": Tally(), "listed": Listed([])}

    def step(self, held, item, ctx):
        held["tally"].seen = (held["tally"].seen + 1) % 3
        if held["tally"].seen == 0:
            yield item


def test_a_state_that_equals_itself_when_changed_or_has_no_hash_is_distinguished():
    found = traced(recipe().insert(after="train", own=Third()))
    assert (found.exact, found.steady["own"].given, found.steady["own"].taken) == (True, 1, 3)


@dataclass(frozen=True)
class Scale(fl.extend.Stateless):
    """Multiplies the number of steps; whole or not as its setting is."""

    by: Any = 1

    def step(self, state, item, ctx):
        yield item.with_(scaled=ctx.run(scaled, np.ones(item.shape, np.int32), by=self.by))


def scaled(x, *, by):
    return x * by


def test_settings_that_are_equal_and_of_other_types_have_shapes_of_their_own():
    forms = traced(recipe().insert(after="batch", one=Scale(2), other=Scale(2.0))).first_items
    assert (forms["one"]["scaled"].dtype, forms["other"]["scaled"].dtype) == (
        jnp.int32,
        jnp.float32,
    )


def test_a_verb_that_is_due_by_a_computed_number_is_not_judged_by_its_shape():
    @dataclass(frozen=True)
    class Due(fl.extend.Stateless):
        runners: fl.extend.Ref[fl.extend.RunnersHandle] = "runners"

        def step(self, state, item, ctx):
            ctx.when(ctx.run(positive_sum, np.ones(3)), "runners", "facts")
            yield item

    assert "not traced after own" in str(recipe().insert(after="batch", own=Due()).compile())


def positive_sum(x):
    return jnp.sum(x) > 0


def test_a_filter_on_static_facts_is_traced():
    assert (
        traced(recipe().insert(after="batch", own=fl.Filter(lambda b: b.steps == 128)))
        .steady["own"]
        .given
        == 1
    )
    assert (
        traced(recipe().insert(after="batch", own=fl.Filter(lambda b: "reward" not in b.data))).rows
        == 0
    )


def test_a_function_that_counts_for_itself_is_called_in_the_trace_as_in_the_run():
    seen = []
    traced(
        recipe()
        .insert(after="report", own=Pass())
        .remove("own")
        .insert(after="train", own=fl.Map(lambda t: seen.append(t.steps) or t))
    )
    assert seen == [128]


# -- lag


@dataclass(frozen=True)
class Twice(fl.extend.Stateless):
    """Yields its item twice."""

    def step(self, state: None, item: Any, ctx: fl.extend.Context) -> Iterator[Any]:
        yield item
        yield item


LAGS = [
    ("in step", lambda g: g, 0),
    ("two rounds a batch", lambda g: g.set("batch.batch_size", 256), 0),
    ("a round late", lambda g: g.insert(after="batch", own=Delay(1)), 1),
    ("two rounds late", lambda g: g.insert(after="batch", own=Delay(2)), 2),
    ("three rounds late", lambda g: g.insert(after="sample", own=Delay(3)), 3),
    (
        "weights before training",
        lambda g: g.remove("sync").insert(after="norm", sync=fl.SyncWeights()),
        1,
    ),
    ("weights every third update", lambda g: g.replace(sync=SyncEvery(3)), 2),
    ("each batch trained twice", lambda g: g.insert(after="norm", own=Twice()), 1),
    ("each round in two halves", lambda g: g.insert(after="batch", own=fl.FlatMap(halves)), 1),
    ("through a map", lambda g: g.insert(after="batch", own=fl.Map(same)), 0),
    ("through a map in jax", lambda g: g.insert(after="batch", own=fl.Map(by_jax)), 0),
    (
        "through a map in numpy",
        lambda g: g.insert(
            after="norm", own=fl.Map(lambda b: b.with_(more=np.asarray(b["reward"])))
        ),
        0,
    ),
]


@pytest.mark.parametrize(("edit", "lag"), [x[1:] for x in LAGS], ids=[x[0] for x in LAGS])
def test_lag_is_exact(edit, lag):
    plan = edit(loose()).compile()
    assert plan.lag == lag
    assert f"lag {lag}" in str(plan)


@pytest.mark.parametrize("name", ["two rounds late", "weights before training"])
def test_a_run_has_the_lag_that_is_reported_here(name):
    ((edit, lag),) = (x[1:] for x in LAGS if x[0] == name)
    with fl.run(edit(loose())) as run:
        assert max(next(run)["lag_max"] for _ in range(6)) == lag


@pytest.mark.parametrize("graph", [fl.ppo(), fl.a2c(), fl.pg()], ids=lambda g: g.name)
def test_stock_graphs_have_lag_0(graph):
    assert graph.compile().lag == 0


def aged(batch):
    return fl.extend.Batch(
        batch.data, {**batch.columns, "version": (batch["reward"][0] * 0).astype(jnp.int32)}
    )


def test_a_version_that_is_computed_makes_the_lag_unknown():
    plan = loose().insert(after="batch", own=fl.Map(aged)).compile()
    assert math.isnan(plan.lag) and "lag unknown" in str(plan)


def test_an_on_policy_loss_on_data_of_unknown_age_is_reported():
    with pytest.raises(fl.errors.CheckError, match=r"g\.train: PPOLoss is on-policy"):
        recipe().insert(after="batch", own=fl.Map(aged)).compile()


# -- nothing happens


def test_the_trace_makes_no_worker_and_takes_no_step(monkeypatch):
    seen = []
    monkeypatch.setattr("flowrl.rollout.gym_runners.Runner", lambda *a: seen.append("worker"))
    monkeypatch.setattr(gym.vector.VectorEnv, "step", lambda *a: seen.append("step"))
    for place in ("CartPoleEnv", "CartPoleVectorEnv"):
        monkeypatch.setattr(
            f"gymnasium.envs.classic_control.cartpole.{place}.step", lambda *a: seen.append("step")
        )
    traced(recipe())
    traced(recipe().insert(after="sync", eval=fl.Evaluate(every=2)))
    assert seen == []


def test_the_trace_computes_nothing_large():
    """2 million steps of a large network: shapes only, so neither the time nor the memory is
    there."""
    policy = fl.Policy(fl.networks.MLP, hidden=(8192, 8192))
    graph = fl.ppo(
        "CartPole-v1",
        fl.PPOSettings(
            envs_per_runner=1000,
            rollout_length=2000,
            batch_size=2_000_000,
            minibatch_size=None,
            policy=policy,
        ),
    )
    compiled = []

    def note(event, seconds, **facts):
        compiled.extend(
            [facts.get("fun_name")] * (event == "/jax/core/compile/backend_compile_duration")
        )

    jax.monitoring.register_event_duration_secs_listener(note)
    tracemalloc.start()
    try:
        assert graph.compile().per_row("trained_steps") == 2_000_000
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        jax.monitoring.unregister_event_duration_listener(note)
    assert compiled == [] and most < 16e6, "observations alone would take 32 MB, the weights 270 MB"


class Holding(fl.extend.Operator):
    """Yields every third item; its state is `make()`, no pytree, and `add` counts up in it."""

    def __init__(self, make, add):
        self.make, self.add = make, add

    def init(self):
        return {"held": self.make()}

    def step(self, state, item, ctx):
        if self.add(state["held"]) == 0:
            yield item


class Tick:
    def __init__(self):
        self.n = 0


def up(tick):
    tick.n = (tick.n + 1) % 3
    return tick.n


def longer(queue):
    queue.append(0)
    return 0 if len(queue) == 3 and not queue.clear() else 1


def larger(numbers):
    numbers.add(len(numbers))
    return 0 if len(numbers) == 3 and not numbers.clear() else 1


@pytest.mark.parametrize(("make", "add"), [(Tick, up), (deque, longer), (set, larger)])
def test_a_state_that_is_no_pytree_is_distinguished_too(make, add):
    found = traced(loose().insert(after="sync", rare=Holding(make, add)))
    assert (found.rows, found.warmup_rows, found.exact) == (1, 0, True)
    assert found.steady["rare"].taken == 3


def test_a_second_trace_finds_the_same():
    one, two = traced(recipe()), traced(recipe())
    assert (one.rows, one.steady, one.lags) == (two.rows, two.steady, two.lags)
    assert runners() == recipe().resources["runners"]


@pytest.mark.parametrize("every", [1, 3, 10])
def test_an_evaluation_makes_no_lag(every):
    played = recipe().insert(after="sync", play=fl.Evaluate(every=every)).set("report.every", 2)
    assert played.compile().lag == 0


def test_rows_that_come_seldom_are_no_mistake():
    plan = loose().set("report.every", 10**6).compile()
    assert plan.found.rows == 0 and not plan.found.exact
    assert f"no row within {plan.found.ever[ROUNDS]:,} passes, whose numbers these are" in str(plan)


def test_a_map_that_reports_of_updates_and_passes_them_on_is_traced():
    graph = recipe().insert(after="train", log=fl.Map(lambda t: (float(t.metrics.values[0]), t)[1]))
    assert graph.compile().found.opaque == {}
    with pytest.raises(fl.errors.CheckError, match="1 problem\n.*act with their first weights"):
        graph.remove("sync").check()


def test_after_what_is_not_traced_the_lag_is_unknown():
    plan = recipe().insert(after="batch", real=fl.Map(only_real)).compile()
    assert (
        math.isnan(plan.lag)
        and "1 stage, lag unknown" in str(plan)
        and "so rates, lag and syncs were not checked" in str(plan)
    )


def test_a_counter_of_numpy_is_part_of_the_period():
    found = traced(loose().insert(after="sync", own=Counter(lambda n: np.int64((n + 1) % 4))))
    assert found.rows == 4
    found = traced(loose().insert(after="sync", own=Counter(lambda n: np.int64((n + 1) % 4))))
    assert found.rows == 4


def test_a_field_of_another_shape_names_who_yields_it():
    with pytest.raises(
        fl.errors.CheckError,
        match=r"g\.short: yields reward \[8\] in a batch whose fields are \[16, 8, \.\.\.\]",
    ):
        recipe().insert(
            after="batch", short=fl.Map(lambda b: b.with_(reward=b["reward"][0]))
        ).check()


def phases(updates, play, report=1):
    """Learns from a dataset for so many updates, then from another part of it."""
    base = fl.iql("Pendulum-v1", data="nowhere", hidden=(4,))
    nodes = {node.name: node.op for node in base.nodes}
    graph = fl.Graph("phases", **base.resources).then(read=fl.ReadDataset(8))
    graph = graph.then(after=(), more=fl.ReadDataset(4))
    graph = graph.then(after=("read", "more"), phase=fl.Switch({"read": updates, "more": None}))
    graph = graph.then(train=nodes["train"], target=nodes["target"], sync=fl.SyncWeights())
    return graph.then(play=fl.Evaluate(every=play), report=fl.Report(every=report))


def played(graph, **every):
    plays = {name: fl.Evaluate(every=number) for name, number in every.items()}
    return graph.insert(after="sync", **plays)


LATE = {"learning_starts": 200_000, "buffer_size": 300_000, "hidden": (4,)}


@pytest.mark.parametrize("every", [3, 50, 1_000, 1_000_000])
def test_a_count_that_goes_on_makes_the_warm_up_no_longer(every):
    graph = fl.dqn("CartPole-v1", learning_starts=3_000, hidden=(4,), report_every=5)
    plain, found = traced(graph), traced(graph.insert(after="sample", play=fl.Evaluate(every)))
    assert found.exact and found.rows % plain.rows == 0
    # States are compared once in 64 rounds where no row closes.
    assert plain.warmup_rounds <= found.warmup_rounds <= plain.warmup_rounds + 64
    assert found.idle_steps == plain.idle_steps == 3_008


@pytest.mark.parametrize(
    ("build", "warmup", "rows"),
    [
        (lambda: phases(1_000_000, 10), 1_000_001, 10),
        # Between two rows the count of evaluations goes on by half of what it counts to.
        pytest.param(lambda: phases(2_000, 1_000, 500), 3, 2, marks=pytest.mark.system),
        pytest.param(lambda: phases(1_000_000, 1_000, 500), 3, 2, marks=pytest.mark.system),
        (lambda: fl.dqn("CartPole-v1", **LATE).insert(after="sample", a=fl.Evaluate(10)), 0, 2),
        (lambda: played(recipe(), a=10, b=10**6), 0, 10**6),
        (lambda: played(recipe(), a=10**9), 0, 10**9),
    ],
)
def test_what_fills_up_is_skipped_beside_what_begins_again(build, warmup, rows):
    found = traced(build())
    assert found.exact and found.rows == rows
    assert found.warmup_rows >= warmup
    assert sum(found.mean_lags.values()) >= rows  # each row has an update at least
