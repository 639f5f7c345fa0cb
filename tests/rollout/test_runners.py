"""Runners: what a rollout holds in each way of resetting, and the abstract stub.

And what happens when an environment goes wrong.
"""

import sys
import threading
import warnings
from functools import partial

import gymnasium as gym
import jax
import numpy as np
import pytest

import environments
import flowrl as fl
from environments import Clockwork
from flowrl.core.events import Tap, Warned
from flowrl.core.workers import Failed, HereWorkers
from flowrl.envs.gym_envs import make_vector
from flowrl.graph import trace
from flowrl.graph.site import Place
from flowrl.rollout.counters import Skipped
from flowrl.rollout.environments import Environments
from flowrl.rollout.reward_scale import RewardScale
from flowrl.rollout.runner import Runner
from flowrl.rollout.runner_stub import RunnerStub

POLICY = fl.Policy(fl.networks.MLP, hidden=(8,))
ROLLOUT = 9


def sampled(env, rounds, *, envs=4, **settings):
    runners = fl.Runners(
        env, POLICY, envs_per_runner=envs, rollout_length=ROLLOUT, **settings
    ).open()
    try:
        return [runners.collect() for _ in range(rounds)], runners.episodes()
    finally:
        runners.close()


def test_episode_statistics_do_not_depend_on_whose_answer_comes_first(monkeypatch):
    def means():
        runners = fl.Runners(
            "CartPole-v1", POLICY, num_runners=3, envs_per_runner=8, rollout_length=64
        ).open()
        return [(runners.collect(), runners.episodes())[1] for _ in range(4)]

    in_order = means()
    monkeypatch.setattr(HereWorkers, "wait", lambda self, futures, timeout=None: len(futures) - 1)
    assert means() == in_order and in_order[-1]["episodes"] > 0


class ArrayReward(Clockwork):
    """Gives its reward as an array of two numbers."""

    def step(self, action):
        obs, reward, *rest = super().step(action)
        return obs, np.array([reward, reward]), *rest


def test_a_reward_that_is_an_array_is_named():
    with pytest.raises(
        fl.errors.EnvError,
        match=r"an array float64\[2\] as reward .*float\(reward\); it happened at its step 1",
    ):
        sampled(ArrayReward, 1)


def story(lengths, steps):
    """(episode, step before, reward, terminated, truncated, observation after) of one environment's
    life."""
    episode = 0
    while True:
        for t in range(lengths[episode % len(lengths)]):
            over, cut = t + 1 == lengths[episode % len(lengths)], episode % 2 == 1
            yield (episode, t), episode + 1, over and not cut, over and cut, (episode, t + 1)
        episode += 1


@pytest.mark.parametrize("mode", ["next_step", "same_step", "disabled"])
def test_every_valid_row_is_a_step_that_was_taken_and_final_observations_stand_after_ends(mode):
    batches, _ = sampled(getattr(environments, mode), 4)
    for column, lengths in enumerate(environments.LENGTHS):
        reported = {
            before: rest
            for before, *rest in (next(s) for s in [story(lengths, 0)] for _ in range(400))
        }
        seen = []
        for batch in batches:
            d = {k: v[:, column] for k, v in batch.data.items()}
            after = np.concatenate([d["obs"][1:], batch.columns["bootstrap_obs"][column][None]])
            done = d["terminated"] | d["truncated"]
            for t in range(ROLLOUT):
                if t and not d["valid"][t]:
                    assert done[t - 1], "an invalid row stands only after an end"
                if not d["valid"][t]:
                    assert (d["reward"][t], done[t]) == (0, False)
                    continue
                before = tuple(int(x) for x in d["obs"][t])
                reward, terminated, truncated, expected = reported[before]
                assert (d["reward"][t], d["terminated"][t], d["truncated"][t]) == (
                    reward,
                    terminated,
                    truncated,
                )
                assert tuple(after[t]) == expected, "the row after it holds what the step led to"
                seen.append(before)
        assert seen == sorted(set(seen)), "no step twice, none out of order"
        if mode == "next_step":
            assert seen == [
                before
                for before, *_ in (next(s) for s in [story(lengths, 0)] for _ in range(len(seen)))
            ], "and none left out"


@pytest.mark.parametrize("mode", ["next_step", "same_step", "disabled"])
def test_episode_statistics_count_every_step_also_the_skipped(mode):
    _, reported = sampled(getattr(environments, mode), 6)
    runners = fl.Runners(
        getattr(environments, mode), POLICY, envs_per_runner=4, rollout_length=ROLLOUT
    ).open()
    samples = [
        runners.pool.submit(
            0, "sample", (runners.site.run(_network(runners).init, jax.random.key(0)), 0)
        ).result()
        for _ in range(6)
    ]
    runners.close()
    returns = np.concatenate([s.episodes.returns for s in samples])
    lengths = np.concatenate([s.episodes.lengths for s in samples])
    full = {
        (n * (k + 1), n)
        for ls in environments.LENGTHS
        for k in range(400)
        for n in [ls[k % len(ls)]]
    }
    assert set(zip(returns.tolist(), lengths.tolist(), strict=True)) <= full, (
        "every episode is whole"
    )
    assert reported["episodes"] == len(returns)
    assert sum(int(s.batch["valid"].sum()) for s in samples) == sum(
        s.episodes.env_steps for s in samples
    )
    assert reported["env_steps"] == sum(s.episodes.env_steps + s.episodes.skipped for s in samples)
    assert (sum(s.episodes.skipped for s in samples) > 0) == (mode != "next_step")


def _network(runners):
    from flowrl.rl.policies import network

    return network(POLICY, runners.spaces)


@pytest.mark.parametrize(
    ("env", "policy"),
    [
        ("CartPole-v1", fl.Policy(fl.networks.MLP, hidden=(8,))),
        ("Pendulum-v1", fl.Policy(fl.networks.MLP, hidden=(8,), normalize=True)),
        ("FrozenLake-v1", fl.Policy(fl.networks.MLP, hidden=(8,))),
        (environments.next_step, POLICY),
    ],
    ids=["discrete", "continuous", "discrete observations", "user's vector"],
)
def test_the_abstract_stub_equals_a_real_call_in_every_verb(env, policy):
    spec = fl.Runners(env, policy, envs_per_runner=4, rollout_length=5)
    real, stub = (
        Runner(spec, "runners", 0, 1),
        RunnerStub(
            spec, trace.AbstractSite(Place("g", {}, 0, trace.AbstractSite), "runners", 0), 1
        ),
    )
    weights = jax.jit(real.network.init)(jax.random.key(0))
    try:
        for published in ((weights, np.int32(3)), None, None):
            if stub.local is None and published is None:
                real.localize(fl.chain(adv=fl.Advantages()))
                stub.localize(fl.chain(adv=fl.Advantages()))
            a, b = real.sample(published), stub.sample(published)
            assert _forms(a.batch) == _forms(b.batch)
            np.testing.assert_array_equal(a.batch.columns["version"], b.batch.columns["version"])
            np.testing.assert_array_equal(a.batch.columns["producer"], b.batch.columns["producer"])
        if isinstance(env, str):
            assert _forms(vars(real.evaluate((2, 0, 5), None))) == _forms(
                vars(stub.evaluate((2, 0, 5), None))
            )
        how = {"sigma": 0.1, "episodes": 2, "max_steps": 5, "sampled": False}
        a, b = (each.perturbed(np.arange(3, dtype=np.uint32), how, None) for each in (real, stub))
        assert set(a.batch.data) == set(b.batch.data)
        assert _forms(a.batch) == _forms(b.batch)
        for name in ("version", "producer"):
            np.testing.assert_array_equal(a.batch.columns[name], b.batch.columns[name])
    finally:
        real.close()
    public = {n for n in vars(RunnerStub) if not n.startswith("_")}
    assert public == {"sample", "localize", "evaluate", "perturbed", "close"}


def _forms(tree):
    return jax.tree.map(lambda x: x if isinstance(x, int) else (tuple(x.shape), str(x.dtype)), tree)


def test_runners_sample_standalone_and_take_weights():
    runners = fl.Runners(
        "CartPole-v1", POLICY, num_runners=2, envs_per_runner=3, rollout_length=5
    ).open()
    first = runners.collect()
    assert first.shape == (5, 6)
    np.testing.assert_array_equal(first.columns["producer"], [0, 0, 0, 1, 1, 1])
    weights = runners.site.run(_network(runners).init, jax.random.key(7))
    runners.publish(weights, 12)
    np.testing.assert_array_equal(runners.collect().columns["version"], np.full(6, 12))
    result = runners.evaluate(episodes=5, seed=1)
    assert result["eval/return_min"] <= result["eval/return_mean"] <= result["eval/return_max"]
    assert result == {k: v for k, v in runners.episodes().items() if k in result}
    assert "eval/return_mean" not in runners.episodes()
    runners.close()


@pytest.mark.parametrize("lost", [(1,), (0, 1)])
def test_an_evaluation_goes_on_without_the_runners_that_are_lost(lost, monkeypatch):
    runners = fl.Runners("CartPole-v1", POLICY, num_runners=2).open()
    submit = runners.pool.submit
    monkeypatch.setattr(
        runners.pool,
        "submit",
        lambda i, *args: Failed(fl.errors.RunError("gone")) if i in lost else submit(i, *args),
    )
    counted, warned = [], []
    monkeypatch.setattr(runners.site, "count", lambda **numbers: counted.append(numbers))
    monkeypatch.setattr(runners.site.stream, "emit", warned.append)
    result = runners.evaluate(episodes=4, seed=1)
    assert np.isnan(result["eval/return_mean"]) == (len(lost) == 2)
    played = 4 - 2 * len(lost)
    assert counted[-1] == {"evaluations": 1, "evaluated_episodes": played}
    assert [event.text for event in warned if isinstance(event, Warned)] == [
        f"runners: an evaluation lacks the episodes of runner {runner}: gone" for runner in lost
    ]
    monkeypatch.setattr(
        runners.pool, "submit", lambda i, *args: Failed(fl.errors.EnvError("broken"))
    )
    with pytest.raises(fl.errors.EnvError):
        runners.evaluate(episodes=4, seed=1)
    runners.close()


def test_a_runner_that_is_evaluated_while_it_is_restarted_gets_weights(monkeypatch):
    runners = fl.Runners("CartPole-v1", POLICY, envs_per_runner=1, rollout_length=4).open()
    submit, restart, failures, results = runners.pool.submit, runners.pool.restart, ["gone"], []

    def submit_once_failing(runner, verb, *args):
        if verb == "sample" and failures:
            return Failed(fl.errors.RunError(failures.pop()))
        return submit(runner, verb, *args)

    def restart_beside_an_evaluation(*args):
        restart(*args)
        evaluation.start()
        evaluation.join(0.3)

    def evaluate():
        results.append(runners.evaluate(episodes=1, seed=0))

    evaluation = threading.Thread(target=evaluate)
    monkeypatch.setattr(runners.pool, "submit", submit_once_failing)
    monkeypatch.setattr(runners.pool, "restart", restart_beside_an_evaluation)
    runners.next()
    evaluation.join()
    runners.close()
    assert results[0]["eval/return_mean"] > 0


def test_runners_draw_different_actions_and_the_same_ones_again():
    def first():
        runners = fl.Runners(
            "CartPole-v1", POLICY, num_runners=2, envs_per_runner=4, rollout_length=32
        ).open()
        batch = runners.collect()
        runners.close()
        return batch

    a, b = first(), first()
    assert all((a[k] == b[k]).all() for k in a.data)
    assert (a["action"][:, :4] != a["action"][:, 4:]).any()
    assert (a["obs"][:, :4] != a["obs"][:, 4:]).any()


@pytest.mark.parametrize(
    ("how", "says"),
    [
        (
            "raise",
            (
                r"runners, runner 0: environment 1 of faulty raised in step\(.*\): "
                r"ZeroDivisionError: a joint broke"
            ),
        ),
        (
            "raise in reset",
            (
                r"runners, runner 0: environment 1 of faulty raised in reset: OSError: the "
                r"simulator is gone"
            ),
        ),
        (
            "nan obs",
            (
                r"runners, runner 0: environment 1 of faulty gave an observation that is not "
                r"finite, at step \d of the rollout"
            ),
        ),
        (
            "nan reward",
            (
                r"runners, runner 0: environment 1 of faulty gave a reward that is not finite, at "
                r"step \d of the rollout"
            ),
        ),
        (
            "shape",
            (
                r"environment 1 of faulty returned an observation float32\[3\] from step, but its "
                r"observation_space declares float32\[2\]"
            ),
        ),
        (
            "dtype",
            (
                r"environment 1 of faulty returned an observation <U1\[2\] from step, but its "
                r"observation_space declares float32\[2\]"
            ),
        ),
        (
            "four values",
            (
                r"environment 1 of faulty returned 4 values from step; it must be \(obs, reward, "
                r"terminated, truncated, info\)"
            ),
        ),
    ],
)
def test_a_fault_names_runner_environment_and_cause(how, says):
    made = []

    def faulty():
        made.append(1)
        return (
            environments.Faulty(5, how) if len(made) == 3 else environments.Clockwork((4,))
        )  # the first one only shows its spaces

    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", RuntimeWarning
        )  # gymnasium's own arithmetic on the planted NaN
        with pytest.raises(fl.errors.EnvError, match=says.replace("of faulty", r"of .*faulty")):
            sampled(faulty, 2)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        # Its episodes have 4 steps.
        ("raise", "; it happened at its step 7 since it was made, 3 of an episode"),
        ("shape", "or its space; it happened at its step 7 since it was made, 3 of an episode"),
        ("four values", r"\); it happened at its step 7 since it was made, 3 of an episode"),
        ("raise in reset", "; it happened in a reset, after its step 8"),
    ],
)
@pytest.mark.parametrize("resumed", [False, True])
def test_a_fault_says_at_which_step_it_came(how, says, resumed):
    spec = fl.Runners(partial(environments.Faulty, 7, how), POLICY, envs_per_runner=1)
    made = Environments(spec, spec.spaces())
    obs, action = made.reset(seed=0), np.zeros(1, int)
    for _ in range(6):  # the fifth is a reset
        made.step(action)
    if resumed:
        again = Environments(spec, spec.spaces())
        assert not again.bring_back(made.keep(), 0, obs).any()
        made = again
    with pytest.raises(fl.errors.EnvError, match=f"{says}$"):
        for _ in range(4):
            made.step(action)


def test_an_unknown_environment_gives_the_nearest():
    with pytest.raises(
        fl.errors.SettingError,
        match=r"unknown environment 'CartPol-v1'; did you mean 'CartPole-v1'\?",
    ):
        fl.Runners("CartPol-v1", POLICY).spaces()
    # The namespace is named even where its package was not imported before.
    with pytest.raises(fl.errors.SettingError, match=r"did you mean 'ALE/Breakout-v5'\?"):
        fl.Runners("Breakout-v5", POLICY).spaces()


def test_what_can_not_be_an_environment_is_refused():
    with pytest.raises(fl.errors.EnvError, match=r"made an int; it must be a gymnasium.Env"):
        fl.Runners(lambda: 3, POLICY).spaces()
    with pytest.raises(fl.errors.EnvError, match="could not be made: RuntimeError: no display"):
        fl.Runners(_no_display, POLICY).spaces()
    with pytest.raises(
        fl.errors.SettingError, match="vector of 4 environments, but envs_per_runner=5"
    ):
        sampled(environments.next_step, 1, envs=5)
    with pytest.raises(fl.errors.EnvError, match="does not say how it resets"):
        sampled(environments.silent, 1)


def _no_display():
    raise RuntimeError("no display")


def test_wrappers_and_settings_reach_the_environment():
    wrapped = fl.Runners(
        "CartPole-v1",
        POLICY,
        envs_per_runner=2,
        wrappers=(_Halved,),
        env_settings={"max_episode_steps": 3},
        rollout_length=8,
    )
    assert wrapped.spaces().obs.shape == (2,)
    runners = wrapped.open()
    batch = runners.collect()
    assert batch["obs"].shape == (8, 2, 2)
    assert batch["truncated"][2].all()
    runners.close()


class _Halved(gym.ObservationWrapper):
    def __init__(self, env):
        super().__init__(env)
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def observation(self, observation):
        return observation[:2]


def test_rewards_are_divided_by_the_deviation_of_discounted_returns():
    rng = np.random.default_rng(0)
    scale, returns, seen = RewardScale(3, 0.9), np.zeros(3), []
    for _ in range(5):
        data = {
            "reward": rng.normal(2, 3, (7, 3)).astype(np.float32),
            "valid": np.ones((7, 3), bool),
            "terminated": rng.random((7, 3)) < 0.2,
        }
        data["truncated"] = np.zeros((7, 3), bool)
        after_last_row = ((1, 2.5, True), (1, -1.0, False), (2, 4.0, False))
        skipped = [Skipped(*step, obs=None, next_obs=None) for step in after_last_row]
        scale.observe(data, skipped)
        scaled = scale(data["reward"])
        for reward, done in zip(data["reward"], data["terminated"], strict=True):
            returns = returns * 0.9 + reward
            seen.extend(returns)
            returns = np.where(done, 0, returns)
        for column, reward, over in after_last_row:
            returns[column] = returns[column] * 0.9 + reward
            seen.append(returns[column])
            returns[column] = 0 if over else returns[column]
        np.testing.assert_allclose(scaled, data["reward"] / np.std(seen), rtol=1e-3)


def test_a_discount_factor_of_0_scales_rewards_too():
    """By the deviation of the rewards themselves, which the first rollout is part of."""
    plain, scaled = (sampled(Clockwork, 1, normalize_rewards=gamma)[0][0] for gamma in (None, 0.0))
    scale = RewardScale(4, 0.0)
    scale.observe(plain.data)
    expected = scale(plain["reward"])
    assert (expected != plain["reward"]).any()
    np.testing.assert_array_equal(scaled["reward"], expected)


@pytest.mark.parametrize("wrong", [True, False, -0.1, 1.5, float("nan"), "0.99"])
def test_what_is_no_discount_factor_can_not_scale_rewards(wrong):
    with pytest.raises(fl.errors.SettingError, match="normalize_rewards must be a discount factor"):
        fl.Runners("CartPole-v1", POLICY, normalize_rewards=wrong)


def test_environments_are_closed_where_the_next_one_can_not_be_made():
    made = []

    def make():
        if len(made) == 2:
            raise OSError("no third one")
        made.append(Closes())
        return made[-1]

    with pytest.raises(
        fl.errors.EnvError,
        match=r"make could not be made: OSError: no third one \(test_runners\.py:\d+\)",
    ):
        make_vector(make, 4, (), {})
    assert [env.closed for env in made] == [True, True]


class BadReset(gym.Env):
    """Episodes of 4 steps; the first observation of the second one is not finite."""

    observation_space, action_space = gym.spaces.Box(-1, 1, (1,)), gym.spaces.Discrete(2)
    resets = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.resets, self.time = self.resets + 1, 0
        return np.full(1, np.nan if self.resets == 2 else 0.0, np.float32), {}

    def step(self, action):
        self.time += 1
        return np.zeros(1, np.float32), 1.0, False, self.time == 4, {}


@pytest.mark.parametrize("mode", gym.vector.AutoresetMode)
@pytest.mark.parametrize("steps", [4, 5, 6])
def test_an_observation_of_a_reset_that_is_not_finite_is_reported_as_one(mode, steps):
    def bad_reset():
        return gym.vector.SyncVectorEnv([BadReset], autoreset_mode=mode)

    runners = fl.Runners(bad_reset, POLICY, envs_per_runner=1, rollout_length=steps).open()
    with pytest.raises(fl.errors.EnvError, match="nan, in a reset, after its step 4; it is env"):
        for _ in range(2):
            runners.collect()


class TwoSteps(gym.Env):
    """Episodes of 2 steps; the observation of one step or of one reset is not finite."""

    observation_space, action_space = gym.spaces.Box(-1, 1, (1,)), gym.spaces.Discrete(2)
    resets = steps = 0

    def __init__(self, kind, number):
        self.wrong = (kind, number)

    def obs(self, *now):
        return np.full(1, np.nan if now == self.wrong else 0.0, np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.resets += 1
        return self.obs("reset", self.resets), {}

    def step(self, action):
        self.steps += 1
        return self.obs("step", self.steps), 1.0, self.steps % 2 == 0, False, {}


class Endless(TwoSteps):
    def __init__(self):
        super().__init__("none", 0)

    def step(self, action):
        return self.obs(), 1.0, False, False, {}


@pytest.mark.parametrize(
    "mode", [gym.vector.AutoresetMode.SAME_STEP, gym.vector.AutoresetMode.DISABLED]
)
@pytest.mark.parametrize(
    ("rollout", "wrong", "says"),
    [
        # Its third row is masked, so 2 of 6 steps are skipped: the fifth and sixth.
        (6, ("step", 5), "at its step 5 since it was made, 1 of an episode"),
        (6, ("step", 6), "at its step 6 since it was made, 2 of an episode"),
        (6, ("reset", 4), "in a reset, after its step 6"),
        # Here the last row ends an episode, and the one step that is skipped begins another.
        (5, ("step", 4), "at its step 4 since it was made, 2 of an episode"),
        (5, ("reset", 3), "in a reset, after its step 4"),
        (5, ("step", 5), "at its step 5 since it was made, 1 of an episode"),
        # Here 3 steps are skipped, the last of which begins an episode.
        (9, ("reset", 5), "in a reset, after its step 8"),
        (9, ("step", 9), "at its step 9 since it was made, 1 of an episode"),
    ],
)
def test_an_observation_of_a_skipped_step_that_is_not_finite_is_reported(
    mode, rollout, wrong, says
):
    def uneven():
        return gym.vector.SyncVectorEnv([lambda: TwoSteps(*wrong), Endless], autoreset_mode=mode)

    runners = fl.Runners(uneven, POLICY, envs_per_runner=2, rollout_length=rollout).open()
    with pytest.raises(fl.errors.EnvError, match=f"environment 0 .* nan, {says}; it is env"):
        for _ in range(2):
            runners.collect()


def test_a_vector_that_fails_to_reset_is_named():
    with pytest.raises(
        fl.errors.EnvError,
        match=r"runners, runner 0: bad_vector raised in reset: OSError: no such level "
        r"\(test_runners\.py:\d+\)",
    ):
        fl.Runners(bad_vector, POLICY, envs_per_runner=2).open().collect()


class Closes(Clockwork):
    closed = False

    def close(self):
        self.closed = True


class BadVector(gym.vector.SyncVectorEnv):
    def reset(self, **how):
        raise OSError("no such level")


def bad_vector():
    return BadVector([Clockwork, Clockwork])


def test_a_closed_worker_pool_closes_its_environments():
    spec = fl.Runners("Pendulum-v1", POLICY, envs_per_runner=2, rollout_length=2)
    runner = Runner(spec, "runners", 0, 0)
    runner.sample((jax.jit(runner.network.init)(jax.random.key(0)), 0))
    vector = runner.vector
    HereWorkers(1, lambda index, restart_count: runner).close()
    assert vector.closed


def test_settings_of_an_environment_may_hold_lists():
    spec = fl.Runners(
        "FrozenLake-v1",
        POLICY,
        env_settings={"desc": ["SFFF", "FHFH", "FFFH", "HFFG"]},
        envs_per_runner=2,
        rollout_length=3,
    )
    runners = spec.open()
    assert runners.collect().shape == (3, 2)
    runners.close()


def test_what_is_evaluated_does_not_depend_on_how_many_runners_share_it():
    def reported(count):
        runners = fl.Runners(
            "CartPole-v1",
            fl.Policy(fl.networks.MLP, hidden=(4,)),
            num_runners=count,
            envs_per_runner=1,
            rollout_length=4,
        ).open()
        try:
            return runners.evaluate(5, seed=11)
        finally:
            runners.close()

    alone = reported(1)
    assert alone["eval/return_std"] > 0
    assert reported(2) == pytest.approx(alone) and reported(3) == pytest.approx(alone)


class Boundless(Clockwork):
    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)


def with_attribute(name, value):
    env = Boundless()
    setattr(env, name, value)
    return env


def test_that_observations_have_no_bounds_and_are_not_normalised_is_said_once():
    def said(policy, env=Boundless, **settings):
        return fl.Runners(env, policy, **settings).advice()

    assert "observations of Boundless have no bounds and are not normalised; normalize=True" in (
        said(POLICY)
    )
    assert not said(fl.Policy(fl.networks.MLP, normalize=True))
    assert not said(POLICY, "CartPole-v1"), "the positions have bounds"
    # Moments of a wrapper are in neither evaluations nor a saved policy.
    for env, wrappers in (
        (Boundless, (gym.wrappers.NormalizeObservation,)),
        (lambda: gym.wrappers.NormalizeObservation(Boundless()), ()),
        (
            lambda: gym.wrappers.vector.NormalizeObservation(
                gym.vector.SyncVectorEnv([Boundless] * 8)
            ),
            (),
        ),
    ):
        assert "take normalize=True" in said(POLICY, env, wrappers=wrappers)
    # Attributes of the user's own may have these names, too.
    for name, value in (("env", np.ones(3)), ("envs", 4), ("env", "maze")):
        assert "have no bounds" in said(POLICY, lambda n=name, v=value: with_attribute(n, v))
    # What a network of the user's own does is not known.
    assert not said(fl.Policy(lambda obs, action, *, rngs: fl.networks.MLP(obs, action, rngs=rngs)))
    warnings = []
    settings = {"rollout_length": 4, "batch_size": 32, "minibatch_size": None, "epochs": 1}
    graph = fl.ppo(Boundless, **settings)
    tap = Tap(lambda event: warnings.append(event.text), Warned)
    with fl.run(graph, observers=(tap,)) as run:
        next(run)
    assert warnings == [f"runners: {graph.resources['runners'].advice()}"]


@pytest.mark.parametrize(
    ("env", "package", "lacks", "extra"),
    [
        ("LunarLander-v3", "gymnasium.envs.box2d", "Box2D", "box2d"),
        ("Hopper-v5", "gymnasium.envs.mujoco", "imageio", "mujoco"),
    ],
)
def test_the_extra_that_an_environment_of_gymnasium_needs_is_named(
    env, package, lacks, extra, monkeypatch
):
    for name in [name for name in sys.modules if name.startswith(package)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, lacks, None)
    with pytest.raises(
        fl.errors.SettingError,
        match=rf"'{env}' needs the extra {extra} \(.*\): .* -m pip install 'flowrl\[{extra}\]'",
    ):
        fl.Runners(env, POLICY).spaces()
