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
from environments import JaxCutShort, cut_short
from flowrl.rl.policies import Memory

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
