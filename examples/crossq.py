"""Write a new algorithm: CrossQ (Bhatt et al. 2024), of a network, a loss and optimisers.

It is SAC without target networks: critics with batch normalisation evaluate a transition's two
pairs of observation and action in one call, so that the moments of both are those of their mixture.

Run it: python examples/crossq.py
"""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

import flowrl as fl


class NormedCritic(nnx.Module):
    """Values of inputs, normalised before each layer: by the moments of the batch, or running."""

    def __init__(self, inputs, hidden, *, rngs):
        sizes = (inputs, *hidden)
        self.norms = nnx.List([nnx.BatchNorm(n, momentum=0.99, rngs=rngs) for n in sizes])
        layers = zip(sizes, (*hidden, 1), strict=True)
        self.layers = nnx.List([nnx.Linear(n, m, rngs=rngs) for n, m in layers])

    def __call__(self, x, *, training):
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = jax.nn.relu(x) if layer is not self.layers[0] else x
            x = layer(norm(x, use_running_average=not training))
        return x[:, 0]


class CrossQNetwork(fl.networks.SACNetwork):
    """The actor and the temperature of SAC, and two critics with batch normalisation."""

    parameter_groups: ClassVar = {
        "actor": ("actor", "action", "log_temperature"),
        "critic": ("critics",),
    }

    def __init__(self, obs_space, action_space, *, hidden=(256, 256), rngs):
        super().__init__(obs_space, action_space, hidden=hidden, rngs=rngs)
        inputs = self.encoder.size + action_space.shape[0]
        self.critics = nnx.List([NormedCritic(inputs, hidden, rngs=rngs) for _ in range(2)])
        del self.values  # the last layers of SAC's critics

    def critic(self, obs, action, *, training=False):
        x = jnp.concatenate([self.encoder(obs), action], axis=-1)
        return jnp.stack([critic(x, training=training) for critic in self.critics])

    def both_values(self, obs, action, next_obs, next_action):
        """The values [2, N] of both pairs, normalised by the moments of all of them together."""
        pairs = jnp.concatenate([obs, next_obs]), jnp.concatenate([action, next_action])
        return jnp.split(self.critic(*pairs, training=True), 2, axis=1)


@dataclass(frozen=True)
class CrossQLoss(fl.losses.Loss):
    """SAC's loss, whose targets come from the critics themselves."""

    # What `check` and the plan know of the loss:
    needs: ClassVar[tuple[str, ...]] = ("obs", "action", "reward", "next_obs", "discount")
    on_policy: ClassVar[bool] = False  # data of any policy lag will do
    priorities: ClassVar[bool] = True  # the metric `priority` serves a prioritised replay
    random: ClassVar[bool] = True  # the batch holds `seed`, random numbers for each row

    def check(self, net):
        if net.head.kind != "tanh_gaussian":
            return f"CrossQLoss needs squashed actions and critics (CrossQNetwork), not {net.name}"
        return ""

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
        next_dist = policy(fixed, batch["next_obs"])[0]
        next_action, next_logp = next_dist.sample_and_log_prob(noise[:, 1])
        pairs = obs, batch["action"], batch["next_obs"], next_action
        values, next_values = policy(params, *pairs, method="both_values")
        target = batch["reward"] + batch["discount"] * (next_values.min(0) - alpha * next_logp)
        error = values - jax.lax.stop_gradient(target)

        mean, valid = fl.losses.masked_mean, batch["valid"]  # over the rows that are valid
        entropy = -mean(logp, valid)
        surplus = jax.lax.stop_gradient(entropy + batch["action"].shape[-1])
        loss = mean((error**2).sum(0), valid) + mean(alpha * logp - climbed, valid)
        return loss + log_alpha * surplus, {
            "alpha": alpha,
            "entropy": entropy,
            "q_mean": mean(target, valid),
            "td_error": mean(jnp.abs(error).mean(0), valid),
            "priority": jnp.abs(error).mean(0),
        }


def crossq(env="Pendulum-v1", lr=1e-3, delay=3, hidden=(256, 256), learning_starts=1_000):
    policy, adam = fl.Policy(CrossQNetwork, hidden=hidden), fl.Adam(lr, b1=0.5)
    optimizers = fl.Optimizers(actor=adam, critic=adam, every={"actor": delay})
    graph = fl.sac(env, policy=policy, learning_starts=learning_starts, report_every=500)
    graph = graph.replace(learner=fl.Learner(policy, CrossQLoss(), optimizers))
    return graph.remove("target").rename("crossq")


def main(steps: int = 5_000, hidden: tuple[int, ...] = (256, 256)) -> fl.Run:
    with fl.run(crossq(hidden=hidden), steps=steps) as run:
        for row in run:
            print(f"{row['env_steps']:>8,} steps   return {row['return_mean']:8.1f}")
    print(run.policy.evaluate(5))
    return run


if __name__ == "__main__":
    main()
