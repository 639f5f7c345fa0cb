"""Trees as named fields, in batches and on their way to a network, a loss and an operator."""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import flowrl as fl
from flowrl.core.items import Batch
from flowrl.core.trees import fields_of, names_of, tree_of
from tests.spaced import Spaced

KEYS = st.text(min_size=1, max_size=4)
TREES = st.recursive(
    st.integers(),
    lambda inner: (
        st.dictionaries(KEYS, inner, min_size=1, max_size=3)
        | st.lists(inner, min_size=1, max_size=12).map(tuple)
    ),
    max_leaves=20,
)


@settings(deadline=None)
@given(TREES)
def test_the_fields_of_a_tree_make_it_up_again_whatever_its_keys_are(tree):
    fields = fields_of("obs", tree)
    assert tree_of("obs", {"reward": 1, "obs2": 2, **fields}) == tree
    assert set(names_of("obs", {"next_obs": 0, **fields})) == set(fields)


def batch_of(tree):
    return Batch({**fields_of("obs", tree), "reward": np.zeros((2, 3))})


def test_a_batch_gives_the_tree_and_takes_another_in_its_place():
    x = np.arange(6.0).reshape(2, 3)
    batch = batch_of({"a": x, "b": (x, x)})
    assert batch["obs"]["b"][1] is x and batch.has("obs") and not batch.has("ob")
    changed = batch.with_(obs={"c": x}, reward=x)
    assert set(changed.data) == {"reward", "obs['c']"} and changed["reward"] is x
    assert set(batch.with_(obs=x).data) == {"reward", "obs"}
    with pytest.raises(fl.errors.ContractError, match=r"no field: unknown field 'next_obs'"):
        _ = batch["next_obs"]


class Own(nnx.Module):
    """Reads one part of observations, and none of a mask."""

    def __init__(self, obs_space, action_space, *, rngs):
        assert sorted(obs_space.spaces) == ["goal", "place"]
        outputs = fl.networks.action_outputs(action_space)
        self.layer = nnx.Linear(obs_space["place"].shape[0], outputs + 1, rngs=rngs)

    def __call__(self, obs):
        assert sorted(obs) == ["goal", "place"]
        both = self.layer(obs["place"])
        return both[:, :-1], both[:, -1]


class OwnLoss(fl.losses.Loss):
    """Learns by one part of the observations."""

    needs: ClassVar[tuple[str, ...]] = ("obs", "action", "reward", "next_obs")
    on_policy: ClassVar[bool] = False

    def __call__(self, policy, params, batch):
        obs, after = batch["obs"]["observation"], batch["next_obs"]["observation"]
        dist, value = policy(params, batch["obs"])
        moved = jnp.abs(after["place"] - obs["place"]).sum(-1)
        loss = ((value - moved) ** 2).mean() - dist.log_prob(batch["action"]).mean() * 0.01
        return loss, {"goal": obs["goal"].mean()}


@dataclass(frozen=True)
class FirstGoal(fl.extend.Stateless):
    """Adds the first goal of each column, and leaves the rest."""

    adds: ClassVar[tuple[str, ...]] = ("first_goal",)

    def step(self, state, batch, ctx):
        goal = batch["obs"]["observation"]["goal"]
        yield batch.with_(first_goal=ctx.run(_first, goal))


def _first(goal):
    return jnp.broadcast_to(goal[:1], goal.shape)


def test_a_network_a_loss_and_an_operator_of_the_users_own_get_the_tree():
    runners = fl.Runners(
        Spaced,
        fl.Policy(Own),
        envs_per_runner=2,
        rollout_length=8,
        env_settings={"obs": "dict", "mask": "obs"},
    )
    graph = fl.Graph(
        "g",
        runners=runners,
        replay=fl.Replay(200, extra=("first_goal",), n_step=2),
        learner=fl.Learner(fl.Policy(Own), OwnLoss(), fl.Adam()),
    ).then(
        sample=fl.ParallelSample(),
        goal=FirstGoal(),
        add=fl.ReplayAdd(),
        batch=fl.ReplaySample(16, learning_starts=32),
        train=fl.TrainOneStep(),
        sync=fl.SyncWeights(),
        report=fl.Report(),
    )
    with fl.run(graph, steps=200) as run:
        rows = list(run)
    assert 0 <= rows[-1]["goal"] <= 2 and np.isfinite(rows[-1]["loss"])


def test_moments_are_those_of_the_part_that_a_layer_reads():
    class Normed(Own):
        def __init__(self, obs_space, action_space, *, rngs):
            super().__init__(obs_space, action_space, rngs=rngs)
            self.norm = fl.networks.RunningNorm((2,))

        def __call__(self, obs):
            return super().__call__({**obs, "place": self.norm(2 * obs["place"])})

    graph = fl.ppo(Spaced, policy=fl.Policy(Normed))
    graph = graph.set("runners.env_settings", {"obs": "dict"})
    with fl.run(graph, steps=3_000) as run:
        list(run)
        state = jax.device_get(run.policy.weights.rest)
    mean, var, count = (
        next(x for name, x in state.items() if name.endswith(end))
        for end in ("mean", "var", "count")
    )
    # Twice a uniform number from -1 to 1 has mean 0 and variance 4 / 3.
    np.testing.assert_allclose(mean, 0, atol=0.15)
    np.testing.assert_allclose(var, 4 / 3, atol=0.15)
    assert count > 2_000
