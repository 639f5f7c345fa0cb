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
