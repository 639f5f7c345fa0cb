"""An operator of one's own: settings, a state that the runtime keeps, and a step. Run it: python examples/custom_operator.py."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

import flowrl as fl


@dataclass(frozen=True)
class ClipRewards(fl.Operator):
    """Clip rewards to [-limit, limit]; the limit rises from 0 to `end` over the first `steps` steps, so the operator counts them."""

    end: float = 4.0
    steps: int = 10_000

    def init(
        self,
    ):  # the whole state: what `step` changes in place. A NumPy number goes on within an XLA program, too
        return {"steps": np.float32(0)}

    def step(self, state, batch, ctx):
        state["steps"] = state["steps"] + np.float32(batch.steps)
        yield batch.with_(
            reward=ctx.run(
                clipped, batch["reward"], jnp.minimum(1, state["steps"] / self.steps), end=self.end
            )
        )


def clipped(
    reward, share, *, end
):  # maths on arrays goes through `ctx.run`: compiled once, traced for the plan
    return jnp.clip(reward, -end * share, end * share)


def main(steps: int = 20_000) -> fl.Run:
    with fl.run(
        fl.ppo("Pendulum-v1").insert(after="sample", clip=ClipRewards()), steps=steps
    ) as run:
        for row in run:
            print(f"{row['env_steps']:>8,} steps   return {row['return_mean']:8.1f}")
    return run


if __name__ == "__main__":
    main()
