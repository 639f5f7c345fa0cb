"""The stock graphs of evolution strategies: plans, runtimes, faults, and the whole path."""

import os
from dataclasses import dataclass
from pathlib import Path

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flowrl as fl
from conftest import close, remembered, remembered_run, rows_and_weights, same, timeless
from environments import Corridor, Faulty
from flowrl.rl.evolution import noise
from jax_teams import Corridors
from teams import TwoCartPoles

MLP = fl.Policy(fl.networks.MLP, hidden=(4,))
SMALL = {"num_runners": 2, "envs_per_runner": 4, "pairs": 5, "max_steps": 40}


class Track(fl.envs.JaxEnv):
    """Walk along a track of bends; without chance, so that every runtime plays the same."""

    observation_space = gym.spaces.Box(-1e3, 1e3, (2,))
    action_space = gym.spaces.Box(-1, 1, (1,))

    def reset(self, key):
        return {"x": jnp.float32(0), "age": jnp.int32(0)}, jnp.zeros(2)

    def step(self, state, action, key):
        age = state["age"] + 1
        x = state["x"] + action[0]
        obs = jnp.stack([x, jnp.sin(age.astype(jnp.float32))])
        reward = 1.0 - jnp.abs(x - jnp.sin(age.astype(jnp.float32)))
        return {"x": x, "age": age}, obs, reward, jnp.abs(x) > 4, age >= 30


ES = fl.es(Track, **SMALL, policy=MLP)
ARS = fl.ars(Track, **SMALL, top=2)
GRAPHS = {"es": ES, "ars": ARS}
every = pytest.mark.parametrize("name", GRAPHS)
every_runtime = pytest.mark.parametrize(
    "runtime", ["local", pytest.param("ray", marks=pytest.mark.ray), "xla"], indirect=True
)


@every
@every_runtime
def test_the_plan_equals_what_is_counted_and_the_audit_closes(name, runtime):
    run = remembered_run(GRAPHS[name], 3, runtime)
    plan, counted, rows = run.plan, run.counts(), run.rows[:3]
    for counter in ("requests", "perturbed_episodes", "most_sampled_steps", "publishes", "updates"):
        assert counted[counter] == len(run.rows) * plan.per_row(counter) > 0, counter
    assert (
        counted["perturbed_episodes"] == 10 * len(run.rows) == rows[0]["episodes"] * len(run.rows)
    )
    assert [row["episodes"] for row in rows] == [10, 20, 30]
    assert 0 < rows[-1]["env_steps"] <= 3 * plan.per_row("most_sampled_steps")
    assert rows[-1]["trained_steps"] == 30 and rows[-1]["lag_max"] == plan.lag == 0
    assert run.audit().closed


@every
@pytest.mark.parametrize(
    "runtime", [pytest.param("ray", marks=pytest.mark.ray), "xla"], indirect=True
)
def test_every_runtime_gives_what_local_gives(name, runtime):
    rows, weights = remembered(GRAPHS[name], 3, runtime)
    local, expected = remembered(GRAPHS[name], 3)
    close((timeless(rows), weights), (timeless(local), expected), rtol=1e-3, atol=1e-4)


@every
def test_the_same_seed_gives_the_same_run_and_another_seed_another(name):
    graph = GRAPHS[name]
    a, wa = remembered(graph, 3)
    b, wb = rows_and_weights(graph, 3)
    _, wc = rows_and_weights(graph, 3, seed=6)
    assert timeless(a) == timeless(b) and same(wa, wb) and not same(wa, wc)


@dataclass(frozen=True)
class Kept(fl.extend.Operator):
    """Keeps all items, in a list that several copies share."""

    items: tuple = ()

    def init(self):
        return {}

    def step(self, state, item, ctx):
        SEEN.append(item)
        yield item


SEEN = []


def returns_of(graph, update=1):
    """The batch of an update, and the weights before and after it."""
    graph = graph.insert(after="rank", kept=Kept())
    with fl.run(graph, seed=3) as run:
        SEEN.clear()  # what was traced
        for _ in range(update - 1):
            next(run)
        before = jax.tree.map(np.asarray, run.policy.weights)
        next(run)
        after = jax.tree.map(np.asarray, run.policy.weights)
    return SEEN[-1], before, after


def test_an_update_of_es_is_adam_along_the_estimate_of_a_loop():
    batch, before, after = returns_of(ES.set("learner.optimizer", fl.Adam(0.03, weight_decay=0.1)))
    # By hand: ranks of the returns, the noise of each seed, one step of AdamW.
    ranks = np.argsort(np.argsort(batch["return"].ravel())) / 9 - 0.5
    assert len(set(batch["return"].ravel().tolist())) == 10, "no ties, which argsort would break"
    gradient = {name: np.zeros(x.shape) for name, x in before.params.items()}
    for i, utility in enumerate(ranks):
        row, pair = divmod(i, 5)
        made = noise(batch["noise_seed"][row, pair], before.params)
        for name in gradient:
            sign = 1 if row == 0 else -1
            gradient[name] -= utility * sign * np.asarray(made[name]) / (10 * 0.1)
    tx = optax.adamw(0.03, eps=1e-5, weight_decay=0.1)
    step, _ = tx.update(gradient, tx.init(before.params), before.params)
    close(optax.apply_updates(before.params, step), after.params, rtol=1e-3, atol=1e-5)


def test_an_update_of_ars_is_the_papers_and_its_moments_are_those_of_what_was_seen():
    batch, before, after = returns_of(ARS, update=2)
    returns = np.asarray(batch["return"], np.float64)
    best = np.argsort(-returns.max(axis=0))[:2]
    deviation = returns[:, best].std()
    for name, x in before.params.items():
        step = sum(
            (returns[0, k] - returns[1, k])
            * np.asarray(noise(batch["noise_seed"][0, k], before.params)[name])
            for k in best
        )
        np.testing.assert_allclose(
            after.params[name], x + 0.05 / (2 * deviation) * step, rtol=1e-3, atol=1e-5
        )
    moments = {name.rpartition("/")[2]: x for name, x in after.rest.items()}
    steps = sum(int(item["length"].sum()) for item in SEEN)
    assert float(moments["count"]) == pytest.approx(steps, rel=1e-4)
    # What was seen last is a part of the moments, to which all of it counts by its steps.
    total = sum((item["visits"][..., None] * item["obs"]).sum(axis=(0, 1)) for item in SEEN)
    np.testing.assert_allclose(moments["mean"], total / steps, atol=1e-3)


def test_pairs_differ_within_an_update_and_from_one_to_the_next():
    returns_of(ES, update=3)
    seeds = [tuple(np.asarray(item["noise_seed"])[0].tolist()) for item in SEEN]
    assert len({seed for of_update in seeds for seed in of_update}) == 15
    assert all((item["noise_seed"][0] == item["noise_seed"][1]).all() for item in SEEN)


def test_the_number_of_runners_changes_nothing_where_chance_has_no_part():
    one, _ = rows_and_weights(ES.set("runners.num_runners", 1), 3)
    two, _ = remembered(ES, 3)
    close(timeless(one), timeless(two))


def test_what_is_trained_too_late_is_refused():
    for graph in (ES.remove("sync"), ES.set("sync.every", 2)):
        with pytest.raises(fl.errors.CheckError, match=r"never get|never|on-policy|no node"):
            graph.compile()


def test_a_loss_without_utilities_says_which_operators_add_them():
    with pytest.raises(
        fl.errors.CheckError,
        match=r"es\.train: EvolutionLoss needs the field utility.*put CentredRanks",
    ):
        ES.remove("rank").compile()


def test_several_agents_and_metrics_are_refused():
    for env in (TwoCartPoles, Corridors):
        with pytest.raises(fl.errors.CheckError, match=r"es\.evaluate: .*there are several agents"):
            fl.es(env, policy=MLP).compile()
    for name in ("clip_rewards", "normalize_rewards"):
        with pytest.raises(fl.errors.CheckError, match=rf"{name}: .* environment's own rewards"):
            fl.es("CartPole-v1").set(f"runners.{name}", 0.5).compile()
    with pytest.raises(fl.errors.CheckError, match=r"metrics: infos are not gathered"):
        fl.es("CartPole-v1").set("runners.metrics", ("x",)).compile()


def test_nan_ends_the_run_with_the_last_good_weights():
    for env, settings, says in (
        (Faulty, {"at": 2, "how": "nan reward"}, r"es\.evaluate: runners, runner 0: environment"),
        (Corridor, {"nan_at": 2}, r"gave an observation or a reward that is not finite"),
    ):
        graph = fl.es(env, **SMALL, policy=MLP).set("runners.env_settings", settings)
        with pytest.raises(fl.errors.EnvError, match=says), fl.run(graph) as run:
            list(run)
        assert run.rows == []
        assert all(np.isfinite(x).all() for x in run.policy.weights.params.values())


def test_cut_episodes_are_counted_in_every_row():
    for env in (Track, "Pendulum-v1"):
        rows, _ = rows_and_weights(fl.es(env, **{**SMALL, "max_steps": 2}, policy=MLP), 2)
        assert [row["cut_episodes"] for row in rows] == [10, 10]
        assert rows[-1]["env_steps"] == 40 and rows[-1]["length_mean"] == 2


class ExitsOnce(gym.Env):
    """Ends its process at its 12th step, if none did before; its returns differ by action."""

    observation_space = gym.spaces.Box(-1e3, 1e3, (1,))
    action_space = gym.spaces.Discrete(2)

    def __init__(self, mark):
        self.mark, self.life = Path(mark), 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x = np.float32([seed % 7 if seed is not None else 0])
        self.age = 0
        return self.x, {}

    def step(self, action):
        self.life, self.age = self.life + 1, self.age + 1
        if self.life == 12 and not self.mark.exists():
            self.mark.touch()
            os._exit(7)
        self.x = self.x + 2 * int(action) - 1
        return self.x, float(-abs(self.x[0])), False, self.age == 9, {}


@pytest.mark.ray
@pytest.mark.usefixtures("ray_up")
def test_a_runner_that_is_killed_plays_the_same_pairs_again(tmp_path):
    def run(mark):
        graph = fl.es(ExitsOnce, **SMALL, policy=MLP)
        graph = graph.set("runners.env_settings", {"mark": str(mark)})
        return rows_and_weights(graph, 3, fl.RayRuntime(processes=2))

    rows, weights = run(tmp_path / "killed")
    (tmp_path / "spared").touch()
    expected, same_weights = run(tmp_path / "spared")
    assert rows[-1]["restarts"] >= 1 and "restarts" not in expected[-1]
    extra = ("restarts", "lost_steps")
    without = [{k: x for k, x in row.items() if k not in extra} for row in timeless(rows)]
    assert without == timeless(expected) and same(weights, same_weights)


@pytest.mark.system
def test_what_is_saved_plays_what_was_learned(tmp_path):
    graph = fl.ars("CartPole-v1", pairs=8, top=4, envs_per_runner=8)
    with fl.run(graph, steps=40_000, out=tmp_path / "run") as run:
        list(run)
    assert fl.load(tmp_path / "run").evaluate(10).mean() > 100
    assert run.rows[-1]["env_steps"] >= 40_000
