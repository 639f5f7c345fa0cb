"""PettingZoo's own environments, by their ids."""

import dataclasses
import itertools
import json
import sys

import gymnasium as gym
import numpy as np
import pytest

import flowrl as fl
from flowrl.cli.main import main

pytest.importorskip("pettingzoo")
MLP = fl.Policy(fl.networks.MLP, hidden=(8,))


def rollouts(env, policy=MLP, steps=20, count=3, envs=3):
    spec = fl.Runners(env, policy, envs_per_runner=envs, rollout_length=steps)
    runners = spec.open()
    found = [runners.collect() for _ in range(count)]
    episodes = runners.episodes()
    runners.close()
    return found, episodes


def test_players_in_turn_win_what_the_other_loses_and_make_no_move_that_is_ruled_out():
    found, episodes = rollouts("pettingzoo:classic.tictactoe_v3")
    of_players = [[], []]
    for batch in found:
        assert batch.shape == (20, 6)
        taken = np.take_along_axis(
            batch["obs"]["action_mask"], batch["action"][..., None].astype(int), axis=-1
        )[..., 0]
        assert taken[batch["valid"]].all()
        assert not batch["truncated"][:-1][batch["valid"][1:]].any()
        for env in range(3):
            for player in (0, 1):
                column = 2 * env + player
                over = batch["terminated"][:, column]
                of_players[player].append(batch["reward"][over, column].tolist())
                # What is no end is worth nothing in this game.
                assert not batch["reward"][~over, column].any()
    first, second = (list(itertools.chain(*each)) for each in of_players)
    assert {*first, *second} <= {-1.0, 0.0, 1.0} and sum(first) != 0
    # The end of a game may be in one player's rollout, and in the next one of the other.
    assert abs(sum(first) + sum(second)) <= 3
    # A game has five to nine moves, of both players together.
    assert 5 <= episodes["env_steps"] / (episodes["episodes"] / 2) <= 12
    assert episodes["agent_steps"] <= episodes["env_steps"]


def test_agents_at_once_share_their_steps():
    pytest.importorskip("mpe2")
    found, episodes = rollouts("pettingzoo:mpe2.simple_spread_v3", steps=30)
    for batch in found:
        assert batch.shape == (30, 9)
        # Episodes have 25 steps, and all agents get the same share of the reward.
        assert np.array_equal(batch["valid"], np.repeat(batch["valid"][:, ::3], 3, axis=1))
    assert episodes["agent_steps"] == 3 * episodes["env_steps"]
    assert episodes["length_mean"] == 25


def test_a_policy_of_several_agents_is_saved_and_plays_where_its_agents_are(tmp_path):
    env = "pettingzoo:classic.tictactoe_v3"
    small = {"num_runners": 1, "envs_per_runner": 2, "rollout_length": 8, "batch_size": 32}
    graph = fl.ppo(env, minibatch_size=16, policy=MLP, **small)
    with fl.run(graph, steps=64, out=tmp_path / "x") as run:
        list(run)
    policy = fl.load(tmp_path / "x")
    obs = {"observation": np.zeros((3, 3, 2), np.int8), "action_mask": np.eye(9, dtype=np.int8)[4]}
    assert policy.act(obs) == run.policy.act(obs) == 4
    for named in (None, env):
        found = fl.load(tmp_path / "x", env=named)
        # What one player wins the other loses.
        assert found.agents == ("player_1", "player_2") and found.evaluate(1).mean() == 0
    with pytest.raises(fl.errors.SettingError, match="agent only, and this policy plays player_1,"):
        fl.load(tmp_path / "x", env="CartPole-v1")
    single = dataclasses.replace(policy, agents=())
    with pytest.raises(fl.errors.SettingError, match="has several agents, and this policy was tra"):
        single.evaluate(1)


def test_the_command_line_takes_them_by_their_ids(tmp_path, capsys):
    small = [f"--set={name}" for name in ("num_runners=1", "envs_per_runner=2", "rollout_length=8")]
    command = ["run", "ppo", "--env", "pettingzoo:classic.tictactoe_v3", "--steps", "64"]
    sizes = ["--set", "batch_size=32", "--set", "minibatch_size=16"]
    out = tmp_path / "x"
    assert main([*command, *small, *sizes, "--out", str(out)]) == 0
    assert "pettingzoo" in json.loads((out / "run.json").read_text())["versions"]
    assert main(["resume", str(out), "--steps", "128"]) == 0
    capsys.readouterr()
    assert main(["eval", str(out), "--episodes", "2"]) == 0
    assert capsys.readouterr().out.startswith("2 episodes, 1 different return: mean 0.0")
    assert main(["eval", str(out), "--video", str(tmp_path / "v")]) == 2
    assert "videos are of environments with one agent only" in capsys.readouterr().err


def test_settings_reach_the_environment():
    spec = fl.Runners("pettingzoo:mpe2.simple_spread_v3", MLP, env_settings={"N": 2})
    assert spec.agents == {"": ("agent_0", "agent_1")}


@pytest.mark.parametrize(
    ("env", "text"),
    [
        ("pettingzoo:classic.tictac_v3", "unknown environment 'pettingzoo:classic.tictac_v3': "),
        ("pettingzoo:classic", "makes no environment: it has no parallel_env or env"),
    ],
)
def test_what_there_is_not_is_refused(env, text):
    with pytest.raises(fl.errors.SettingError) as caught:
        fl.Runners(env, MLP).spaces()
    assert text in str(caught.value)


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("pettingzoo")]:
        monkeypatch.delitem(sys.modules, name)

    class Missing:
        def find_spec(self, name, path, target=None):
            if name.startswith("pettingzoo"):
                raise ModuleNotFoundError(f"No module named '{name}'", name=name)

    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    with pytest.raises(fl.errors.SettingError, match=r"pip install .*flowrl\[agents\]"):
        fl.Runners("pettingzoo:classic.tictactoe_v3", MLP).spaces()


class Walk:
    """Two agents that act at once, three times, with PettingZoo's attributes."""

    possible_agents = ("a", "b")

    def observation_space(self, agent):
        return gym.spaces.Box(-1, 1, (2,))

    def action_space(self, agent):
        return gym.spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        self.agents, self.steps = list(self.possible_agents), 0
        return dict.fromkeys(self.agents, np.zeros(2, np.float32)), {}

    def step(self, actions):
        self.last, self.steps = actions, self.steps + 1
        over = self.steps == 3
        self.agents = [] if over else self.agents
        obs = dict.fromkeys(actions, np.zeros(2, np.float32))
        ends = dict.fromkeys(actions, over)
        return obs, dict.fromkeys(actions, 1.0), ends, dict.fromkeys(actions, False), {}

    def close(self):
        pass


class Remembering(Walk):
    last = None


class Misnamed(Walk):
    def last(self):
        return None


class Alone(gym.Env):
    """One agent, whose environment names it as environments of several do."""

    possible_agents = ("me",)
    observation_space, action_space = gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.zeros(2, np.float32), 1.0, True, False, {}


SMALL = {"envs_per_runner": 1, "rollout_length": 8, "minibatch_size": 8}


@pytest.mark.parametrize("env", [Walk, Remembering])
def test_agents_at_once_may_have_data_called_last(env):
    with fl.run(fl.multi_ppo(env, batch_size=8, **SMALL)) as run:
        assert next(run)["return_mean"] == 3


def test_a_method_called_last_where_agents_act_at_once_is_named():
    with (
        pytest.raises(fl.errors.EnvError, match=r"Misnamed: reset\(\) returned.*rename last\(\)"),
        fl.run(fl.multi_ppo(Misnamed, batch_size=8, **SMALL)) as run,
    ):
        next(run)


def test_one_agent_may_be_named_among_possible_ones():
    with fl.run(fl.ppo(Alone, batch_size=8, **SMALL)) as run:
        assert next(run)["return_mean"] == 1
