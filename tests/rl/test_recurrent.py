"""Recurrent policies: what is computed along a rollout is what the runner computed by steps.

This holds in every way of resetting.
"""

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import environments
import flowrl as fl
from flowrl.rl.policies import Memory, Weights, network
from flowrl.rl.spaces import Spaces

SPACES = Spaces(gym.spaces.Box(-np.inf, np.inf, (2,), np.float32), gym.spaces.Discrete(2))
CELLS = {
    name: fl.Policy(fl.networks.RNN, hidden=(6,), cell=name, size=5) for name in ("lstm", "gru")
}


def loud(weights):
    """Weights that make the outputs differ plainly, which first ones do not."""
    return Weights(
        {
            k: x + 0.3 * jax.random.normal(jax.random.key(i), x.shape)
            for i, (k, x) in enumerate(weights.params.items())
        },
        weights.rest,
    )


@pytest.mark.parametrize("mode", ["next_step", "same_step", "disabled"])
@pytest.mark.parametrize("cell", CELLS)
def test_unrolled_from_the_stored_carry_a_rollout_gives_what_its_runner_computed(cell, mode):
    policy, net = CELLS[cell], network(CELLS[cell], SPACES)
    weights = loud(net.init(jax.random.key(0)))
    runners = fl.Runners(
        getattr(environments, mode), policy, envs_per_runner=4, rollout_length=9
    ).open()
    runners.publish(weights, 0)
    unroll = jax.jit(net.unroll)
    for _ in range(4):
        batch = runners.collect()
        memory = net.memory_of(batch.data, batch.columns)
        # The last reset is that of the observation after the rollout.
        memory = memory._replace(reset=memory.reset[:-1])
        dist, value, _ = unroll(weights, batch["obs"], memory)
        np.testing.assert_allclose(value, batch["value"], rtol=1e-4, atol=1e-5)
        logp = dist.log_prob(batch["action"])
        np.testing.assert_allclose(
            logp[batch["valid"]], batch["logp"][batch["valid"]], rtol=1e-4, atol=1e-5
        )
    runners.close()


@pytest.mark.parametrize("cell", CELLS)
def test_two_episodes_joined_are_each_alone(cell):
    net = network(CELLS[cell], SPACES)
    weights = loud(net.init(jax.random.key(1)))
    obs = jax.random.normal(jax.random.key(2), (9, 3, 2))
    start = net.memory(weights, 3).carry
    reset = np.zeros((9, 3), bool)
    alone = [
        net.unroll(weights, part, Memory(start, reset[: len(part)])) for part in (obs[:4], obs[4:])
    ]
    reset = reset.copy()  # jax may still be reading the first one
    reset[4] = True
    dist, value, _ = net.unroll(weights, obs, Memory(start, reset))
    np.testing.assert_allclose(
        value, np.concatenate([alone[0][1], alone[1][1]]), rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(
        dist.logits, np.concatenate([alone[0][0].logits, alone[1][0].logits]), rtol=1e-5, atol=1e-6
    )
    without = net.unroll(weights, obs, Memory(start, np.zeros((9, 3), bool)))[1]
    assert np.abs(without[4:] - value[4:]).max() > 1e-3, "the carry matters"


@pytest.mark.system
@pytest.mark.parametrize(
    ("loss", "minibatch"),
    [
        (fl.losses.PPOLoss(), 64),
        (fl.losses.PPOLoss(), None),
        (fl.losses.VTraceLoss(), None),
        (fl.losses.APPOLoss(), 32),
    ],
)
def test_every_loss_trains_a_recurrent_policy(loss, minibatch):
    policy = fl.Policy(fl.networks.RNN, hidden=(8,), size=8)
    graph = fl.ppo(
        "CartPole-v1",
        fl.PPOSettings(
            envs_per_runner=8,
            rollout_length=16,
            batch_size=128,
            epochs=2,
            minibatch_size=minibatch,
            policy=policy,
        ),
    ).set("learner.loss", loss)
    graph = graph.insert(after="train", target=fl.UpdateTarget()) if loss.target_network else graph
    with fl.run(graph) as run:
        rows = [next(run) for _ in range(2)]
    assert np.isfinite(rows[-1]["loss"])
    action, carry = run.policy.act(np.zeros(4))
    assert run.policy.act(np.zeros(4), carry)[0] in (0, 1) and action in (0, 1)
    assert len(run.policy.evaluate(2)) == 2


def test_the_first_gradient_step_of_a_recurrent_policy_sees_no_ratio():
    """With the behaviour policy's weights, every probability ratio is 1: else the carry or a reset
    were wrong."""
    policy = fl.Policy(fl.networks.RNN, hidden=(8,), size=8)
    graph = fl.ppo(
        "CartPole-v1",
        fl.PPOSettings(
            envs_per_runner=8,
            rollout_length=32,
            batch_size=256,
            epochs=1,
            minibatch_size=None,
            policy=policy,
        ),
    )
    with fl.run(graph) as run:
        for row, _ in zip(run, range(4), strict=False):
            assert abs(row["kl"]) < 1e-6 and row["clip_fraction"] == 0


def test_minibatches_of_a_recurrent_policy_are_whole_columns():
    policy = fl.Policy(fl.networks.RNN, hidden=(8,), size=8)
    graph = fl.ppo(
        "CartPole-v1",
        fl.PPOSettings(
            envs_per_runner=8,
            rollout_length=16,
            batch_size=128,
            epochs=1,
            minibatch_size=8,
            policy=policy,
        ),
    )
    with pytest.raises(
        fl.errors.CheckError,
        match=r"minibatch_size=8 does not divide the batch of 128 steps of 8 columns with 16 "
        r"each, which stay whole; take 16 or 32",
    ):
        graph.check()


class Grows(nnx.Module):
    def __init__(self, obs_space, action_space, *, rngs):
        self.out = nnx.Linear(2, 3, rngs=rngs)

    def initial_carry(self, n):
        return jnp.zeros((n, 2))

    def __call__(self, obs, carry):
        out = self.out(obs)
        return out[:, :2], out[:, 2], jnp.concatenate([carry, obs], axis=1)


class Forgets(Grows):
    def __call__(self, obs, carry):
        return super().__call__(obs, carry)[:2]


def test_a_carry_of_another_form_and_none_at_all_are_reported():
    with pytest.raises(
        fl.errors.PolicyError,
        match=r"Grows must return a carry of the shapes that it gets, float32\[3, 2\], but it "
        r"returned float32\[3, 4\]",
    ):
        network(fl.Policy(Grows), SPACES)
    with pytest.raises(
        fl.errors.PolicyError,
        match=r"Forgets must return \(action outputs, value, carry\), but it returned a tuple of 2",
    ):
        network(fl.Policy(Forgets), SPACES)
