"""Environments of several agents, and graphs over them."""

import gymnasium as gym

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
