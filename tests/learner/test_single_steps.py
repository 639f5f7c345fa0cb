"""Updates of a single gradient step, which are checked before they are taken where they can be."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import flowrl as fl
from flowrl.core.items import Batch
from flowrl.graph.site import HereSite, Place
from flowrl.learner.core import Core
from flowrl.learner.gradients import arrays_of

ROWS = 6
ADAM = fl.Adam(1e-2, max_grad_norm=0.5)


class Counting(nnx.Module):
    """A network with a number of its own, which becomes infinite where an observation is large."""

    def __init__(self, obs_space, action_space, *, normalize=False, rngs):
        self.norm = fl.networks.RunningNorm(obs_space.shape) if normalize else None
        self.out = nnx.Linear(obs_space.shape[0], fl.networks.action_outputs(action_space) + 1,
                              rngs=rngs)  # fmt: skip
        self.seen = nnx.BatchStat(jnp.float32(0))

    def __call__(self, obs):
        self.seen[...] = self.seen[...] + jnp.sum(obs[:, 0] * 1e38)
        out = self.out(jnp.tanh(obs if self.norm is None else self.norm(obs)))
        return out[:, :-1], out[:, -1]


class Root(fl.losses.Loss):
    """A loss that is finite where its gradient is not: at a root of 0."""

    needs: ClassVar[tuple[str, ...]] = ("target", "reward")
    on_policy = False

    def __call__(self, policy, params, batch):
        dist, value = policy(params, batch["obs"])
        root = jnp.sqrt(jnp.sum(batch["target"] * value) ** 2)
        return jnp.mean(dist.log_prob(batch["action"])) + root + jnp.sum(batch["reward"]), {}


class Adapting(Root):
    def init(self):
        return {"weight": jnp.float32(1)}


POLICY = fl.Policy(Counting)


def learner(loss=Root(), optimizer=ADAM, policy=POLICY):  # noqa: B008 - frozen settings
    runners = fl.Runners("CartPole-v1", policy, envs_per_runner=1, rollout_length=1)
    resources = {"runners": runners, "learner": fl.Learner(policy, loss, optimizer)}
    return Place("test", resources, 0, HereSite).open()["learner"]


def batch(seed=0, **fields):
    rng = np.random.default_rng(seed)
    f = lambda *shape: rng.normal(size=(1, ROWS, *shape)).astype(np.float32)
    data = {
        "obs": f(4),
        "target": f(),
        "reward": f(),
        "action": rng.integers(0, 2, (1, ROWS)).astype(np.int32),
        "valid": np.ones((1, ROWS), bool),
    }
    return Batch({**data, **fields}, {"version": np.zeros(ROWS, np.int32)})


def now(handle):
    return jax.tree.map(np.array, {k: handle.state["core"][k] for k in ("weights", "opt", "loss")})


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


ZEROS = np.zeros((1, ROWS), np.float32)
FAULTS = {
    "a loss that is NaN": {"target": np.full((1, ROWS), np.nan, np.float32)},
    "a loss whose gradient is finite": {"reward": np.full((1, ROWS), np.inf, np.float32)},
    "a gradient that is NaN": {"target": ZEROS},
    "a gradient whose square is infinite": {"target": np.full((1, ROWS), 1e19, np.float32)},
    "a number of the network": {"obs": np.full((1, ROWS, 4), 3.0, np.float32)},
}


@pytest.mark.parametrize("by", ["an update", "gradients"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_step_that_is_not_finite_changes_nothing(fault, by):
    taking = learner()
    assert taking.core.checks_first
    update = taking.update if by == "an update" else lambda x: taking.apply(taking.gradients(x))
    update(batch())
    before = now(taking)
    assert np.isfinite(before["weights"].rest["seen"])
    trained = update(batch(1, **FAULTS[fault]))
    found = dict(zip(trained.metrics.names, np.asarray(trained.metrics.values), strict=True))
    assert (found["bad"], found["gradient_steps"]) == (1, 0)
    assert_equal(now(taking), before)
    trained = update(batch(2))
    found = dict(zip(trained.metrics.names, np.asarray(trained.metrics.values), strict=True))
    assert (found["bad"], found["gradient_steps"]) == (0, 1)
    after = now(taking)["weights"]
    assert (after.params["out/kernel"] != before["weights"].params["out/kernel"]).any()


def updated(core, state, rows):
    others = {name: x for name, x in state.items() if name != "weights"}
    data, columns = arrays_of(core, rows)
    return core.update(state["weights"], others, data, columns, epochs=1, minibatch_size=ROWS)


def test_a_step_is_the_same_whether_it_is_checked_first_or_dropped_afterwards(monkeypatch):
    cores = [Core(POLICY, learner().core.spaces, Root(), ADAM) for _ in range(2)]
    monkeypatch.setitem(cores[1].__dict__, "checks_first", False)
    states = []
    for core in cores:
        step = jax.jit(lambda state, rows, core=core: updated(core, state, Batch(rows, {}))[0])
        state = core.init(jax.random.key(0))
        for rows in (batch(0), batch(1, target=ZEROS), batch(2), batch(3)):
            state = step(state, rows.data)
        states.append({name: x for name, x in state.items() if name != "key"})
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    jax.tree.map(close, *states)


def test_a_step_that_is_checked_first_keeps_no_old_weights_beside_the_new(monkeypatch):
    """Those would be copied in a loop over updates."""
    found = []
    for checks in (True, False):
        core = Core(POLICY, learner().core.spaces, Root(), ADAM)
        monkeypatch.setitem(core.__dict__, "checks_first", checks)
        state = core.init(jax.random.key(0))
        traced = jax.make_jaxpr(lambda state, core=core: updated(core, state, batch()))(state)
        chosen = [x for x in traced.eqns if x.params.get("name") == "_where"]
        found.append((4, 3) in {x.outvars[0].aval.shape for x in chosen})
    assert found == [False, True]


@pytest.mark.parametrize(
    ("checks", "settings"),
    [
        (True, {}),
        (True, {"optimizer": fl.Optimizers(out=fl.RMSProp(1e-3))}),
        (False, {"optimizer": fl.SGD(0.1)}),
        (False, {"optimizer": fl.Adam(0.1, weight_decay=0.1)}),
        (False, {"optimizer": fl.Optax(optax.adam, learning_rate=0.1)}),
        (False, {"optimizer": optax.adam(0.1)}),
        (False, {"loss": Adapting()}),
        (False, {"loss": fl.losses.PPOLoss(target_kl=0.1)}),
        (False, {"policy": fl.Policy(Counting, normalize=True)}),
    ],
)
def test_what_may_break_after_finite_gradients_is_checked_afterwards(checks, settings, monkeypatch):
    # A transformation itself can't be in a graph's settings, but in a core.
    parts = {"policy": POLICY, "loss": Root(), "optimizer": ADAM, **settings}
    core = Core(**parts, spaces=learner().core.spaces)
    assert core.checks_first == checks
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert not Core(**parts, spaces=core.spaces).checks_first
