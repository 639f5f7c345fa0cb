"""Write a new algorithm: CrossQ (Bhatt et al. 2024), of a network, a loss and optimisers.

SAC without target networks: its critics normalise both pairs of a transition in one call.

Run it: python examples/crossq.py
"""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

import flowrl as fl


def critic(inputs, hidden, rngs):
    """Layers that are each normalised first: by the moments of the batch, or running ones."""
    layers = []
    for n, m in zip((inputs, *hidden), (*hidden, 1), strict=True):
        layers += [nnx.BatchNorm(n, rngs=rngs), nnx.Linear(n, m, rngs=rngs), jax.nn.relu]
    return nnx.Sequential(*layers[:-1])


class CrossQNetwork(fl.networks.SACNetwork):
    """The actor and the temperature of SAC, and two critics with batch normalisation."""

    def __init__(self, obs_space, action_space, *, hidden=(256, 256), rngs):
        super().__init__(obs_space, action_space, hidden=hidden, rngs=rngs)
        inputs = self.encoder.size + action_space.shape[0]
        self.critics = nnx.List([critic(inputs, hidden, rngs) for _ in range(2)])
        self.critics.eval()  # by running moments
        del self.values  # the last layers of SAC's critics, which these have themselves

    def critic(self, obs, action):
        x = jnp.concatenate([self.encoder(obs), action], axis=-1)
        return jnp.stack([critic(x)[:, 0] for critic in self.critics])

    def both_values(self, obs, action, next_obs, next_action):
        """The values [2, N] of both pairs, normalised by the moments of all of them together."""
        self.critics.train()
        pairs = jnp.concatenate([obs, next_obs]), jnp.concatenate([action, next_action])
        return jnp.split(self.critic(*pairs), 2, axis=1)


@dataclass(frozen=True)
class CrossQLoss(fl.losses.Loss):
    """SAC's loss, whose targets come from the critics themselves."""

    # What `check` and the plan know of the loss:
    needs: ClassVar[tuple[str, ...]] = ("obs", "action", "reward", "next_obs", "discount")
    on_policy: ClassVar[bool] = False  # data of any policy lag will do
    random: ClassVar[bool] = True  # the batch holds `seed`, random numbers for each row

    def __call__(self, policy, params, batch):
        fixed, obs = jax.lax.stop_gradient(params), batch["obs"]
        keys = jax.random.wrap_key_data(batch["seed"])
        noise = jax.vmap(lambda key: jax.random.normal(key, (2, *batch["action"].shape[1:])))(keys)
        log_alpha = policy(params, method="log_alpha")
        alpha = jnp.exp(jax.lax.stop_gradient(log_alpha))

        # The actor climbs the critics as they are, with their running moments.
        action, logp = policy(params, obs)[0].sample_and_log_prob(noise[:, 0])
        climbed = policy(fixed, obs, action, method="critic").min(0)
        # Only now do the critics see the batch, which changes those moments.
        next_obs = batch["next_obs"]
        next_action, next_logp = policy(fixed, next_obs)[0].sample_and_log_prob(noise[:, 1])
        pairs = obs, batch["action"], next_obs, next_action
        values, next_values = policy(params, *pairs, method="both_values")
        target = batch["reward"] + batch["discount"] * (next_values.min(0) - alpha * next_logp)
        error = values - jax.lax.stop_gradient(target)

        mean, valid = fl.losses.masked_mean, batch["valid"]  # over the rows that are valid
        entropy = -mean(logp, valid)
        surplus = jax.lax.stop_gradient(entropy + batch["action"].shape[-1])
        loss = mean((error**2).sum(0), valid) + mean(alpha * logp - climbed, valid)
        metrics = {"alpha": alpha, "td_error": mean(jnp.abs(error).mean(0), valid)}
        return loss + log_alpha * surplus, metrics


def crossq(env="Pendulum-v1", lr=1e-3, delay=3, hidden=(256, 256), learning_starts=1_000):
    policy, adam = fl.Policy(CrossQNetwork, hidden=hidden), fl.Adam(lr, b1=0.5)
    delays = {"actor": delay, "temperature": delay}
    optimizers = fl.Optimizers(actor=adam, critic=adam, temperature=adam, every=delays)
    graph = fl.sac(env, policy=policy, learning_starts=learning_starts, report_every=500)
    learner = fl.Learner(policy, CrossQLoss(), optimizers)
    return graph.replace(learner=learner).remove("target").rename("crossq")


def main(steps: int = 5_000, hidden: tuple[int, ...] = (256, 256)) -> fl.Run:
    with fl.run(crossq(hidden=hidden), steps=steps) as run:
        for row in run:
            print(f"{row['env_steps']:>8,} steps   return {row['return_mean']:8.1f}")
    print(run.policy.evaluate(5))
    return run


if __name__ == "__main__":
    main()
