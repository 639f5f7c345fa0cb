"""Gradients and the step by them against the whole update, and their mean against one batch."""

import pickle
from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import flowrl as fl
from flowrl.core.items import Batch, Gradients
from flowrl.graph.site import HereSite, Place
from flowrl.rl.averaging import average

T, B = 4, 3


class Small(nnx.Module):
    """A network that compiles quickly, with a norm, dropout and a count of its calls if asked."""

    def __init__(self, obs_space, action_space, *, norm=False, drop=False, rngs):
        self.norm = fl.networks.RunningNorm(obs_space.shape) if norm else None
        self.drop = nnx.Dropout(0.5, rngs=rngs) if drop else None
        self.calls = nnx.BatchStat(jnp.zeros(())) if drop else None
        outputs = fl.networks.action_outputs(action_space) + 1
        kernel = nnx.initializers.normal(0.5)
        self.out = nnx.Linear(obs_space.shape[0], outputs, kernel_init=kernel, rngs=rngs)

    def __call__(self, obs):
        hidden = obs if self.norm is None else self.norm(obs)
        if self.drop is not None:
            self.calls[...] += 1
            hidden = self.drop(hidden)
        out = self.out(jnp.tanh(hidden))
        return out[:, :-1], out[:, -1]


PLAIN, NORMED = fl.Policy(Small), fl.Policy(Small, norm=True)
DROPPING = fl.Policy(Small, norm=True, drop=True)
PG, SGD = fl.losses.PGLoss(), fl.SGD(0.1)


@dataclass(frozen=True)
class Errors(fl.losses.Loss):
    """Moves values towards targets, and reports how far off each was."""

    needs: ClassVar[tuple[str, ...]] = ("obs", "target")
    on_policy: ClassVar[bool] = False
    priorities: ClassVar[bool] = True

    def __call__(self, policy, params, batch):
        _, value = policy(params, batch["obs"])
        error = jnp.abs(value - batch["target"])
        return jnp.sum(error**2 * batch["valid"]) / jnp.sum(batch["valid"]), {"priority": error}


@cache
def opened(loss, optimizer, policy, env):
    runners = fl.Runners(env, policy, envs_per_runner=2, rollout_length=3)
    resources = {"runners": runners, "learner": fl.Learner(policy, loss, optimizer)}
    learner = Place("test", resources, 0, HereSite).open()["learner"]
    return learner, jax.tree.map(jnp.copy, learner.state["core"])


def fresh(loss=PG, optimizer=SGD, policy=PLAIN, env="CartPole-v1"):
    """A learner in its first state. It is opened once and then set back: compiling takes time."""
    learner, first = opened(loss, optimizer, policy, env)
    learner.state = {"core": jax.tree.map(jnp.copy, first), "version": np.int32(0)}
    return learner


def batch(seed=0, valid=None, continuous=False, columns=B, versions=None):
    random = np.random.default_rng(seed)
    obs = 3 if continuous else 4
    names = ["reward", "value", "logp", "advantage", "target", "discount", "weight"]
    data = {name: random.normal(size=(T, columns)).astype(np.float32) for name in names}
    for name in ("obs", "next_obs"):
        data[name] = random.normal(size=(T, columns, obs)).astype(np.float32)
    data["terminated"] = data["truncated"] = np.zeros((T, columns), bool)
    data["action"] = (
        random.uniform(-1, 1, (T, columns, 1)).astype(np.float32)
        if continuous
        else random.integers(0, 2, (T, columns)).astype(np.int32)
    )
    rows = np.arange(T * columns).reshape(T, columns)
    data["valid"] = rows % 4 != 3 if valid is None else rows < valid
    of_columns = {
        "bootstrap_obs": random.normal(size=(columns, obs)).astype(np.float32),
        "version": np.zeros(columns, np.int32) if versions is None else np.int32(versions),
        "producer": np.arange(columns, dtype=np.int32),
        "slot": np.arange(columns),
    }
    return Batch(data, of_columns)


def plain(tree):
    """A tree with its arrays as those of NumPy, random keys as plain numbers."""

    def of(x):
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if is_key else x)

    return jax.tree.map(of, tree)


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, plain(a), plain(b))


PPO = fl.losses.PPOLoss(ent_coef=0.01, kl_penalty_target=0.01)
CASES = {
    "ppo, adaptive, normalised": (PPO, fl.Adam(1e-2, max_grad_norm=0.5), NORMED),
    "ppo that stops early": (fl.losses.PPOLoss(target_kl=1e-4), SGD, PLAIN),
    "pg, dropout and a norm": (PG, fl.RMSProp(1e-2, max_grad_norm=0.1), DROPPING),
    "vtrace": (fl.losses.VTraceLoss(), fl.SGD(fl.Linear(0.1, 0.0, 3), momentum=0.9), PLAIN),
    "recurrent": (PG, SGD, fl.Policy(fl.networks.RNN, hidden=(4,), size=4, cell="gru")),
    "dqn": (
        fl.losses.DQNLoss(),
        fl.Adam(1e-2, weight_decay=0.1),
        fl.Policy(fl.networks.QNetwork, hidden=(4,)),
    ),
    "sac": (
        fl.losses.SACLoss(),
        fl.Optax(optax.lion, learning_rate=1e-3),
        fl.Policy(fl.networks.SACNetwork, hidden=(4,)),
    ),
    "sac, an actor that steps at every second update": (
        fl.losses.SACLoss(),
        fl.Optimizers(actor=SGD, critic=SGD, temperature=SGD, every={"actor": 2}),
        fl.Policy(fl.networks.SACNetwork, hidden=(4,)),
    ),
    "priorities": (Errors(), SGD, PLAIN),
}


@pytest.mark.system
@pytest.mark.parametrize("name", CASES)
def test_gradients_and_the_step_by_them_are_an_update_to_the_bit(name):
    loss, optimizer, policy = CASES[name]
    env = "Pendulum-v1" if name.startswith("sac") else "CartPole-v1"
    batches = [batch(seed, continuous=name.startswith("sac")) for seed in range(2)]
    learner, results = fresh(loss, optimizer, policy, env), []
    if learner.core.network.recurrent:
        net, weights = learner.core.network, learner.weights()[0]
        carry = {k: np.asarray(x) for k, x in net.begin(weights, net.memory(weights, B)).items()}
        batches = [replace(x, columns={**x.columns, **carry}) for x in batches]
    for update in (
        lambda learner, x: learner.update(x),
        lambda learner, x: learner.apply(learner.gradients(x)),
    ):
        learner = fresh(loss, optimizer, policy, env)
        results.append(([update(learner, x) for x in batches], learner.state))
    whole, halves = results
    # As tests compile, at the lowest level, one of DQN's priorities has another last bit.
    priorities = [[x.feedback.pop("priority", 0.0) for x in trained] for trained, _ in results]
    np.testing.assert_allclose(*priorities, rtol=3e-7)
    assert_equal(whole, halves)
    metrics = whole[0][-1].metrics
    assert metrics.names == halves[0][-1].metrics.names and metrics.names[-1] == "bad"
    assert {"producer", "slot"} <= set(whole[0][0].feedback)
    assert np.any(priorities[0]) == loss.priorities
    assert whole[1]["version"] == 2


@pytest.mark.parametrize("poisoned", ["obs", "target"])
def test_gradients_that_are_not_finite_change_nothing_and_are_reported(poisoned):
    bad = batch(valid=12)
    bad = bad.with_(**{poisoned: np.full_like(bad[poisoned], np.nan)})
    learner = fresh(Errors())
    before = plain(learner.state["core"])
    trained = learner.apply(learner.gradients(bad))
    found = dict(zip(trained.metrics.names, trained.metrics.values.tolist(), strict=True))
    assert (found["bad"], found["gradient_steps"]) == (1, 0)
    assert (np.asarray(trained.feedback["priority"]) == 0).all()
    changed = plain(learner.state["core"])
    assert_equal(before["weights"], changed["weights"])
    assert (before["key"] != changed["key"]).any()


def test_lag_is_that_of_the_data_and_that_of_the_gradients():
    learner = fresh()
    early, late = (learner.gradients(batch(versions=[0, 0, 0])) for _ in range(2))
    assert learner.apply(early).lag == (0, 0)
    assert late.columns["version"].tolist() == late.columns["lag"].tolist() == [0, 0, 0]
    older = learner.gradients(batch(versions=[1, 0, 1]))
    assert older.columns["lag"].tolist() == [0, 1, 0]
    assert learner.apply(late).lag == (1, 1), "an update came since its weights"
    np.testing.assert_allclose(learner.apply(older).lag, (4 / 3, 2), rtol=1e-6)


@pytest.mark.parametrize("policy", [PLAIN, NORMED], ids=["plain", "normalised"])
def test_the_mean_of_unequal_batches_is_the_gradient_of_one_large_batch(policy):
    # Of the first batch 5 of 12 rows are valid, of the second 12, and of the third none.
    parts = [batch(1, valid=5), batch(2), batch(3, valid=0)]
    parts[2] = parts[2].with_(obs=np.full_like(parts[2]["obs"], np.nan))
    one = fresh(PG, SGD, policy)
    trained = one.update(Batch.join(parts))
    together = plain(one.state["core"]["weights"])
    many = fresh(PG, SGD, policy)
    mean = average([many.gradients(x) for x in parts], many.site.run)
    assert (mean.steps, mean.batches, float(mean.valid)) == (36, 3, 5 + 9)
    assert mean.columns["producer"].tolist() == [0, 1, 2] * 3
    result = many.apply(mean)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    jax.tree.map(close, plain(many.state["core"]["weights"]), together)
    close(result.metrics.values, trained.metrics.values)
    assert many.state["version"] == 1 and result.steps == trained.steps == 36


def test_rows_of_a_burn_in_do_not_weigh_in_the_mean():
    """Of 12 valid rows 6 are trained on, and of 7 only 1."""
    parts = [batch(1, valid=12), batch(2, valid=7)]
    loss = fl.losses.R2D2Loss(burn_in=2, n_step=1)
    learner = fresh(loss, SGD, fl.Policy(fl.networks.QNetwork, hidden=(4,)))
    found = [learner.gradients(x) for x in parts]
    mean, whole = average(found, learner.site.run), learner.gradients(Batch.join(parts))
    assert [float(x.valid) for x in (*found, mean, whole)] == [6, 1, 7, 7]
    for name, x in whole.params.items():
        np.testing.assert_allclose(mean.params[name], x, rtol=1e-4, atol=1e-6, err_msg=name)


def test_the_gradient_of_a_loss_is_that_of_a_plain_loop():
    """The mean over valid rows, one row after another, by finite differences of a linear value."""
    rows = batch(5)
    learner = fresh(Errors())
    kernel, bias = (np.float64(learner.weights()[0].params[f"out/{x}"]) for x in ("kernel", "bias"))
    wanted, count = np.zeros_like(kernel), 0
    for t in range(T):
        for b in range(B):
            if rows["valid"][t, b]:
                hidden = np.tanh(np.float64(rows["obs"][t, b]))
                value = hidden @ kernel[:, -1] + bias[-1]
                wanted[:, -1] += 2 * (value - rows["target"][t, b]) * hidden
                count += 1
    found = learner.gradients(rows)
    np.testing.assert_allclose(found.params["out/kernel"], wanted / count, rtol=1e-4, atol=1e-6)
    assert float(found.valid) == count


def test_running_norms_take_in_what_late_gradients_saw():
    """Gradients of the same first weights that are applied one after another, or late."""
    learner = fresh(PG, SGD, NORMED)
    seen = [batch(seed) for seed in range(3)]
    for gradients in [learner.gradients(x) for x in seen]:
        learner.apply(gradients)
    rest = plain(learner.state["core"]["weights"].rest)
    valid = [x["obs"][x["valid"]] for x in seen]
    obs = np.concatenate(valid)
    np.testing.assert_allclose(rest["norm/count"], len(obs), rtol=1e-4)
    np.testing.assert_allclose(rest["norm/mean"], obs.mean(0), rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(rest["norm/var"], obs.var(0), rtol=1e-3)


def test_a_count_of_calls_goes_on_through_late_gradients():
    learner = fresh(PG, SGD, DROPPING)
    several = [learner.gradients(batch(seed)) for seed in range(2)]
    calls = [float(x.rest["after"]["calls"]) - float(x.rest["before"]["calls"]) for x in several]
    for gradients in several:
        learner.apply(gradients)
    assert float(learner.weights()[0].rest["calls"]) == sum(calls) > 0


def test_gradients_outlive_the_updates_that_take_over_the_buffers_of_the_state():
    learner = fresh(PG, SGD, DROPPING)
    held = learner.gradients(batch())
    kept = plain(held)
    learner.update(batch(1))
    learner.apply(learner.gradients(batch(2)))
    assert_equal(held, kept)


def test_the_gradients_of_another_learner_are_refused():
    gradients = fresh().gradients(batch())
    with pytest.raises(fl.errors.ContractError, match="applies the gradients of red to learner"):
        fresh().apply(replace(gradients, learner="red"))
    with pytest.raises(fl.errors.ContractError, match="of learner and red; average those of each"):
        average([gradients, replace(gradients, learner="red")], fresh().site.run)


def test_gradients_are_pickled_as_one_buffer():
    made = jax.tree.map(np.asarray, plain(fresh(PG, SGD, NORMED).gradients(batch())))
    again = pickle.loads(pickle.dumps(made))
    assert isinstance(again, Gradients) and (again.steps, again.learner) == (12, "learner")
    assert_equal(again, made)
    assert len(pickle.dumps(made)) < sum(x.nbytes for x in jax.tree.leaves(made)) + 3_000
