"""MAML (Finn et al. 2017): runners adapt to a task, and send the gradient of how well they did.

Each episode is a task: a sine wave of another amplitude and phase, of which a step shows a place x
and, as its reward, the height there. A runner adapts the weights to the first half of the points;
the loss is the error that is left on the second half. Run it: python examples/maml.py
"""

from dataclasses import dataclass
from typing import ClassVar

import gymnasium as gym
import jax
import numpy as np

import flowrl as fl

POINTS = 20
"""The points of a task, half of which are adapted to."""


class Sines(gym.Env):
    """Shows points of a sine wave, another one in each episode; actions do nothing."""

    observation_space = gym.spaces.Box(-5.0, 5.0, (1,))
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.amplitude = self.np_random.uniform(0.1, 5.0)
        self.phase = self.np_random.uniform(0.0, np.pi)
        self.left = POINTS
        return self._place(), {}

    def step(self, action):
        height = float(self.amplitude * np.sin(self.x - self.phase))
        self.left -= 1
        return self._place(), height, False, self.left == 0, {}

    def _place(self):
        self.x = self.np_random.uniform(-5.0, 5.0)
        return np.float32([self.x])


@dataclass(frozen=True)
class MAMLLoss(fl.losses.Loss):
    """The error on the second half of each column, after gradient steps on its first half."""

    inner_lr: float = 0.02
    inner_steps: int = 1

    needs: ClassVar[tuple[str, ...]] = ("obs", "reward")
    on_policy: ClassVar[bool] = False
    sequences: ClassVar[bool] = True  # it takes whole tasks

    def __call__(self, policy, params, batch):
        def error(params, obs, height):
            _, value = policy(params, obs[:, None])
            return ((value[:, 0] - height) ** 2).mean()

        def task(obs, height):
            half, adapted = POINTS // 2, params
            for _ in range(self.inner_steps):
                gradient = jax.grad(error)(adapted, obs[:half], height[:half])
                adapted = jax.tree.map(lambda x, g: x - self.inner_lr * g, adapted, gradient)
            # The row after the last point is the reset to another task.
            rest = obs[half:POINTS], height[half:POINTS]
            return error(params, *rest), error(adapted, *rest)

        before, after = jax.vmap(task, in_axes=1)(batch["obs"], batch["reward"])
        return after.mean(), {"error/before": before.mean(), "error/after": after.mean()}


def graph(report_every: int = 25) -> fl.Graph:
    policy = fl.Policy(fl.networks.MLP, hidden=(40, 40))
    runners = fl.Runners(Sines, policy, 2, envs_per_runner=16, rollout_length=POINTS + 1)
    learner = fl.Learner(policy, MAMLLoss(), fl.Adam(1e-3))
    # The adaptation is within the loss, so it happens at the runners. Gradients travel, and neither
    # points nor adapted weights.
    return fl.Graph("maml", runners=runners, learner=learner).then(
        sample=fl.ParallelSample(local=fl.chain(grads=fl.ComputeGradients())),
        apply=fl.ApplyGradients(),
        sync=fl.SyncWeights(),
        report=fl.Report(every=report_every),
    )


def main(steps: int = 1_000_000, **settings) -> fl.Run:
    with fl.run(graph(**settings), steps=steps) as run:
        for row in run:
            print(
                f"{row['env_steps']:>9,} steps, return {row['return_mean']:6.2f}, error "
                f"{row['error/before']:5.2f}, and {row['error/after']:5.2f} after a step"
            )
    return run


if __name__ == "__main__":
    main()
