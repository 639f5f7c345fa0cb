"""An operator of one's own: settings, a state that the runtime owns, and a step. Here: clip the rewards, and count how many.

Run it: python examples/custom_operator.py
"""

from collections.abc import Iterator
from dataclasses import dataclass

import jax.numpy as jnp

import flowrl as fl


@dataclass(frozen=True)
class ClipRewards(fl.Stateless):
    """Clip rewards to [-limit, limit]. Maths on arrays goes through `ctx.run`: compiled once, traced for the plan."""

    limit: float = 1.0

    def step(self, state: None, batch: fl.Batch, ctx: fl.Context) -> Iterator[fl.Batch]:
        yield batch.with_(reward=ctx.run(clipped, batch["reward"], limit=self.limit))


def clipped(reward, *, limit):
    return jnp.clip(reward, -limit, limit)


def main(steps: int = 20_000) -> fl.Run:
    graph = fl.ppo("Pendulum-v1").insert(after="sample", clip=ClipRewards(limit=4.0))
    print(graph.draw())
    with fl.run(graph, steps=steps) as run:
        for row in run:
            print(f"{row['env_steps']:>8,} steps   return {row['return_mean']:8.1f}")
    return run


if __name__ == "__main__":
    main()
