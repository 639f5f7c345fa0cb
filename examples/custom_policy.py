"""Write a network: any Flax NNX module that is built from the spaces, without a base class.

Run it: python examples/custom_policy.py
"""

from flax import nnx

import flowrl as fl


class Residual(nnx.Module):
    """Compute action outputs [N, n] and values [N] from observations [N, ...]."""

    def __init__(self, obs_space, action_space, *, width=64, blocks=2, rngs):
        self.first = nnx.Linear(obs_space.shape[0], width, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(width, width, rngs=rngs) for _ in range(blocks)])
        self.action = nnx.Linear(width, fl.networks.action_outputs(action_space), rngs=rngs)
        self.value = nnx.Linear(width, 1, rngs=rngs)

    def __call__(self, obs):
        x = self.first(obs)
        for block in self.blocks:
            x = x + nnx.silu(block(x))
        return self.action(x), self.value(x)[:, 0]


def main(steps: int = 50_000) -> fl.Run:
    policy = fl.Policy(Residual, width=64, blocks=2)
    graph = fl.ppo("CartPole-v1", fl.PPOSettings(policy=policy, lr=1e-3))
    with fl.run(graph, steps=steps) as run:
        for row in run:
            print(f"{row['env_steps']:>8,} steps   return {row['return_mean']:6.1f}")
    return run


if __name__ == "__main__":
    main()
