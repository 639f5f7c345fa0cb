"""An operator of one's own: settings, a state that the runtime keeps, and a step. Here: rewards are clipped, at first closely.

The limit widens with the steps that went by, so the operator counts them: in `init`'s dict, which `step` changes in place.
Run it: python examples/custom_operator.py
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

import flowrl as fl


@dataclass(frozen=True)
class ClipRewards(fl.Operator):
    """Clip rewards to [-limit, limit]; the limit rises from `start` to `end` over `steps` steps."""

    start: float = 1.0
    end: float = 4.0
    steps: int = 10_000

    def init(self) -> dict[str, Any]:
        # A NumPy number that grows for ever: the runtimes carry it along, as an array where the graph is one XLA program.
        return {"steps": np.float32(0)}

    def step(self, state: dict[str, Any], batch: fl.Batch, ctx: fl.Context) -> Iterator[fl.Batch]:
        # Maths on arrays goes through `ctx.run`: it is compiled once, and traced for the plan.
        settings = {"start": self.start, "end": self.end, "steps": self.steps}
        reward = ctx.run(clipped, batch["reward"], state["steps"], **settings)
        state["steps"] = state["steps"] + np.float32(batch.steps)
        yield batch.with_(reward=reward)


def clipped(reward, gone, *, start, end, steps):
    limit = start + (end - start) * jnp.minimum(gone / steps, 1.0)
    return jnp.clip(reward, -limit, limit)


def main(steps: int = 20_000) -> fl.Run:
    graph = fl.ppo("Pendulum-v1").insert(after="sample", clip=ClipRewards())
    print(graph.draw())
    with fl.run(graph, steps=steps) as run:
        for row in run:
            print(f"{row['env_steps']:>8,} steps   return {row['return_mean']:8.1f}")
    return run


if __name__ == "__main__":
    main()
