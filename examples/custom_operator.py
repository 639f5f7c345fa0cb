"""Write an operator: its settings, a state that the runtime keeps, and a step.

Run it: python examples/custom_operator.py
"""

from dataclasses import dataclass

import jax.numpy as jnp

import flowrl as fl


@dataclass(frozen=True)
class ClipRewards(fl.extend.Operator):
    """Clip rewards to [-limit, limit]; the limit rises from 0 to `end` over `steps` steps."""

    end: float = 4.0
    steps: int = 10_000

    def init(self):
        # The whole state, which `step` changes in place. What grows for ever is an array.
        return {"steps": jnp.float32(0)}

    def step(self, state, batch, ctx):
        state["steps"] = state["steps"] + batch.steps
        share = jnp.minimum(1, state["steps"] / self.steps)
        # Maths on arrays goes through `ctx.run`: it is compiled once, and traced for the plan.
        yield batch.with_(reward=ctx.run(clipped, batch["reward"], share, end=self.end))


def clipped(reward, share, *, end):
    return jnp.clip(reward, -end * share, end * share)


def main(steps: int = 20_000) -> fl.Run:
    graph = fl.ppo("Pendulum-v1").insert(after="sample", clip=ClipRewards())
    with fl.run(graph, steps=steps) as run:
        for row in run:
            print(f"{row['env_steps']:>8,} steps   return {row['return_mean']:8.1f}")
    return run


if __name__ == "__main__":
    main()
