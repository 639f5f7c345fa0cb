"""Environments of several agents in JAX for the host, and JaxMARL's."""

import sys
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium.spaces import Discrete

import flowrl as fl
from flowrl.envs.bringing_back import RetracedAgents
from flowrl.envs.jax_agents import HostAgents, JaxmarlEnv
from jax_teams import TINY, Corridors


def played(env, steps, seed=None):
    """The turns of an environment in which all go to the right."""
    turns = [env.reset(seed)]
    for _ in range(steps):
        turns.append(env.step(dict.fromkeys(turns[-1].obs, np.int32(1))))
    return turns


def alike(turns, others):
    for one, other in zip(turns, others, strict=True):
        jax.tree.map(np.testing.assert_array_equal, one, other)


def test_one_for_the_host_returns_turns_and_goes_on_from_where_it_was():
    env = RetracedAgents(HostAgents(Corridors()))
    turns = played(env, 12, seed=3)
    assert list(turns[0].obs) == ["red", "blue"] and not turns[0].ended
    ended = [turn for turn in turns if "red" in turn.ended]
    assert ended[0].reward["red"] == 1.0 and ended[0].ended["red"].terminated
    # It comes back a step later, while the other goes on.
    assert all("red" not in turn.obs for turn in ended)
    assert np.array_equal(ended[0].ended["red"].obs, [1.0])
    again = RetracedAgents(HostAgents(Corridors()))
    assert again.bring_back(env.keep())
    alike(played(again, 8), played(env, 8))
    alike(played(env, 5, seed=3), turns[:6])
    assert env.spaces_of("red") == (Corridors.observation_spaces["red"], Discrete(2))


class Eager(Corridors):
    """Says of all agents that they act next, also where their episode ended."""

    def step(self, state, actions, key):
        *found, acts = super().step(state, actions, key)
        return *found, dict.fromkeys(acts, True)


def test_who_ended_does_not_act_next_whatever_the_environment_says():
    turns = played(HostAgents(Eager()), 20, seed=1)
    ended = [turn for turn in turns if turn.ended]
    assert len(ended) > 2 and not any(set(turn.ended) & set(turn.obs) for turn in ended)
    # It may come back with the next step.
    after = next(i for i, turn in enumerate(turns) if turn.ended) + 1
    assert set(turns[after - 1].ended) <= set(turns[after].obs)


# -- a stand-in for JaxMARL


class Space:
    def __init__(self, kind, **facts):
        self.__dict__.update(facts)
        self.__class__ = type(kind, (Space,), {})


class Squad:
    """Two units; agent_0 is done after 2 steps, all after 4. Its class has what JaxMARL's have."""

    agents = ("agent_0", "agent_1")

    def __init__(self, masks=True, actions="Discrete"):
        self.masks, self.actions = masks, actions

    def observation_space(self, agent):
        return Space("Box", low=0.0, high=9.0, shape=(9, 9), dtype=jnp.float32)

    def action_space(self, agent):
        return Space(self.actions, n=3, shape=(), dtype=jnp.int32)

    def reset(self, key):
        return self.obs(0), {"step": jnp.int32(0)}

    def obs(self, step):
        seen = jnp.full(2, step, jnp.int32)
        return {**dict.fromkeys(self.agents, seen), "world_state": jnp.zeros(7)}

    def get_avail_actions(self, state):
        if not self.masks:
            raise NotImplementedError
        return dict.fromkeys(self.agents, jnp.array([1, 0, 1], jnp.uint8))

    def step_env(self, key, state, actions):
        step = state["step"] + 1
        done = {"agent_0": step >= 2, "agent_1": step >= 4, "__all__": step >= 4}
        reward = dict.fromkeys(self.agents, jnp.int32(1))
        return self.obs(step), {"step": step}, reward, done, {}


@pytest.fixture
def jaxmarl(monkeypatch):
    made = ModuleType("jaxmarl")
    made.registered_envs = ["squad"]
    made.make = lambda name, **settings: Squad(**settings)
    monkeypatch.setitem(sys.modules, "jaxmarl", made)


@pytest.mark.usefixtures("jaxmarl")
def test_an_agent_of_jaxmarl_that_is_done_gains_until_the_end_of_all():
    spec = fl.Runners("jaxmarl:squad", TINY, envs_per_runner=1, rollout_length=10)
    batch, episodes = (runners := spec.open()).collect(), runners.episodes()
    valid, mask = np.asarray(batch["valid"]), batch["obs"]["action_mask"]
    # Episodes of two turns of the one and four of the other, each with a masked row at its end.
    assert valid[:6, 0].tolist() == [True, True, False] * 2
    assert valid[:5, 1].tolist() == [True, True, True, True, False]
    assert batch["reward"][:3, 0].tolist() == [1, 3, 0] and batch["terminated"][1, 0]
    assert episodes["return_mean"] == 4 and not batch["truncated"][:4, 1].any()
    # What is not available is never done, and nothing else is seen than declared.
    assert mask.shape == (10, 2, 3) and not (batch["action"][valid] == 1).any()
    assert batch["obs"]["observation"].dtype == np.float32


@pytest.mark.usefixtures("jaxmarl")
def test_settings_reach_the_environment_and_what_there_is_not_is_refused():
    spec = fl.Runners("jaxmarl:squad", TINY, env_settings={"masks": False})
    assert spec.by_policy[""].spaces().obs.shape == (2,)
    for name, settings, text in (
        ("jaxmarl:squat", {}, "unknown jaxmarl environment 'squat'; did you mean 'squad'?"),
        ("jaxmarl:squad", {"actions": "Graph"}, "jaxmarl:squad has a space Graph; it must be"),
    ):
        with pytest.raises(fl.errors.FlowrlError) as caught:
            fl.Runners(name, TINY, env_settings=settings).open()
        assert text in str(caught.value)


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "jaxmarl", None)
    with pytest.raises(fl.errors.SettingError, match=r"jaxmarl .*pip install .*flowrl\[jax-envs\]"):
        fl.Runners("jaxmarl:MPE_simple_spread_v3", TINY).open()


def test_environments_of_jaxmarl_run_where_it_is_installed():
    pytest.importorskip("jaxmarl")
    env = JaxmarlEnv("MPE_simple_tag_v3")
    assert len({spaces.shape for spaces in env.observation_spaces.values()}) == 2
    policy = {"hunters": TINY, "prey": TINY}
    team = fl.Team(of=lambda agent: "prey" if agent == "agent_0" else "hunters", **policy)
    spec = fl.Runners("jaxmarl:MPE_simple_tag_v3", team, envs_per_runner=2, rollout_length=30)
    batch = spec.open().collect()
    assert batch["hunters"].shape == (30, 6) and batch["prey"].shape == (30, 2)
    # Episodes have 26 steps.
    assert np.flatnonzero(batch["prey"]["terminated"][:, 0]).tolist() == [25]
