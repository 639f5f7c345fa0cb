"""Environments written in JAX: the adapters against what they adapt.

And the Gymnasium form against single environments.
"""

import sys

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

import flowrl as fl
from environments import Corridor
from flowrl.envs.gym_envs import make_env, make_vector, probe
from flowrl.envs.jax_envs import BraxEnv, GymnaxEnv, JaxVector, advance, begin


def test_a_step_of_gymnax_is_that_of_gymnasium():
    env, oracle = GymnaxEnv("CartPole-v1"), gym.make("CartPole-v1").unwrapped
    oracle.reset(seed=0)
    state, obs = env.reset(jax.random.key(0))
    oracle.state = np.asarray(obs, np.float64)
    for action in (0, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1):
        state, obs, reward, terminated, truncated = env.step(
            state, jnp.int32(action), jax.random.key(0)
        )
        expected, _, over, _, _ = oracle.step(action)
        np.testing.assert_allclose(obs, expected, rtol=1e-4, atol=1e-5)
        assert (float(reward), bool(terminated), bool(truncated)) == (1.0, over, False)
        if over:
            break
    assert over


def test_settings_are_parameters_of_gymnax_and_a_limit_truncates():
    vector = make_vector("gymnax:CartPole-v1", 2, (), {"max_steps_in_episode": 3})
    vector.reset(seed=1)
    flags = [vector.step(np.array([0, 1]))[2:4] for _ in range(4)]
    assert [t.tolist() for _, t in flags] == [[False] * 2, [False] * 2, [True] * 2, [False] * 2]
    assert not any(t.any() for t, _ in flags)


@pytest.mark.parametrize(
    ("name", "obs", "action"),
    [("Pendulum-v1", (3,), "Box"), ("Breakout-MinAtar", (10, 10, 4), "Discrete")],
)
def test_spaces_of_gymnax_become_those_of_gymnasium(name, obs, action):
    spaces, env, *_ = probe(f"gymnax:{name}", (), {})
    assert (
        isinstance(env, GymnaxEnv)
        and spaces.obs.shape == obs
        and type(spaces.action).__name__ == action
    )
    vector = make_vector(f"gymnax:{name}", 3, (), {})
    assert vector.observation_space.contains(vector.reset(seed=0)[0])


def test_the_gymnasium_form_is_that_of_single_environments_in_next_step_form():
    vector = JaxVector(Corridor(), 3)
    assert vector.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
    rng, (obs, _) = np.random.default_rng(0), vector.reset(seed=0)
    before, over, ages, kinds = obs[:, 0] * 6, np.zeros(3, bool), np.zeros(3, int), set()
    for _ in range(200):
        action = rng.choice([0, 1], 3, p=[0.45, 0.55])
        obs, reward, terminated, truncated, _ = vector.step(action)
        place = np.clip(before + 2 * action - 1, 0, 6)
        ages = np.where(over, 0, ages + 1)
        np.testing.assert_allclose(obs[~over, 0] * 6, place[~over], atol=1e-5)
        assert (
            (obs[over, 0] * 6 < 2.5).all()
            and not reward[over].any()
            and not (terminated | truncated)[over].any()
        )
        np.testing.assert_array_equal(terminated[~over], np.isclose(place[~over], 6))
        np.testing.assert_array_equal(truncated[~over], ages[~over] >= 20)
        np.testing.assert_array_equal(reward[~over], terminated[~over])
        kinds |= {("terminated", bool(terminated.any())), ("truncated", bool(truncated.any()))}
        before, over = obs[:, 0] * 6, terminated | truncated
    assert len(kinds) == 4


class Wrong(Corridor):
    """Breaks what an environment promises, in one of many ways."""

    def __init__(self, way):
        super().__init__()
        self.way = way

    def observe(self, place):
        return jnp.zeros(2) if self.way == "obs" else super().observe(place)

    def step(self, state, action, key):
        state, obs, *reported = super().step(state, action, key)
        match self.way:
            case "step's obs":
                obs = jnp.zeros(2)
            case "reward":
                reported[0] = reported[0][None]
            case "flag":
                reported[1] = jnp.float32(jnp.nan)
            case "no flag":
                reported[2] = None
            case "state":
                state["age"] = state["age"] * 0.5
            case "tree":
                state["more"] = 1
            case "four":
                reported.pop()
        return state, obs, *reported


@pytest.mark.parametrize(
    ("way", "says"),
    [
        (
            "obs",
            (
                r"Wrong returned an observation float32\[2\] from reset, but its "
                r"observation_space declares float32\[1\]"
            ),
        ),
        ("step's obs", r"Wrong returned an observation float32\[2\] from step, but its"),
        ("reward", r"Wrong\.step returned reward of shape \[1\]; it must be a single number"),
        ("flag", r"Wrong\.step returned terminated of the type float32; it must be True or False"),
        ("no flag", r"Wrong\.step returned None as truncated; it must be a single number"),
        (
            "state",
            (
                r"Wrong\.step returned a state\['age'\] float32\[\], but reset's is int32\[\]; "
                r"make them equal"
            ),
        ),
        ("tree", r"Wrong\.step returned a state that is another tree than reset's"),
        ("four", r"Wrong\.step must return \(state, obs, reward, terminated, truncated\)"),
    ],
)
def test_an_environment_that_breaks_its_promise_is_reported_which(way, says):
    with pytest.raises(fl.errors.EnvError, match=says):
        jax.eval_shape(
            lambda: advance(
                env := Wrong(way),
                begin(env, bits := jnp.zeros((3, 2), jnp.uint32))[0],
                jnp.zeros(3, bool),
                jnp.zeros(3, int),
                jnp.stack([bits, bits], 1),
            )
        )


class WithoutKey(Corridor):
    def reset(self):
        return super().reset(None)


class WithoutSpace(Corridor):
    observation_space = None


@pytest.mark.parametrize(
    ("env", "says"),
    [
        (WithoutKey, r"WithoutKey raised in reset: TypeError: .*positional argument"),
        (WithoutSpace, r"WithoutSpace: its observation_space is None, and no space"),
    ],
)
def test_an_environment_that_can_not_begin_is_an_error_that_names_it(env, says):
    with pytest.raises(fl.errors.FlowrlError, match=says):
        fl.ppo(env).compile()


class Random(Corridor):
    """Returns a number of the key that it got, from `reset` and from `step`."""

    def reset(self, key):
        return super().reset(key)[0], jax.random.uniform(key, (1,))

    def step(self, state, action, key):
        state, _, *others = super().step(state, action, key)
        return state, jax.random.uniform(key, (1,)), *others


@pytest.mark.parametrize("done", [(False, False), (True, False), (True, True)])
def test_steps_and_resets_have_keys_of_their_own(done):
    env, bits = Random(), jnp.arange(8, dtype=jnp.uint32).reshape(2, 2, 2)
    states, _ = begin(env, bits[:, 0])
    _, obs, *_ = advance(env, states, jnp.array(done), jnp.zeros(2, int), bits)
    for i, over in enumerate(done):
        key = jax.random.wrap_key_data(bits[i, int(over)])
        assert obs[i, 0] == jax.random.uniform(key)


@pytest.mark.system
def test_brax_runs_and_is_cut_after_its_episodes_length():
    pendulum = BraxEnv("inverted_pendulum")
    assert pendulum.observation_space.shape == (4,) and pendulum.action_space.shape == (1,)
    state, obs = jax.eval_shape(pendulum.reset, jax.random.key(0))
    assert obs.shape == (4,) and jax.eval_shape(
        pendulum.step, state, jnp.zeros(1), jax.random.key(0)
    )[1].shape == (4,)
    env = BraxEnv("fast", episode_length=2)  # Brax's own for tests
    vector = JaxVector(env, 2)
    vector.reset(seed=0)
    reported = [vector.step(np.zeros((2, *env.action_space.shape), np.float32)) for _ in range(3)]
    assert [t[3].tolist() for t in reported] == [[False] * 2, [True] * 2, [False] * 2]
    assert not any(t[2].any() for t in reported) and not reported[2][1].any()


@pytest.mark.parametrize(
    ("env", "says"),
    [
        (
            "gymnax:CartPol-v1",
            (
                r"gymnax:CartPol-v1: unknown gymnax environment 'CartPol-v1'; did you mean "
                r"'CartPole-v1'\?"
            ),
        ),
        ("brax:antt", r"unknown brax environment 'antt'; did you mean 'ant'\?"),
        (
            "jumanji:Snake-v1",
            (
                "'jumanji:Snake-v1' would import jumanji; .* Environments written in JAX have the "
                "prefixes gymnax:, brax:, jaxmarl:, those of several agents pettingzoo:"
            ),
        ),
    ],
)
def test_what_there_is_not_is_reported_with_what_there_is(env, says):
    with pytest.raises(fl.errors.SettingError, match=says):
        make_env(env, 1, (), {})


def test_a_missing_package_is_reported_with_the_command_that_fixes_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnax", None)
    with pytest.raises(
        fl.errors.SettingError,
        match=r"gymnax:CartPole-v1: needs the package gymnax \(.*\): .* -m pip install "
        r"'flowrl\[jax-envs\]'",
    ):
        make_env("gymnax:CartPole-v1", 1, (), {})
