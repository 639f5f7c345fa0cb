"""Runners over environments of several agents, beside single ones and lists of turns."""

import itertools
import random

import gymnasium as gym
import jax
import numpy as np
import pytest
from flax import nnx
from gymnasium.spaces import Box, Discrete
from hypothesis import given, settings
from hypothesis import strategies as st

import flowrl as fl
from flowrl.envs.agents import Agents, End, Turn
from flowrl.envs.bringing_back import RetracedAgents
from flowrl.graph.site import alone
from flowrl.rollout.runner import Runner
from flowrl.rollout.sample import seed_of
from flowrl.rollout.team_runner import TeamRunner
from flowrl.rollout.team_runners import TeamStatistics
from teams import TwoCartPoles

POLICY = fl.Policy(fl.networks.MLP, hidden=(8,))


RECURRENT = fl.Policy(fl.networks.RNN, hidden=(8,), size=4)


@pytest.mark.parametrize("policy", [POLICY, RECURRENT], ids=["feed-forward", "recurrent"])
def test_two_agents_with_two_policies_are_two_single_runs(policy):
    seed, envs, steps = 3, 3, 16
    offset = {
        name: seed_of(seed, name, 0) - seed_of(seed, "runners", 0) for name in ("red", "blue")
    }

    def make():
        return TwoCartPoles(offset["red"], offset["blue"])

    both = fl.Team(red=policy, blue=policy)
    spec = fl.Runners(make, both, envs_per_runner=envs, rollout_length=steps)
    team = TeamRunner(spec, "runners", seed, 0)
    # Gymnasium's own vector of CartPoles has one generator, so these are stepped singly.
    single = fl.Runners(
        lambda: gym.make("CartPole-v1"), policy, envs_per_runner=envs, rollout_length=steps
    )
    alone = {name: Runner(single, name, seed, 0) for name in offset}
    init = jax.jit(alone["red"].network.init)
    weights = {name: (init(jax.random.key(i)), i) for i, name in enumerate(offset)}
    for _ in range(5):
        found = team.sample(*weights.values()).by_policy
        for name, runner in alone.items():
            # What a single agent's rollout has no need of.
            columns = found[name].batch.columns
            last_version, cut = columns.pop("last_version"), columns.pop("cut")
            jax.tree.map(np.testing.assert_array_equal, found[name], runner.sample(weights[name]))
            assert (last_version == runner.version).all() and not cut.any()
        weights = dict.fromkeys(offset)
    team.close()


def test_steps_that_no_row_has_yet_are_those_of_environments_not_of_their_agents():
    both = fl.Team(red=POLICY, blue=POLICY)
    spec = fl.Runners(TwoCartPoles, both, envs_per_runner=3, rollout_length=4)
    team = TeamRunner(spec, "runners", 0, 0)
    statistics = TeamStatistics(team.parts, alone("runners", spec))
    weights = [(part.network.init(jax.random.key(0)), 0) for part in team.parts.values()]
    statistics.note(team.sample(*weights))
    assert statistics.unreported == statistics.drain()["env_steps"] == 3 * 4
    assert statistics.unreported == 0
    team.close()


class Counting(nnx.Module):
    """A recurrent policy whose value is the number of turns of the episode before this one."""

    def __init__(self, obs_space, action_space, *, rngs):
        self.logits = nnx.Param(jax.numpy.zeros(fl.networks.action_outputs(action_space)))

    def initial_carry(self, n):
        return {"turns": jax.numpy.zeros(n)}

    def __call__(self, obs, carry):
        outputs = jax.numpy.tile(self.logits[...], (obs.shape[0], 1))
        return outputs, carry["turns"], {"turns": carry["turns"] + 1}


class Chaotic(Agents):
    """Agents act, gain, die and come back at random; every turn is noted in plain lists.

    Agents see numbers that count up, so every observation is another.
    """

    names = ("a", "b", "c")

    def __init__(self, rate, seed):
        self.random, self.rate = random.Random(seed), rate
        self.count, self.turns = 0, {name: [] for name in self.names}
        self.total, self.returns = dict.fromkeys(self.names, 0.0), {n: [] for n in self.names}
        """By agent: its turns: what it saw and did, its reward, and its flags."""

    def spaces_of(self, agent):
        return Box(0, 1e6, (1,)), Discrete(3)

    def _see(self):
        self.count += 1
        return np.array([self.count], np.float32)

    def _next(self, ended, reward):
        here = [name for name in self.names if name in self.live]
        acting = [name for name in here if self.random.random() < self.rate["act"]]
        # Someone acts, or the episode is over for all.
        self.now = {name: self._see() for name in acting or here[:1]}
        return Turn(self.now, reward, ended)

    def reset(self, seed=None):
        self.live = {name for name in self.names if self.random.random() < 0.7} or {"a"}
        self.begun, self.over = set(), set()
        return self._next({}, {})

    def step(self, actions):
        assert set(actions) == set(self.now)
        for name, action in actions.items():
            self.turns[name].append([float(self.now[name][0]), int(action), 0.0, False, False])
            self.begun.add(name)
            self.over.discard(name)
        reward, ended = {}, {}
        for name in sorted(self.live):
            # What an agent gains before its first turn is in none of its rows.
            if name not in self.over and self.random.random() < self.rate["gain"]:
                reward[name] = float(2 ** self.random.randrange(8))
            self.total[name] += reward.get(name, 0.0)
            if name in self.begun:
                self.turns[name][-1][2] += reward.get(name, 0.0)
            if self.random.random() < self.rate["end"]:
                flags = self.random.choice([(True, False), (False, True)])
                ended[name] = End(*flags, self._see())
                if name in self.begun:
                    self.turns[name][-1][3:] = flags
                    self.turns[name][-1].append(float(ended[name].obs[0]))
                    self.returns[name].append(self.total[name])
                self.total[name] = 0.0
        self.over |= set(ended)
        self.live -= set(ended)
        self.begun -= set(ended)
        coming = set(self.names) - self.live - set(ended)
        self.live |= {name for name in sorted(coming) if self.random.random() < self.rate["come"]}
        return self._next(ended, reward)

    def close(self):
        pass


def rate():
    return st.sampled_from([0.0, 0.1, 0.5, 0.9])


RATES = st.fixed_dictionaries({"act": rate(), "gain": rate(), "end": rate(), "come": rate()})
AGENTS = {"red": ("a",), "blue": ("b", "c")}
ENVS = 2


def chaotic_team(rates, seed, steps):
    """A runner over two chaotic environments, and these."""
    made = []

    def make():
        made.append(Chaotic(rates, seed + len(made)))
        return made[-1]

    counting = fl.Policy(Counting)
    both = fl.Team(red=counting, blue=counting, of={"a": "red", "b": "blue", "c": "blue"})
    spec = fl.Runners(make, both, envs_per_runner=ENVS, rollout_length=steps)
    team = TeamRunner(spec, "runners", 0, 0)
    # The spaces were found by making one more.
    made.clear()
    return team, made


def agents_of(made):
    """Yield each policy, and the column, the environment and the name of each of its agents."""
    for policy, several in AGENTS.items():
        for column in range(ENVS * len(several)):
            yield policy, column, made[column // len(several)], several[column % len(several)]


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 1000), rates=RATES, steps=st.sampled_from([2, 5]))
def test_every_turn_is_one_row_with_all_reward_until_the_next(seed, rates, steps):
    team, made = chaotic_team(rates, seed, steps)
    weights = jax.jit(team.parts["red"].network.init)(jax.random.key(0))
    rollouts, taken = [], []
    for version in range(4):
        published = [(weights, 10 + version), (weights, 20 + version)]
        rollouts.append(team.sample(*published).by_policy)
        taken.append([len(env.turns[agent]) for _, _, env, agent in agents_of(made)])
    for number, (policy, column, env, agent) in enumerate(agents_of(made)):
        batches = [rollout[policy].batch for rollout in rollouts]
        turns = env.turns[agent]
        found = rows_of(batches, column)
        # The last turn may be open: its reward is still to come.
        is_open = bool(team.parts[policy].open[column])
        expected = [turn[:5] for turn in turns[: len(turns) - is_open]]
        assert [row[:4] for row in found] == [turn[:4] for turn in expected]
        # A column that has fewer rows than others ends with a cut.
        for row, turn in zip(found, turns, strict=False):
            assert row[4] == (turn[4] or (row[6] and len(turn) == 5))
        follows_right(found, turns)
        # What a policy remembers is of the agent's own turns since its episode began.
        assert [row[7] for row in found] == ages(turns)[: len(found)]
        # The value to bootstrap from is one turn older, also at masked rows.
        assert all(row[8] in (None, row[7] + 1) for row in found)
        carried = [batch.columns["carry['turns']"][column] for batch in batches]
        firsts = [first_row(batch, column) for batch in batches]
        assert all(c == v for c, v in zip(carried, firsts, strict=True) if v is not None)
        # The version of a column is that of its oldest turn.
        base, done = {"red": 10, "blue": 20}[policy], 0
        for version, batch in enumerate(batches):
            valid = int(batch["valid"][:, column].sum())
            oldest = next(i for i, counts in enumerate(taken) if counts[number] > done or i == 3)
            assert batch.columns["version"][column] == base + (oldest if valid else version)
            done += valid
    for policy, several in AGENTS.items():
        noted = [rollout[policy].episodes.returns.tolist() for rollout in rollouts]
        whole = [env.returns[agent] for env in made for agent in several]
        assert sorted(itertools.chain(*noted)) == sorted(itertools.chain(*whole))


def test_an_environment_that_can_not_be_brought_back_begins_again_without_its_open_turns(
    monkeypatch,
):
    rates = {"act": 0.5, "gain": 0.5, "end": 0.1, "come": 0.5}
    team, _ = chaotic_team(rates, 3, 5)
    weights = jax.jit(team.parts["red"].network.init)(jax.random.key(0))
    team.sample((weights, 0), (weights, 0))
    assert team.parts["blue"].open.any()
    again, made = chaotic_team(rates, 9, 5)
    again.take(team.keep())
    monkeypatch.setattr(RetracedAgents, "bring_back", lambda self, kept: False)
    sample = again.sample((weights, 0), (weights, 0))
    assert sample.reset == ENVS
    for policy, column, env, agent in agents_of(made):
        found = rows_of([sample.by_policy[policy].batch], column)
        assert [row[:3] for row in found] == [turn[:3] for turn in env.turns[agent]][: len(found)]
        assert [row[7] for row in found] == ages(env.turns[agent])[: len(found)]


def test_what_is_asked_of_a_runner_has_the_versions_of_each_policy():
    team = fl.Team(red=POLICY, blue=POLICY)
    spec = fl.Runners(TwoCartPoles, team, envs_per_runner=2, rollout_length=4)
    runners = spec.open()
    weights = runners.part("red").spec.open()._start().weights
    runners.part("red").publish(weights, np.int32(3))
    runners.part("blue").publish(weights, np.int32(5))
    runners.next(in_flight=2)
    state = runners.state
    runners.close()
    for policy, version in (("red", 3), ("blue", 5)):
        assert [each["version"] for each in state[policy]["due"]] == [version, version]
        asked = [each["version"] for each in state[policy]["asked"][0]]
        assert asked == [version]


def rows_of(batches, column):
    """Return the valid rows of a column: obs, action, reward, flags, the observation after,
    whether masked rows follow, the value, and that of the next row if it is there."""
    found = []
    for batch in batches:
        seen = np.append(batch["obs"][:, column, 0], batch.columns["bootstrap_obs"][column, 0])
        valid = np.flatnonzero(batch["valid"][:, column])
        for row in valid:
            fields = (
                batch[name][row, column].item() for name in ("action", "reward", "terminated")
            )
            found.append([seen[row].item(), *fields, batch["truncated"][row, column].item()])
            is_last = row == valid[-1] and row + 1 < len(batch["valid"])
            found[-1].extend([seen[row + 1].item(), is_last, batch["value"][row, column].item()])
            after = batch["value"][row + 1 : row + 2, column].tolist()
            found[-1].append(after[0] if after else None)
    return found


def ages(turns):
    """Return how many turns each turn's episode had before it."""
    found, age = [], 0
    for turn in turns:
        found.append(age)
        age = 0 if len(turn) == 6 else age + 1
    return found


def first_row(batch, column):
    """Return the value at the first row of a column; None if that row is masked."""
    return batch["value"][0, column] if batch["valid"][0, column] else None


def follows_right(found, turns):
    """Check that each row is followed by the agent's next turn, or by its final observation."""
    for i, row in enumerate(found):
        after = (
            turns[i][5] if len(turns[i]) == 6 else turns[i + 1][0] if i + 1 < len(turns) else None
        )
        assert after is None or row[5] == after


class Gives(TwoCartPoles):
    """Blue sees NaN, from its third step on in the environment with an odd seed."""

    def reset(self, seed=None, options=None):
        self.steps, self.odd = 0, bool((seed or 0) % 2)
        return super().reset(seed, options)

    def step(self, actions):
        obs, *rest = super().step(actions)
        self.steps += 1
        if self.odd and self.steps > 3:
            obs = {**obs, "blue": obs["blue"] * np.float32(np.nan)}
        return obs, *rest


@pytest.mark.parametrize("policy", [POLICY, fl.Team(red=POLICY, blue=POLICY)], ids=["one", "two"])
def test_a_number_that_is_not_finite_is_reported_with_its_agent_environment_and_seed(policy):
    spec = fl.Runners(Gives, policy, envs_per_runner=2, rollout_length=8)
    runner = TeamRunner(spec, "runners", 3, 1)
    seed = seed_of(3, "runners", 1)
    with pytest.raises(fl.errors.EnvError) as caught:
        runner.sample(
            *((jax.jit(p.network.init)(jax.random.key(0)), 0) for p in runner.parts.values())
        )
    within = (seed + 1) % 2
    text = str(caught.value)
    assert f"environment {within} of blue of Gives gave an observation that is not finite" in text
    assert (
        f"it is environment {2 + within} over all runners, of a runner with the seed {seed}" in text
    )
    assert caught.value.facts["env"] == 2 + within
    assert caught.value.facts["seed"] == seed + within
