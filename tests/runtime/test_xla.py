"""One XLA program: the rows of the local runtime, chunks, many runs, devices, and refusals."""

import itertools
import signal
import subprocess
import sys
import textwrap
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flowrl as fl
from conftest import close, remembered, rows_and_weights, timeless
from environments import Corridor
from flowrl.core.arguments import Argument, Values, substituted
from flowrl.core.xla_threads import clients
from flowrl.runtime.fusable import program_report
from flowrl.runtime.members import Members
from flowrl.runtime.periodicity import Periodicity, Section, Stretch, periodicity
from flowrl.runtime.rows import RowMaker

ENV = "gymnax:CartPole-v1"
MLP = fl.Policy(fl.networks.MLP, hidden=(16,))
SMALL = {"envs_per_runner": 4, "rollout_length": 16, "policy": MLP}
ASYNC = {"num_runners": 2, **SMALL, "batch_size": 128, "report_every": 1}
LEAST = {
    "envs_per_runner": 1,
    "rollout_length": 4,
    "batch_size": 8,
    "report_every": 2,
    "policy": fl.Policy(fl.networks.MLP, hidden=(4,)),
}
PPO = fl.ppo(ENV, fl.PPOSettings(**SMALL, batch_size=64, epochs=1, minibatch_size=None))
GRAPHS = {
    "ppo": PPO,
    "a2c": fl.a2c(ENV, fl.A2CSettings(**SMALL, batch_size=64, report_every=3)),
    "a2c with micro-batches": fl.a2c(ENV, fl.A2CSettings(**SMALL, batch_size=64, report_every=3))
    .remove("train")
    .insert(
        after="adv",
        grads=fl.ComputeGradients(),
        mean=fl.AverageGradients(4),
        apply=fl.ApplyGradients(),
    ),
    "a3c": fl.a3c(ENV, fl.A3CSettings(**SMALL, num_runners=2, report_every=3)),
    "impala": fl.impala(ENV, fl.IMPALASettings(**ASYNC)),
    "appo": fl.appo(ENV, fl.APPOSettings(**ASYNC)),
}
TINY = fl.ppo(
    "gymnax:CartPole-v1",
    fl.PPOSettings(
        envs_per_runner=2,
        rollout_length=4,
        batch_size=8,
        epochs=1,
        minibatch_size=None,
        policy=fl.Policy(fl.networks.MLP, hidden=(4,)),
    ),
).set("runners.env", Corridor)


WATCH = fl.Graph("watch", runners=TINY.resources["runners"]).then(
    sample=fl.ParallelSample(), report=fl.Report()
)


def learned(graph, count, runtime="xla", seed=0):
    rows, weights = (
        rows_and_weights(graph, count, runtime, seed) if seed else remembered(graph, count, runtime)
    )
    return timeless(rows), weights


@pytest.mark.parametrize(
    "name",
    [
        # The others share with them what they are made of.
        pytest.param(x, marks=() if x == "ppo" else pytest.mark.system)
        for x in GRAPHS
    ],
)
def test_three_rows_and_the_weights_agree_with_the_local_runtime(name):
    (local, a), (fused, b) = (
        learned(GRAPHS[name], 3, runtime) for runtime in ("local", fl.XlaRuntime(chunk=1))
    )
    close(fused, local)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), a, b)


@pytest.mark.system
@pytest.mark.parametrize(
    "edit",
    [
        lambda g: g.insert(after="batch", again=fl.MixIn(batches=2, uses=2)).set(
            "queue.order", "lifo"
        ),
        lambda g: g.set("queue.max_lag", 1).set("queue.on_stale", "pace"),
        lambda g: g.set("sync.to", "producer").set("sample.local", fl.chain(half=fl.Map(halved))),
        lambda g: (
            g.set("sample.mode", "sync")
            .set("sample.min_fraction", 0.5)
            .insert(after="sync", play=fl.Evaluate(every=2, episodes=3))
        ),
    ],
    ids=[
        "circular replay, lifo",
        "paced",
        "to the producers, work at the sampler",
        "partial rounds, evaluated",
    ],
)
def test_what_is_asked_of_an_asynchronous_graph_holds_in_a_program(edit):
    graph = edit(fl.impala(ENV, fl.IMPALASettings(**{**ASYNC, **LEAST}))).set(
        "runners.env", Corridor
    )
    close(learned(graph, 5, fl.XlaRuntime(chunk=2))[0], learned(graph, 5, "local")[0])


def halved(batch):
    return batch.with_(reward=batch["reward"] / 2)


@pytest.mark.system
def test_recurrent_policies_and_scaled_rewards_run_in_a_program():
    policy = fl.Policy(fl.networks.RNN, hidden=(4,), cell="gru")
    graph = (
        fl.impala(ENV, fl.IMPALASettings(**{**ASYNC, **LEAST, "policy": policy}))
        .set("runners.normalize_rewards", 0.99)
        .set("runners.env", Corridor)
    )
    close(learned(graph, 2)[0], learned(graph, 2, "local")[0])


@pytest.mark.parametrize("chunk", [3, None])
def test_the_size_of_chunks_changes_nothing(chunk):
    rows, _ = learned(TINY, 7, fl.XlaRuntime(chunk=chunk))
    close(rows, learned(TINY, 7, "local")[0])


def test_a_goal_is_reached_with_the_last_row_of_a_chunk_and_all_its_rows_are_given(tmp_path):
    with fl.run(
        TINY,
        runtime=fl.XlaRuntime(chunk=3),
        until=lambda row: row["row"] == 7,
        out=tmp_path / "run",
    ) as run:
        rows = list(run)
    assert (
        run.reason == "until"
        and [r["row"] for r in rows] == list(range(1, 10))
        and len(run.rows) == 9
    )
    assert (tmp_path / "run/rows.jsonl").read_text().count("\n") == 9 and run.audit().closed
    _, local = learned(TINY, 9, "local")
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), local, run.policy.weights
    )
    assert run.counts()["updates"] == 9 and len(run.policy.evaluate(2)) == 2


def test_a_run_that_is_left_within_a_chunk_has_all_its_rows():
    with fl.run(TINY, runtime=fl.XlaRuntime(chunk=3)) as run:
        next(run)
    assert run.reason == "closed" and len(run.rows) == 3


def test_steps_are_not_overshot_by_a_chunk_of_its_own_choice():
    with fl.run(TINY, runtime="xla", steps=400) as run:
        rows = list(run)
    assert run.reason == "steps" and rows[-2]["env_steps"] < 400 <= rows[-1]["env_steps"]
    assert all(a["seconds"] < b["seconds"] for a, b in itertools.pairwise(rows))


@pytest.mark.system
def test_ctrl_c_ends_within_a_chunk_and_what_there_is_is_saved(tmp_path):
    script = """
        import os, signal, sys, flowrl as fl
        sys.path.insert(0, "tests")
        from environments import Corridor
        policy = fl.Policy(fl.networks.MLP, hidden=(4,))
        settings = fl.PPOSettings(
            envs_per_runner=2, rollout_length=4, batch_size=8, epochs=1, minibatch_size=None,
            policy=policy,
        )
        graph = fl.ppo(Corridor, settings)
        with fl.run(graph, runtime="xla", out=sys.argv[1]) as run:
            for row in run:
                if row["row"] == 30:
                    os.kill(os.getpid(), signal.SIGINT)
    """
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "run")],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert "KeyboardInterrupt" in done.stderr
    assert (tmp_path / "run/rows.jsonl").read_text().count("\n") >= 30
    fl.load(tmp_path / "run", allow=["environments"])


def test_a_nan_ends_the_run_with_its_row_and_keeps_the_last_good_policy():
    bad = TINY.set("runners.env_settings", {"nan_at": 11})
    says = (
        "environment [01], .* gave an observation or a reward that is not finite, an observation "
        "that is none of its space's choices, or a mask that allows no action, before row 3; "
        "fix the environment"
    )
    with (
        pytest.raises(fl.errors.EnvError, match=says),
        fl.run(bad, runtime=fl.XlaRuntime(chunk=8)) as run,
    ):
        list(run)
    assert len(run.rows) == 2
    _, good = learned(bad, 2, "local")
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), good, run.policy.weights)


@pytest.mark.system
def test_a_nan_among_many_environments_is_named_too():
    graph = fl.ppo(
        Corridor, envs_per_runner=64, rollout_length=128, batch_size=8192, minibatch_size=8192
    )
    bad = graph.set("runners.env_settings", {"nan_at": 5})
    with (
        pytest.raises(fl.errors.EnvError, match="environment 0, .* at its step 5 "),
        fl.run(bad, runtime="xla") as run,
    ):
        list(run)


def test_a_row_that_raises_leaves_no_rows_to_be_taken_after_it():
    # Without a learner no update ends the chunk, so that rows closed after the one with the NaN.
    bad = WATCH.set("runners.env_settings", {"nan_at": 11})
    with (
        pytest.raises(fl.errors.EnvError) as raised,
        fl.run(bad, runtime=fl.XlaRuntime(chunk=8)) as run,
    ):
        list(run)
    assert len(run.rows) < 8 and not getattr(raised.value, "__notes__", None)


@dataclass(frozen=True)
class Fades(fl.extend.Operator):
    """Rewards are raised by a number that falls with each batch."""

    scale: object

    def init(self):
        return {"scale": self.scale}

    def step(self, held, batch, ctx):
        held["scale"] = held["scale"] - 0.125
        yield batch.with_(reward=ctx.run(raised_by, batch["reward"], held["scale"]))


def raised_by(reward, scale):
    return reward + scale


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_a_numpy_number_in_a_state_goes_on_within_a_program(kind):
    graph = TINY.insert(after="sample", fade=Fades(kind(4)))
    (local, a), (fused, b) = learned(graph, 4, "local"), learned(graph, 4, fl.XlaRuntime(chunk=2))
    close(fused, local)
    close(b, a)
    assert local[-1]["loss"] != pytest.approx(learned(TINY, 4, "local")[0][-1]["loss"])


@pytest.mark.system
def test_a_python_number_that_never_repeats_itself_is_reported_by_node():
    says = (
        r"ppo\.fade: its state\['scale'\] is a number that never repeats itself; .* begin "
        r"with jnp\.float32\(0\) or jnp\.int32\(0\)"
    )
    with pytest.raises(fl.errors.CheckError, match=says):
        fl.run(TINY.insert(after="sample", fade=Fades(4.0)), runtime="xla")


class Switches(fl.extend.Operator):
    """An array of NumPy becomes one of JAX with the first batch, within the program."""

    def init(self):
        return {"mean": np.zeros(2, np.float32)}

    def step(self, held, batch, ctx):
        held["mean"] = ctx.run(moved, held["mean"], batch["reward"])
        yield batch


def moved(mean, reward):
    return mean + jnp.mean(reward)


def test_an_array_that_changes_its_kind_is_reported_by_node():
    says = (
        r"mine\['mean'\] was value .* and became array \(2,\) float32; an array in a state is one "
        r"of JAX from the beginning, such as jnp\.zeros\(3\)"
    )
    with pytest.raises(fl.errors.GraphError, match=says):
        fl.run(TINY.insert(after="sample", mine=Switches()), runtime="xla")


@dataclass(frozen=True)
class Poisons(fl.extend.Operator):
    """Makes the advantages of one batch NaN, by a count that goes on within a program."""

    at: int

    def init(self):
        return {"seen": np.int32(0)}

    def step(self, held, batch, ctx):
        yield batch.with_(advantage=ctx.run(poisoned, batch["advantage"], held["seen"] == self.at))
        held["seen"] = held["seen"] + 1


def poisoned(x, bad):
    return jnp.where(bad, jnp.nan, x)


@pytest.mark.parametrize("runtime", ["local", fl.XlaRuntime(chunk=8)], ids=["local", "xla"])
@pytest.mark.parametrize(
    ("every", "row"),
    [
        pytest.param(1, 5, id="a row each"),
        pytest.param(2, 3, id="two a row", marks=pytest.mark.system),
    ],
)
def test_an_update_that_is_not_finite_ends_a_chunk_and_what_was_not_run_is_not_counted(
    runtime, every, row
):
    graph = TINY.insert(after="adv", poison=Poisons(4)).set("report.every", every)
    with (
        pytest.raises(fl.errors.NotFiniteError, match=rf"update 5, of row {row}"),
        fl.run(graph, runtime=runtime) as run,
    ):
        list(run)
    assert len(run.rows) == row - 1 and run.audit().closed
    # The row of that update was closed.
    done = row * every
    assert (run.counts()["updates"], run.counts()["sampled_steps"]) == (done, done * 8)


class Held(fl.extend.Handle):
    """Holds a state, and changes an array in it or a number beside one."""

    def __init__(self, state):
        self.state = state

    def close(self):
        pass

    def turn_array(self):
        self.state["array"] = 1 - self.state["array"]

    def turn_number(self):
        self.state["number"] = np.int32(1 - self.state["number"])


class Holds(fl.extend.Resource):
    handle = Held

    def describe(self):
        return "a state"

    def review(self, use):
        return iter(())


@dataclass(frozen=True)
class Turns(Holds):
    def open(self, site):
        return Held({"array": jnp.int32(0), "number": np.int32(0)})


@dataclass(frozen=True)
class Seed(Holds):
    """Its state is one array without a name, made from the run's seed."""

    def open(self, site):
        return Held(jnp.zeros((), jnp.float32) + site.seed)


def with_resource(made, **nodes):
    ops = {node.name: node.op for node in TINY.nodes}
    graph = fl.Graph("ppo", **TINY.resources, held=made).then(**ops)
    return graph.insert(after="sample", **nodes)


@dataclass(frozen=True)
class TurnsOver(fl.extend.Operator):
    """Calls a verb with every other batch."""

    verb: str
    held: fl.extend.Ref[Held] = "held"

    def init(self):
        return {"seen": np.int32(0)}

    def step(self, state, batch, ctx):
        state["seen"] = (state["seen"] + 1) % 2
        ctx.when(state["seen"] == 0, self.held, self.verb)
        yield batch


@pytest.mark.system
def test_what_is_no_array_can_not_change_where_only_the_program_knows_when():
    learned(with_resource(Turns(), mine=TurnsOver("turn_array")), 2)
    says = (
        r"ppo\.mine: a verb changes the state\['number'\], an int32 and no array of JAX, where "
        r"only the running program knows .* such as jnp\.int32\(0\)"
    )
    with pytest.raises(fl.errors.GraphError, match=says):
        fl.run(with_resource(Turns(), mine=TurnsOver("turn_number")), runtime="xla")


@dataclass(frozen=True)
class Adds(fl.extend.Stateless):
    """Adds what the resource holds to the rewards."""

    held: fl.extend.Ref[Held] = "held"

    def step(self, state, batch, ctx):
        yield batch.with_(reward=ctx.run(raised_by, batch["reward"], ctx[self.held].state))


@pytest.mark.system
def test_a_resource_may_hold_a_bare_array_and_sees_the_seed_of_its_own_run():
    graph = with_resource(Seed(), mine=Adds())
    with fl.run(graph, runtime=fl.XlaRuntime(seeds=2, chunk=2), seed=5) as run:
        next(run)
    for seed, own in zip((5, 6), run.curves().rows, strict=True):
        close(timeless(own), learned(graph, 2, "local", seed)[0], rtol=1e-3)


# -- many at once


@pytest.mark.system
def test_many_seeds_are_each_what_it_is_alone_and_a_row_is_their_mean():
    with fl.run(TINY, runtime=fl.XlaRuntime(seeds=4, chunk=4), seed=5) as run:
        rows = [next(run) for _ in range(4)]
    curves = run.curves()
    assert curves.labels == ("seed 5", "seed 6", "seed 7", "seed 8")
    for seed, own in zip((5, 6, 7, 8), curves.rows, strict=True):
        close(timeless(own), learned(TINY, 4, "local", seed)[0], rtol=1e-3)
    for k in ("env_steps", "loss"):
        assert rows[-1][k] == pytest.approx(np.mean([own[-1][k] for own in curves.rows]))
    assert run.audit().closed and run.counts()["updates"] == 16


@pytest.mark.system
def test_a_sweep_runs_every_value_with_every_seed():
    sweep = fl.Sweep(lr=[1e-3, 1e-2], ent_coef=[0.01, 0.3])
    with fl.run(TINY, runtime=fl.XlaRuntime(seeds=2, sweep=sweep, chunk=4)) as run:
        [next(run) for _ in range(4)]
    curves = run.curves()
    assert len(curves.rows) == 8 and curves.labels[2] == "lr=0.001, ent_coef=0.3, seed 0"
    for i in (1, 6):
        lr, entropy, seed = list(itertools.product((1e-3, 1e-2), (0.01, 0.3), (0, 1)))[i]
        graph = TINY.set("learner.optimizer.lr", lr).set("learner.loss.ent_coef", entropy)
        close(timeless(curves.rows[i]), learned(graph, 4, "local", seed)[0], rtol=1e-3, atol=1e-3)
    assert len({rows[-1]["loss"] for rows in curves.rows}) == 8


@pytest.mark.system
def test_a_sweep_reaches_operators_and_refuses_what_it_can_not_have():
    with fl.run(TINY, runtime=fl.XlaRuntime(sweep=fl.Sweep(gamma=[0.5, 0.99]), chunk=2)) as run:
        next(run)
    for gamma, rows in zip((0.5, 0.99), run.curves().rows, strict=True):
        close(timeless(rows), learned(TINY.set("adv.gamma", gamma), 2, "local")[0], rtol=1e-3)
    with pytest.raises(
        fl.errors.SettingError,
        match=r"unknown setting 'lrr'; did.*Only fractional numbers can be swept",
    ):
        fl.run(TINY, runtime=fl.XlaRuntime(sweep=fl.Sweep(lrr=[1, 2])))
    for name in ("epochs", "runners.rollout_length"):
        with pytest.raises(
            fl.errors.SettingError,
            match=rf"{name} shapes the program, so .* make one run for each value. Only frac",
        ):
            fl.run(TINY, runtime=fl.XlaRuntime(sweep=fl.Sweep(**{name: [1, 2]})))
    with pytest.raises(
        fl.errors.SettingError,
        match=r"sweep: sample\.min_fraction shapes the program and is no number in it",
    ):
        fl.run(TINY, runtime=fl.XlaRuntime(sweep=fl.Sweep(min_fraction=[0.5, 1.0])))
    with pytest.raises(fl.errors.SettingError, match="gamma must be from 0 to 1, got 1.5"):
        fl.run(TINY, runtime=fl.XlaRuntime(sweep=fl.Sweep(gamma=[0.9, 1.5])))
    with pytest.raises(
        fl.errors.SettingError,
        match=r"learner\.optimizer\.lr is meant by lr and by learner\.optimizer\.lr",
    ):
        fl.run(
            TINY,
            runtime=fl.XlaRuntime(sweep=fl.Sweep(lr=[1e-3], **{"learner.optimizer.lr": [1e-3]})),
        )
    decided = TINY.set("learner.loss", Decides(ent_coef=0.01))
    with pytest.raises(fl.errors.CheckError, match=r"ppo\.train: TracerBoolConversionError"):
        fl.run(decided, runtime=fl.XlaRuntime(sweep=fl.Sweep(ent_coef=[0.1, 0.2])))
    with pytest.raises(fl.errors.SettingError, match="lr has no values"):
        fl.Sweep(lr=[])
    for wrong in (0.1, "1e-3", "12", [None]):
        with pytest.raises(
            fl.errors.SettingError, match=r"sweep: lr takes a list of numbers, .*write lr=\[1e-3"
        ):
            fl.Sweep(lr=wrong)
    with pytest.raises(fl.errors.GraphError, match="this is one run"):
        fl.run(TINY).curves()


@dataclass(frozen=True)
class Decides(fl.losses.PPOLoss):
    """Python decides by a number."""

    def __call__(self, policy, params, batch):
        return super().__call__(policy, params, batch) if self.ent_coef > 0 else None


@dataclass(frozen=True)
class Scales(fl.extend.Stateless):
    """Scales rewards by a number, which it gives as an argument, or computes with in Python."""

    gamma: float = 0.99
    plain: bool = False

    def step(self, state, batch, ctx):
        scale = 2 * self.gamma if self.plain else self.gamma
        yield batch.with_(reward=ctx.run(scaled_by, batch["reward"], scale))


def scaled_by(reward, scale):
    return reward * scale


def test_a_sweep_reaches_arguments_and_refuses_one_setting_that_python_read():
    graph, sweep = TINY.insert(after="sample", mine=Scales()), fl.Sweep(gamma=[0.5, 0.9])
    with fl.run(graph, runtime=fl.XlaRuntime(sweep=sweep, chunk=2)) as run:
        next(run)
    for gamma, rows in zip((0.5, 0.9), run.curves().rows, strict=True):
        alone = graph.set("adv.gamma", gamma).set("mine.gamma", gamma)
        close(timeless(rows), learned(alone, 2, "local")[0], rtol=1e-3)
    with pytest.raises(
        fl.errors.SettingError,
        match=r"sweep: mine\.gamma shapes the program .*by their whole paths",
    ):
        fl.run(graph.set("mine.plain", True), runtime=fl.XlaRuntime(sweep=sweep))


def test_a_sweep_reaches_operators_at_the_sampler():
    def with_gamma(gamma):
        return TINY.set("sample.local", fl.chain(mine=Scales(gamma)))

    sweep = fl.Sweep(**{"sample.local.mine.gamma": [0.5, 2.0]})
    with fl.run(with_gamma(0.9), runtime=fl.XlaRuntime(sweep=sweep, chunk=2)) as run:
        next(run)
    for gamma, rows in zip((0.5, 2.0), run.curves().rows, strict=True):
        close(timeless(rows), learned(with_gamma(gamma), 2, "local")[0], rtol=1e-3)


def test_numbers_take_the_place_of_what_is_swept_wherever_it_stands():
    adam, values = fl.Adam(Argument("lr", 1e-3, "learner.lr")), Values({"lr": 5.0})
    assert substituted(adam, values).lr == 5.0 and adam.lr == Argument("lr", 7.0) != 1e-3
    assert values.read == {"learner.lr"}
    same = fl.Adam(1e-3)
    assert substituted(same, values) is same
    assert substituted((Argument("lr", 1.0), 2.0), values) == (5.0, 2.0)


def test_values_that_differ_only_in_late_digits_have_labels_of_their_own():
    members = Members.of(3, None, fl.Sweep(lr=[1e-3, 0.00100000001, 1e38]))
    labels = [members.label(i) for i in range(members.count)]
    assert labels == ["lr=0.001, seed 3", "lr=0.00100000001, seed 3", "lr=1e+38, seed 3"]
    assert Members.of(3, 1, None).label(0) == "seed 3"


class EarlyInterrupt(RowMaker):
    """Makes rows, and a Ctrl-C comes while it makes the third."""

    def row(self, *args, **kwargs):
        if self.totals["row"] == 2:
            signal.raise_signal(signal.SIGINT)
        return super().row(*args, **kwargs)


def test_ctrl_c_while_the_rows_of_a_chunk_are_made_loses_none_of_them(monkeypatch):
    monkeypatch.setattr("flowrl.runtime.base.RowMaker", EarlyInterrupt)
    with fl.run(TINY, runtime=fl.XlaRuntime(chunk=4)) as run, pytest.raises(KeyboardInterrupt):
        list(run)
    assert len(run.rows) == 4


@pytest.mark.system
def test_what_runs_only_after_a_long_warm_up_and_can_not_be_traced_is_named():
    late = fl.DQNSettings(
        envs_per_runner=1,
        rollout_length=1,
        updates_per_step=1,
        learning_starts=200,
        batch_size=8,
        hidden=(4,),
        report_every=10,
    )
    graph = fl.dqn("gymnax:CartPole-v1", late).insert(after="train", own=fl.Map(reads_the_loss))
    with pytest.raises(fl.errors.CheckError, match=r"dqn\.own: .*Error: .*; in a program it sees"):
        list(fl.run(graph, runtime="xla", steps=400))


def reads_the_loss(trained):
    return replace(trained, steps=trained.steps + 0 * int(float(trained.metrics.values.sum()) > 0))


def test_seeds_beyond_the_last_one_are_refused():
    with pytest.raises(
        fl.errors.SettingError,
        match=r"seeds=2 from seed 4294967295 on .*; take a first seed of at most 4294967294",
    ):
        fl.run(TINY, runtime=fl.XlaRuntime(seeds=2), seed=2**32 - 1)
    for wrong in ({"chunk": 2.5}, {"seeds": 2.5}, {"chunk": 0}):
        with pytest.raises(fl.errors.SettingError, match="must be a whole number, at least 1 or"):
            fl.XlaRuntime(**wrong)


def test_a_nan_names_its_seed():
    bad = TINY.set("runners.env_settings", {"nan_at": 11})
    with (
        pytest.raises(fl.errors.EnvError, match=r"seed [0-3]: environment [01], .* before row 3"),
        fl.run(bad, runtime=fl.XlaRuntime(seeds=4, chunk=8)) as run,
    ):
        list(run)
    assert (
        len(run.rows) == 2
        and run.policy.weights
        and {len(rows) for rows in run.curves().rows} == {2}
    )


def test_a_rate_that_breaks_leaves_the_others_rows_and_a_policy(tmp_path):
    many = fl.XlaRuntime(sweep=fl.Sweep(lr=[1e-3, 1e30]), chunk=4)
    with (
        pytest.raises(fl.errors.NotFiniteError, match=r"lr=1e\+30, seed 0: update"),
        fl.run(TINY, runtime=many, out=tmp_path / "run") as run,
    ):
        list(run)
    assert {"audit.txt", "policy"} <= {p.name for p in (tmp_path / "run").iterdir()}


@pytest.mark.system
def test_what_many_runs_drop_is_reported_of_each_and_their_audit_closes():
    graph = fl.impala(
        ENV, fl.IMPALASettings(**{**ASYNC, **LEAST, "batch_size": 4, "report_every": 1})
    ).set("runners.env", Corridor)
    graph = graph.replace(queue=fl.Queue(2, full="drop_oldest"), batch=fl.FlatMap(twice))
    local, _ = learned(graph, 8, "local")
    with fl.run(graph, runtime=fl.XlaRuntime(seeds=3, chunk=3)) as run:
        rows = [next(run) for _ in range(8)]
    assert run.audit().closed and local[-1]["dropped_steps"] > 0
    assert [r["dropped_steps"] for r in rows] == [r["dropped_steps"] for r in local]


def twice(batch):
    return [batch, batch]


def test_many_runs_without_a_learner_have_weights_of_their_own():
    with fl.run(WATCH, runtime=fl.XlaRuntime(seeds=2, chunk=2)) as run:
        assert next(run)["row"] == 1


def test_the_policy_of_many_is_that_of_the_best(tmp_path):
    with fl.run(TINY, runtime=fl.XlaRuntime(seeds=4, chunk=4), out=tmp_path / "run") as run:
        [next(run) for _ in range(20)]
    best = int(np.nanargmax([rows[-1]["return_mean"] for rows in run.curves().rows]))
    _, weights = learned(TINY, 20, "local", best)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, atol=1e-4), weights, run.policy.weights
    )
    assert {"curves.txt", "curves.svg", "members.jsonl"} <= {
        p.name for p in (tmp_path / "run").iterdir()
    }
    assert (tmp_path / "run/members.jsonl").read_text().count("\n") == 80
    fl.load(tmp_path / "run", allow=["environments"])


# -- what is refused


def by_numpy(batch):
    return batch.with_(reward=np.clip(np.asarray(batch["reward"]), -1, 1))


def by_value(batch):
    return batch if batch["reward"].sum() > 0 else batch.with_(reward=batch["reward"])


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (
            lambda g: g.set("runners.env", "CartPole-v1"),
            r"ppo\.runners: the xla runtime takes environments written in JAX, such as gymnax",
        ),
        (
            lambda g: g.insert(after="batch", mine=fl.Map(by_numpy)),
            (
                r"ppo\.mine: TracerArrayConversionError.*\(test_xla\.py:\d+\); .*compute with "
                r"jax\.numpy"
            ),
        ),
        (
            lambda g: g.insert(after="batch", mine=fl.Map(by_value)),
            r"ppo\.mine: TracerBoolConversionError.*\(test_xla\.py:\d+\); .*choose by jnp\.where",
        ),
        (
            lambda g: g.set("report.every_seconds", 1.0),
            r"ppo\.report: looks at the clock, which a program can't; count items or steps",
        ),
    ],
    ids=["gymnasium", "numpy", "a value", "the clock"],
)
def test_what_can_not_be_traced_is_refused_with_its_line_and_the_way_out(edit, says):
    graph = edit(PPO)
    with pytest.raises(fl.errors.CheckError, match=says):
        fl.run(graph, runtime="xla")


def test_the_plan_reports_what_would_be_unrolled_and_what_not(capsys):
    from flowrl.cli.main import main

    assert main(["plan", "impala", "--env", ENV, "--runtime", "xla"]) == 0
    assert (
        "xla: one program of all 6 operators; it unrolls 2 of 20 rounds, after 20 that "
        "come before" in capsys.readouterr().out
    )
    assert (
        main(
            [
                "plan",
                "ppo",
                "--env",
                ENV,
                "--runtime",
                "xla",
            ]
        )
        == 0
    )
    assert "xla: one program of all 7 operators; it unrolls 1 round" in capsys.readouterr().out
    assert main(["plan", "ppo", "--runtime", "xla", "--env", "CartPole-v1"]) == 2
    assert "  runners  the xla runtime takes environments written in JAX" in capsys.readouterr().out


def thrice(batch):
    return [batch, batch, batch]


THRICE = (
    PPO.set("learner.loss", fl.losses.VTraceLoss())
    .remove("adv", "norm")
    .insert(after="batch", thrice=fl.FlatMap(thrice))
)


def one(warmup, period, *stretches, updates):
    section = Section(stretches)
    return Periodicity(warmup, period, (section,), section.rounds, updates)


@pytest.mark.parametrize(
    ("graph", "expected"),
    [
        (PPO, one(0, 1, Stretch(1, 1), updates=1)),
        (PPO.set("report.every", 6), one(0, 6, Stretch(1, 6), updates=1)),
        (
            PPO.set("sync.every", 2)
            .set("learner.loss", fl.losses.VTraceLoss())
            .remove("adv", "norm")
            .set("report.every", 6),
            one(0, 6, Stretch(2, 3), updates=2),
        ),
        (GRAPHS["impala"].set("report.every", 3), one(6, 6, Stretch(2, 3), updates=1)),
        (
            THRICE.set("report.every", 13),
            one(0, 13, *(Stretch(1, n) for n in (4, 1, 3, 1, 4)), updates=15),
        ),
    ],
    ids=["a row", "rows of six", "every other", "queue", "rows within rounds"],
)
def test_a_period_is_made_of_what_repeats_itself_but_for_the_clock(graph, expected):
    assert periodicity(graph, graph.compile().found) == expected


def test_a_period_that_is_too_long_is_refused():
    graph = (
        PPO.set("sync.every", 101).set("learner.loss", fl.losses.VTraceLoss()).remove("adv", "norm")
    )
    with pytest.raises(
        fl.errors.CheckError,
        match="it repeats itself only after 101 rounds, of which 101 differ, and its programs "
        "unroll 64 at most",
    ):
        fl.run(graph, runtime="xla")


SIXTEEN = fl.sac("gymnax:Pendulum-v1", envs_per_runner=16, learning_starts=16, report_every=32)


@pytest.mark.system
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"sync.every": 400, "report.every": 400, "runners.envs_per_runner": 1},
            (
                "it repeats itself only after 400 rounds, of which 400 differ, and its programs "
                "unroll 64 at most"
            ),
        ),
        (
            {"sync.every": 400},
            (
                r"50 rounds have 800 updates that differ, and its programs unroll 256 at most, "
                r"each compiled for a second or two; sample fewer steps at once"
            ),
        ),
        (
            {"runners.envs_per_runner": 257, "sync.every": 257, "report.every": 257},
            (
                r"a round has 257 updates that differ, and its programs unroll 256 at most, each "
                r"compiled for a second or two; sample fewer steps at once, train less often on "
                r"them, or let its rates divide one another"
            ),
        ),
    ],
)
def test_updates_that_would_take_minutes_to_compile_are_refused(changes, says):
    graph = SIXTEEN
    for name, value in changes.items():
        graph = graph.set(name, value)
    with pytest.raises(fl.errors.CheckError, match=says):
        fl.run(graph, runtime="xla")


def test_updates_that_are_alike_are_in_a_program_once():
    assert program_report(SIXTEEN.compile()) == (
        True,
        (
            "xla: one program of all 7 operators; it unrolls 1 of 2 rounds, after 2 that come "
            "before\n"
        ),
    )


@pytest.mark.system
def test_ten_thousand_rows_take_no_more_of_the_device_than_a_hundred():
    with fl.run(TINY, runtime=fl.XlaRuntime(chunk=100)) as run:
        held = []
        for row in run:
            if row["row"] % 100 == 0:
                arrays = [x for client in clients() for x in client.live_arrays()]
                held.append(sum(x.nbytes for x in arrays if not x.is_deleted()))
            if row["row"] == 10_000:
                break
    assert len(held) == 100 and max(held[1:]) <= held[1] + 10_000
    assert run.rows[-1]["updates"] == 10_000 and run.audit().closed
