"""Environments of several agents, and graphs over them."""

import gymnasium as gym
import numpy as np

import flowrl as fl

MLP = fl.Policy(fl.networks.MLP, hidden=(8,))
NAMES = ("red", "blue")


class TwoCartPoles:
    """Two CartPoles, each begun again alone; an agent whose pole fell comes back a step later."""

    possible_agents = ("red", "blue")

    def __init__(self, red=0, blue=1_000):
        self.poles = {name: gym.make("CartPole-v1") for name in self.possible_agents}
        self.offset = {"red": red, "blue": blue}

    def observation_space(self, agent):
        return self.poles[agent].observation_space

    def action_space(self, agent):
        return self.poles[agent].action_space

    def reset(self, seed=None, options=None):
        self.agents = list(self.possible_agents)
        seeds = {name: seed if seed is None else seed + self.offset[name] for name in self.agents}
        return {name: self.poles[name].reset(seed=seeds[name])[0] for name in self.agents}, {}

    def step(self, actions):
        obs, reward, terminated, truncated = {}, {}, {}, {}
        for name, pole in self.poles.items():
            if name in actions:
                obs[name], reward[name], terminated[name], truncated[name], _ = pole.step(
                    actions[name]
                )
            else:
                obs[name], _ = pole.reset()
                reward[name], terminated[name], truncated[name] = 0.0, False, False
        self.agents = [name for name in obs if not (terminated[name] or truncated[name])]
        return obs, reward, terminated, truncated, {}

    def close(self):
        for pole in self.poles.values():
            pole.close()


def two_learners(env=TwoCartPoles, policy=MLP, **runners):
    """PPO twice: each agent has a policy and a learner of its own."""
    runners = {"envs_per_runner": 4, "rollout_length": 16, **runners}

    def learner(name):
        loss = fl.losses.PPOLoss()
        return fl.Learner(policy, loss, fl.Adam(1e-3), runners=f"runners.{name}")

    graph = fl.Graph(
        "two",
        runners=fl.Runners(env, fl.Team(red=policy, blue=policy), **runners),
        red=learner("red"),
        blue=learner("blue"),
    ).then(sample=fl.ParallelSample())
    for name in NAMES:
        nodes = {
            "select": fl.Select(name),
            "adv": fl.Advantages(gamma=0.98, gae_lambda=0.8, learner=name),
            "norm": fl.Standardize(),
            "train": fl.TrainOneStep(epochs=2, minibatch_size=32, learner=name),
            "sync": fl.SyncWeights(learner=name, runners=f"runners.{name}"),
        }
        graph = graph.then(after="sample", **{f"{key}_{name}": op for key, op in nodes.items()})
    ends = tuple(f"sync_{name}" for name in NAMES)
    return graph.then(after=ends, both=fl.Merge(), report=fl.Report(every=2))


def ppo_and_dqn(env=TwoCartPoles, **runners):
    """Two algorithms on one stream: red learns by PPO, and blue by DQN from a replay."""
    q = fl.Policy(fl.networks.QNetwork, hidden=(8,))
    ways = {"blue": fl.EpsilonGreedy(0.1)}
    runners = {"envs_per_runner": 4, "rollout_length": 16, "explore": ways, **runners}
    return (
        fl.Graph(
            "both",
            runners=fl.Runners(env, fl.Team(red=MLP, blue=q), **runners),
            red=fl.Learner(MLP, fl.losses.PPOLoss(), fl.Adam(1e-3), runners="runners.red"),
            blue=fl.Learner(q, fl.losses.DQNLoss(), fl.Adam(1e-3), runners="runners.blue"),
            replay=fl.Replay(2_000, runners="runners.blue"),
        )
        .then(
            sample=fl.ParallelSample(),
            select_red=fl.Select("red"),
            adv=fl.Advantages(learner="red"),
            train_red=fl.TrainOneStep(learner="red"),
            sync_red=fl.SyncWeights(learner="red", runners="runners.red"),
        )
        .then(
            after="sample",
            select_blue=fl.Select("blue"),
            add=fl.ReplayAdd(),
            replayed=fl.ReplaySample(32, learning_starts=64, updates_per_step=1 / 32),
            train_blue=fl.TrainOneStep(learner="blue", shuffle=False),
            target=fl.UpdateTarget(every=4, learner="blue"),
            sync_blue=fl.SyncWeights(learner="blue", runners="runners.blue"),
        )
        .then(after=("sync_red", "sync_blue"), both=fl.Merge(), report=fl.Report(every=3))
    )


class Relay:
    """A team whose rewards, masks and states follow from its actions, so that a list shows them.

    Agent i of three sees the time, its number and its last action, may not take action `time % 3`,
    and gains (i + 1) times its action. Episodes end after `length` steps.
    """

    possible_agents = ("a", "b", "c")
    state_space = gym.spaces.Box(-1, 99, (2,), np.float32)
    masked, truncates = True, True

    def __init__(self, length=3):
        self.length = length
        self.actions = self.time = 0

    def observation_space(self, agent):
        seen = gym.spaces.Box(-1, 99, (3,), np.float32)
        mask = gym.spaces.Box(0, 1, (3,), np.int8)
        return gym.spaces.Dict(observation=seen, action_mask=mask) if self.masked else seen

    def action_space(self, agent):
        return gym.spaces.Discrete(3)

    def state(self):
        return np.array([self.time, sum(self.actions.values())], np.float32)

    def seen(self):
        found = {}
        for i, name in enumerate(self.possible_agents):
            obs = np.array([self.time, i, self.actions[name]], np.float32)
            mask = (np.arange(3) != self.time % 3).astype(np.int8)
            found[name] = {"observation": obs, "action_mask": mask} if self.masked else obs
        return found

    def reset(self, seed=None, options=None):
        self.agents, self.time = list(self.possible_agents), 0
        self.actions = dict.fromkeys(self.agents, 0)
        return self.seen(), {}

    def step(self, actions):
        self.time, self.actions = self.time + 1, {k: int(v) for k, v in actions.items()}
        reward = {name: (i + 1.0) * self.actions[name] for i, name in enumerate(self.agents)}
        over = self.time == self.length
        terminated = dict.fromkeys(self.agents, over and not self.truncates)
        truncated = dict.fromkeys(self.agents, over and self.truncates)
        self.agents = [] if over else self.agents
        return self.seen(), reward, terminated, truncated, {}

    def close(self):
        pass


class Unmasked(Relay):
    masked = False


class Alone(Unmasked):
    """A team of one."""

    possible_agents = ("a",)
