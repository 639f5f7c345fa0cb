"""Evaluations of several agents: what is reported equals what a slow loop by hand plays."""

import functools

import gymnasium as gym
import jax
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete

import flowrl as fl
from conftest import RAY
from flowrl.envs.gym_envs import make_env
from flowrl.rl.spaces import Spaces
from flowrl.rollout.playing_agents import PolicyPlayer, ScriptedPlayer, play_agents
from flowrl.rollout.scripted import random_action
from teams import MLP, NAMES, TwoCartPoles, two_learners

TICTACTOE = "pettingzoo:classic.tictactoe_v3"
RECURRENT = fl.Policy(fl.networks.RNN, hidden=(8,), size=4)


@functools.cache
def trained(env, policy=MLP, key=10):
    """A policy with loud random weights for the first agent of an environment."""
    made = make_env(env, 1, (), {})
    spaces = Spaces(*made.spaces_of(made.names[0]))
    made.close()
    found = fl.TrainedPolicy(policy, spaces, None, env, agents=made.names)
    weights = jax.jit(found.network.init)(jax.random.key(key))
    louder = {k: x * (20 if k == "heads/action/kernel" else 1) for k, x in weights.params.items()}
    return fl.TrainedPolicy(policy, spaces, weights._replace(params=louder), env, agents=made.names)


def by_hand(env, policies, episodes, seed):
    """The returns and turns of each agent, one episode after another; the first end counts."""
    made = make_env(env, 1, (), {})
    returns = {agent: np.zeros(episodes) for agent in made.names}
    turns = {agent: np.zeros(episodes, int) for agent in made.names}
    for i in range(episodes):
        turn, over, carry = made.reset(seed + i), set(), dict.fromkeys(made.names)
        while turn.obs and len(over) < len(made.names):
            actions = {}
            for agent, obs in turn.obs.items():
                turns[agent][i] += agent not in over
                acted = policies[agent].act(obs, carry[agent])
                recurrent = policies[agent].network.recurrent
                actions[agent], carry[agent] = acted if recurrent else (acted, None)
            turn = made.step(actions)
            for agent, reward in turn.reward.items():
                returns[agent][i] += reward if agent not in over else 0
            for agent in turn.ended:
                over.add(agent)
                carry[agent] = None
    made.close()
    return returns, turns


class CutPoles(TwoCartPoles):
    """Red's episodes are cut after three steps, and blue's after seven; a step later they go on."""

    def reset(self, seed=None, options=None):
        self.most = {"red": 3, "blue": 7}
        self.left = dict(self.most)
        return super().reset(seed, options)

    def step(self, actions):
        obs, reward, terminated, truncated, info = super().step(actions)
        for name in NAMES:
            self.left[name] = self.left[name] - 1 if name in actions else self.most[name]
            truncated[name] = self.left[name] == 0
        self.agents = [name for name in self.agents if not truncated[name]]
        return obs, reward, terminated, truncated, info


@pytest.mark.parametrize(
    ("env", "policy"),
    [
        (TwoCartPoles, MLP),
        (CutPoles, MLP),
        (TwoCartPoles, RECURRENT),
        (TICTACTOE, MLP),
        (TICTACTOE, RECURRENT),
    ],
    ids=["at once", "cut", "recurrent", "in turn", "recurrent in turn"],
)
def test_the_returns_of_every_agent_are_those_of_a_loop_by_hand(env, policy, monkeypatch):
    one = trained(env, policy)
    # One player for both agents acts in one call, in which some columns have their turn.
    other = one if (env, policy) == (TICTACTOE, RECURRENT) else trained(env, policy, 12)
    policies = dict(zip(one.agents, (one, other), strict=True))
    players = dict.fromkeys(one.agents, one.player())
    if other is not one:
        players[one.agents[1]] = other.player()
    returns, turns = by_hand(env, policies, 5, 20)
    # More episodes than environments take several rounds.
    for envs in (2, 32):
        monkeypatch.setattr("flowrl.rollout.playing_agents.ENVS", envs)
        found = play_agents(env, players, 5, 20)
        for agent in policies:
            np.testing.assert_array_equal(found.agents[agent].returns, returns[agent])
            np.testing.assert_array_equal(found.agents[agent].lengths, turns[agent])
    if env is not CutPoles and policy is MLP:
        assert len({*np.concatenate([*returns.values()]).tolist()}) > 1


def test_the_agents_of_one_policy_sample_actions_each_by_itself():
    def alike():
        return TwoCartPoles(0, 0)

    policy = trained(TwoCartPoles)
    # Both poles begin alike, so only by their actions do the episodes differ.
    games = play_agents(alike, dict.fromkeys(NAMES, policy.player(greedy=False)), 4, 1)
    assert not (games.agents["red"].digests == games.agents["blue"].digests).any()
    greedy = play_agents(alike, dict.fromkeys(NAMES, policy.player()), 4, 1)
    assert (greedy.agents["red"].digests == greedy.agents["blue"].digests).all()


def test_an_episode_is_the_same_however_many_are_played_beside_it(monkeypatch):
    policy = trained(TICTACTOE)
    players = dict.fromkeys(policy.agents, policy.player(greedy=False))
    many = play_agents(TICTACTOE, players, 7, 3)
    monkeypatch.setattr("flowrl.rollout.playing_agents.ENVS", 2)
    for scripted in (False, True):
        if scripted:
            players = dict.fromkeys(policy.agents, ScriptedPlayer(fl.Scripted()))
            monkeypatch.setattr("flowrl.rollout.playing_agents.ENVS", 32)
            many = play_agents(TICTACTOE, players, 7, 3)
            monkeypatch.setattr("flowrl.rollout.playing_agents.ENVS", 2)
        few = play_agents(TICTACTOE, players, 7, 3)
        for agent in policy.agents:
            assert few.agents[agent].digests.tolist() == many.agents[agent].digests.tolist()
        assert many.of(policy.agents).different == 7
        np.testing.assert_array_equal(few.steps, many.steps)


def test_a_policy_of_all_agents_is_evaluated_by_the_mean_of_their_returns():
    policy = trained(TwoCartPoles)
    found = policy.evaluate(4, seed=20)
    returns, turns = by_hand(TwoCartPoles, dict.fromkeys(NAMES, policy), 4, 20)
    np.testing.assert_array_equal(found.returns, np.mean([*returns.values()], axis=0))
    # Each pole begins again alone, so the environment goes on until the last one fell.
    np.testing.assert_array_equal(found.lengths, np.max([*turns.values()], axis=0))
    assert policy.evaluate(2, seed=20, max_steps=5).cut.tolist() == [True, True]
    assert policy.evaluate(2, seed=20, max_steps=5).returns.tolist() == [5.0, 5.0]


def test_rows_have_the_evaluation_of_all_agents_and_of_each_policy():
    graph = two_learners().insert(after="both", play=fl.Evaluate(every=2, episodes=3, seed=5))
    for name in NAMES:
        graph = graph.set(f"{name}.optimizer.lr", 0.1)
    assert graph.compile().per_row("evaluated_episodes") == 3
    with fl.run(graph) as run:
        rows = [next(run) for _ in range(2)]
    found = fl.match(run.policies, episodes=3, seed=5)
    means = [[row[f"eval/return_mean/{name}"] for name in NAMES] for row in rows]
    assert means[0] != means[1]
    for name in NAMES:
        assert rows[1][f"eval/return_mean/{name}"] == pytest.approx(found[name].mean())
        assert rows[1][f"eval/return_max/{name}"] == found[name].max()
    both = np.mean([found[name].returns for name in NAMES], axis=0)
    assert rows[1]["eval/return_mean"] == pytest.approx(both.mean())
    assert rows[1]["eval/cut_episodes"] == 0


@pytest.mark.system
def test_on_ray_the_same_episodes_are_evaluated(ray_up):
    graph = two_learners(num_runners=2).insert(after="both", play=fl.Evaluate(1, episodes=3))
    graph = graph.set("runners.policy", fl.Team(red=MLP, blue=fl.Scripted()))
    graph = one_learner(graph)
    with fl.run(graph) as local, fl.run(graph, runtime=RAY) as remote:
        here, there = next(local), next(remote)
    assert here["eval/return_mean"] == there["eval/return_mean"]
    assert here["return_mean"] == there["return_mean"]


def one_learner(graph):
    """The graph without blue's nodes and its learner: red's alone are left."""
    nodes = {n.name: n.op for n in graph.nodes if "blue" not in n.name and n.name != "both"}
    red = graph.resources["red"]
    return fl.Graph("one", runners=graph.resources["runners"], red=red).then(**nodes)


def leaning(obs, rng):
    """Push a pole the way that it falls, now and then the other way."""
    return int(obs[2] > 0) if rng.random() < 0.9 else 0


def scripted_graph(act=leaning, **runners):
    team = fl.Team(red=MLP, blue=fl.Scripted(act))
    return one_learner(two_learners(**runners)).set("runners.policy", team)


def test_a_scripted_policy_plays_its_agent_and_nothing_of_it_is_trained():
    graph = scripted_graph()
    assert "TwoCartPoles, blue by leaning" in str(graph.compile())
    with fl.run(graph) as run:
        rows = [next(run) for _ in range(4)]
    assert not [name for name in rows[-1] if name.endswith("/blue")]
    # Red's steps are those that it takes without blue's policy as well.
    assert rows[-1]["agent_steps/red"] == rows[-1]["agent_steps"]
    again = fl.Graph.from_text(graph.text(), allow=["teams", "test_playing_agents"])
    assert again == graph
    # Who leans plays longer than who acts at random.
    policy = trained(TwoCartPoles)
    skilled, random = (
        play_agents(TwoCartPoles, {"red": policy.player(), "blue": ScriptedPlayer(x)}, 20, 0)
        for x in (fl.Scripted(leaning), fl.Scripted())
    )
    assert skilled.agents["blue"].mean() > 1.2 * random.agents["blue"].mean()


def test_a_run_with_a_scripted_policy_goes_on_bit_for_bit(tmp_path):
    graph = scripted_graph()
    with fl.run(graph, steps=64 * 6) as run:
        whole = [dict(row) for row in run]
    with fl.run(graph, steps=64 * 2, out=tmp_path / "x", snapshots=fl.Snapshots(every=0)) as run:
        list(run)
    allow = ["teams", "test_playing_agents"]
    with fl.resume(tmp_path / "x", steps=64 * 6, allow=allow) as run:
        list(run)
    for row, expected in zip(run.rows, whole, strict=True):
        # No episode has ended at the first rows, whose mean is NaN in both.
        np.testing.assert_equal(row["return_mean"], expected["return_mean"])
        assert row["loss"] == expected["loss"]


def failing(obs, rng):
    raise ValueError("no such opening")


def test_mistakes_with_players_are_reported_with_a_way_out():
    def text(error, make):
        with pytest.raises(error) as caught:
            make()
        return str(caught.value)

    def run_failing():
        with fl.run(scripted_graph(failing)) as run:
            next(run)

    problem = text(fl.errors.PolicyError, run_failing)
    assert "failing, which plays blue, raised: ValueError: no such opening" in problem
    problem = text(fl.errors.SettingError, lambda: fl.Team(red=fl.Scripted(), blue=fl.Scripted()))
    assert "all policies of this team are scripted" in problem
    assert "takes a function act(obs, rng), got an int" in text(
        fl.errors.SettingError, lambda: fl.Scripted(3)
    )
    problem = text(fl.errors.SettingError, lambda: fl.Team(red=MLP, blue=leaning))
    assert "blue must be fl.Policy(...) or fl.Scripted(act), got a function" in problem
    # A learner can't train what is scripted.
    graph = two_learners().set("runners.policy", fl.Team(red=MLP, blue=fl.Scripted()))
    assert "unknown part of a resource 'runners.blue'" in text(fl.errors.CheckError, graph.compile)
    policy = trained(TwoCartPoles)
    alone = fl.TrainedPolicy(
        policy.policy, policy.spaces, policy.weights, TwoCartPoles, agents=("red",)
    )
    problem = text(fl.errors.SettingError, lambda: alone.evaluate(1))
    assert "plays red of TwoCartPoles, and not blue; let others play them: fl.match" in problem
    player = PolicyPlayer(policy.network, policy.weights, None)
    problem = text(
        fl.errors.SettingError, lambda: play_agents(TICTACTOE, {"player_1": player}, 1, 0)
    )
    assert f"agent player_2 of {TICTACTOE} has no player" in problem
    both = {"player_1": player, "player_2": player}
    problem = text(fl.errors.SettingError, lambda: play_agents(TICTACTOE, both, 1, 0))
    assert f"agent player_1 of {TICTACTOE} has other spaces than the policy" in problem
    problem = text(fl.errors.SettingError, lambda: play_agents("CartPole-v1", {}, 1, 0))
    assert "CartPole-v1 has but one agent" in problem


@pytest.mark.parametrize(
    ("action", "size"), [(Discrete(4, start=2), 4), (MultiDiscrete([2, 3]), 5)], ids=str
)
def test_random_actions_are_those_that_the_mask_allows_each_as_often(action, size):
    seen = Dict({"observation": Box(0, 1, (1,)), "action_mask": Box(0, 1, (size,), np.int8)})
    spaces, rng = Spaces(seen, action), np.random.default_rng(0)
    mask = np.ones(size, np.int8)
    mask[0] = 0
    obs = spaces.arrays({"observation": np.zeros(1), "action_mask": mask})
    found = [random_action(spaces, obs, rng) for _ in range(600)]
    assert all(action.contains(x) for x in found)
    if isinstance(action, Discrete):
        counts = np.bincount(np.array(found) - 2, minlength=4)
        assert counts[0] == 0 and counts[1:].min() > 150
    else:
        assert {int(x[0]) for x in found} == {1}
        assert np.bincount([int(x[1]) for x in found]).min() > 150
    reals = Spaces(
        Dict({**seen.spaces, "action_mask": Box(0, 1, (0,))}), gym.spaces.Box(-1, 1, (2,))
    )
    assert reals.head.reals == 2
