"""Rule out actions by a mask: a CartPole whose motor overheats after 3 pushes to the same side.

Run it: python examples/action_mask.py
"""

import gymnasium as gym
import numpy as np

import flowrl as fl


class Overheating(gym.Wrapper):
    """CartPole whose `info["action_mask"]` says which pushes are possible now.

    A network does not see the mask, so the observation holds how often the motor pushed, too.
    """

    def __init__(self, most=3):
        super().__init__(gym.make("CartPole-v1"))
        self.most = most
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (5,), np.float32)

    def reset(self, **how):
        self.side, self.pushes = 0, 0
        obs, info = self.env.reset(**how)
        return self.seen(obs), {**info, "action_mask": self.mask()}

    def step(self, action):
        if not self.mask()[action]:
            raise ValueError(f"the motor is too hot to push to side {action} again")
        self.pushes = self.pushes + 1 if action == self.side else 1
        self.side = action
        obs, reward, terminated, truncated, info = self.env.step(action)
        info = {**info, "action_mask": self.mask()}
        return self.seen(obs), reward, terminated, truncated, info

    def seen(self, obs):
        heat = self.pushes / self.most * (1 if self.side else -1)
        return np.append(obs, heat).astype(np.float32)

    def mask(self):
        possible = np.ones(2, np.int8)
        if self.pushes == self.most:
            possible[self.side] = 0
        return possible


def main(steps: int = 50_000) -> fl.Run:
    with fl.run(fl.ppo(Overheating), steps=steps) as run:
        for row in run:
            print(f"{row['env_steps']:>8,} steps   return {row['return_mean']:6.1f}")
    return run


if __name__ == "__main__":
    main()
