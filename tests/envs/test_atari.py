"""Atari games: registered at need, preprocessed as the field does, and nothing sampled twice.

Their scores are reported unclipped.
"""

import functools
import sys
import weakref

import gymnasium as gym
import numpy as np
import pytest

import flowrl as fl
from conftest import rows_and_weights, same, timeless
from environments import Clockwork
from flowrl.algos.default import default_policy
from flowrl.cli.main import main
from flowrl.envs.gym_envs import make_vector
from flowrl.rollout.runner import Runner

SMALL = fl.Policy(fl.networks.CNN, channels=(4,), kernels=(6,), strides=(6,), hidden=8)
SETTINGS = {
    "policy": SMALL,
    "envs_per_runner": 2,
    "rollout_length": 10,
    "batch_size": 40,
    "clip_rewards": 1.0,
    "report_every": 1,
}
IMPALA = fl.impala("ALE/SpaceInvaders-v5", fl.IMPALASettings(**SETTINGS)).set(
    "runners.env_settings", {"max_num_frames_per_episode": 200}
)
PLAIN = {"repeat_action_probability": 0.0, "noop_max": 0, "use_fire_reset": False}


def area(size, to):
    """``[to, size]``: the share of each pixel in each wider one."""
    edges, low = np.arange(to + 1) * size / to, np.arange(size)
    share = np.clip(
        np.minimum(edges[1:, None], low + 1) - np.maximum(edges[:-1, None], low), 0, None
    )
    return share / share.sum(axis=1, keepdims=True)


def test_frames_are_those_of_the_single_game_pooled_grey_small_and_stacked():
    vector = make_vector("ALE/Breakout-v5", 1, (), PLAIN)
    one = gym.make(
        "ALE/Breakout-v5", frameskip=1, repeat_action_probability=0.0, obs_type="grayscale"
    )
    rng, rows, columns, total = np.random.default_rng(0), area(210, 84), area(160, 84), 0.0
    stack = [np.zeros((84, 84))] * 3 + [
        rows @ one.reset(seed=7)[0] @ columns.T
    ]  # where gymnasium's own wrapper repeats the first frame
    seen = vector.reset(seed=7)[0]
    np.testing.assert_allclose(seen[0], stack, atol=0.501)
    for _ in range(150):
        action = rng.integers(4)
        frames = [one.step(action)[:2] for _ in range(4)]
        stack = [*stack[1:], rows @ np.maximum(frames[2][0], frames[3][0]) @ columns.T]
        seen, reward, *_ = vector.step(np.array([action]))
        np.testing.assert_allclose(seen[0], stack, atol=0.501)
        assert reward[0] == sum(r for _, r in frames)
        total += reward[0]
    assert total > 0
    one.close()
    vector.close()


def test_spaces_are_those_of_what_runs():
    runners = fl.Runners("ALE/Pong-v5", SMALL, envs_per_runner=2, rollout_length=2)
    assert runners.spaces().obs == gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    handle = runners.open()
    assert (handle.collect()["obs"].shape, handle.collect()["obs"].dtype) == (
        (2, 2, 4, 84, 84),
        np.uint8,
    )
    handle.close()
    coarse = fl.Runners(
        "ALE/Pong-v5", SMALL, env_settings={"stack_num": 2, "img_height": 42, "img_width": 42}
    )
    assert coarse.spaces().obs.shape == (2, 42, 42)
    wrapped = fl.Runners("ALE/Pong-v5", SMALL, wrappers=(gym.wrappers.GrayscaleObservation,))
    assert wrapped.spaces().obs.shape == (210, 160)


@functools.cache
def sampled(clip):
    """220 steps of 2 games, cut every 100."""
    cut = {"max_num_frames_per_episode": 400}
    handle = fl.Runners(
        "ALE/SpaceInvaders-v5",
        SMALL,
        envs_per_runner=2,
        rollout_length=220,
        env_settings=cut,
        clip_rewards=clip,
    ).open()
    batch, reported = handle.collect(), handle.episodes()
    handle.close()
    return batch, reported


def test_what_is_learned_from_is_clipped_and_scores_are_not():
    whole, reported = sampled(None)
    clipped, same_reported = sampled(1.0)
    assert whole["reward"].max() >= 5
    np.testing.assert_array_equal(clipped["reward"], np.clip(whole["reward"], -1, 1))
    assert (
        reported
        == same_reported
        == {
            "env_steps": 2 * 218,
            "episodes": 4,
            "return_mean": whole["reward"][:201].sum() / 4,
            "length_mean": 100,
        }
    )
    np.testing.assert_array_equal(clipped["obs"], whole["obs"])
    with pytest.raises(fl.errors.SettingError, match="clip_rewards must be above 0 or None, got 0"):
        sampled(0)


def test_an_episode_that_is_cut_keeps_its_last_frames_in_a_row_of_their_own():
    batch, _ = sampled(None)
    assert (np.flatnonzero(batch["truncated"][:, 0]) == [99, 200]).all()
    assert not batch["terminated"].any()
    assert (np.flatnonzero(~batch["valid"][:, 0]) == [100, 201]).all()
    assert not batch["reward"][100].any()
    moving, fresh = batch["obs"][100], batch["obs"][101]
    np.testing.assert_array_equal(moving[:, :3], batch["obs"][99][:, 1:])
    assert not fresh[:, :3].any()


@pytest.mark.ray
@pytest.mark.system
def test_on_ray_the_same_rows_come(ray_up):
    graph = fl.pg(
        "ALE/SpaceInvaders-v5",
        fl.PGSettings(policy=SMALL, envs_per_runner=2, rollout_length=10, batch_size=20),
    )
    rows, weights = rows_and_weights(graph, 1)
    far, same_weights = rows_and_weights(graph, 1, "ray")
    assert timeless(rows) == timeless(far)
    assert same(weights, same_weights)


@pytest.mark.system
def test_a_saved_policy_is_evaluated_in_what_it_was_trained_in(tmp_path):
    with fl.run(IMPALA, steps=40) as run:
        list(run)
        run.save(tmp_path / "run")
    policy = fl.load(tmp_path / "run")
    vector, returns = (
        make_vector("ALE/SpaceInvaders-v5", 1, (), IMPALA.resources["runners"].env_settings),
        [],
    )
    for seed in (3, 4):
        obs, total, over = vector.reset(seed=seed)[0], 0.0, False
        while not over:
            obs, reward, terminated, truncated, _ = vector.step(policy.act(obs))
            total, over = total + reward[0], terminated[0] or truncated[0]
        returns.append(total)
    np.testing.assert_array_equal(policy.evaluate(2, seed=3), returns)
    vector.close()


def test_a_closed_runner_lets_go_of_the_threads_of_its_games():
    runner = Runner(fl.Runners("ALE/Pong-v5", SMALL, envs_per_runner=2), "runners", 0, 0)
    vector = weakref.ref(runner.vector)
    runner.close()
    assert vector() is None


def test_without_the_package_the_message_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ale_py", None)
    says = r"'ALE/Pong-v5' needs the package ale_py \(.*\): .* -m pip install 'flowrl\[atari\]'"
    with pytest.raises(fl.errors.SettingError, match=says):
        fl.Runners("ALE/Pong-v5", SMALL).spaces()
    assert main(["plan", "impala", "--env", "ALE/Pong-v5"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[0] == "flowrl: impala can't run: 1 problem"
    assert err.splitlines()[1:] == [
        (
            "  impala.runners: 'ALE/Pong-v5' needs the package ale_py (import of ale_py halted; "
            f"None in sys.modules): {sys.executable} -m pip install 'flowrl[atari]'"
        )
    ]


def test_an_unknown_game_gives_the_nearest():
    with pytest.raises(fl.errors.SettingError, match="did you mean 'ALE/Pong-v5'"):
        fl.Runners("ALE/Pongg-v5", SMALL).spaces()


def test_a_stock_graph_reads_images_with_a_cnn():
    plan = str(fl.impala("ALE/Pong-v5").compile())
    assert "2 runners x 8 envs x 50 steps of ALE/Pong-v5" in plan
    assert "learner  CNN, VTraceLoss, Adam" in plan
    assert default_policy("ALE/Pong-v5", normalize=False) == fl.Policy(fl.networks.CNN)
    with pytest.raises(
        fl.errors.SettingError,
        match=r"normalize: the policy has convolutions .*; leave normalize out, or give "
        r"policy=fl\.Policy\(fl\.networks\.MLP",
    ):
        fl.ppo("ALE/Pong-v5", fl.PPOSettings(normalize=True))
    for make in (Clockwork, SmallImages, DictObservations):
        assert default_policy(make, normalize=False) == fl.Policy(fl.networks.MLP, normalize=False)


class SmallImages(Clockwork):
    observation_space = gym.spaces.Box(0, 255, (7, 7, 3), np.uint8)


class DictObservations(Clockwork):
    observation_space = gym.spaces.Dict(image=gym.spaces.Box(0, 255, (84, 84, 3), np.uint8))


@pytest.mark.parametrize("name", ["ppo", "a2c", "a3c", "pg", "impala", "appo"])
def test_tuned_settings_for_every_game_clip_rewards(name, capsys):
    assert fl.tuned(name, "ALE/Pong-v5") == fl.tuned(name, "ALE/Breakout-v5")
    assert fl.tuned(name, "ALE/Pong-v5")["clip_rewards"] == 1.0
    assert main(["check", name, "--env", "ALE/Pong-v5"]) == 0
    assert "is sound" in capsys.readouterr().out
