"""The stock asynchronous graphs on every kind of policy and of action."""

import math

import gymnasium as gym
import numpy as np
import pytest

import flowrl as fl


class Screens(gym.Env):
    """Images, and actions of either kind."""

    def __init__(self, continuous=False):
        self.observation_space = gym.spaces.Box(0, 255, (9, 8, 1), np.uint8)
        self.action_space = gym.spaces.Box(-1, 1, (2,)) if continuous else gym.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 12
        return self.observation_space.low + np.uint8(self.np_random.integers(200)), {}

    def step(self, action):
        self.left -= 1
        return (
            self.observation_space.low + np.uint8(self.np_random.integers(200)),
            float(np.sum(action)),
            self.left == 0,
            False,
            {},
        )


POLICIES = {
    "MLP": fl.Policy(fl.networks.MLP, hidden=(8,)),
    "CNN": fl.Policy(fl.networks.CNN, channels=(4,), kernels=(3,), strides=(2,), hidden=8),
    "LSTM": fl.Policy(fl.networks.RNN, hidden=(8,), size=8),
    "GRU": fl.Policy(fl.networks.RNN, hidden=(8,), size=8, cell="gru"),
}


def graph_of(algo, policy, continuous):
    stock, settings = {
        "impala": (fl.impala, fl.IMPALASettings),
        "appo": (fl.appo, fl.APPOSettings),
    }[algo]
    env = Screens if policy == "CNN" else "Pendulum-v1" if continuous else "CartPole-v1"
    graph = stock(
        env,
        settings(
            num_runners=2,
            envs_per_runner=2,
            rollout_length=8,
            batch_size=32,
            report_every=2,
            policy=POLICIES[policy],
        ),
    )
    return (
        graph.set("runners.env_settings", {"continuous": True})
        if env is Screens and continuous
        else graph
    )


@pytest.mark.parametrize("continuous", [False, True], ids=["discrete", "continuous"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("algo", ["impala", "appo"])
def test_they_are_planned_on_every_policy_and_kind_of_action(algo, policy, continuous):
    plan = graph_of(algo, policy, continuous).compile()
    assert plan.per_row("updates") == 2 and math.isinf(plan.lag_bound)


@pytest.mark.parametrize(
    ("algo", "policy", "continuous"), [("impala", "CNN", False), ("appo", "MLP", True)]
)
def test_they_train_as_planned(algo, policy, continuous):
    with fl.run(graph_of(algo, policy, continuous)) as run:
        before = run.policy.weights
        row = next(run)
        after = run.policy.weights
    assert math.isfinite(row["loss"]) and row["updates"] == run.plan.per_row("updates")
    assert any((before.params[name] != after.params[name]).any() for name in before.params)
    assert run.audit().closed and run.counts()["trained_steps"] == row["trained_steps"]
