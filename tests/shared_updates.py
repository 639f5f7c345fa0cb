"""What the update of a learner is compiled to on several devices, printed as JSON.

It is run in a process that has four of them.
"""

import json
import re
import sys

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

import flowrl as fl
from flowrl.core.clock import EPOCHS
from flowrl.core.mesh import AXIS, mean_of_devices, shared
from flowrl.learner.core import core_of
from flowrl.rl.function_loss import as_loss
from flowrl.rl.spaces import Spaces


class Tracking(fl.networks.MLP):
    """Keeps the mean of the last observations that it was shown, as batch normalisation would."""

    def __init__(self, *spaces, rngs, **settings):
        super().__init__(*spaces, rngs=rngs, **settings)
        self.seen = nnx.BatchStat(jnp.zeros(16))

    def __call__(self, obs):
        self.seen[...] = obs.mean(0)
        return super().__call__(obs)


OBS = gym.spaces.Box(-1, 1, (16,))
DISCRETE, BOX = Spaces(OBS, gym.spaces.Discrete(3)), Spaces(OBS, gym.spaces.Box(-1, 1, (2,)))
MLP = fl.Policy(fl.networks.MLP, hidden=(32, 32), normalize=True)
RNN = fl.Policy(fl.networks.RNN, hidden=(16,), size=16)
RQ = fl.Policy(fl.networks.RecurrentQNetwork, hidden=(16,), size=16)
Q, SAC = (
    fl.Policy(fl.networks.QNetwork, hidden=(32, 32)),
    fl.Policy(fl.networks.SACNetwork, hidden=(32, 32)),
)
ADAM, STILL = fl.Adam(1e-3, max_grad_norm=0.5), fl.SGD(0.0)
TD3 = fl.Policy(fl.networks.TD3Network, hidden=(32, 32))
GROUPS = fl.Optimizers(actor=ADAM, critic=ADAM, every={"actor": 2})
T, B, DRAWN = 32, 16, 512
CASES = {
    "ppo": (MLP, DISCRETE, fl.losses.PPOLoss(target_kl=0.5), 256, (2, 4)),
    "vtrace": (MLP, DISCRETE, fl.losses.VTraceLoss(), T * 8, (2, 4)),
    "dqn": (Q, DISCRETE, fl.losses.DQNLoss(), 256, (2, 4)),
    "dqn, noisy c51": (
        fl.Policy(
            fl.networks.QNetwork, hidden=(32, 32), atoms=11, v_min=-3.0, v_max=3.0, noisy=True
        ),
        DISCRETE,
        fl.losses.C51Loss(),
        256,
        (4,),
    ),
    "sac": (SAC, BOX, fl.losses.SACLoss(), 256, (2, 4)),
    "td3": (TD3, BOX, fl.losses.TD3Loss(), 256, (4,)),
    # The first update divides advantages by their own root mean square.
    "marwil": (MLP, DISCRETE, fl.losses.MARWILLoss(), 256, (4,)),
    "ppo, less than a line": (
        fl.Policy(fl.networks.MLP, hidden=(8,), normalize=True),
        DISCRETE,
        fl.losses.PPOLoss(),
        8,
        (4,),
    ),
    "appo": (MLP, DISCRETE, fl.losses.APPOLoss(standardize=True), T * B, (4,)),
    "r2d2": (RQ, DISCRETE, fl.losses.R2D2Loss(burn_in=8), T * 8, (4,)),
    "recurrent": (RNN, DISCRETE, fl.losses.VTraceLoss(), T * 8, (4,)),
    "tracking": (fl.Policy(Tracking, hidden=(8,)), DISCRETE, fl.losses.PGLoss(), T * B, ()),
}
"""By name: policy, spaces, loss, the steps of a minibatch, and the numbers of devices that share
it."""


def example(core, carry):
    """A batch of random numbers in which each column has another number of valid rows, and the
    columns of sequences."""
    random = np.random.default_rng(0)
    t, b = (1, DRAWN) if "next_obs" in core.loss.needs else (T, B)
    action = (
        random.uniform(-1, 1, (t, b, 2)).astype(np.float32)
        if core.spaces is BOX
        else random.integers(0, 3, (t, b)).astype(np.int32)
    )
    numbers = {
        k: random.normal(size=(t, b)).astype(np.float32)
        for k in ("reward", "advantage", "target", "value", "discount", "weight")
    }
    flags = {k: np.zeros((t, b), bool) for k in ("terminated", "truncated")}
    observations = {
        k: random.normal(size=(t, b, 16)).astype(np.float32) for k in ("obs", "next_obs")
    }
    valid = random.uniform(size=(t, b)) < np.linspace(0.4, 1, b)
    data = {
        **observations,
        **numbers,
        **flags,
        "action": action,
        "logp": numbers["value"] * 0.1 - 1,
        "valid": valid,
    }
    columns = {"bootstrap_obs": random.normal(size=(b, 16)).astype(np.float32), **carry}
    return data, columns if core.sequences else {}


def updated(name, shards, shuffle=False, optimizer=ADAM, **more):
    """The program of an update on so many devices; and weights, metrics and priorities after it."""
    policy, spaces, loss, minibatch, _ = CASES[name]
    if policy is TD3:
        optimizer = GROUPS
    core = core_of(policy, spaces, as_loss(loss), optimizer)
    state = core.init(jax.random.key(0))
    net = core.network
    carry = net.begin(state["weights"], net.memory(state["weights"], B)) if net.recurrent else {}
    data, columns = example(core, {k: np.asarray(x) for k, x in carry.items()})
    given = state["weights"], state, data, columns
    how = {"epochs": 2, "minibatch_size": minibatch, "shuffle": shuffle, "shards": shards, **more}
    compiled = jax.jit(lambda *given: core.update(*given, **how)).lower(*given).compile()
    new, metrics, priority = compiled(*given)
    return compiled, (new["weights"], metrics.values, priority)


def gathered(compiled):
    """The numbers that each all-gather and other exchange of rows brings to a device."""
    found = re.findall(
        r" = \(?\w+\[([\d,]*)\]\S* (?:all-gather|all-to-all|collective-permute)(?:-start)?\(",
        compiled.as_text(),
    )
    return [int(np.prod([int(n) for n in shape.split(",") if n])) for shape in found]


def furthest(one, other):
    """The largest difference between the numbers of two trees."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return max(float(np.max(np.abs(np.asarray(a) - np.asarray(b)))) for a, b in pairs)


def main():
    assert jax.local_device_count() == 4
    found = {}
    for name, (*_, numbers) in CASES.items():
        program, alone = updated(name, 1)
        for shards in numbers:
            compiled, after = updated(name, shards)
            found[f"{name} on {shards}"] = {
                "operations": compiled.cost_analysis()["flops"] / program.cost_analysis()["flops"],
                "sums": len(re.findall(r" all-reduce(?:-start)?\(", compiled.as_text())),
                "gathered": gathered(compiled),
                "difference": furthest(after, alone),
            }
    found["ppo on 4, shuffled"] = {"gathered": gathered(updated("ppo", 4, shuffle=True)[0])}
    compiled, (*_, priority) = updated("dqn", 4, shuffle=True, optimizer=STILL)
    difference = furthest(priority, updated("dqn", 1, optimizer=STILL)[1][-1])
    found["dqn on 4, shuffled"] = {"gathered": gathered(compiled), "difference": difference}
    statistics = updated("tracking", 4)[1][0].rest["seen"]
    obs = example(core_of(*CASES["tracking"][:2], as_loss(fl.losses.PGLoss()), STILL), {})[0]["obs"]
    found["statistics"] = {
        "gathered": [],
        "spread": furthest(
            [shard.data for shard in statistics.addressable_shards], [np.asarray(statistics)] * 4
        ),
        "off": furthest(statistics, obs.mean((0, 1))),
    }
    means = shared(
        lambda x, weight: mean_of_devices(x / weight, weight[0]),
        4,
        (PartitionSpec(AXIS), PartitionSpec(AXIS)),
        PartitionSpec(),
    )
    weights = jnp.float32([1, 2, 0, 1])  # one device has no row that counts
    found["a mean"] = {
        "gathered": [],
        "mean": float(jax.jit(means)(jnp.float32([1, 6, 0, 4]), weights)[0]),
    }
    before = len(EPOCHS)
    jax.block_until_ready(updated("ppo", 4, traced=True)[1])
    jax.effects_barrier()
    found["epochs"] = {"gathered": [], "reported": len(EPOCHS) - before}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
