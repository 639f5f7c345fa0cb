"""AlphaZero (Silver et al. 2018) on tic-tac-toe: a policy that searches before it acts.

Run it: pip install mctx && python examples/alphazero.py
"""

import jax
import jax.numpy as jnp
import mctx
from flax import nnx

import flowrl as fl

LINES = [(0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6)]


class SearchingNetwork(nnx.Module):
    """A network whose call returns the policy that a tree search makes of the network's own."""

    def __init__(self, obs_space, action_space, *, hidden=64, simulations=50, rngs):
        self.first = nnx.Linear(18, hidden, rngs=rngs)
        self.second = nnx.Linear(hidden, hidden, rngs=rngs)
        self.outputs = nnx.Linear(hidden, 10, rngs=rngs)
        self.simulations = simulations

    def plain(self, boards):
        """Logits [N, 9], values [N] of boards [N, 3, 3, 2]: one's own and the other's marks."""
        x = nnx.relu(self.first(boards.reshape(-1, 18).astype(jnp.float32)))
        numbers = self.outputs(nnx.relu(self.second(x)))
        logits = jnp.where(boards.any(-1).reshape(-1, 9), -1e9, numbers[:, :9])
        return logits, jnp.tanh(numbers[:, 9])

    def __call__(self, boards):
        boards = boards.astype(bool)
        logits, value = self.plain(boards)
        # Moves at random, a quarter of all, show it other games: the search itself needs no noise.
        found = mctx.muzero_policy(
            (),
            jax.random.key(0),
            mctx.RootFnOutput(prior_logits=logits, value=value, embedding=boards),
            self.after,
            self.simulations,
            invalid_actions=boards.any(-1).reshape(-1, 9),
            dirichlet_fraction=0.0,
        )
        return jnp.log(found.action_weights + 1e-9), value

    def after(self, _params, _key, action, boards):
        """The rules: what a move leads to, as the next player sees it."""
        own = boards[..., 0].reshape(-1, 9) | (jnp.arange(9) == action[:, None])
        other = boards[..., 1].reshape(-1, 9)
        won = own[:, jnp.array(LINES)].all(-1).any(-1)
        over = won | (own | other).all(-1)
        boards = jnp.stack([other, own], axis=-1).reshape(-1, 3, 3, 2)
        logits, value = self.plain(boards)
        # What is good for the next player is bad for this one.
        discount, reward = jnp.where(over, 0.0, -1.0), won.astype(jnp.float32)
        found = {"reward": reward, "discount": discount, "prior_logits": logits, "value": value}
        return mctx.RecurrentFnOutput(**found), boards


def alphazero_loss(policy, params, batch):
    """Towards the moves that the search chose, and towards the result of the game."""
    logits, value = policy(params, batch["obs"], method="plain")
    logp = nnx.log_softmax(logits)
    taken = jnp.take_along_axis(logp, batch["action"][:, None], axis=1)[:, 0]
    mean = fl.losses.masked_mean  # over the rows that are valid
    policy_loss = -mean(taken, batch["valid"])
    value_loss = mean((value - batch["target"]) ** 2, batch["valid"])
    return policy_loss + value_loss, {"loss/policy": policy_loss, "loss/value": value_loss}


def graph() -> fl.Graph:
    policy = fl.Policy(SearchingNetwork)
    ppo = fl.ppo(
        "pettingzoo:classic.tictactoe_v3", policy=policy, envs_per_runner=64, rollout_length=16,
        batch_size=2048, minibatch_size=256, epochs=2, gamma=1.0, gae_lambda=1.0,
    )  # fmt: skip
    return ppo.rename("alphazero").replace(
        learner=fl.Learner(policy, alphazero_loss, fl.Adam(2e-3))
    )


def main(steps: int = 100_000) -> fl.Run:
    with fl.run(graph(), steps=steps) as run:
        for row in run:
            print(f"{row['env_steps']:>8,} steps   loss {row['loss']:.2f}")
    return run


if __name__ == "__main__":
    run = main()
    print(fl.match({"alphazero": run.policy, "random": fl.Scripted()}, episodes=1_000))
