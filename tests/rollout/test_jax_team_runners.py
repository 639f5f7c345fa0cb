"""Runners over environments of several agents in JAX, beside those of the host."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from gymnasium.spaces import Box, Discrete
from hypothesis import given, settings
from hypothesis import strategies as st

import flowrl as fl
from flowrl.core.items import Batch
from flowrl.graph.site import alone
from flowrl.rollout.jax_team_runners import JaxTeamRunners
from flowrl.rollout.runner import Runner
from flowrl.rollout.team_runner import TeamRunner
from flowrl.rollout.team_runners import TeamStatistics
from jax_teams import TINY, Chaos, Corridors, Fixed, fixed

RNN = fl.Policy(fl.networks.RNN, hidden=(4,), size=3)
TEAM = fl.Team(red=TINY, blue=RNN, of={"a": "red", "b": "blue", "c": "blue"})


@cache
def chaos(**settings):
    """Settings of runners over chaotic environments; the same ones, to compile them once."""
    return fl.Runners(Chaos, TEAM, num_runners=2, envs_per_runner=2, rollout_length=5, **settings)


def both(spec, seed):
    """The handle of runners in JAX, the runners of the host, and weights of each policy."""
    in_jax = JaxTeamRunners(spec, alone("runners", spec, seed))
    host = [TeamRunner(spec, "runners", seed, i) for i in range(spec.num_runners)]
    inits = {name: jax.jit(part.network.init) for name, part in host[0].parts.items()}
    weights = {name: init(jax.random.key(seed + i)) for i, (name, init) in enumerate(inits.items())}
    return in_jax, host, weights


def alike(found, wanted):
    """That a batch is that of the host, where masked rows may hold any action."""
    valid = np.asarray(wanted["valid"])
    assert set(found.data) == set(wanted.data)
    for name, expected in wanted.data.items():
        x, y = np.asarray(found.data[name]), np.asarray(expected)
        assert (x.shape, x.dtype) == (y.shape, y.dtype), name
        if name in ("action", "logp"):
            x, y = x[valid], y[valid]
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=1e-5, err_msg=name)
    columns = {**found.columns, "version": found.columns["version"] - found.columns["older"]}
    columns["last_version"] = found.columns["version"]
    for name, expected in wanted.columns.items():
        np.testing.assert_allclose(columns[name], expected, rtol=1e-4, atol=1e-5, err_msg=name)


def of_host(runners, published, policy=None):
    """The samples of runners of the host, and the batch of each policy."""
    samples = [runner.sample(*published) for runner in runners]
    batches = {}
    for name in samples[0].by_policy:
        batches[name] = Batch.join([sample.by_policy[name].batch for sample in samples])
    return samples, batches


@pytest.mark.system
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_rollouts_are_those_of_the_host_whoever_acts_gains_dies_and_comes_back(seed):
    spec = chaos()
    in_jax, host, weights = both(spec, seed)
    statistics = TeamStatistics(weights, alone("runners", spec))
    for rollout in range(4):
        versions = {"red": 2 * rollout, "blue": rollout}
        for name in weights:
            in_jax.publish_of(name, weights[name], np.int32(versions[name]))
        samples, batches = of_host(host, [(weights[name], versions[name]) for name in weights])
        found = in_jax.collect()
        for name, batch in batches.items():
            alike(found[name], batch)
        for sample in samples:
            statistics.note(sample)
        reported, wanted = in_jax.episodes(), statistics.drain()
        reported["broken"].check("chaos", 1)
        for name in ("env_steps", "episodes", "return_mean", "length_mean/blue"):
            np.testing.assert_allclose(reported[name], wanted[name], rtol=1e-5, err_msg=name)


@pytest.mark.system
def test_scaled_and_clipped_rewards_are_those_of_the_host():
    in_jax, host, weights = both(chaos(normalize_rewards=0.9, clip_rewards=1.5), 3)
    for name in weights:
        in_jax.publish_of(name, weights[name], np.int32(0))
    for _ in range(4):
        _, batches = of_host(host, [(weights[name], 0) for name in weights])
        found = in_jax.collect()
        for name, batch in batches.items():
            alike(found[name], batch)
    assert 0 < np.max(found["blue"]["reward"]) <= 1.5


@pytest.mark.system
def test_runners_that_sample_one_by_one_are_those_of_the_host_each_with_its_own_version():
    in_jax, host, weights = both(chaos(), 5)
    older = []
    for version, to in enumerate([None, [1], [1], [0, 1], [0], None]):
        receivers = None if to is None else np.array(to)
        for name in weights:
            in_jax.publish_of(name, weights[name], np.int32(version), to=receivers)
        found = in_jax.next(1)
        runner = host[int(found["red"].columns["producer"][0])]
        used = int(found["red"].columns["version"][0])
        _, batches = of_host([runner], [(weights[name], used) for name in weights])
        for name, batch in batches.items():
            alike(found[name], batch)
        older.append(max(int(found[name].columns["older"].max()) for name in batches))
    # Turns that were open at the end of a rollout began the next one with the version that acted.
    assert older[:2] == [0, 0] and max(older) == 3


@pytest.mark.parametrize(
    "policy",
    [TINY, pytest.param(RNN, marks=pytest.mark.system)],
    ids=["feed-forward", "recurrent"],
)
def test_two_agents_with_two_policies_are_two_single_runs(policy):
    seed, sizes = 3, {"envs_per_runner": 3, "rollout_length": 8}
    spec = fl.Runners(fixed, fl.Team(red=policy, blue=policy), **sizes)
    team = JaxTeamRunners(spec, alone("runners", spec, seed))
    single = fl.Runners(Fixed, policy, **sizes)
    runners = {name: Runner(single, name, seed, 0) for name in ("red", "blue")}
    init = jax.jit(runners["red"].network.init)
    for i, name in enumerate(runners):
        team.publish_of(name, init(jax.random.key(i)), np.int32(i))
    over = 0
    for _ in range(5):
        found = team.collect()
        for i, (name, runner) in enumerate(runners.items()):
            alike(found[name], runner.sample((init(jax.random.key(i)), i)).batch)
            over += int(np.sum(found[name]["terminated"]))
    assert over > 4


@pytest.mark.system
@pytest.mark.parametrize("most", [6, 400])
def test_episodes_are_played_as_on_the_host(most):
    in_jax, host, weights = both(chaos(), 2)
    for name in weights:
        in_jax.publish_of(name, weights[name], np.int32(0))
    wanted = host[0].evaluate((2, 5, most), *((each, 0) for each in weights.values()))
    in_jax.keep_evaluated()
    found = in_jax.evaluate(2, seed=5, max_steps=most)
    # Nothing is random in these, so both episodes are the same one.
    for ending, of in (("", wanted.all), ("/red", wanted.by_policy["red"])):
        np.testing.assert_allclose(found[f"eval/return_mean{ending}"], of.mean(), rtol=1e-6)
        assert found[f"eval/cut_episodes{ending}"] == of.cut.sum()
    assert wanted.all.cut.all() == (most == 6) and wanted.all.mean() > 0
    assert in_jax.evaluated_of("red") is None
    assert in_jax.episodes()["eval/return_min/blue"] == found["eval/return_mean/blue"]
    assert in_jax.evaluated_of("red") is weights["red"]


def test_one_policy_acts_for_all_agents():
    spec = fl.Runners(Chaos, TINY, num_runners=2, envs_per_runner=2, rollout_length=4)
    in_jax, host, weights = both(spec, 1)
    assert in_jax.environments == 12 and in_jax.spaces == spec.by_policy[""].spaces()
    in_jax.publish(weights[""], np.int32(0))
    for _ in range(2):
        _, batches = of_host(host, [(weights[""], 0)])
        alike(in_jax.collect(), batches[""])
    assert in_jax.episodes()["since_last"].keys() == {"agent_steps"}


@pytest.mark.system
def test_what_was_kept_goes_on_as_if_nothing_had_been():
    runners, _, weights = both(chaos(), 8)
    for name in weights:
        runners.publish_of(name, weights[name], np.int32(1))
    runners.collect()
    runners.next(2)
    again = JaxTeamRunners(chaos(), alone("runners", chaos(), 9))
    again.take(runners.keep())
    for _ in range(3):
        jax.tree.map(np.testing.assert_array_equal, again.next(2), runners.next(2))
    reports = [{**each.episodes(), "broken": 0} for each in (again, runners)]
    jax.tree.map(np.testing.assert_array_equal, *reports)


class Chosen(nnx.Module):
    """A policy whose actions are what its only weights say."""

    def __init__(self, obs_space, action_space, *, rngs):
        self.logits = nnx.Param(jnp.zeros(fl.networks.action_outputs(action_space)))

    def __call__(self, obs):
        n = obs.shape[0]
        return jnp.tile(self.logits[...], (n, 1)), jnp.zeros(n)


class Wrong(fl.envs.JaxAgents):
    """The agent a acts first and b never; the action of a says what goes wrong from step 3 on."""

    observation_spaces = dict.fromkeys("ab", Box(0, 9, (1,)))
    action_spaces = dict.fromkeys("ab", Discrete(6))

    def reset(self, key):
        return {"age": jnp.int32(0)}, self.see(0.0), {"a": True, "b": False}

    def see(self, x):
        return dict.fromkeys("ab", jnp.full(1, x, jnp.float32))

    def step(self, state, actions, key):
        what, age = actions["a"], state["age"] + 1
        due = age >= 3
        nan, no = jnp.where(due & (what == 1), jnp.nan, 0.0), jnp.bool_(False)
        reward = {"a": jnp.where(due & (what == 2), jnp.inf, 0.0), "b": jnp.float32(0)}
        # What b gains after its end, in the third step, is too late.
        reward["b"] = jnp.where((age > 3) & (what == 3), 1.0, 0.0)
        terminated = {"a": due & (what == 5), "b": (age == 3) & (what == 3)}
        acts = {"a": ~(due & (what == 4)), "b": no}
        return {"age": age}, self.see(nan), reward, terminated, {"a": no, "b": no}, acts


WRONG = {
    1: "runner 1, for agent a at its row 3, gave an observation or a reward that is not finite",
    2: "runner 1, for agent a at its row 3, gave an observation or a reward that is not finite",
    3: "runner 1, for agent b at its row 0, gave a reward to this agent, whose episode is over",
    4: "runner 1, for agent a at its row 3, left this agent without an end of its episode",
}


def test_what_goes_wrong_is_reported_with_its_environment_and_its_agent():
    spec = fl.Runners(Wrong, fl.Policy(Chosen), num_runners=2, envs_per_runner=2, rollout_length=6)
    for action in (0, *WRONG, 5):
        runners = spec.open()
        init = runners.core.parts[""].network.init(jax.random.key(0))
        # Only the second runner gets weights with which something goes wrong.
        for at, to in ((0, None), (action, [1])):
            logits = {name: jnp.full_like(x, -50).at[at].set(50) for name, x in init.params.items()}
            runners.publish(init._replace(params=logits), np.int32(0), to=to)
        batch = runners.collect()
        broken = runners.episodes()["broken"]
        if action not in WRONG:
            broken.check("graph", 1)
            assert batch["valid"][:, 0].all() and not batch["valid"][:, 1].any()
            continue
        text = f"graph: environment 2, counted over all runners, which is one of {WRONG[action]}"
        with pytest.raises(fl.errors.EnvError) as caught:
            broken.check("graph", 4)
        assert str(caught.value).startswith(text) and "before row 4; fix" in str(caught.value)
        assert (caught.value.facts["env"], caught.value.facts["agent"]) == (2, WRONG[action][20])
        # It is reported once.
        runners.collect()


class Nobody(Wrong):
    def reset(self, key):
        state, obs, acts = super().reset(key)
        return state, obs, {**acts, "a": False}


def test_an_environment_in_which_nobody_acts_after_a_reset_ends_the_run():
    spec = fl.Runners(Nobody, fl.Policy(Chosen), envs_per_runner=2, rollout_length=2)
    runners = spec.open()
    assert not runners.collect()["valid"].any()
    with pytest.raises(fl.errors.EnvError, match="environment 0, .* runner 0, has no agent that a"):
        runners.episodes()["broken"].check("graph", 1)


def test_numbers_that_are_not_finite_end_a_run_before_the_row():
    graph = fl.Graph("watch", runners=fl.Runners(NAN, TINY, envs_per_runner=2, rollout_length=8))
    graph = graph.then(sample=fl.ParallelSample(), report=fl.Report())
    says = "watch: environment [01], .* for agent blue at its row .* not finite, .* before row 1"
    with pytest.raises(fl.errors.EnvError, match=says), fl.run(graph) as run:
        next(run)


NAN = partial(Corridors, nan_at=3)


class Several(fl.envs.JaxAgents):
    """What `Corridors` does, but for what a test says."""

    def __init__(self, **edits):
        self.inner = Corridors()
        self.observation_spaces = dict(self.inner.observation_spaces)
        self.action_spaces = dict(self.inner.action_spaces)
        self.edits = edits
        for name in ("observation_spaces", "action_spaces"):
            if name in edits:
                setattr(self, name, edits[name](getattr(self, name)))

    def edited(self, verb, found):
        if edit := self.edits.get(verb):
            found = edit(list(found))
        return tuple(found)

    def reset(self, key):
        return self.edited("reset", self.inner.reset(key))

    def step(self, state, actions, key):
        return self.edited("step", self.inner.step(state, actions, key))


def without(at, agent):
    return lambda found: [
        *found[:at],
        {k: x for k, x in found[at].items() if k != agent},
        *found[at + 1 :],
    ]


def changed(at, agent, to):
    return lambda found: [*found[:at], {**found[at], agent: to}, *found[at + 1 :]]


BAD = {
    "an agent without an observation": (
        {"reset": without(1, "blue")},
        "Several: the obs of reset has no entry for agent blue; give it one for each of red, blue",
    ),
    "an unknown agent": (
        {"step": changed(2, "bleu", 1.0)},
        "Several: the reward of step has an entry for an unknown agent 'bleu'; did you mean 'blue",
    ),
    "no mapping": (
        {"reset": lambda found: [*found[:2], [True, True]]},
        "Several: the acts of reset must be a dict by agent (red, blue), got",
    ),
    "an observation of another shape": (
        {"step": changed(1, "red", jnp.zeros(3))},
        "declares float32[1]; fix the environment or its space, for agent red",
    ),
    "an observation of another type": (
        {"reset": changed(1, "blue", jnp.zeros(1, jnp.complex64))},
        "for agent blue",
    ),
    "a reward for each of several": (
        {"step": changed(2, "red", jnp.zeros(2))},
        "Several.step returned reward of shape [2] for agent red; it must be a single number",
    ),
    "a flag that may be NaN": (
        {"step": changed(3, "red", jnp.float32(0))},
        "Several.step returned terminated of the type float32 for agent red; it must be True or F",
    ),
    "four values of reset": (
        {"reset": lambda found: [*found, 0]},
        "Several.reset must return (state, obs, acts)",
    ),
    "five values of step": (
        {"step": lambda found: found[:5]},
        "Several.step must return (state, obs, reward, terminated, truncated, acts)",
    ),
    "a state that changes": (
        {"step": lambda found: [{"red": found[0]["red"]}, *found[1:]]},
        "Several.step returned a state that is another tree than reset's",
    ),
    "an agent without actions": (
        {"action_spaces": lambda spaces: {"red": spaces["red"]}},
        "Several: action_spaces has no entry for agent blue",
    ),
    "no agents": (
        {"observation_spaces": lambda spaces: {}},
        "Several has no agents; observation_spaces names them",
    ),
    "spaces that differ under one policy": (
        {"action_spaces": lambda spaces: {**spaces, "blue": Discrete(3)}},
        "one policy acts for red and blue of Several, whose spaces differ",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_what_an_environment_returns_wrongly_is_reported_with_its_agent(what):
    edits, text = BAD[what]
    with pytest.raises(fl.errors.FlowrlError) as caught:
        fl.Runners(
            Several, TINY, env_settings=edits, envs_per_runner=2, rollout_length=2
        ).open().collect()
    assert text in str(caught.value)


def test_agents_and_policies_that_do_not_fit_are_reported():
    team = fl.Team(red=TINY, blue=TINY, of={"red": "red", "blue": "red"})
    with pytest.raises(fl.errors.SettingError, match="policy blue acts for no agent of Corridors"):
        fl.Runners(Corridors, team).open()
    runners = fl.Runners(Corridors, fl.Team(red=TINY, blue=TINY)).open()
    with pytest.raises(fl.errors.GraphError, match="runners have several policies; name one of t"):
        runners.publish(None, 0)
    with pytest.raises(fl.errors.GraphError, match="unknown policy 'rad'; did you mean 'red'"):
        runners.part("rad")
    with pytest.raises(fl.errors.GraphError, match="can't pace requests"):
        runners.pace(1, 1)
