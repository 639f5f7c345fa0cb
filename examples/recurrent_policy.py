"""Train an LSTM with IMPALA on CartPole without velocities, where a policy has to remember.

Run it: python examples/recurrent_policy.py
"""

import gymnasium as gym
import numpy as np

import flowrl as fl


class HideVelocities(gym.ObservationWrapper):
    """Show only the position of the cart and the angle of the pole."""

    def __init__(self, env):
        super().__init__(env)
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def observation(self, observation):
        return observation[[0, 2]]


def graph() -> fl.Graph:
    settings = fl.IMPALASettings(
        policy=fl.Policy(fl.networks.RNN, cell="lstm"),
        lr=fl.Linear(1e-3, 1e-5, 1_200),  # a rate that stays high forgets again what it found
        max_grad_norm=0.5,
    )
    return fl.impala("CartPole-v1", settings).set("runners.wrappers", (HideVelocities,))


def main(steps: int = 600_000) -> fl.Run:
    with fl.run(graph(), steps=steps, until=lambda row: row["return_mean"] >= 350) as run:
        for row in run:
            print(f"{row['env_steps']:>8,} steps   return {row['return_mean']:6.1f}")
    return run


if __name__ == "__main__":
    main()
