"""Write a new algorithm: TD3 (Fujimoto et al. 2018), of a network, a loss and an optimiser.

Run it: python examples/td3.py
"""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import optax

import flowrl as fl


class TD3Network(fl.networks.SACNetwork):
    """The actor and the two critics of SAC; only the actor's mean is used."""


@dataclass(frozen=True)
class TD3Loss(fl.losses.Loss):
    """Two critics that learn from smoothed target actions, and an actor that climbs the first."""

    smoothing: float = 0.2  # deviation of the noise on target actions
    noise_clip: float = 0.5  # its largest size

    # What `check` and the plan know of the loss:
    needs: ClassVar[tuple[str, ...]] = ("obs", "action", "reward", "next_obs", "discount")
    on_policy: ClassVar[bool] = False  # data of any policy lag will do
    target_network: ClassVar[bool] = True  # the batch holds `target_params`
    priorities: ClassVar[bool] = True  # the metric `priority` serves a prioritised replay
    random: ClassVar[bool] = True  # the batch holds `seed`, random numbers for each row

    def check(self, net):
        if net.head.kind != "tanh_gaussian":
            return f"TD3Loss needs squashed actions and critics (TD3Network), not {net.name}"
        return ""

    def __call__(self, policy, params, batch):
        fixed, target_params = jax.lax.stop_gradient(params), batch["target_params"]

        # The target: the smaller value of both critics, at a next action with some noise.
        keys = jax.random.wrap_key_data(batch["seed"])
        noise = jax.vmap(lambda key: jax.random.normal(key, batch["action"].shape[1:]))(keys)
        noise = jnp.clip(self.smoothing * noise, -self.noise_clip, self.noise_clip)
        next_action = policy(target_params, batch["next_obs"])[0].mode() + noise
        next_value = policy(
            target_params, batch["next_obs"], jnp.clip(next_action, -1, 1), method="critic"
        ).min(0)
        target = jax.lax.stop_gradient(batch["reward"] + batch["discount"] * next_value)

        # Gradients of the critics' error reach only the critics, those of the actor's only it.
        error = policy(params, batch["obs"], batch["action"], method="critic") - target
        action = policy(params, batch["obs"])[0].mode()
        value = policy(fixed, batch["obs"], action, method="critic")[0]
        mean = fl.losses.masked_mean  # over the rows that are valid
        loss = mean((error**2).sum(0), batch["valid"]) - mean(value, batch["valid"])
        return loss, {
            "q_mean": mean(target, batch["valid"]),
            "td_error": mean(jnp.abs(error).mean(0), batch["valid"]),
            "priority": jnp.abs(error).mean(0),
        }


def delayed_adam(lr, delay):
    """Adam that steps the critics each time and the actor every `delay` times."""

    def part_of(params):  # names such as "actor/layers/0/kernel"
        return {name: "actor" if name.startswith("act") else "critics" for name in params}

    actor = optax.transforms.conditionally_mask(
        optax.adam(lr), lambda step: (step + 1) % delay == 0
    )
    return optax.transforms.partition({"actor": actor, "critics": optax.adam(lr)}, part_of)


def td3(env="Pendulum-v1", lr=1e-3, delay=2, hidden=(256, 256), learning_starts=1_000):
    policy = fl.Policy(TD3Network, hidden=hidden)
    return fl.sac(env, learning_starts=learning_starts, report_every=400).rename("td3").replace(
        runners=fl.Runners(env, policy, envs_per_runner=1, rollout_length=8,
                           explore=fl.GaussianNoise(0.1)),
        learner=fl.Learner(policy, TD3Loss(), fl.Optax(delayed_adam, lr=lr, delay=delay)),
        target=fl.UpdateTarget(every=delay, tau=0.005),
    )  # fmt: skip


def main(steps: int = 10_000, hidden: tuple[int, ...] = (256, 256)) -> fl.Run:
    with fl.run(td3(hidden=hidden), steps=steps) as run:
        for row in run:
            print(f"{row['env_steps']:>8,} steps   return {row['return_mean']:8.1f}")
    print(run.policy.evaluate(5))
    return run


if __name__ == "__main__":
    main()
