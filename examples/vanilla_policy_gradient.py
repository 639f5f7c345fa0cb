"""Build the policy gradient from operators, with a loss that is a plain function.

Run it: python examples/vanilla_policy_gradient.py
"""

import jax.numpy as jnp

import flowrl as fl


def loss(policy, params, batch):
    """Return -log pi(a|s) times the advantage plus the error of the value, and two metrics."""
    # Masked rows must not count, so every mean weighs rows by `valid`.
    dist, value = policy(params, batch["obs"])
    weight = batch["valid"] / batch["valid"].sum()
    actor = -jnp.sum(weight * dist.log_prob(batch["action"]) * batch["advantage"])
    critic = jnp.sum(weight * (value - batch["target"]) ** 2)
    return actor + 0.5 * critic, {"loss/actor": actor, "loss/critic": critic}


def main(steps: int = 200_000) -> fl.Run:
    policy = fl.Policy(fl.networks.MLP, hidden=(64, 64))
    graph = fl.Graph(
        "vpg",
        runners=fl.Runners("CartPole-v1", policy, envs_per_runner=8, rollout_length=128),
        learner=fl.Learner(policy, loss, fl.Adam(1e-2)),
    ).then(
        sample=fl.ParallelSample(),
        adv=fl.Advantages(gamma=0.99, gae_lambda=1.0),
        norm=fl.Standardize(),
        train=fl.TrainOneStep(),
        sync=fl.SyncWeights(),
        report=fl.Report(every=10),
    )
    with fl.run(graph, steps=steps, until=lambda row: row["return_mean"] >= 200) as run:
        for row in run:
            print(f"{row['env_steps']:>8,} steps   return {row['return_mean']:6.1f}")
    return run


if __name__ == "__main__":
    main()
