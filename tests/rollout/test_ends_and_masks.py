"""What ends episodes, what masks allow, and what environments that come back without them leave."""

import os

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

import flowrl as fl
from flowrl.rl.policies import network
from flowrl.rollout.runner import Runner

MLP = fl.Policy(fl.networks.MLP, hidden=(4,))


class Clearing(VectorEnv):
    """Returns its own arrays of flags, and clears them in a reset."""

    def __init__(self):
        self.metadata = {"autoreset_mode": AutoresetMode.DISABLED}
        self.num_envs = 2
        self.single_observation_space = gym.spaces.Box(-99, 99, (1,), np.float32)
        self.single_action_space = gym.spaces.Discrete(2)
        self.observation_space = batch_space(self.single_observation_space, 2)
        self.action_space = batch_space(self.single_action_space, 2)
        self.time, self.flags = np.zeros(2, int), np.zeros((2, 2), bool)

    def reset(self, *, seed=None, options=None):
        mask = (options or {}).get("reset_mask", np.ones(2, bool))
        self.time[mask] = 0
        self.flags[:, mask] = False
        return self.time[:, None].astype(np.float32), {}

    def step(self, actions):
        self.time += 1
        self.flags[0] = self.time >= 4
        return self.time[:, None].astype(np.float32), np.ones(2), *self.flags, {}


def test_flags_that_a_reset_clears_are_those_of_the_step():
    runners = fl.Runners(Clearing, MLP, envs_per_runner=2, rollout_length=10).open()
    batch = runners.collect()
    runners.close()
    assert batch["obs"][:, 0, 0].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4]
    assert np.flatnonzero(batch["terminated"][:, 0]).tolist() == [3, 8]
    assert np.flatnonzero(~np.asarray(batch["valid"], bool)[:, 0]).tolist() == [4, 9]


class Vanishing:
    """Two agents in turn, who are gone after four turns without a word."""

    possible_agents = ("a", "b")

    def observation_space(self, agent):
        return gym.spaces.Box(-99, 99, (1,), np.float32)

    def action_space(self, agent):
        return gym.spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        self.agents, self.time, self.agent_selection = list(self.possible_agents), 0, "a"

    def last(self):
        return np.array([self.time], np.float32), 0.0, False, False, {}

    def step(self, action):
        self.time += 1
        self.agent_selection = "b" if self.agent_selection == "a" else "a"
        if self.time == 4:
            self.agents = []

    def close(self):
        pass


def test_agents_that_are_gone_without_an_end_are_an_error():
    team = fl.Team(a=MLP, b=MLP)
    runners = fl.Runners(Vanishing, team, envs_per_runner=1, rollout_length=10).open()
    with pytest.raises(
        fl.errors.EnvError, match="environment 0 of Vanishing left agent a without an end"
    ):
        runners.collect()
    runners.close()


SEEN = gym.spaces.Dict(
    {"obs": gym.spaces.Box(0, 9, (1,), np.float32), "action_mask": gym.spaces.MultiBinary(3)}
)


def seen(time):
    mask = jnp.where(time == 2, 0, jnp.array([0, 1, 0])).astype(jnp.int8)
    return {"obs": jnp.ones(1) * time, "action_mask": mask}


class Closed(fl.envs.JaxEnv):
    """Allows no action at step 2."""

    observation_space, action_space = SEEN, gym.spaces.Discrete(3)

    def reset(self, key):
        return jnp.int32(0), seen(0)

    def step(self, state, action, key):
        return state + 1, seen(state + 1), 1.0, state >= 5, False


class ClosedToAgents(fl.envs.JaxAgents):
    """Allows its only agent no action at step 2."""

    observation_spaces, action_spaces = {"a": SEEN}, {"a": gym.spaces.Discrete(3)}

    def reset(self, key):
        return jnp.int32(0), {"a": seen(0)}, {"a": jnp.bool_(True)}

    def step(self, state, action, key):
        no, yes = jnp.bool_(False), jnp.bool_(True)
        over = {"a": state >= 5}
        return state + 1, {"a": seen(state + 1)}, {"a": 1.0}, over, {"a": no}, {"a": yes}


@pytest.mark.system
@pytest.mark.parametrize(("make", "env"), [(fl.ppo, Closed), (fl.multi_ppo, ClosedToAgents)])
def test_a_mask_that_allows_nothing_ends_the_run_in_jax_too(make, env):
    graph = make(env, envs_per_runner=2, rollout_length=16, minibatch_size=16)
    with pytest.raises(
        fl.errors.EnvError, match="its step 2 with|its row 2, .*|a mask that allows no action"
    ) as caught:
        list(fl.run(graph, steps=200))
    assert "or a mask that allows no action" in str(caught.value)


class ClosedInPython(gym.Env):
    """Allows no action at step 2."""

    observation_space, action_space = SEEN, gym.spaces.Discrete(3)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.age = 0
        return self.seen(), {}

    def seen(self):
        return jax.tree.map(np.asarray, seen(self.age))

    def step(self, action):
        self.age += 1
        return self.seen(), 1.0, self.age > 5, False, {}


@pytest.mark.parametrize("env", [Closed, ClosedInPython])
def test_episodes_with_perturbed_weights_end_where_a_mask_allows_nothing(env):
    graph = fl.es(env, pairs=2, envs_per_runner=2)
    with pytest.raises(fl.errors.EnvError, match="allows no action"):
        list(fl.run(graph, steps=200))


class OverThen(Closed):
    """Allows no action when its episode is over."""

    def step(self, state, action, key):
        return state + 1, seen(state + 1), 1.0, state >= 1, False


class OverThenInPython(ClosedInPython):
    """Allows no action when its episode is over."""

    def step(self, action):
        self.age += 1
        return self.seen(), 1.0, self.age > 1, False, {}


@pytest.mark.parametrize("env", [OverThen, OverThenInPython])
def test_the_last_observation_of_an_episode_may_allow_nothing(env):
    with fl.run(fl.es(env, pairs=2, envs_per_runner=2), steps=40) as run:
        assert [row["length_mean"] for row in run][-1] == 2


class Wide(gym.Env):
    """Shows whole numbers of 8 bytes."""

    observation_space = gym.spaces.Box(0, 2**60, (1,), np.int64)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.array([5], np.int64), {}

    def step(self, action):
        return np.array([2**31 + 5], np.int64), 1.0, False, False, {}


def test_a_whole_number_that_batches_can_not_hold_is_an_error():
    runners = fl.Runners(Wide, MLP, envs_per_runner=2, rollout_length=4).open()
    with pytest.raises(
        fl.errors.EnvError, match="an observation from step that holds 2147483653, which int32"
    ):
        runners.collect()
    runners.close()


class Forgetful(gym.Env):
    """Never shows the same twice, so that nobody can bring it back."""

    observation_space = gym.spaces.Box(-9, 9, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def _seen(self):
        return np.array([int.from_bytes(os.urandom(2), "big") / 1e4], np.float32)

    def reset(self, *, seed=None, options=None):
        self.time = 0
        return self._seen(), {}

    def step(self, action):
        self.time += 1
        return self._seen(), 10.0, self.time >= 8, False, {"k": float(self.time)}


@pytest.mark.parametrize("length", [5, 8])
def test_an_environment_that_begins_again_has_no_past(length):
    spec = fl.Runners(
        Forgetful, MLP, envs_per_runner=2, rollout_length=length, normalize_rewards=1.0,
        metrics=("k",),
    )  # fmt: skip
    published = (network(MLP, spec.spaces()).init(jax.random.key(0)), 0)
    before, after = (Runner(spec, "runners", 0, 0) for _ in range(2))
    before.sample(published)
    after.take(before.keep())
    found = after.sample(published)
    assert found.episodes.reset == 2
    steps = int(np.asarray(found.batch["valid"]).sum())
    assert found.episodes.metrics["env/k"].number == steps, "an info of a step is missing"
    np.testing.assert_array_equal(after.scale.returns, after.counters.unfinished[0])
