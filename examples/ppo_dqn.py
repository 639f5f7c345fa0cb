"""Two algorithms on one stream: of four CartPoles PPO balances two, and DQN two.

Run it: python examples/ppo_dqn.py
"""

import gymnasium as gym

import flowrl as fl

NAMES = ("ppo_0", "ppo_1", "dqn_0", "dqn_1")


class CartPoles:
    """Four CartPoles with PettingZoo's interface; an agent that fell is back a step later."""

    possible_agents = NAMES

    def __init__(self):
        self.poles = gym.make_vec("CartPole-v1", len(NAMES), "sync")

    def observation_space(self, agent):
        return self.poles.single_observation_space

    def action_space(self, agent):
        return self.poles.single_action_space

    def reset(self, seed=None, options=None):
        self.agents = list(NAMES)
        return dict(zip(NAMES, self.poles.reset(seed=seed)[0], strict=True)), {}

    def step(self, actions):
        *found, _ = self.poles.step([actions.get(name, 0) for name in NAMES])
        obs, reward, fell, cut = (dict(zip(NAMES, x, strict=True)) for x in found)
        self.agents = [name for name in NAMES if not (fell[name] or cut[name])]
        return obs, reward, fell, cut, {}

    def close(self):
        self.poles.close()


def graph() -> fl.Graph:
    mlp, q = fl.Policy(fl.networks.MLP), fl.Policy(fl.networks.QNetwork)
    team = fl.Team(ppo=mlp, dqn=q, of={name: name[:3] for name in NAMES})
    explore = {"dqn": fl.EpsilonGreedy(steps=20_000)}
    falling = fl.Linear(1e-3, 0.0, 25_000)  # over the gradient steps of 100,000 environment steps
    return (
        fl.Graph(
            "ppo_dqn",
            runners=fl.Runners(CartPoles, team, rollout_length=64, explore=explore),
            ppo=fl.Learner(mlp, fl.losses.PPOLoss(), fl.Adam(1e-3), runners="runners.ppo"),
            dqn=fl.Learner(q, fl.losses.DQNLoss(), fl.Adam(falling), runners="runners.dqn"),
            replay=fl.Replay(100_000, n_step=3, runners="runners.dqn"),
        )
        .then(
            sample=fl.ParallelSample(),
            of_ppo=fl.Select("ppo"),
            adv=fl.Advantages(gamma=0.98, gae_lambda=0.8, learner="ppo"),
            norm=fl.Standardize(),
            ppo_train=fl.TrainOneStep(epochs=4, minibatch_size=128, learner="ppo"),
            ppo_sync=fl.SyncWeights(learner="ppo", runners="runners.ppo"),
        )
        .then(
            after="sample",
            of_dqn=fl.Select("dqn"),
            add=fl.ReplayAdd(),
            batch=fl.ReplaySample(64, learning_starts=1_000, updates_per_step=1 / 8),
            dqn_train=fl.TrainOneStep(learner="dqn", shuffle=False),
            target=fl.UpdateTarget(every=200, learner="dqn"),
            dqn_sync=fl.SyncWeights(learner="dqn", runners="runners.dqn"),
        )
        .then(after=("ppo_sync", "dqn_sync"), all=fl.Merge(), report=fl.Report(every=129))
    )


def main(steps: int = 100_000) -> fl.Run:
    with fl.run(graph(), steps=steps) as run:
        for row in run:
            returns = (f"{name} {row[f'return_mean/{name}']:6.1f}" for name in ("ppo", "dqn"))
            print(f"{row['env_steps']:>8,} steps   return of {'   '.join(returns)}")
    return run


if __name__ == "__main__":
    main()
