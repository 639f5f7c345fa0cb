"""Stock graphs take their own settings, and say so."""

import gymnasium as gym
import numpy as np
import pytest

import flowrl as fl
from environments import Clockwork
from flowrl.rl.networks import Images
from flowrl.rl.policies import network


@pytest.mark.parametrize("name", ["ppo", "a2c", "pg", "impala", "appo", "dqn", "sac", "apex"])
@pytest.mark.parametrize("wrong", [{"lr": 1e-3}, fl.Adam()])
def test_settings_of_another_kind_are_refused_by_name(name, wrong):
    with pytest.raises(
        fl.SettingError, match=r"settings must be fl\.\w+Settings\(\.\.\.\), got (\{'lr'|Adam)"
    ):
        getattr(fl, name)("CartPole-v1", wrong)


class Pictures(Clockwork):
    observation_space = gym.spaces.Box(0, 255, (7, 7, 3), np.uint8)

    def _obs(self):
        return np.full((7, 7, 3), self.time, np.uint8)


PIXELS = fl.Policy(fl.QNetwork, channels=(4,), kernels=(3,), strides=(1,))
QUICK = {"envs_per_runner": 2, "learning_starts": 8, "batch_size": 8, "report_every": 1}


@pytest.mark.parametrize(
    ("policy", "convolves"),
    [(None, False), (PIXELS, True)],
    ids=["fully connected", "kernels of one's own"],
)
def test_dqn_learns_from_small_images(policy, convolves, tmp_path):
    graph = fl.dqn(Pictures, fl.DQNSettings(policy=policy, **QUICK))
    with fl.run(graph, steps=32, out=tmp_path / "run") as run:
        assert list(run)[-1]["updates"] >= 1
    loaded = fl.load(tmp_path / "run", allow=["test_settings"])
    assert network(loaded.policy, loaded.spaces).has(Images) == convolves
    np.testing.assert_array_equal(loaded.evaluate(1), [1.0 * 3])


@pytest.mark.parametrize(("size", "convolves"), [(36, True), (35, False)])
def test_stock_policies_of_both_kinds_convolve_from_the_same_size_on(size, convolves):
    class Sized(Clockwork):
        observation_space = gym.spaces.Box(0, 255, (size, 50, 3), np.uint8)

    ppo, dqn = (graph.resources["runners"] for graph in (fl.ppo(Sized), fl.dqn(Sized)))
    assert [network(r.policy, r.spaces()).has(Images) for r in (ppo, dqn)] == [convolves] * 2


@pytest.mark.parametrize("name", ["ppo", "pg", "a2c"])
def test_small_images_are_normalised_where_that_is_asked_for(name):
    kind = {"ppo": fl.PPOSettings, "pg": fl.PGSettings, "a2c": fl.A2CSettings}[name]
    runners = getattr(fl, name)(Pictures, kind(normalize=True)).resources["runners"]
    assert network(runners.policy, runners.spaces()).has(fl.RunningNorm)


class Pushed(Clockwork):
    """Any push is allowed."""

    action_space = gym.spaces.Box(-np.inf, np.inf, (1,))


def bounded(env):
    return gym.wrappers.TransformAction(env, np.asarray, gym.spaces.Box(-3, 3, (1,)))


def test_sac_refuses_actions_without_bounds_and_its_way_out_works():
    graph = fl.sac(Pushed, fl.SACSettings(learning_starts=4, batch_size=4, report_every=4))
    with pytest.raises(
        fl.CheckError, match=r"sac\.learner: SACNetwork has actions in \[-1, 1\].*TransformAction"
    ):
        graph.compile()
    with fl.run(graph.set("runners.wrappers", (bounded,)), steps=10) as run:
        assert next(run)["updates"] >= 1
