"""Evaluation: what is reported equals what a slow loop written by hand plays.

This holds in every way in which episodes are played.
"""

import functools
import json
import logging
from pathlib import Path

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import flowrl as fl
from environments import Clockwork
from flowrl.cli.main import main
from flowrl.envs.jax_envs import begin
from flowrl.rollout.evaluation import MAX_STEPS
from flowrl.rollout.handle import EVALUATED
from flowrl.rollout.runners import Runners

SEED = 20
PLAIN, RECURRENT = (
    fl.Policy(fl.networks.MLP, hidden=(8,)),
    fl.Policy(fl.networks.RNN, hidden=(8,), size=8),
)


@functools.cache
def trained(env, policy=PLAIN):
    """A policy with random weights, of a seed with which it plays some 30 to 90 steps of CartPole,
    each time others."""
    made = fl.TrainedPolicy(policy, Runners(env, policy).spaces(), None, env)
    weights = jax.jit(made.network.init)(jax.random.key(14 if policy is RECURRENT else 10))
    louder = {k: x * (20 if k == "heads/action/kernel" else 1) for k, x in weights.params.items()}
    return fl.TrainedPolicy(policy, made.spaces, weights._replace(params=louder), env)


def by_hand(env, policy, episodes, greedy=True):
    """The returns and lengths of episodes, one after another; episode i has the seed SEED + i."""
    returns, lengths, net = [], [], policy.network
    act = jax.jit(net.act)
    draw = jax.jit(
        lambda seed, step: net.head.noise(jax.random.fold_in(jax.random.key(seed), step), 1)
    )
    for seed in range(SEED, SEED + episodes):
        obs, _ = env.reset(seed=seed)
        carry, total, step, over = None, 0.0, 0, False
        while not over:
            if greedy:
                acted = policy.act(obs, carry) if net.recurrent else policy.act(obs)
                action, carry = acted if net.recurrent else (acted, None)
            else:
                packed, _ = act(policy.weights, obs[None], draw(seed, step))
                action = net.head.to_env(net.unpack(np.asarray(packed))[0])[0]
            obs, reward, terminated, truncated, _ = env.step(action)
            total, step, over = total + float(reward), step + 1, terminated or truncated
        returns.append(total)
        lengths.append(step)
    return returns, lengths


CASES = {
    "discrete": ("CartPole-v1", PLAIN, True),
    "discrete, sampled": ("CartPole-v1", PLAIN, False),
    "continuous": ("Pendulum-v1", PLAIN, True),
    "continuous, sampled": ("Pendulum-v1", PLAIN, False),
    "recurrent": ("CartPole-v1", RECURRENT, True),
}


@pytest.mark.parametrize("name", CASES)
def test_the_returns_are_those_of_a_loop_by_hand(name):
    env, kind, greedy = CASES[name]
    policy = trained(env, kind)
    returns, lengths = by_hand(gym.make(env), policy, 3, greedy)
    found = policy.evaluate(3, seed=SEED, greedy=greedy)
    np.testing.assert_allclose(found.returns, returns, rtol=1e-6 if env == "Pendulum-v1" else 0)
    np.testing.assert_array_equal(found.lengths, lengths)
    assert len(set(returns)) == 3 and not found.cut.any() and found.different == 3


def test_an_evaluation_is_an_array_of_returns_and_more():
    found = trained("CartPole-v1").evaluate(4, seed=SEED)
    again = trained("CartPole-v1").evaluate(3, seed=SEED + 1)
    np.testing.assert_array_equal(np.asarray(found)[1:], again)
    assert len(found) == 4 and list(found) == found.returns.tolist()
    assert (found.mean(), found.std(), found.min(), found.max()) == tuple(
        getattr(np.array(list(found)), k)() for k in ("mean", "std", "min", "max")
    )
    assert str(again).startswith("3 episodes, 3 different returns: mean ")


# -- vectors


def cartpoles(mode, count):
    return SyncVectorEnv(
        [lambda: gym.make("CartPole-v1")] * count, autoreset_mode=AutoresetMode(mode)
    )


def next_step():
    return cartpoles("NextStep", 3)


def same_step():
    return cartpoles("SameStep", 3)


def disabled():
    return cartpoles("Disabled", 3)


def one():
    return cartpoles("Disabled", 1)


def silent():
    vector = next_step()
    del vector.metadata["autoreset_mode"]
    return vector


@pytest.mark.parametrize("kind", [PLAIN, RECURRENT], ids=["plain", "recurrent"])
@pytest.mark.parametrize("make", [next_step, same_step, disabled, one])
def test_a_vector_plays_the_episodes_that_single_environments_do(make, kind):
    """Seven episodes in three columns: two whole rounds and a part of one; in each, columns end at
    different times."""
    single = trained("CartPole-v1", kind)
    vector = fl.TrainedPolicy(single.policy, single.spaces, single.weights, make)
    for how in ({}, {"greedy": False}, {"max_steps": 40}):
        wanted, found = (policy.evaluate(7, seed=SEED, **how) for policy in (single, vector))
        for part in ("returns", "lengths", "cut", "digests"):
            np.testing.assert_array_equal(getattr(found, part), getattr(wanted, part))
        assert (
            len({tuple(wanted.lengths[i : i + 3]) for i in (0, 3)}) == 2
            and wanted.different_returns > 1
        )
        assert (0 < wanted.cut.sum() < 7) == ("max_steps" in how)


def test_a_vector_that_does_not_say_how_it_resets_is_refused():
    single = trained("CartPole-v1")
    with pytest.raises(
        fl.errors.EnvError,
        match=r"silent does not say how it resets: metadata\['autoreset_mode'\] is None",
    ):
        fl.TrainedPolicy(single.policy, single.spaces, single.weights, silent).evaluate(2)


class Mixed(gym.Env):
    """Its episodes are short or long, by the seed, and worth their length."""

    observation_space = gym.spaces.Box(0, 100, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 50 if self.np_random.random() < 0.5 else 1
        return np.float32([self.left]), {}

    def step(self, action):
        self.left -= 1
        return np.float32([self.left]), 1.0, self.left == 0, False, {}


def mixed():
    return SyncVectorEnv([Mixed] * 8, autoreset_mode=AutoresetMode.SAME_STEP)


def test_short_episodes_are_not_preferred():
    """Who takes the first 40 that end of eight columns finds nearly all of them short."""
    found = trained(mixed).evaluate(40, seed=SEED)
    long = [gym.utils.seeding.np_random(SEED + i)[0].random() < 0.5 for i in range(40)]
    np.testing.assert_array_equal(found, np.where(long, 50, 1))
    assert 10 < sum(long) < 30


# -- without an end


class Endless(gym.Env):
    """Goes on for ever, if its seed is odd; else it ends after four steps. A step is worth 1."""

    observation_space = gym.spaces.Box(-1e6, 1e6, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.start = self.np_random_seed % 97
        self.time = 0
        return np.float32([self.start, 0]), {}

    def step(self, action):
        self.time += 1
        return (
            np.float32([self.start, self.time]),
            1.0,
            self.start % 2 == 0 and self.time == 4,
            False,
            {},
        )


class EndlessInJax(fl.envs.JaxEnv):
    """A step is worth what the observation was; one that begins below 1/2 goes on for ever."""

    observation_space = gym.spaces.Box(-1e6, 1e6, (1,))
    action_space = gym.spaces.Discrete(2)

    def reset(self, key):
        start = jax.random.uniform(key)
        return {"start": start, "time": jnp.int32(0)}, start[None]

    def step(self, state, action, key):
        time = state["time"] + 1
        over = (state["start"] > 0.5) & (time == 4)
        return (
            {"start": state["start"], "time": time},
            state["start"][None],
            state["start"],
            over,
            jnp.bool_(False),
        )


def in_a_run(env, **how):
    settings = fl.PPOSettings(
        num_runners=2,
        envs_per_runner=2,
        rollout_length=8,
        batch_size=32,
        minibatch_size=None,
        epochs=1,
        policy=fl.Policy(fl.networks.MLP, hidden=(8,)),
    )
    return fl.ppo(env, settings).insert(after="sync", play=fl.Evaluate(**how))


def test_an_episode_without_an_end_is_cut_counted_and_said(caplog):
    policy = trained(Endless)
    with caplog.at_level(logging.WARNING, "flowrl"):
        found = policy.evaluate(4, seed=SEED, max_steps=9)
    np.testing.assert_array_equal(found.returns, [4, 9, 4, 9])
    np.testing.assert_array_equal(found.lengths, [4, 9, 4, 9])
    np.testing.assert_array_equal(found.cut, [False, True, False, True])
    says = (
        "2 of 4 episodes did not end within 9 steps and were cut; the return is that of the steps "
        "until then (max_steps raises the bound)"
    )
    assert [r.getMessage() for r in caplog.records] == [says] and found.notes == (says,)
    assert policy.evaluate(1, seed=SEED).max_steps == MAX_STEPS == fl.Evaluate().max_steps
    np.testing.assert_array_equal(
        policy.evaluate(1, seed=SEED, max_steps=4).cut, [False]
    )  # it ended with the last step


@pytest.mark.parametrize(
    ("episodes", "max_steps"), [(2.5, 5), ("5", 5), (None, 5), (5, 1e4), (0, 5), (5, 0)]
)
def test_what_is_no_number_of_episodes_or_of_steps_is_refused(episodes, max_steps):
    says = "episodes and max_steps must be whole numbers of at least 1, got episodes="
    with pytest.raises(fl.errors.SettingError, match=says):
        trained(Endless).evaluate(episodes, max_steps=max_steps)


@pytest.mark.parametrize("name", ["every", "episodes", "max_steps"])
def test_an_operator_without_episodes_or_steps_is_refused(name):
    with pytest.raises(fl.errors.SettingError, match=f"{name} must be at least 1, got 0"):
        fl.Evaluate(**{"every": 1, name: 0})


def endless_vector():
    return SyncVectorEnv([Endless] * 3, autoreset_mode=AutoresetMode.DISABLED)


@pytest.mark.parametrize(
    ("runtime", "env"),
    [
        ("local", "CartPole-v1"),
        ("local", same_step),
        ("local", Endless),
        pytest.param("ray", endless_vector, marks=(pytest.mark.ray, pytest.mark.system)),
    ],
    indirect=["runtime"],
)
def test_what_a_run_evaluates_is_what_its_policy_plays(runtime, env, tmp_path):
    """Shared among two runners, with the weights that the policy then has, and with the same
    seeds."""
    graph = in_a_run(env, every=1, episodes=7, seed=SEED, max_steps=30)
    if env in (same_step, endless_vector):
        graph = graph.set("runners.envs_per_runner", 3).set("batch.batch_size", 48)
    with fl.run(graph, runtime=runtime, out=tmp_path / "run") as run:
        row = next(run)
        found = run.policy.evaluate(7, seed=SEED, max_steps=30)
    wanted = dict(
        zip(
            EVALUATED,
            (found.mean(), found.std(), found.min(), found.max(), found.cut.sum()),
            strict=True,
        )
    )
    assert {name: row[name] for name in EVALUATED} == pytest.approx(
        wanted
    ) and found.different_returns > 1
    warned = [
        json.loads(line)["text"]
        for line in (tmp_path / "run/events.jsonl").read_text().splitlines()
        if '"warned"' in line.lower()
    ]
    if env in (Endless, endless_vector):
        assert row["eval/cut_episodes"] == 3 and [
            w for w in warned if "ppo: 3 evaluated episodes did not end within the max_steps" in w
        ]


def slow(env, policy, episodes, seed, max_steps):
    """The returns of episodes of an environment in JAX whose steps have no randomness, and how many
    were cut."""
    states, obs = begin(
        env, jax.random.bits(jax.random.fold_in(jax.random.key(seed), 0), (episodes, 2))
    )
    returns, cut = np.zeros(episodes), 0
    for i in range(episodes):
        state, seen, over = jax.tree.map(lambda x, i=i: x[i], states), obs[i], False
        for _ in range(max_steps):
            state, seen, reward, terminated, truncated = env.step(
                state, policy.act(np.asarray(seen)), None
            )
            returns[i] += float(reward)
            over = bool(terminated | truncated)
            if over:
                break
        cut += not over
    return returns, cut


@pytest.mark.parametrize("runtime", ["local", "xla"], indirect=True)
def test_what_a_program_evaluates_is_what_a_slow_loop_plays(runtime):
    with fl.run(
        in_a_run(EndlessInJax, every=1, episodes=6, seed=SEED, max_steps=12), runtime=runtime
    ) as run:
        row = next(run)
    returns, cut = slow(EndlessInJax(), run.policy, 6, SEED, 12)
    wanted = [returns.mean(), returns.std(), returns.min(), returns.max(), cut]
    assert [row[name] for name in EVALUATED] == pytest.approx(wanted, rel=1e-5) and 0 < cut < 6


@pytest.mark.parametrize(
    "runtime", [pytest.param("ray", marks=(pytest.mark.ray, pytest.mark.system))], indirect=True
)
def test_on_ray_episodes_of_an_environment_in_jax_are_cut_too(runtime):
    with fl.run(in_a_run(EndlessInJax, every=1, episodes=4, max_steps=12), runtime=runtime) as run:
        row = next(run)
        found = run.policy.evaluate(4, max_steps=12)
    assert row["eval/cut_episodes"] == found.cut.sum() > 0 and row[
        "eval/return_mean"
    ] == pytest.approx(found.mean())


# -- sampled


class Always(nnx.Module):
    """Gives action 1 the logit or value 1, and the other 0, wherever it is."""

    def __init__(self, obs_space, action_space, *, rngs):
        self.bias = nnx.Param(jnp.array([0.0, 1.0]))

    def __call__(self, obs):
        return jnp.broadcast_to(self.bias[...], (obs.shape[0], 2)), jnp.ones(obs.shape[0])


class Counted(gym.Env):
    """Episodes of 200 steps, each worth the action."""

    observation_space = gym.spaces.Box(0, 1000, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)
    taken: tuple = ()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        Counted.taken, self.time = (), 0
        return np.float32([seed or 0]), {}

    def step(self, action):
        self.time += 1
        Counted.taken += (int(action),)
        return np.float32([self.time]), float(action), False, self.time == 200, {}


def test_sampled_actions_are_drawn_from_the_policy_and_again_in_each_step():
    policy = trained(Counted, fl.Policy(Always))
    found, likely = policy.evaluate(12, seed=SEED, greedy=False), 1 / (1 + np.exp(-1))
    assert found.mean() / 200 == pytest.approx(likely, abs=0.04)
    assert found.std() == pytest.approx(
        (200 * likely * (1 - likely)) ** 0.5, rel=0.5
    )  # one draw for an episode would give 0 or 200
    parts = {Counted.taken[i : i + 20] for i in range(0, 200, 20)}
    assert len(parts) == 10  # no draw comes again
    np.testing.assert_array_equal(policy.evaluate(2, seed=SEED, greedy=False), found.returns[:2])
    assert (
        np.asarray(policy.evaluate(2, seed=SEED + 100, greedy=False)) != found.returns[:2]
    ).any()
    np.testing.assert_array_equal(policy.evaluate(2, seed=SEED), [200, 200])


def test_actions_are_not_drawn_by_the_size_of_action_values(tmp_path):
    settings = fl.DQNSettings(
        envs_per_runner=2,
        learning_starts=8,
        batch_size=8,
        report_every=1,
        lr=0.0,
        policy=fl.Policy(Always),
    )
    with fl.run(fl.dqn(Counted, settings), steps=16, out=tmp_path / "run") as run:
        list(run)
    for policy in (run.policy, fl.load(tmp_path / "run", allow=["test_evaluation"])):
        assert policy.action_values
        other = 1 - policy.evaluate(6, seed=SEED, greedy=False).mean() / 200
        assert other == pytest.approx(
            0.025, abs=0.015
        )  # half of what is drawn with 0.05; by softmax it would be 0.27
    others = np.mean([run.policy.act(np.zeros((100, 1)), greedy=False) == 0 for _ in range(20)])
    assert others == pytest.approx(0.025, abs=0.012)


def test_a_deterministic_policy_is_played_with_noise_not_by_a_deviation_that_it_has_not(tmp_path):
    graph = fl.td3("Pendulum-v1", hidden=(8,), learning_starts=4, batch_size=4, report_every=1)
    with fl.run(graph, steps=8, out=tmp_path / "run") as run:
        list(run)
    seen = np.tile(np.float32([1, 0, 0]), (2_000, 1))
    for policy in (run.policy, fl.load(tmp_path / "run")):
        off = policy.act(seen, greedy=False, seed=SEED) - policy.act(seen)
        # Torques are from -2 to 2.
        assert off.std() == pytest.approx(0.2, rel=0.1) and abs(off.mean()) < 0.02


# -- copies


class TwoStarts(gym.Env):
    """Begins in one of two places, by the seed, and has no other chance."""

    observation_space = gym.spaces.Box(0, 100, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)
    same = True
    """Whether both are worth the same."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.time = self.np_random_seed % 2, 0
        return np.float32([self.place, 0]), {}

    def step(self, action):
        self.time += 1
        worth = 1.0 if self.same else float(self.place)
        return np.float32([self.place, self.time]), worth, self.time == 5, False, {}


class TwoWorths(TwoStarts):
    same = False


@pytest.mark.parametrize(("env", "returns"), [(TwoStarts, 1), (TwoWorths, 2)])
def test_copies_of_episodes_are_no_samples_and_that_is_said(env, returns, caplog):
    found = trained(env).evaluate(20, seed=SEED)
    assert (found.different, found.different_returns) == (2, returns) and found[0] == found.returns[
        0
    ]
    assert (
        "only 2 of the 20 episodes differ in any observation or reward" in caplog.text
        and "greedy=False (--sampled)" in caplog.text
    )
    assert str(found).startswith(
        f"20 episodes, {returns} different return{'s' * (returns > 1)}: mean "
    )


class Steady(Clockwork):
    """Each episode begins in a place of its own, and all are worth the same."""

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed)
        self.episode = 0
        return obs + seed, info


def test_equal_returns_of_different_episodes_are_no_copies(caplog):
    found = trained(Steady).evaluate(5, seed=SEED)
    assert (found.different_returns, found.different, found.notes, caplog.text) == (1, 5, (), "")


# -- the command line


def test_eval_says_what_differs_what_was_cut_and_how_actions_are_taken(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    # As Brax does when it is imported.
    monkeypatch.setattr(logging.getLogger(), "handlers", [library := logging.StreamHandler()])
    library.setFormatter(logging.Formatter(logging.BASIC_FORMAT))
    settings = fl.PPOSettings(
        envs_per_runner=2,
        rollout_length=8,
        batch_size=16,
        minibatch_size=None,
        policy=fl.Policy(fl.networks.MLP, hidden=(8,)),
    )
    with fl.run(fl.ppo("CartPole-v1", settings), steps=10, out="run") as run:
        next(run)
    played = {}
    for name, how in {"greedy": (), "sampled": ("--sampled",), "cut": ("--max-steps", "7")}.items():
        assert main(["eval", "run", "--episodes", "6", "--seed", "3", *how]) == 0
        played[name], said = capsys.readouterr()
        assert ("flowrl: 6 of 6 episodes did not end" in said) == (name == "cut")
        assert "WARNING:" not in said
    policy = fl.load(Path("run"))
    wanted = {"greedy": {}, "sampled": {"greedy": False}, "cut": {"max_steps": 7}}
    assert played == {
        name: f"{policy.evaluate(6, seed=3, **how)}\n" for name, how in wanted.items()
    }
    assert (
        len(set(played.values())) == 3
        and played["cut"] == "6 episodes, 1 different return: mean 7.0, std 0.0, min 7.0, max 7.0\n"
    )
    assert main(["eval", "run", "--json", "--sampled", "--episodes", "6", "--seed", "3"]) == 0
    found = policy.evaluate(6, seed=3, greedy=False)
    assert json.loads(capsys.readouterr().out) == {
        "env": "CartPole-v1",
        "seed": 3,
        "actions": "sampled",
        "episodes": 6,
        "max_steps": MAX_STEPS,
        "mean": found.mean(),
        "std": found.std(),
        "min": found.min(),
        "max": found.max(),
        "cut_episodes": 0,
        "different_episodes": 6,
        "returns": found.returns.tolist(),
        "lengths": found.lengths.tolist(),
        "cut": [False] * 6,
    }


def test_returns_that_json_has_no_number_for_are_texts_and_null():
    found = fl.Evaluation(np.array([1.0, np.inf]), np.ones(2, int), np.zeros(2, bool), np.ones(2))
    with np.errstate(invalid="ignore"):
        plain = found.plain()
    assert plain["returns"] == [1.0, "Infinity"]
    assert (plain["min"], plain["max"], plain["std"]) == (1.0, "Infinity", None)


@pytest.mark.parametrize("sampled", [False, True])
def test_to_sample_actions_is_advised_only_where_they_were_not(sampled):
    (note,) = fl.Evaluation(
        np.ones(3), np.ones(3, int), np.zeros(3, bool), np.ones(3, np.uint64), sampled=sampled
    ).notes
    assert note.startswith("only 1 of the 3 episodes differ") and ("--sampled" in note) != sampled
