"""One update against plain loops over epochs and minibatches, and all that surrounds it."""

from dataclasses import dataclass
from functools import cache, partial
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import flowrl as fl
from flowrl.core.items import Batch
from flowrl.core.permuting import permutation
from flowrl.graph.site import HereSite, Place
from flowrl.learner.checked import all_finite
from flowrl.rl.policies import Memory

T, B = 4, 3
STEPS = T * B


class Small(nnx.Module):
    """A network that compiles quickly."""

    def __init__(self, obs_space, action_space, *, normalize=False, rngs):
        self.norm = fl.networks.RunningNorm(obs_space.shape) if normalize else None
        self.hidden = nnx.Linear(
            obs_space.shape[0], 4, kernel_init=nnx.initializers.normal(0.5), rngs=rngs
        )
        self.out = nnx.Linear(
            4,
            fl.networks.action_outputs(action_space) + 1,
            kernel_init=nnx.initializers.normal(0.5),
            rngs=rngs,
        )

    def __call__(self, obs):
        out = self.out(jnp.tanh(self.hidden(obs if self.norm is None else self.norm(obs))))
        return out[:, :-1], out[:, -1]


POLICY, NORMALIZED = fl.Policy(Small), fl.Policy(Small, normalize=True)


@cache
def opened(loss, optimizer, policy, seed):
    runners = fl.Runners("CartPole-v1", policy, envs_per_runner=2, rollout_length=3)
    handles = Place(
        "test", {"runners": runners, "learner": fl.Learner(policy, loss, optimizer)}, seed, HereSite
    ).open()
    return handles, jax.tree.map(jnp.copy, handles["learner"].state["core"])


def fresh(loss, optimizer, policy=POLICY, seed=0):
    """A learner in its first state. It is opened once and then set back, for compiling its update
    is what takes time."""
    handles, first = opened(loss, optimizer, policy, seed)
    handles["learner"].state = {"core": jax.tree.map(jnp.copy, first), "version": np.int32(0)}
    return handles["learner"]


def batch(seed=0, versions=(0, 0, 0), invalid=True):
    rng = np.random.default_rng(seed)
    f = lambda *shape: rng.normal(size=(T, B, *shape)).astype(np.float32)
    valid = np.arange(STEPS).reshape(T, B) % 4 != 3 if invalid else np.ones((T, B), bool)
    data = {
        "obs": f(4),
        "action": rng.integers(0, 2, (T, B)).astype(np.int32),
        "logp": 0.3 * f() - 0.7,
        "value": f(),
    }
    return Batch(
        {**data, "advantage": f(), "target": f(), "valid": valid},
        {"version": np.array(versions, np.int32)},
    )


def metrics_of(trained):
    return dict(
        zip(trained.metrics.names, np.asarray(trained.metrics.values).tolist(), strict=True)
    )


def now(handle):
    """What an update may change, as NumPy arrays: weights, the optimiser's state, what the loss
    adapts."""
    return jax.tree.map(np.array, {k: handle.state["core"][k] for k in ("weights", "opt", "loss")})


def assert_close(a, b):
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), a, b)


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


# -- against plain loops


def ppo(dist, value, rows, clip=0.2):
    w = rows["valid"] / rows["valid"].sum()
    ratio = jnp.exp(dist.log_prob(rows["action"]) - rows["logp"])
    surrogate = jnp.minimum(
        ratio * rows["advantage"], jnp.clip(ratio, 1 - clip, 1 + clip) * rows["advantage"]
    )
    return (
        w * (-surrogate + 0.5 * 0.5 * (value - rows["target"]) ** 2 - 0.01 * dist.entropy())
    ).sum()


def pg(dist, value, rows):
    w = rows["valid"] / rows["valid"].sum()
    return (
        w
        * (
            -dist.log_prob(rows["action"]) * rows["advantage"]
            + 0.5 * 0.5 * (value - rows["target"]) ** 2
        )
    ).sum()


def orders(key, epochs, minibatch):
    """The rows of each gradient step: every epoch goes through a new permutation of them all."""
    for one in jax.random.split(jax.random.split(key)[1], epochs):
        yield from np.asarray(permutation(one, STEPS)).reshape(-1, minibatch)


@partial(jax.jit, static_argnums=(0, 1, 2))
def slow_step(net, tx, loss, weights, opt, rows):
    def of(params):
        dist, value, _ = net.apply(weights._replace(params=params), rows["obs"])
        return loss(dist, value, rows)

    number, grads = jax.value_and_grad(of)(weights.params)
    updates, opt = tx.update(grads, opt, weights.params)
    return number, weights._replace(params=optax.apply_updates(weights.params, updates)), opt


def slow_update(learner, tx, loss, data, steps):
    """What comes of a gradient step on each of the row numbers in `steps`, from the learner's
    weights on."""
    rows = {k: v.reshape(STEPS, *v.shape[2:]) for k, v in data.items()}
    weights, _ = learner.weights()
    opt, losses = tx.init(weights.params), []
    for chosen in steps:
        number, weights, opt = slow_step(
            learner.core.network, tx, loss, weights, opt, {k: v[chosen] for k, v in rows.items()}
        )
        losses.append(number)
    return weights.params, opt, np.mean(losses)


LOSS, ADAM = fl.losses.PPOLoss(ent_coef=0.01), fl.Adam(1e-2, max_grad_norm=0.5)
BY_HAND = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2, eps=1e-5))
SGD, PG, BY_HAND_SGD = fl.SGD(0.1), fl.losses.PGLoss(), optax.sgd(0.1)


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_update_equals_loops_over_epochs_and_minibatches(shuffle):
    learner = fresh(LOSS, ADAM)
    steps = (
        list(orders(learner.state["core"]["key"], 3, 4))
        if shuffle
        else [*np.arange(STEPS).reshape(-1, 4)] * 3
    )
    assert len(steps) == 9
    params, opt, loss = slow_update(learner, BY_HAND, ppo, batch().data, steps)
    found = metrics_of(learner.update(batch(), epochs=3, minibatch_size=4, shuffle=shuffle))
    assert_close(now(learner)["weights"].params, params)
    assert_close(jax.tree.leaves(now(learner)["opt"]), jax.tree.leaves(opt))
    np.testing.assert_allclose(found["loss"], loss, rtol=1e-4)
    assert (found["gradient_steps"], found["bad"]) == (9, 0)


@pytest.mark.parametrize("minibatch", [None, STEPS])
def test_without_a_minibatch_each_epoch_is_one_step_on_the_whole_batch(minibatch):
    learner = fresh(PG, SGD)
    params, _, loss = slow_update(learner, BY_HAND_SGD, pg, batch().data, [np.arange(STEPS)] * 2)
    found = metrics_of(learner.update(batch(), epochs=2, minibatch_size=minibatch))
    assert_close(now(learner)["weights"].params, params)
    np.testing.assert_allclose(found["loss"], loss, rtol=1e-4)
    assert found["gradient_steps"] == 2


def test_each_update_draws_new_minibatches():
    learner, seen = fresh(PG, SGD), []
    for _ in range(2):
        seen.append(list(orders(learner.state["core"]["key"], 1, 4)))
        params, *_ = slow_update(learner, BY_HAND_SGD, pg, batch().data, seen[-1])
        learner.update(batch(), minibatch_size=4)
        assert_close(now(learner)["weights"].params, params)
    assert (np.stack(seen[0]) != np.stack(seen[1])).any()


def test_a_seed_decides_the_first_weights_and_the_minibatches():
    first = [
        open_(PG, SGD, POLICY, seed)[1]
        for open_, seed in ((opened, 0), (opened.__wrapped__, 0), (opened, 1))
    ]
    kernels, keys = (
        [f(x) for x in first]
        for f in (
            lambda x: x["weights"].params["hidden/kernel"],
            lambda x: jax.random.key_data(x["key"]),
        )
    )
    for same, again, other in (kernels, keys):
        assert (same == again).all() and (same != other).any()


def traced():
    """A loss of the user's own, and how often it was traced."""
    calls = []

    def squared(policy, params, batch):
        calls.append(1)
        _, value = policy(params, batch["obs"])
        error = jnp.where(batch["valid"], value - batch["target"], 0) ** 2
        return error.sum() / batch["valid"].sum(), {"largest": error.max()}

    return squared, calls


def test_a_loss_and_a_transformation_of_the_user_s_own():
    def by_hand(_, value, rows):
        return ((value - rows["target"]) ** 2 * rows["valid"]).sum() / rows["valid"].sum()

    squared, _ = traced()
    own = optax.chain(optax.scale_by_sign(), optax.scale(-0.05))
    learner = fresh(squared, own)
    params, _, loss = slow_update(learner, own, by_hand, batch().data, [np.arange(STEPS)])
    found = metrics_of(learner.update(batch()))
    assert_close(now(learner)["weights"].params, params)
    np.testing.assert_allclose(found["loss"], loss, rtol=1e-4)
    assert found["largest"] > found["loss"]


def test_learners_of_equal_settings_share_what_was_compiled():
    squared, calls = traced()
    for _ in range(2):
        opened.__wrapped__(squared, SGD, POLICY, 0)[0]["learner"].update(batch())
        calls.append("update")
    assert calls[-2:] == ["update", "update"]


def test_an_update_leaves_the_types_of_the_state_so_that_the_next_one_compiles_nothing():
    learner = fresh(LOSS, ADAM, NORMALIZED)
    before = jax.tree.map(jax.typeof, learner.state["core"])
    learner.update(batch())
    assert jax.tree.map(jax.typeof, learner.state["core"]) == before


# -- versions, lag, copies


def test_the_version_rises_by_one_per_update_whatever_its_epochs():
    learner = fresh(PG, SGD)
    for version, epochs in enumerate((1, 2, 1)):
        assert learner.weights()[1] == learner.state["version"] == version
        learner.update(batch(), epochs=epochs)
    assert learner.weights()[1] == 3


def test_lag_is_mean_and_maximum_over_the_columns():
    learner = fresh(PG, SGD)
    for versions, wanted in (((0, 0, 0), (0, 0)), ((1, 0, 1), (1 / 3, 1)), ((2, 0, 1), (1, 2))):
        trained = learner.update(batch(versions=versions))
        np.testing.assert_allclose(trained.lag, wanted, rtol=1e-6)
        assert trained.steps == STEPS


@pytest.mark.parametrize("how", ["update", "apply"])
def test_weights_outlive_later_updates_and_the_optimisers_state_is_reused(how):
    learner = fresh(PG, fl.Adam(0.1))

    def updated():
        learner.apply(learner.gradients(batch())) if how == "apply" else learner.update(batch())

    updated()  # the first call of a function gets copies
    weights, _ = learner.weights()
    opt, before = learner.state["core"]["opt"], jax.tree.map(np.array, weights)
    updated()
    # Weights are published as they are, so no update may change them in place.
    assert all(x.is_deleted() for x in jax.tree.leaves(opt))
    assert_equal(weights, before)
    assert (learner.weights()[0].params["out/kernel"] != before.params["out/kernel"]).any()


def test_the_runners_act_with_the_first_weights():
    handles, _ = opened(PG, SGD, POLICY, 1)
    sample = handles["runners"].collect()
    handles["runners"].close()
    learner = handles["learner"]
    value = learner.core.network.unroll(learner.weights()[0], sample["obs"], Memory())[1]
    np.testing.assert_allclose(sample["value"], value, rtol=1e-5, atol=1e-6)


def test_values_are_those_of_what_comes_after_the_last_rows():
    learner, data = fresh(PG, SGD), batch()
    data = fl.extend.Batch(data.data, {**data.columns, "bootstrap_obs": data["obs"][0] + 1})
    flat = learner.core.network.apply(learner.weights()[0], data.columns["bootstrap_obs"])[1]
    np.testing.assert_allclose(learner.values(data), flat, rtol=1e-5, atol=1e-6)


# -- what ends or refuses an update


@partial(jax.jit, static_argnums=0)
def log_prob_of(net, weights, obs, action):
    return (
        net.apply(weights, obs.reshape(STEPS, 4))[0].log_prob(action.reshape(STEPS)).reshape(T, B)
    )


def log_prob(learner, rows):
    """The log-probabilities ``[T, B]`` of the actions by the learner's weights."""
    return np.asarray(
        log_prob_of(learner.core.network, learner.weights()[0], rows["obs"], rows["action"])
    )


def test_target_kl_ends_the_update_before_the_step_that_goes_too_far():
    learner = fresh(fl.losses.PPOLoss(ent_coef=0.01, target_kl=0.01), ADAM)
    rows = batch(invalid=False)
    rows = rows.with_(logp=log_prob(learner, rows))
    steps = list(orders(learner.state["core"]["key"], 20, 4))
    found = metrics_of(learner.update(rows, epochs=20, minibatch_size=4))
    applied, ended = int(found["gradient_steps"]), now(learner)
    assert 1 < applied < len(steps) and found["bad"] == 0 and found["kl"] <= 0.015
    params, opt, loss = slow_update(fresh(LOSS, ADAM), BY_HAND, ppo, rows.data, steps[:applied])
    assert_close(ended["weights"].params, params)
    assert_close(jax.tree.leaves(ended["opt"]), jax.tree.leaves(opt))
    np.testing.assert_allclose(found["loss"], loss, rtol=1e-4)
    moved = log_prob(learner, rows) - rows["logp"]
    assert (np.exp(moved) - 1 - moved).ravel()[steps[applied]].mean() > 0.015


def test_an_update_without_a_gradient_step_reports_why_it_took_none():
    loss = fl.losses.PPOLoss(target_kl=0.01, kl_penalty_target=0.01)
    learner = fresh(loss, ADAM)
    before = now(learner)
    rows = batch(invalid=False)
    found = metrics_of(learner.update(rows.with_(logp=log_prob(learner, rows) + 1.0)))
    assert (found["gradient_steps"], found["bad"]) == (0, 0)
    assert found["kl"] > 0.015 and found["loss"] != 0
    after = now(learner)
    assert_equal(after["weights"], before["weights"])
    # The policy is too far off, so that the penalty must not fall.
    assert after["loss"]["kl_weight"] == 2 * before["loss"]["kl_weight"]


@pytest.mark.parametrize("shape", [(2, 3), (200, 100)])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_number_that_is_not_finite_is_seen_among_all(bad, shape):
    numbers = {"a": jnp.linspace(-1e38, 1e38, 50).reshape(5, 10), "n": jnp.int32(3)}
    empty = {"none": jnp.zeros((0, 3))}
    assert all_finite({**numbers, **empty})
    assert not all_finite({**numbers, **empty, "b": jnp.zeros(shape).at[1, 2].set(bad)})


@pytest.mark.parametrize("field", ["advantage", "obs"])
@pytest.mark.parametrize("policy", [POLICY, NORMALIZED], ids=["plain", "normalized"])
def test_nan_leaves_weights_and_optimiser_as_they_were_and_the_next_update_works(policy, field):
    nan = np.array(batch()[field])
    nan[0, 0] = np.nan
    learner = fresh(LOSS, ADAM, policy)
    learner.update(batch())
    before = now(learner)
    found = metrics_of(learner.update(batch().with_(**{field: nan})))
    assert_equal(now(learner), before)
    assert (found["bad"], found["gradient_steps"], learner.state["version"]) == (1, 0, 2)
    found = metrics_of(learner.update(batch(1)))
    assert (found["bad"], found["gradient_steps"], learner.state["version"]) == (0, 1, 3)
    assert (
        now(learner)["weights"].params["out/kernel"] != before["weights"].params["out/kernel"]
    ).any()


def test_an_update_that_is_not_finite_reports_no_priority_that_is_not():
    class RemoteArray(fl.losses.Loss):
        needs, on_policy, priorities = ("advantage",), False, True

        def __call__(self, policy, params, batch):
            dist, _ = policy(params, batch["obs"])
            return (dist.log_prob(batch["action"]) * batch["advantage"]).mean(), {
                "priority": batch["advantage"]
            }

    nan = np.full_like(batch()["advantage"], np.nan)
    found = fresh(RemoteArray(), ADAM).update(batch().with_(advantage=nan))
    assert (
        metrics_of(found)["bad"] == 1
        and np.asarray(found.feedback["priority"]).tolist() == [0.0] * nan.size
    )


def test_a_priority_that_is_not_finite_makes_an_update_bad_unless_its_row_is_masked():
    class Unsure(fl.losses.Loss):
        needs, on_policy, priorities = ("advantage",), False, True

        def __call__(self, policy, params, batch):
            dist, _ = policy(params, batch["obs"])
            return dist.log_prob(batch["action"]).mean(), {"priority": batch["advantage"]}

    class Masked(Unsure):
        def __call__(self, policy, params, batch):
            loss, metrics = super().__call__(policy, params, batch)
            return loss, {"priority": jnp.where(batch["valid"], metrics["priority"], jnp.nan)}

    one_nan = batch()["advantage"].copy()
    one_nan[tuple(np.argwhere(batch()["valid"])[0])] = np.nan
    learner = fresh(Unsure(), ADAM)
    before = now(learner)
    found = learner.update(batch().with_(advantage=one_nan))
    assert metrics_of(found)["bad"] == 1 and metrics_of(found)["gradient_steps"] == 0
    assert np.asarray(found.feedback["priority"]).tolist() == [0.0] * STEPS
    assert_equal(now(learner), before)
    assert metrics_of(fresh(Masked(), ADAM).update(batch()))["bad"] == 0


def test_an_optimiser_state_that_overflows_is_bad_too():
    def steep(policy, params, batch):
        _, value = policy(params, batch["obs"])
        return (1e25 * value).mean(), {}

    learner = fresh(steep, fl.Adam(1e-2))
    before = now(learner)
    assert metrics_of(learner.update(batch()))["bad"] == 1
    assert_equal(now(learner), before)


@pytest.mark.parametrize(("minibatch", "near"), [(5, "4 or 6"), (11, "6 or 12"), (24, "6 or 12")])
def test_a_minibatch_that_does_not_divide_the_batch_names_the_nearest_that_do(minibatch, near):
    with pytest.raises(
        fl.errors.ContractError,
        match=rf"^minibatch_size={minibatch} does not divide the batch of 12 steps; take {near}$",
    ):
        fresh(PG, SGD).update(batch(), minibatch_size=minibatch)


@pytest.mark.parametrize(
    ("lacking", "text"),
    [
        (
            ["advantage"],
            r"PPOLoss needs the field advantage, but the batch has obs, .*; add them before it$",
        ),
        (
            ["advantage", "target"],
            r"PPOLoss needs the fields advantage, target, .*; add them before it$",
        ),
        (
            ["logp"],
            (
                r"PPOLoss needs the field logp, but .*; take a loss that needs no more than that "
                r"\(PGLoss\)$"
            ),
        ),
    ],
    ids=str,
)
def test_a_field_that_the_loss_needs_and_the_batch_lacks_is_named(lacking, text):
    short = Batch({k: v for k, v in batch().data.items() if k not in lacking}, batch().columns)
    learner = fresh(LOSS, ADAM)
    before = now(learner)
    with pytest.raises(fl.errors.ContractError, match=text):
        learner.update(short)
    assert_equal(now(learner), before)
    assert learner.state["version"] == 0


def test_a_batch_that_does_not_say_which_rows_are_valid_has_all_valid():
    ends = []
    for data in (
        batch(invalid=False).data,
        {k: v for k, v in batch().data.items() if k != "valid"},
    ):
        learner = fresh(PG, SGD)
        learner.update(Batch(data, batch().columns))
        ends.append(now(learner))
    assert_equal(*ends)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"policy": fl.networks.MLP},
            r"^Learner: policy must be fl.Policy\(ModuleClass, \*\*settings\), got <class .*MLP'>$",
        ),
        ({"loss": fl.losses.PPOLoss}, "^Learner: loss must be one such as fl.losses.PPOLoss"),
        ({"optimizer": "adam"}, "^Learner: optimizer must be one such as fl.Adam"),
    ],
    ids=["policy", "loss", "optimizer"],
)
def test_wrong_settings_are_refused_at_once(settings, text):
    with pytest.raises(fl.errors.SettingError, match=text):
        fl.Learner(**{"policy": POLICY, "loss": PG, "optimizer": SGD, **settings})


# -- invalid rows and what is not trained


@pytest.mark.parametrize("filler", [1e15, np.nan])
@pytest.mark.parametrize("policy", [POLICY, NORMALIZED], ids=["plain", "normalized"])
def test_invalid_rows_never_change_the_result(policy, filler):
    good, ends = batch(), []
    for number in (0, filler):
        invalid = {
            k: ~good["valid"].reshape(T, B, *[1] * (v.ndim - 2))
            for k, v in good.data.items()
            if v.dtype == np.float32
        }
        learner = fresh(LOSS, ADAM, policy)
        found = learner.update(
            good.with_(
                **{k: np.where(where, np.float32(number), good[k]) for k, where in invalid.items()}
            )
        )
        ends.append((metrics_of(found), now(learner)))
    assert ends[0][0]["bad"] == ends[1][0]["bad"] == 0
    assert_equal(*ends)


def test_moments_are_updated_once_per_update_from_the_valid_rows():
    learner = fresh(PG, SGD, NORMALIZED)
    seen = []
    for seed in (0, 1):
        rows = batch(seed)
        seen.append(rows["obs"][rows["valid"]].astype(float))
        learner.update(rows, epochs=3)
        rest, every = now(learner)["weights"].rest, np.concatenate(seen)
        np.testing.assert_allclose(rest["norm/count"], 1e-4 + len(every), rtol=1e-6)
        np.testing.assert_allclose(rest["norm/mean"], every.mean(0), rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(rest["norm/var"], every.var(0), rtol=1e-3)


def test_an_update_looks_through_the_moments_from_before_it():
    learner = fresh(PG, SGD, NORMALIZED)
    learner.update(batch())
    params, *_ = slow_update(learner, BY_HAND_SGD, pg, batch(1).data, [np.arange(STEPS)] * 3)
    learner.update(batch(1), epochs=3)
    assert_close(now(learner)["weights"].params, params)


def test_the_kl_penalty_adapts_from_update_to_update():
    learner = fresh(fl.losses.PPOLoss(kl_penalty_target=0.01), SGD)
    same = log_prob(learner, batch())
    reported = [
        metrics_of(learner.update(batch().with_(logp=logp)))["kl_weight"]
        for logp in (same, same + 1, same + 1)
    ]
    np.testing.assert_allclose(
        [*reported, learner.state["core"]["loss"]["kl_weight"]], [0.2, 0.1, 0.2, 0.4], rtol=1e-6
    )


class Dropping(nnx.Module):
    """A module with random state of its own, which changes at every call."""

    def __init__(self, obs_space, action_space, *, rngs):
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.heads = nnx.Linear(
            obs_space.shape[0], fl.networks.action_outputs(action_space) + 1, rngs=rngs
        )

    def __call__(self, obs):
        out = self.heads(self.drop(obs))
        return out[:, :-1], out[:, -1]

    def critic(self, obs):
        return self(obs)[1]


class Counting(nnx.Module):
    """A module with a number that is not trained and counts its calls."""

    def __init__(self, obs_space, action_space, *, rngs):
        self.heads = nnx.Linear(
            obs_space.shape[0], fl.networks.action_outputs(action_space) + 1, rngs=rngs
        )
        self.calls = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, obs):
        self.calls[...] += 1
        out = self.heads(obs)
        return out[:, :-1], out[:, -1]


def test_what_a_module_keeps_beside_its_parameters_goes_through_every_gradient_step():
    learner = fresh(PG, SGD, fl.Policy(Counting))
    learner.update(batch(), epochs=2)
    assert learner.weights()[0].rest["calls"] == 2


@dataclass(frozen=True)
class OfMethod(fl.losses.Loss):
    """Moves the values that a method of the module gives towards targets."""

    needs: ClassVar[tuple[str, ...]] = ("obs", "target")
    on_policy: ClassVar[bool] = False

    def __call__(self, policy, params, batch):
        error = policy(params, batch["obs"], method="critic") - batch["target"]
        return (error**2).mean(), {}


@pytest.mark.parametrize("loss", [PG, OfMethod()])
def test_a_module_with_random_state_trains_and_draws_again_at_every_step(loss):
    learner = fresh(loss, SGD, fl.Policy(Dropping))
    ends = []
    for _ in range(2):
        before, _ = learner.weights()
        assert metrics_of(learner.update(batch()))["bad"] == 0
        ends.append(learner.weights()[0])
        assert (ends[-1].params["heads/kernel"] != before.params["heads/kernel"]).any()
    counts = [{k: int(v) for k, v in end.rest.items() if k.endswith("count")} for end in ends]
    assert all(counts[1][k] > counts[0][k] for k in counts[0]) and counts[0]


@dataclass(frozen=True)
class Errors(fl.losses.Loss):
    """Moves values towards targets, and reports how far off each was."""

    needs: ClassVar[tuple[str, ...]] = ("obs", "target")
    on_policy: ClassVar[bool] = False
    priorities: ClassVar[bool] = True

    def __call__(self, policy, params, batch):
        _, value = policy(params, batch["obs"])
        error = jnp.abs(value - batch["target"])
        return (error**2).mean(), {"priority": error}


def priority_of(learner, **how):
    return np.asarray(learner.update(batch(invalid=False), **how).feedback["priority"])


@pytest.mark.parametrize("minibatch", [None, 4])
def test_a_priority_is_what_the_last_epoch_found(minibatch):
    how = {"minibatch_size": minibatch, "shuffle": False}
    last = priority_of(fresh(Errors(), fl.SGD(lr=0.1)), epochs=2, **how)
    learner = fresh(Errors(), fl.SGD(lr=0.1))
    first, second = (priority_of(learner, **how) for _ in range(2))
    np.testing.assert_allclose(last, second, rtol=1e-5, atol=1e-6)
    assert np.abs(last - first).max() > 1e-3


def test_priorities_stand_in_the_order_of_the_rows_however_these_are_shuffled():
    in_order, shuffled = (
        priority_of(fresh(Errors(), fl.SGD(lr=0.0)), epochs=2, minibatch_size=4, shuffle=shuffle)
        for shuffle in (False, True)
    )
    np.testing.assert_allclose(shuffled, in_order, rtol=1e-5, atol=1e-6)
    assert len(np.unique(in_order)) == len(in_order)


@dataclass(frozen=True)
class Hasty(fl.losses.PGLoss):
    """Stops early, as it says, but does not say when."""

    @property
    def stops_early(self):
        return True


def test_a_loss_that_stops_early_says_when():
    graph = fl.pg(
        "CartPole-v1", fl.PGSettings(envs_per_runner=2, rollout_length=4, batch_size=8)
    ).set("learner.loss", Hasty())
    with pytest.raises(
        fl.errors.CheckError,
        match=r"Hasty stops early, but does not say when: give it a method stop\(metrics\)",
    ):
        graph.check()


def test_work_on_rollouts_is_no_way_out_after_a_replay():
    graph = (
        fl.dqn("CartPole-v1")
        .set("learner.loss", fl.losses.PPOLoss())
        .set("learner.policy", fl.Policy(fl.networks.MLP))
        .set("runners.policy", fl.Policy(fl.networks.MLP))
    )
    with pytest.raises(fl.errors.CheckError) as refused:
        graph.check()
    assert (
        "PPOLoss needs the fields" in str(refused.value)
        and "put Advantages" not in str(refused.value)
        and "DQNLoss" in str(refused.value)
    )
