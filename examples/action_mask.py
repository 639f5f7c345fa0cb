"""Rule out actions by a mask: a CartPole whose motor overheats after 3 pushes to the same side.

Run it: python examples/action_mask.py
"""

import gymnasium as gym
import numpy as np

import flowrl as fl


class Overheating(gym.Wrapper):
    """CartPole whose info["action_mask"] says which pushes are possible now.

    A network does not see the mask, so the observation holds how hot the motor is, too.
    """

    def __init__(self):
        super().__init__(gym.make("CartPole-v1"))
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (5,), np.float32)

    def reset(self, **how):
        self.heat = 0  # pushes in a row: below 0 to the left, above 0 to the right
        obs, info = self.env.reset(**how)
        return self.seen(obs), {**info, "action_mask": self.mask()}

    def step(self, action):
        if not self.mask()[action]:
            raise ValueError("the motor is too hot to push to this side again")
        self.heat = max(self.heat, 0) + 1 if action else min(self.heat, 0) - 1
        obs, reward, terminated, truncated, info = self.env.step(action)
        info = {**info, "action_mask": self.mask()}
        return self.seen(obs), reward, terminated, truncated, info

    def seen(self, obs):
        return np.append(obs, self.heat / 3).astype(np.float32)

    def mask(self):
        return np.array([self.heat > -3, self.heat < 3], np.int8)


def main(steps: int = 50_000) -> fl.Run:
    with fl.run(fl.ppo(Overheating), steps=steps) as run:
        for row in run:
            print(f"{row['env_steps']:>8,} steps   return {row['return_mean']:6.1f}")
    return run


if __name__ == "__main__":
    main()
