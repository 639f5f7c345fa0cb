"""Runners over environments written in JAX: what they give against slow loops.

And what they ask for against runners over Gymnasium.
"""

from collections import deque

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import flowrl as fl
from conftest import with_system
from environments import Corridor
from flowrl.core.items import Batch
from flowrl.graph.site import alone
from flowrl.rl.policies import network
from flowrl.rollout.jax_core import first_broken
from flowrl.rollout.jax_runners import JaxRunners, core_of
from flowrl.rollout.reward_scale import RewardScale

MLP = fl.Policy(fl.networks.MLP, hidden=(8,))
LSTM = fl.Policy(fl.networks.RNN, hidden=(8,), cell="lstm")


def opened(policy=MLP, **settings):
    return fl.Runners(
        Corridor,
        policy,
        **{"num_runners": 2, "envs_per_runner": 3, "rollout_length": 16, **settings},
    ).open()


@pytest.mark.parametrize("policy", [MLP, LSTM], ids=["mlp", "lstm"])
def test_rollouts_follow_on_from_one_another_and_report_what_happened(policy):
    runners, last, over = opened(policy), None, None
    recent = deque(maxlen=100)
    total, lengths, steps, episodes = np.zeros(6), np.zeros(6), 0, 0
    for _ in range(12):
        batch = jax.tree.map(np.asarray, runners.collect())
        d = batch.data
        assert batch.shape == (16, 6) and batch.columns["producer"].tolist() == [0, 0, 0, 1, 1, 1]
        done = d["terminated"] | d["truncated"]
        before = np.zeros(6, bool) if over is None else over
        np.testing.assert_array_equal(d["valid"], ~np.concatenate([before[None], done[:-1]]))
        if last is not None:
            np.testing.assert_array_equal(d["obs"][0], last)
        after = np.concatenate([d["obs"][1:], batch.columns["bootstrap_obs"][None]])
        place = np.clip(np.rint(d["obs"][..., 0] * 6) + 2 * d["action"] - 1, 0, 6)
        valid = d["valid"]
        np.testing.assert_allclose(after[valid][:, 0] * 6, place[valid], atol=1e-5)
        np.testing.assert_array_equal(d["terminated"][valid], place[valid] == 6)
        assert not d["reward"][~valid].any() and not done[~valid].any()
        for t in range(16):
            total += d["reward"][t]
            lengths += valid[t]
            for b in np.flatnonzero(done[t]):
                recent.append((total[b], lengths[b]))
                total[b] = lengths[b] = 0
                episodes += 1
        steps += valid.sum()
        reported = runners.episodes()
        assert (reported["env_steps"], reported["episodes"]) == (steps, episodes)
        np.testing.assert_allclose(
            (reported["return_mean"], reported["length_mean"]),
            np.mean(recent, axis=0) if recent else np.nan,
            rtol=1e-5,
        )
        steps = episodes = 0
        last, over = batch.columns["bootstrap_obs"], done[-1]
    assert len(recent) > 20


@pytest.mark.parametrize("policy", [MLP, LSTM], ids=["mlp", "lstm"])
def test_what_is_reported_of_actions_is_what_the_policy_says_from_the_stored_carry(policy):
    runners = opened(policy)
    net, weights = network(policy, runners.spaces), None
    for _ in range(3):
        batch = runners.collect()
        weights = runners.state["published"][0]["weights"]
        memory = net.memory_of(batch.data, batch.columns)
        dist, value, _ = net.unroll(
            weights,
            batch["obs"],
            memory._replace(reset=memory.reset[:-1]) if net.recurrent else memory,
        )
        np.testing.assert_allclose(batch["logp"], dist.log_prob(batch["action"]), atol=1e-5)
        np.testing.assert_allclose(batch["value"], value, atol=1e-5)


class Lives(fl.envs.JaxEnv):
    """Lives from 2 to 7 steps, with a reward of 1 for each; the observation is what is left."""

    observation_space = gym.spaces.Box(0, 8, (1,))
    action_space = gym.spaces.Discrete(2)

    def reset(self, key):
        left = jax.random.randint(key, (), 2, 8)
        return {"left": left}, left[None].astype(jnp.float32)

    def step(self, state, action, key):
        left = state["left"] - 1
        return (
            {"left": left},
            left[None].astype(jnp.float32),
            jnp.float32(1),
            left == 0,
            jnp.bool_(False),
        )


def test_an_evaluation_counts_no_step_after_the_end_of_an_episode():
    played = (
        fl.Runners(Lives, MLP, envs_per_runner=2, rollout_length=4).open().evaluate(200, seed=3)
    )
    assert (float(played["eval/return_min"]), float(played["eval/return_max"])) == (2.0, 7.0)
    assert float(played["eval/return_mean"]) == pytest.approx(4.5, abs=0.4)


@pytest.mark.parametrize("env", [Corridor, Lives])
def test_rewards_are_scaled_and_clipped_as_those_of_gymnasium(env):
    plain, scaled = (
        fl.Runners(env, MLP, num_runners=2, envs_per_runner=3, rollout_length=16, **how).open()
        for how in ({}, {"normalize_rewards": 0.9, "clip_rewards": 2.0})
    )
    slow = [RewardScale(3, 0.9), RewardScale(3, 0.9)]
    for _ in range(4):
        a, b = (jax.tree.map(np.asarray, r.collect()) for r in (plain, scaled))
        np.testing.assert_array_equal(a["obs"], b["obs"])
        parts = [{k: x[:, i : i + 3] for k, x in a.data.items()} for i in (0, 3)]
        for scale, part in zip(slow, parts, strict=True):
            scale.observe(part)
        expected = np.concatenate(
            [scale(part["reward"]) for scale, part in zip(slow, parts, strict=True)], axis=1
        )
        np.testing.assert_allclose(b["reward"], np.clip(expected, -2, 2), rtol=2e-4)
        assert plain.episodes()["return_mean"] == pytest.approx(
            float(scaled.episodes()["return_mean"]), nan_ok=True
        )


class Still(gym.Env):
    """The spaces of the corridor, in Gymnasium."""

    observation_space, action_space = Corridor.observation_space, Corridor.action_space

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), 0.0, False, False, {}


CALLS = st.one_of(
    st.tuples(st.just("next"), st.integers(1, 3)),
    st.tuples(st.just("collect"), st.sampled_from([0.3, 0.6, 1.0])),
)
RECEIVERS = st.none() | st.lists(st.integers(0, 3), min_size=1, max_size=4)
"""The runners that get the weights before a call; None for all."""


@settings(max_examples=12, deadline=None)
@given(count=st.integers(1, 4), calls=st.lists(st.tuples(CALLS, RECEIVERS), max_size=8))
# Here all runners sample at once, and the first of them was not asked first.
@example(2, [((verb, 1), None) for verb in ("next", "collect", "collect", "next")])
def test_they_ask_and_give_in_the_order_of_runners_over_gymnasium(count, calls):
    both = [
        fl.Runners(env, MLP, num_runners=count, envs_per_runner=1, rollout_length=2).open()
        for env in (Corridor, Still)
    ]
    assert isinstance(both[0], JaxRunners) and not isinstance(both[1], JaxRunners)
    net = network(MLP, both[0].spaces)
    weights = net.init(jax.random.key(0))
    for version, ((verb, argument), receivers) in enumerate(calls):
        to = None if version == 0 or receivers is None else np.array(receivers) % count
        for runners in both:
            runners.publish(weights, np.int32(version), to=to)
        a, b = (getattr(runners, verb)(argument) for runners in both)
        for name in ("producer", "version"):
            np.testing.assert_array_equal(a.columns[name], b.columns[name])


def test_greedy_episodes_are_played_all_at_once_and_reported_with_the_next_row():
    runners = opened()
    runners.collect()
    runners.evaluate(5, seed=3)
    reported = runners.episodes()
    assert (
        0
        <= reported["eval/return_min"]
        <= reported["eval/return_mean"]
        <= reported["eval/return_max"]
        <= 1
    )
    assert "eval/return_mean" not in runners.episodes()


def test_work_at_the_sampler_is_done_for_each_runner():
    seen = []
    graph = fl.Graph(
        "own", runners=fl.Runners(Corridor, MLP, num_runners=2, envs_per_runner=3, rollout_length=4)
    )
    chain = fl.chain(note=fl.Map(lambda b: seen.append(b.shape) or b))
    runners = graph.resources["runners"].open(alone("runners", graph.resources["runners"]))
    runners.localize(chain)
    assert (
        isinstance(batch := runners.collect(), Batch)
        and batch.shape == (4, 6)
        and seen == [(4, 3)] * 2
    )
    with pytest.raises(fl.errors.GraphError, match="with another local"):
        runners.localize(fl.chain(other=fl.Map(lambda b: b)))


def test_equal_settings_share_what_is_compiled():
    a, b = (
        fl.Runners(Corridor, MLP, num_runners=2, envs_per_runner=3, rollout_length=4)
        for _ in range(2)
    )
    assert core_of(a) is core_of(b)


def test_runners_that_sample_one_by_one_share_one_compiled_program(monkeypatch):
    runners, calls = opened(num_runners=3, envs_per_runner=2, rollout_length=4), []
    run = runners.site.run

    def noting(fn, *args, **static):
        calls.append((fn.__name__, tuple(static.items())))
        return run(fn, *args, **static)

    monkeypatch.setattr(runners.site, "run", noting)
    envs = [runners.next(1).columns["env"].tolist() for _ in range(3)]
    assert envs == [[0, 1], [2, 3], [4, 5]]
    assert len({call for call in calls if call[0] == "roll"}) == 1


def test_the_largest_numbers_are_finite():
    largest = jnp.full((2, 3), jnp.finfo(jnp.float32).max)
    assert (first_broken([(0, largest), (1, largest)]) < 0).any()
    assert first_broken([(0, largest), (1, largest.at[1, 2].set(jnp.inf))]).tolist() == [2, 2]


@pytest.mark.parametrize("shape", [(128, 8, 4), (128, 256), (16, 4, 10, 10, 4)])
def test_a_nan_is_found_in_a_rollout_of_any_size(shape):
    seen = jnp.zeros(shape).at[7, 3].set(jnp.nan)
    assert first_broken([(0, seen)]).tolist() == [3, 7]


THREE = gym.spaces.Discrete(3)


class Leaving(fl.envs.JaxEnv):
    """Gives a choice that its space lacks from step 3 on."""

    observation_space, action_space = THREE, gym.spaces.Discrete(2)

    def reset(self, key):
        return jnp.int32(0), jnp.int32(0)

    def step(self, state, action, key):
        return state + 1, state + 1, 1.0, state >= 5, False


class Staying(Leaving):
    """Gives all choices of its space."""

    def step(self, state, action, key):
        return state + 1, jnp.minimum(state + 1, 2), 1.0, state >= 5, False


@pytest.mark.parametrize("runtime", with_system(["local", "xla"], {"xla"}))
@pytest.mark.parametrize("make", [fl.ppo, fl.es])
def test_an_observation_that_is_none_of_the_choices_is_found(make, runtime):
    rollouts = {"envs_per_runner": 2, "rollout_length": 8, "batch_size": 16, "minibatch_size": 16}
    graph = make(Leaving, **(rollouts if make is fl.ppo else {}))
    with (
        pytest.raises(fl.errors.EnvError, match="none of its space's choices"),
        fl.run(graph, runtime=runtime, steps=200) as run,
    ):
        list(run)
    inside = graph.set("runners.env", Staying)
    with fl.run(inside, runtime=runtime, steps=16) as run:
        list(run)


class LeavingAgent(fl.envs.JaxAgents):
    """Gives its only agent a choice that its space lacks from step 3 on."""

    observation_spaces, action_spaces = {"a": THREE}, {"a": gym.spaces.Discrete(2)}

    def reset(self, key):
        return jnp.int32(0), {"a": jnp.int32(0)}, {"a": jnp.bool_(True)}

    def step(self, state, action, key):
        over = {"a": state >= 5}
        acts = {"a": jnp.bool_(True)}
        return state + 1, {"a": state + 1}, {"a": 1.0}, over, {"a": jnp.bool_(False)}, acts


def test_an_observation_of_an_agent_that_is_none_of_the_choices_is_found():
    graph = fl.multi_ppo(LeavingAgent, envs_per_runner=2, rollout_length=16, minibatch_size=16)
    says = "for agent a at its row 3, .* none of its space's choices"
    with pytest.raises(fl.errors.EnvError, match=says), fl.run(graph, steps=200) as run:
        list(run)


@pytest.mark.parametrize("steps", [1, 4])
def test_a_reward_that_is_not_finite_is_found_in_rollouts_of_any_length(steps):
    graph = fl.ppo(
        Corridor,
        envs_per_runner=2,
        rollout_length=steps,
        batch_size=8,
        minibatch_size=None,
        epochs=1,
        policy=MLP,
    ).set("runners.env_settings", {"nan_at": 3})
    with (
        pytest.raises(fl.errors.EnvError, match="reward that is not finite"),
        fl.run(graph, steps=200) as run,
    ):
        list(run)
