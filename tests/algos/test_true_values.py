"""What a whole run learns where the true value is known.

Reward 1 for ever, cut into short episodes, is worth 1 / (1 - gamma).

The value of an episode that is cut short goes on, so the value of its final observation counts. A
fault anywhere on the way from the environment to the saved policy (rows of the runner, batch, loss,
update) shows in the values that the saved policy gives.
"""

from functools import partial

import numpy as np
import pytest

import flowrl as fl
from environments import JaxCutShort, cut_short, two_ends
from flowrl.rl.policies import Memory
from flowrl.rl.sequence_losses import unscaled

GAMMA = 0.9
TRUE = 10.0
SETTINGS = {
    "num_runners": 1, "envs_per_runner": 8, "rollout_length": 12, "batch_size": 96, "lr": 1e-2,
    "gamma": GAMMA, "max_grad_norm": 40.0, "ent_coef": 0.0, "report_every": 20,
}  # fmt: skip
MLP, RNN = fl.Policy(fl.networks.MLP, hidden=(16,)), fl.Policy(fl.networks.RNN, hidden=(8,), size=8)
GRAPHS = {
    "impala": (lambda env: fl.impala(env, fl.IMPALASettings(**SETTINGS, policy=MLP)), 200),
    "appo": (lambda env: fl.appo(env, fl.APPOSettings(**SETTINGS, policy=MLP)), 200),
    "recurrent": (lambda env: fl.impala(env, fl.IMPALASettings(**SETTINGS, policy=RNN)), 800),
}
"""By name: what makes the graph, and the updates after which it has learned the value."""
NEXT, SAME, DISABLED = (partial(cut_short, mode) for mode in ("NextStep", "SameStep", "Disabled"))
LOCAL = [
    ("impala", "local", NEXT),
    ("impala", "local", SAME),
    # They compile for long.
    pytest.param("appo", "local", DISABLED, marks=pytest.mark.system),
    pytest.param("recurrent", "local", NEXT, marks=pytest.mark.system),
]
RAY = [
    pytest.param(graph, "ray", env, marks=pytest.mark.system)
    for graph, env in zip(GRAPHS, (SAME, NEXT, DISABLED), strict=True)
]
XLA = [
    pytest.param(
        *(graph, "xla", JaxCutShort), marks=pytest.mark.system if graph == "recurrent" else ()
    )
    for graph in GRAPHS
]


def values_of_an_episode(policy):
    """The values of the 5 observations of an episode, by a policy that acts greedily."""
    net = policy.network
    memory, values = net.memory(policy.weights, 1), []
    for _ in range(5):
        packed, carry = net.act(policy.weights, np.ones((1, 1), np.float32), None, memory)
        memory = Memory(carry, np.zeros(1, bool)) if net.recurrent else memory
        values.append(float(packed[0, -1]))
    return values


@pytest.mark.system
@pytest.mark.parametrize(("graph", "runtime", "env"), [*LOCAL, *RAY, *XLA], indirect=["runtime"])
def test_a_truncated_episode_is_bootstrapped_from_the_value_of_its_final_observation(
    graph, runtime, env, tmp_path
):
    make, updates = GRAPHS[graph]
    with fl.run(
        make(env),
        runtime=runtime,
        until=lambda row: row["updates"] >= updates,
        out=tmp_path / "run",
    ) as run:
        for _ in run:
            pass
    values = values_of_an_episode(fl.load(tmp_path / "run", allow=("environments",)))
    assert values == pytest.approx([TRUE] * 5, rel=0.05)


REPLAYED = {
    "envs_per_runner": 4, "rollout_length": 8, "learning_starts": 64, "batch_size": 64,
    "updates_per_step": 1.0, "lr": 1e-2, "gamma": GAMMA, "tau": 0.1, "hidden": (16,),
    "report_every": 50,
}  # fmt: skip
ONE = {"target_update_every": 1}
OF_REPLAYS = {
    "dqn": lambda env: fl.dqn(env, **REPLAYED, **ONE, n_step=3, prioritized=True),
    "c51": lambda env: fl.dqn(
        env, **REPLAYED, **ONE, n_step=2, distribution="c51", v_min=0.0, v_max=12.0
    ),
    "quantile": lambda env: fl.dqn(env, **REPLAYED, **ONE, distribution="quantile", atoms=8),
    "r2d2": lambda env: fl.r2d2(
        env,
        **{**REPLAYED, "batch_size": 16, "updates_per_step": 0.25},
        **{**ONE, "size": 8, "sequence_length": 6, "burn_in": 2, "n_step": 3},
    ),
    "ddpg": lambda env: fl.ddpg(env, **REPLAYED, n_step=3),
    "td3": lambda env: fl.td3(env, **REPLAYED),
}
"""By name: what makes a graph with a replay, from an environment."""
POINTS = np.float32([[1, 0], [0, 0], [0, 1 / 3], [0, 2 / 3]])
"""What is seen in the episodes that are cut short, and at the steps of one that terminates."""
WORTH = [TRUE, 1 + GAMMA + GAMMA**2, 1 + GAMMA, 1.0]


def action_values(policy):
    """The values of actions at each of the points, by a saved policy's network.

    They are of all actions, or of all critics the values of the policy's own action.
    """
    net, weights = policy.network, policy.weights
    if not net.head.sizes:
        action = net.apply(weights, POINTS)[0].mode()
        return np.asarray(net.call("critic", weights, POINTS, action)[0]).T
    # A recurrent network sees each as the first observation of an episode.
    memory = net.memory(weights, 4)
    values = np.asarray(net.apply(weights, POINTS, memory)[0].logits)
    return np.asarray(unscaled(values)) if net.recurrent else values


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("dqn", "SameStep"),
        pytest.param("c51", "Disabled", marks=pytest.mark.system),
        pytest.param("quantile", "NextStep", marks=pytest.mark.system),
        pytest.param("r2d2", "NextStep", marks=pytest.mark.system),
        pytest.param("ddpg", "SameStep", marks=pytest.mark.system),
        pytest.param("td3", "NextStep", marks=pytest.mark.system),
    ],
)
def test_a_replay_gives_the_true_values_of_episodes_of_both_ends(name, mode, tmp_path):
    env = partial(two_ends, mode, name in ("ddpg", "td3"))
    with fl.run(
        OF_REPLAYS[name](env), until=lambda row: row["updates"] >= 800, out=tmp_path / "run"
    ) as run:
        for _ in run:
            pass
    values = action_values(fl.load(tmp_path / "run", allow=("environments",)))
    # Episodes of a recurrent policy begin with two of these observations alone.
    points = 2 if name == "r2d2" else 4
    for found, worth in zip(values[:points], WORTH, strict=False):
        np.testing.assert_allclose(found, worth, rtol=0.06)


OFFLINE = {
    "batch_size": 64, "lr": 1e-2, "gamma": GAMMA, "hidden": (16,), "envs_per_runner": 4,
    "evaluate_every": 100_000, "report_every": 100,
}  # fmt: skip


@pytest.mark.system
@pytest.mark.parametrize(("name", "mode"), [("marwil", "SameStep"), ("iql", "NextStep")])
def test_a_dataset_gives_the_true_values_of_episodes_of_both_ends(name, mode, tmp_path):
    env = partial(two_ends, mode, name == "iql")
    small = {"rollout_length": 16, "batch_size": 64, "minibatch_size": 64, "hidden": (4,)}
    writes = fl.write_dataset(fl.ppo(env, envs_per_runner=4, **small), str(tmp_path / "data"))
    more = {"tau": 0.1, "n_step": 3} if name == "iql" else {}
    learns = getattr(fl, name)(env, data=str(tmp_path / "data"), **OFFLINE, **more)
    for graph, until in (
        (writes, lambda row: row["env_steps"] >= 600),
        (learns, lambda row: row["updates"] >= 800),
    ):
        with fl.run(graph, until=until, out=tmp_path / graph.name) as run:
            for _ in run:
                pass
    policy = fl.load(tmp_path / name, allow=("environments",))
    values = policy.network.apply(policy.weights, POINTS)[1]
    np.testing.assert_allclose(values, WORTH, rtol=0.06)
