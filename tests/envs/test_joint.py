"""A team as one agent, and agents that see the global state, beside plain lists."""

import gymnasium as gym
import numpy as np
import pytest

import flowrl as fl
from flowrl.envs.gym_envs import env_name
from teams import MLP, Relay, TwoCartPoles, Unmasked

ACTIONS = ([1, 2, 0], [0, 2, 2], [2, 0, 1], [1, 1, 2], [0, 0, 0], [2, 1, 2])


def played(env, actions=ACTIONS):
    """Everything that an environment returns for actions, reset where an episode ends."""
    found, over = [(env.reset(seed=1)[0], 0.0, False, False)], False
    for action in actions:
        if over:
            found.append((env.reset()[0], 0.0, False, False))
        obs, reward, terminated, truncated, _ = env.step(np.array(action))
        found.append((obs, reward, terminated, truncated))
        over = terminated or truncated
    return found


def listed(actions=ACTIONS):
    """The same by hand: times, last actions, rewards and ends of episodes of three steps."""
    found = []
    for i, action in enumerate(actions):
        if i % 3 == 0:
            found.append((0, [0, 0, 0], 0.0, False))
        reward = float(action[0] + 2 * action[1] + 3 * action[2])
        found.append((i % 3 + 1, action, reward, i % 3 == 2))
    return found


@pytest.mark.parametrize("truncates", [True, False])
def test_a_team_sees_and_gains_what_its_agents_do(truncates, monkeypatch):
    monkeypatch.setattr(Relay, "truncates", truncates)
    env = fl.envs.Joint(Relay)(length=3)
    assert env.action_space == gym.spaces.MultiDiscrete([3, 3, 3])
    for (obs, reward, terminated, truncated), (time, action, wanted, over) in zip(
        played(env), listed(), strict=True
    ):
        assert env.observation_space.contains(obs)
        assert obs["agents"].tolist() == [[time, i, action[i]] for i in range(3)]
        assert obs["state"].tolist() == [time, sum(action)]
        assert obs["action_mask"].tolist() == [[int(k != time % 3) for k in range(3)]] * 3
        assert (reward, terminated, truncated) == (
            wanted,
            over and not truncates,
            over and truncates,
        )


def test_a_reward_may_be_the_mean_and_a_state_the_joined_observations(monkeypatch):
    mean = played(fl.envs.Joint(Relay, reward="mean")())
    assert [reward * 3 for _, reward, _, _ in mean] == pytest.approx([x[2] for x in listed()])
    monkeypatch.setattr(Relay, "state_space", None)
    for obs, *_ in played(fl.envs.Joint(Relay)()):
        assert obs["state"].tolist() == obs["agents"].ravel().tolist()
    assert set(played(fl.envs.Joint(Unmasked, state=False)())[0][0]) == {"agents"}


class Words(Unmasked):
    """What agents see has parts and choices, which become one-hot."""

    def observation_space(self, agent):
        return gym.spaces.Dict(time=gym.spaces.Discrete(4), place=gym.spaces.Box(0, 9, (1, 2)))

    def action_space(self, agent):
        return gym.spaces.Discrete(3, start=5)

    def seen(self):
        place = np.float32([[self.time, self.actions["b"]]])
        return {name: {"time": self.time, "place": place} for name in self.possible_agents}


def test_observations_of_any_kind_become_rows_of_numbers_and_choices_keep_their_start():
    env = fl.envs.Joint(Words)()
    (first, *_), (second, reward, *_) = played(env, [[5, 7, 6]])
    assert first["agents"].tolist() == [[1, 0, 0, 0, 0, 0]] * 3
    assert second["agents"].tolist() == [[0, 1, 0, 0, 1, 7]] * 3
    assert reward == 5 + 2 * 7 + 3 * 6 and env.action_space.start.tolist() == [5, 5, 5]


def test_runners_sample_the_team_and_a_truncated_episode_keeps_its_final_observation():
    policy = fl.Policy(fl.networks.TeamQNetwork, hidden=(4,))
    way = {"envs_per_runner": 2, "rollout_length": 8, "explore": fl.EpsilonGreedy(1.0)}
    runners = fl.Runners(fl.envs.Joint(Relay), policy, **way).open()
    batch = runners.collect()
    runners.close()
    agents, action, valid = batch["obs"]["agents"], batch["action"], batch["valid"]
    times = np.array([0, 1, 2, 3] * 2)
    assert agents[:, :, 0, 0].tolist() == [[t, t] for t in times]
    assert valid.tolist() == [[t < 3] * 2 for t in times]
    assert batch["truncated"].tolist() == [[t == 2] * 2 for t in times]
    assert not batch["terminated"].any()
    gained = (action * [1, 2, 3]).sum(-1)
    np.testing.assert_array_equal(batch["reward"][valid], gained[valid])
    # The next row shows what the agents did, that of the end among them.
    np.testing.assert_array_equal(agents[1:, :, :, 2][valid[:-1]], action[:-1][valid[:-1]])
    # No random action is ever one that is ruled out.
    assert not (action == (times % 3)[:, None, None])[valid].any()
    assert len(np.unique(action[valid])) == 3


class Wide(Unmasked):
    def observation_space(self, agent):
        return gym.spaces.Box(-1, 99, (3 + (agent == "b"),), np.float32)


class Pushes(Unmasked):
    def action_space(self, agent):
        return gym.spaces.Box(-1, 1, (2,))


class Dies(Unmasked):
    """Agent a is out after the second step."""

    def step(self, actions):
        obs, reward, terminated, truncated, info = super().step(actions)
        terminated["a"] = self.time == 2
        return obs, reward, terminated, truncated, info


class Rests(Unmasked):
    """Agent c begins with the second step."""

    def reset(self, seed=None, options=None):
        found = super().reset(seed, options)
        self.agents = ["a", "b"]
        return found


class Broken(Unmasked):
    def __init__(self):
        raise ValueError("no such map")


class Endless(Unmasked):
    def observation_space(self, agent):
        return gym.spaces.Sequence(gym.spaces.Discrete(2))


@pytest.mark.parametrize(
    ("env", "text"),
    [
        (Wide, r"a and b of Wide have different spaces, .*policies=.separate"),
        (Pushes, r"agents of Pushes act in Box.* needs actions that are Discrete; train them as"),
        (Endless, r"Endless: what is seen in Sequence.* is no row of numbers; make it a Box"),
        (Broken, r"^Broken could not be made: ValueError: no such map \(test_joint.py:\d+\)$"),
        (lambda: gym.make("CartPole-v1"), "has but one agent; name an environment of several"),
        ("pettingzoo:mpe2.no_such_v3", "'pettingzoo:mpe2.no_such_v3' needs a package"),
        (Dies, r"Dies: the episode of a ended, and that of b, c did not; .*fl\.multi_ppo"),
        (Rests, "Rests: c did not act where a, b did; a team that acts as one agent needs agents"),
        (
            "pettingzoo:classic.tictactoe_v3",
            "tictactoe_v3: player_2 did not act where player_1 did",
        ),
    ],
)
def test_what_is_no_team_is_reported_with_a_way_out(env, text):
    with pytest.raises(fl.errors.FlowrlError, match=text):
        played(fl.envs.Joint(env)())
    assert env_name(fl.envs.Joint(env)) == f"{env_name(env)} as one agent"


def test_a_reward_is_a_sum_or_a_mean():
    with pytest.raises(fl.errors.SettingError, match="reward must be 'sum' or 'mean', got 'max'"):
        fl.envs.Joint(Relay, reward="max")


def test_agents_see_the_state_beside_what_is_their_own():
    spec = fl.Runners(
        fl.envs.WithState(Relay), MLP, envs_per_runner=1, rollout_length=8, num_runners=1
    )
    runners = spec.open()
    batch = runners.collect()
    runners.close()
    own, state = batch["obs"]["own"], batch["obs"]["state"]
    assert own[:, :, 0].tolist() == [[t] * 3 for t in [0, 1, 2, 3] * 2]
    assert own[:, :, 1].tolist() == [[0, 1, 2]] * 8
    # All agents see one state: the time, and the sum of what all did, also at an episode's end.
    assert (state == state[:, :1]).all() and (state[:, 0, 0] == own[:, 0, 0]).all()
    np.testing.assert_array_equal(state[:, 0, 1], own[:, :, 2].sum(-1))
    assert (batch["action"] != (own[..., 0] % 3))[batch["valid"]].all()


def test_without_a_state_agents_see_the_newest_observations_of_all():
    env = fl.envs.WithState(TwoCartPoles)()
    turn = env.reset(seed=3)
    both = np.concatenate([turn.obs[name]["own"] for name in env.names])
    np.testing.assert_array_equal(turn.obs["red"]["state"], both)
    while not turn.ended:
        turn = env.step(dict.fromkeys(turn.obs, np.int64(1)))
    ended = {name: end.obs for name, end in turn.ended.items()}
    seen = {**turn.obs, **ended}
    both = np.concatenate([seen[name]["own"] for name in env.names])
    for one in seen.values():
        np.testing.assert_array_equal(one["state"], both)
    # One begins again while the other goes on or waits: what it saw last is still in the state.
    later = env.step({name: np.int64(0) for name in turn.obs})
    for name, one in later.obs.items():
        place = env.names.index(name)
        np.testing.assert_array_equal(one["state"].reshape(2, 4)[place], one["own"])
    assert env_name(fl.envs.WithState(TwoCartPoles)) == "TwoCartPoles with its state"
    env.close()


def test_in_a_game_of_turns_who_saw_nothing_yet_is_zeros_in_the_state():
    pytest.importorskip("pettingzoo")
    env = fl.envs.WithState("pettingzoo:classic.tictactoe_v3")()
    (first,) = env.reset(seed=0).obs.values()
    assert first["state"].shape == (36,) and not first["state"][18:].any()
    (second,) = env.step({"player_1": np.int64(4)}).obs.values()
    np.testing.assert_array_equal(second["state"][18:], second["own"].ravel())
    assert second["state"][18:].any() and second["action_mask"].tolist()[4] == 0
    # A new game begins with nothing again.
    (again,) = env.reset(seed=1).obs.values()
    assert not again["state"][18:].any()
