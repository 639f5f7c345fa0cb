"""Stages: what a channel holds and drops, whose turn it is, and that a race is a unit test."""

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small import AnyAgeLoss, Delay, learner, runners

import flowrl as fl
from flowrl.graph.stages import Channel

ASYNC = fl.Graph("g", runners=runners(num_runners=3), learner=learner(AnyAgeLoss())).then(
    sample=fl.ParallelSample(mode="async"),
    batch=fl.Concat(128),
    queue=fl.Queue(3),
    adv=fl.Advantages(),
    train=fl.TrainOneStep(),
    sync=fl.SyncWeights(),
    report=fl.Report(every=2),
)


def held(channel):
    return [item for _, item in channel.items]


@pytest.mark.parametrize(
    ("full", "order", "gone", "out"),
    [
        ("block", "fifo", [], [1, 2, 3, 4]),
        ("block", "lifo", [], [4, 3, 2, 1]),
        ("drop_oldest", "fifo", [1, 2], [3, 4]),
        ("drop_oldest", "lifo", [1, 2], [4, 3]),
        ("drop_newest", "fifo", [3, 4], [1, 2]),
        ("drop_newest", "lifo", [3, 4], [2, 1]),
    ],
)
def test_a_channel_keeps_drops_and_gives_as_it_is_reported(full, order, gone, out):
    channel = Channel("q", ("a",), 2, full, order)
    assert channel.has_capacity
    assert [x[1] for i in (1, 2, 3, 4) if (x := channel.put("a", i))] == gone
    assert channel.has_capacity == (full != "block")
    assert [channel.take()[1] for _ in out] == out
    assert channel.take() is None and len(channel) == 0


def rows(graph, count, **how):
    with fl.run(graph, runtime=fl.LocalRuntime(**how), seed=how.pop("seed", 0)) as run:
        got = [next(run) for _ in range(count)]
    return got, run


def test_lock_step_counts_what_the_plan_says():
    plan = ASYNC.compile()
    assert plan.found.exact and len(plan.graph.stages()) == 2
    warm = plan.found.warmup_rows
    got, run = rows(ASYNC, warm + 3 * plan.found.rows)
    later, earlier = got[-1], got[warm + 2 * plan.found.rows - 1]
    period = plan.found.rows
    assert later["updates"] - earlier["updates"] == period * plan.per_row("updates")
    assert later["trained_steps"] - earlier["trained_steps"] == period * plan.per_row(
        "trained_steps"
    )
    assert max(r["lag_max"] for r in got[warm:]) == plan.lag
    assert run.audit().closed


@pytest.mark.parametrize("schedule", ["lockstep", "random"])
def test_a_seed_gives_the_same_run_again(schedule):
    (a, _), (b, _) = (rows(ASYNC, 4, schedule=schedule) for _ in range(2))
    assert [r["loss"] for r in a] == [r["loss"] for r in b] and [r["lag_mean"] for r in a] == [
        r["lag_mean"] for r in b
    ]


@settings(max_examples=10, deadline=None)
@given(
    st.integers(0, 10_000),
    st.integers(0, 3),
    st.sampled_from(["block", "drop_oldest", "drop_newest"]),
    st.sampled_from(["fifo", "lifo"]),
)
def test_no_schedule_trains_on_what_is_older_than_max_lag(seed, max_lag, full, order):
    graph = ASYNC.replace(queue=fl.Queue(2, full=full, order=order, max_lag=max_lag))
    with fl.run(graph, runtime=fl.LocalRuntime(schedule="random"), seed=seed) as run:
        got = list(itertools.islice(run, 6))
    assert max(r["lag_max"] for r in got) <= max_lag
    audit = run.audit()
    assert audit.closed, str(audit)
    edge = next(e for e in audit.edges if e.after == "queue")
    assert edge.got.steps == got[-1]["trained_steps"]


@settings(max_examples=10, deadline=None)
@given(
    st.integers(0, 10_000),
    st.integers(0, 3),
    st.sampled_from(
        [
            {"mode": "async", "in_flight": 1},
            {"mode": "async", "in_flight": 3},
            {"mode": "sync"},
            {"min_fraction": 0.6},
        ]
    ),
    st.sampled_from([64, 128, 200]),
)
def test_paced_requests_are_never_too_old_and_nothing_is_dropped_for_it(
    seed, max_lag, sample, steps
):
    graph = ASYNC.replace(
        sample=fl.ParallelSample(**sample),
        batch=fl.Concat(steps),
        queue=fl.Queue(3, max_lag=max_lag, on_stale="pace"),
    )
    plan = graph.compile()
    assert plan.lag_bound == max_lag >= plan.lag
    with fl.run(plan, runtime=fl.LocalRuntime(schedule="random"), seed=seed) as run:
        got = list(itertools.islice(run, 6))
    assert max(r["lag_max"] for r in got) <= max_lag and got[-1]["dropped_steps"] == 0
    assert run.audit().closed


@settings(max_examples=10, deadline=None)
@given(
    st.integers(0, 10_000), st.integers(1, 3), st.sampled_from([64, 128, 200]), st.integers(1, 3)
)
def test_after_rounds_a_queue_that_blocks_bounds_the_lag(seed, capacity, steps, every):
    graph = ASYNC.replace(
        sample=fl.ParallelSample(),
        batch=fl.Concat(steps),
        queue=fl.Queue(capacity),
        sync=fl.SyncWeights(every=every),
    )
    plan = graph.compile()
    assert plan.lag_bound == capacity - 1 + every
    with fl.run(plan, runtime=fl.LocalRuntime(schedule="random"), seed=seed) as run:
        assert max(r["lag_max"] for r in itertools.islice(run, 8)) <= plan.lag_bound


@pytest.mark.parametrize("env", ["CartPole-v1", "gymnax:CartPole-v1"])
def test_runners_that_no_learner_sends_first_weights_to_can_be_paced(env):
    other = runners(env=env, num_runners=2)
    graph = fl.Graph("g", runners=other, actors=other, learner=learner(AnyAgeLoss())).then(
        sample=fl.ParallelSample(mode="async", runners="actors"),
        batch=fl.Concat(64),
        queue=fl.Queue(3, max_lag=2, on_stale="pace", runners="actors"),
        adv=fl.Advantages(),
        train=fl.TrainOneStep(),
        sync=fl.SyncWeights(runners="actors"),
        report=fl.Report(runners="actors"),
    )
    plan = graph.compile()
    assert plan.lag <= plan.lag_bound == 2


def test_the_plan_says_where_lag_has_no_bound():
    for graph in (
        ASYNC,
        ASYNC.remove("queue").replace(sample=fl.ParallelSample(min_fraction=0.6)),
        ASYNC.insert(after="queue", mix=fl.MixIn()),
        # One in two batches trains twice, the other waits for its second half after the queue.
        ASYNC.insert(after="queue", mix=fl.MixIn(uses=2), both=fl.Concat(256)).set(
            "queue.max_lag", 1
        ),
    ):
        plan = graph.compile()
        assert plan.lag_bound == np.inf and "lag bound none, expected " in str(plan)
    assert "lag bound 4, expected " in str(ASYNC.set("queue.max_lag", 4).compile())


@dataclass(frozen=True)
class Thrice(fl.extend.Stateless):
    """Samples three rounds a turn."""

    source = True
    runners: str = "runners"

    def step(self, state, item, ctx):
        for _ in range(3):
            yield ctx[self.runners].collect()


def test_a_source_that_gives_several_items_a_round_has_no_bound_by_its_queue():
    graph = ASYNC.remove("batch").replace(sample=Thrice(), queue=fl.Queue(1))
    plan = graph.compile()
    assert plan.lag == 2 and plan.lag_bound == np.inf


def test_pacing_that_can_not_be_is_reported_before_the_run():
    with pytest.raises(
        fl.errors.SettingError, match="on_stale='pace' needs max_lag, full='block' and order='fifo'"
    ):
        fl.Queue(3, on_stale="pace")
    late = ASYNC.replace(
        queue=fl.Queue(3, max_lag=1, on_stale="pace"), sync=fl.SyncWeights(every=8)
    )
    with pytest.raises(fl.errors.CheckError, match="no stage can go on"):
        late.check()


def test_random_schedules_differ_and_drop():
    graph = ASYNC.replace(queue=fl.Queue(1, full="drop_oldest"))
    dropped = set()
    for seed in range(3):
        with fl.run(graph, runtime=fl.LocalRuntime(schedule="random"), seed=seed) as run:
            list(itertools.islice(run, 5))
        dropped.add(next(e for e in run.audit().edges if e.after == "queue").dropped.steps)
    assert len(dropped) > 1 and max(dropped) > 0


def test_a_queue_that_never_gets_an_item_is_reported():
    with pytest.raises(fl.errors.CheckError, match=r"g\.late: took [\d,]+ items and yielded none"):
        ASYNC.insert(after="batch", late=fl.Filter(lambda b: b.steps > 10**6)).check()


def test_an_error_in_any_stage_has_its_address():
    for node, name in (("batch", "first"), ("queue", "second")):
        graph = ASYNC.insert(after=node, **{name: Delay(0)}).replace(
            **{name: fl.Map(fails_on_data)}
        )
        with pytest.raises(ZeroDivisionError) as caught, fl.run(graph) as run:
            next(run)
        assert caught.value.__notes__ == [f"in g.{name}"]


def fails_on_data(batch):
    if isinstance(batch["obs"], np.ndarray) and batch["obs"].any():
        raise ZeroDivisionError
    return batch


def test_a_partial_round_takes_those_that_came_and_the_others_later():
    graph = ASYNC.remove("queue").replace(sample=fl.ParallelSample(min_fraction=0.6))
    plan = graph.compile()
    assert plan.found.first_items["sample"].shape == (16, 8), "two of three runners make a round"
    with fl.run(graph, runtime=fl.LocalRuntime(schedule="random"), seed=1) as run:
        got = list(itertools.islice(run, 5))
    assert got[-1]["trained_steps"] == 10 * 128
    assert max(r["lag_max"] for r in got) > 0, "a late rollout has its true version"
