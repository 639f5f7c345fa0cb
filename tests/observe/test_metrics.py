"""Metrics of the user's own: from any operator, in every thread and at the sampler.

And those that environments report.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import flowrl as fl
from conftest import timeless
from environments import Clockwork, Corridor
from flowrl.cli.main import main
from flowrl.core.events import Warned
from flowrl.core.metrics import MOST, Metered, Summed, misnamed, summed
from flowrl.rollout.runner import Runner

TINY = fl.Policy(fl.networks.MLP, hidden=(4,))
PPO = fl.ppo(
    "CartPole-v1",
    fl.PPOSettings(
        envs_per_runner=2,
        rollout_length=16,
        batch_size=64,
        epochs=1,
        minibatch_size=None,
        policy=TINY,
    ),
)
LOOK = fl.Graph(
    "look", runners=fl.Runners(Clockwork, TINY, envs_per_runner=1, rollout_length=4)
).then(sample=fl.ParallelSample(), report=fl.Report())


@dataclass(frozen=True)
class Measure(fl.extend.Stateless):
    """Reports of each item what a function of the batch, compiled, gives."""

    name: str = "reward_sum"

    def step(self, state, batch, ctx):
        ctx.metric(self.name, ctx.run(total, batch["reward"]))
        yield batch


def total(x):
    return jnp.sum(x)


@dataclass(frozen=True)
class Say(fl.extend.Operator):
    """Reports these values, one of each item; nothing where it is None."""

    values: tuple[object, ...]
    name: str = "said"

    def init(self):
        return {"at": 0}

    def step(self, held, item, ctx):
        value = self.values[held["at"] % len(self.values)]
        held["at"] = (held["at"] + 1) % len(self.values)
        if value is not None:
            ctx.metric(self.name, value)
        yield item


def said(rows, name="said"):
    return [tuple(row[name + end] for end in ("", "/min", "/max")) for row in rows]


def test_the_next_row_has_the_mean_the_least_and_the_most():
    graph = LOOK.insert(after="sample", say=Say((1, 2.5, np.float32(4), jnp.float32(0.5)))).set(
        "report.every", 2
    )
    with fl.run(graph) as run:
        rows = [next(run) for _ in range(4)]
    assert said(rows) == [(1.75, 1, 2.5), (2.25, 0.5, 4)] * 2


def test_nan_is_kept_and_stands_where_no_value_came():
    graph = LOOK.insert(after="sample", say=Say((None, 3, math.nan)))
    with fl.run(graph, steps=20) as run:
        rows = list(run)
    assert [row["said"] for row in rows[:3]] == pytest.approx([math.nan, 3, math.nan], nan_ok=True)
    assert len({tuple(row) for row in rows}) == 1, "the columns are the same in all rows"


def test_each_of_several_rows_of_one_pass_has_its_own():
    graph = LOOK.insert(after="sample", each=fl.FlatMap(twice), say=Say((1, 2, 3)))
    with fl.run(graph) as run:
        rows = [next(run) for _ in range(6)]
    assert [row["said"] for row in rows] == [1, 2, 3] * 2


def twice(batch):
    return [batch, batch]


def test_arrays_stay_on_the_device_until_the_row_and_never_too_many():
    metered = Metered()
    value = jnp.float32(2)
    metered.add("x", value)
    metered.add("x", 1)
    assert metered.drain()["x"] == (Summed(1, 1, 1, 1), (value,)) and metered.drain() == {
        "x": (Summed(), ())
    }
    for i in range(MOST + 1):
        metered.add("x", jnp.float32(i))
    drained = metered.drain()
    assert drained["x"][1] == () and summed(drained)["x"] == Summed.of(np.arange(MOST + 1))


def test_sums_of_sums():
    a, b = Summed.of([1, 5]), Summed.of([-2.0])
    assert a.plus(b) == Summed(3, 4.0, -2.0, 5.0) and a.plus(Summed()) == a
    assert math.isnan(a.plus(Summed.of([math.nan])).least) and math.isnan(
        Summed.of([math.nan]).plus(a).most
    )


@pytest.mark.parametrize(
    ("op", "says"),
    [
        (
            Measure("env_steps"),
            (
                r"look\.mine: 'env_steps' is a column that every Row has already; give the metric "
                r"another name"
            ),
        ),
        (Measure("x/min"), r"look\.mine: 'x/min' is what flowrl itself may call a column"),
        (
            Measure("a b"),
            r"the name of a metric is made of letters, digits and _ \. / -, got 'a b'",
        ),
        (
            Say((np.zeros(3),)),
            (
                r"look\.mine: metric 'said' is one number or an array of shape \[\], got "
                r"float64\[3\]; take its mean first: ctx\.run"
            ),
        ),
        (Say(("high",)), r"metric 'said' is one number or an array of shape \[\], got 'high'"),
    ],
)
def test_what_is_no_metric_is_refused_when_the_graph_is_compiled(op, says):
    with pytest.raises(fl.errors.CheckError, match=says):
        LOOK.insert(after="sample", mine=op).compile()


def test_a_metric_of_the_loss_is_not_reported_twice():
    with pytest.raises(
        fl.errors.CheckError,
        match=r"ppo\.mine: reports the metric 'entropy', which comes from the loss already; give "
        r"it another name",
    ):
        PPO.insert(after="sample", mine=Measure("entropy")).compile()


def test_within_a_compiled_function_there_is_nothing_to_report():
    with pytest.raises(
        fl.errors.ContractError,
        match="metric 'x' is reported within a compiled function; let that return it",
    ):
        jax.jit(lambda x: Metered().add("x", x))(1.0)


@pytest.mark.parametrize(
    "runtime",
    ["local", pytest.param("ray", marks=(pytest.mark.ray, pytest.mark.system))],
    indirect=True,
)
def test_at_the_sampler_it_is_reported_as_after_it(runtime):
    names = ("reward_sum", "reward_sum/min", "reward_sum/max")
    rows = []
    for graph in (
        PPO.insert(after="sample", measure=Measure()),
        PPO.set("sample.local", fl.chain(measure=Measure())),
    ):
        assert set(graph.compile().found.metrics) == {"reward_sum"}
        with fl.run(graph, runtime=runtime) as run:
            rows.append([next(run) for _ in range(2)])
    assert timeless(rows[0]) == timeless(rows[1]) and all(name in rows[0][0] for name in names)


@pytest.mark.ray
@pytest.mark.system
@pytest.mark.usefixtures("ray_up")
def test_on_ray_every_stage_and_every_environment_reports():
    settings = fl.IMPALASettings(
        num_runners=2,
        envs_per_runner=2,
        rollout_length=8,
        batch_size=32,
        report_every=2,
        policy=TINY,
    )
    graph = (
        fl.impala(Telling, settings)
        .set("runners.metrics", ("x",))
        .insert(after="sample", measure=Measure())
        .insert(after="train", say=Say((7,)))
    )
    with fl.run(graph, runtime="ray") as run:
        rows = [next(run) for _ in range(3)]
    assert said(rows) == [(7, 7, 7)] * 3
    for name in ("reward_sum", "env/x"):  # sampling goes its own pace: there may be a row without
        reported = [x for x in said(rows, name) if not math.isnan(x[0])]
        assert reported and all(0 < least <= mean <= most for mean, least, most in reported)


def test_a_program_refuses_it_by_node_and_line_and_with_the_way_out():
    graph = PPO.set("runners.env", Corridor).insert(after="sample", measure=Measure())
    says = (
        r"ppo\.measure: reports the metric 'reward_sum' by ctx\.metric, which a program can't; let "
        r"the loss return it .* \(test_metrics\.py:\d+\)"
    )
    with pytest.raises(fl.errors.CheckError, match=says):
        fl.run(graph, runtime="xla")
    with fl.run(graph, steps=1) as run:
        assert "reward_sum" in next(run), "environments in JAX run without a program, too"


# -- what environments report


class Telling(Clockwork):
    """Reports its step's number, and at an episode's end how long that was."""

    def __init__(self, lengths=(3, 2, 5, 1)):
        super().__init__(lengths)
        self.life = 0

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed, options=options)[0], {"x": -1000.0, "only_reset": 1}

    def step(self, action):
        self.life += 1
        obs, reward, terminated, truncated, _ = super().step(action)
        ended = {"length": self.time} if terminated or truncated else {}
        return (
            obs,
            reward,
            terminated,
            truncated,
            {"x": float(self.life), "name": "none", "pair": np.zeros(2), **ended},
        )


def vector(mode):
    return SyncVectorEnv(
        [lambda k=k: Telling(k) for k in ((3, 2, 5, 1), (1, 1, 2))],
        autoreset_mode=AutoresetMode(mode),
    )


def next_step():
    return vector("NextStep")


def same_step():
    return vector("SameStep")


def disabled():
    return vector("Disabled")


@pytest.mark.parametrize(
    "env", [next_step, same_step, disabled, Telling], ids=lambda env: env.__name__
)
def test_every_step_is_counted_once_and_no_reset(env):
    runner = Runner(
        fl.Runners(env, TINY, envs_per_runner=2, rollout_length=10, metrics=("x", "length")),
        "runners",
        0,
        0,
    )
    runner.weights = runner.network.init(jax.random.key(0))
    steps, reported = 0, []
    for _ in range(3):
        sample = runner.sample(None)
        steps += sample.episodes.env_steps + sample.episodes.skipped
        reported.append(sample.episodes.metrics)
        lengths = sample.episodes.lengths
        assert reported[-1]["env/length"] == Summed(
            len(lengths), lengths.sum(), lengths.min(), lengths.max()
        )
    assert sum(t["env/x"].number for t in reported) == steps
    by_env = sum(t["env/x"].total for t in reported)
    ones = [e.life for e in (getattr(w, "unwrapped", w) for w in runner.vector.envs)]
    assert sum(ones) == steps and by_env == sum(n * (n + 1) / 2 for n in ones), (
        "each environment counted 1, 2, 3, ..."
    )
    runner.close()


def test_rows_have_columns_of_them_and_a_run_can_stop_at_one(tmp_path, monkeypatch, capsys):
    graph = LOOK.set("runners.env", Telling).set("runners.metrics", ("x", "length"))
    assert set(graph.compile().found.metrics) == {"env/x", "env/length"}
    with fl.run(graph) as run:
        rows = [next(run) for _ in range(3)]
    assert said(rows, "env/x")[:2] == [(2, 1, 3), (5, 4, 6)], (
        "between two episodes there is a row that is no step"
    )
    assert said(rows, "env/length")[:2] == [(3, 3, 3), (2, 2, 2)]
    (tmp_path / "telling.py").write_text(
        "import flowrl as fl\nfrom test_metrics import Telling\n\ndef mine():\n"
        "    settings = fl.PPOSettings(envs_per_runner=1, rollout_length=16, batch_size=16, "
        "minibatch_size=None)\n"
        '    return fl.ppo(Telling, settings).set("runners.metrics", ("x",))\n'
    )
    monkeypatch.chdir(tmp_path)
    assert main(["run", "telling.py:mine", "--until", "env/x/max>=20"]) == 0
    assert "solved: env/x/max>=20" in capsys.readouterr().err


class Notes(list):
    kinds = (Warned,)

    def __call__(self, event):
        # The graph has no learner, which is a warning of its own.
        if "random weights" not in event.text:
            self.append(event.text)


def test_a_key_that_never_came_is_nan_and_reported_once():
    notes = Notes()
    graph = LOOK.set("runners.env", Telling).set("runners.metrics", ("lenght", "x"))
    with fl.run(graph, observers=[notes]) as run:
        rows = [next(run) for _ in range(4)]
    assert all(math.isnan(row["env/lenght"]) and row["env/x"] > 0 for row in rows)
    assert notes == [
        (
            "runners: metrics: no step's info ever had the key 'lenght'; did you mean 'length'? "
            "Known: x, name, pair, length; env/lenght is NaN"
        )
    ]


def test_without_an_episodes_end_it_is_reported_at_the_end():
    notes = Notes()
    graph = (
        LOOK.set("runners.env", Telling)
        .set("runners.env_settings", {"lengths": (1000,)})
        .set("runners.metrics", ("y",))
    )
    with fl.run(graph, observers=[notes]) as run:
        next(run)
        assert notes == []
    assert len(notes) == 1


@pytest.mark.parametrize(("key", "is_"), [("pair", r"float64\[1, 2\]"), ("name", r"object\[1\]")])
def test_what_is_no_number_is_refused(key, is_):
    run = fl.run(LOOK.set("runners.env", Telling).set("runners.metrics", (key,)))
    says = (
        rf"info\['{key}'\] of Telling is {is_}; metrics takes keys with one number per "
        rf"environment, \[1\]"
    )
    with run, pytest.raises(fl.errors.EnvError, match=says):
        next(run)


def test_what_runners_can_not_report_is_refused():
    with pytest.raises(
        fl.errors.SettingError,
        match=r"metrics: an environment in JAX returns no info with its steps; .* by ctx\.metric",
    ):
        fl.Runners(Corridor, TINY, metrics=("x",)).open()
    with pytest.raises(
        fl.errors.SettingError, match="metrics: the name of a metric is made of letters"
    ):
        fl.Runners(Clockwork, TINY, metrics=("a>b",))
    assert misnamed("loss", "env/") == "" and misnamed("loss")
