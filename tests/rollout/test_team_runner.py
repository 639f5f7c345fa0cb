"""Runners over environments of several agents, beside single ones and lists of turns."""

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
from flowrl.rollout.runner import Runner
from flowrl.rollout.sample import seed_of
from flowrl.rollout.team_runner import TeamRunner
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
            jax.tree.map(np.testing.assert_array_equal, found[name], runner.sample(weights[name]))
        weights = dict.fromkeys(offset)
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
            if name in self.begun:
                self.turns[name][-1][2] += reward.get(name, 0.0)
            if self.random.random() < self.rate["end"]:
                flags = self.random.choice([(True, False), (False, True)])
                ended[name] = End(*flags, self._see())
                if name in self.begun:
                    self.turns[name][-1][3:] = flags
                    self.turns[name][-1].append(float(ended[name].obs[0]))
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


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000),
    rates=st.fixed_dictionaries({"act": rate(), "gain": rate(), "end": rate(), "come": rate()}),
    steps=st.sampled_from([2, 5]),
)
def test_every_turn_is_one_row_with_all_reward_until_the_next(seed, rates, steps):
    made = []

    def make():
        made.append(Chaotic(rates, seed + len(made)))
        return made[-1]

    agents, envs = {"red": ("a",), "blue": ("b", "c")}, 2
    counting = fl.Policy(Counting)
    both = fl.Team(red=counting, blue=counting, of={"a": "red", "b": "blue", "c": "blue"})
    spec = fl.Runners(make, both, envs_per_runner=envs, rollout_length=steps)
    team = TeamRunner(spec, "runners", 0, 0)
    # The spaces were found by making one more.
    made.clear()
    init = jax.jit(team.parts["red"].network.init)
    published = [(init(jax.random.key(0)), 7)] * 2
    rollouts = []
    for _ in range(4):
        rollouts.append(team.sample(*published).by_policy)
        published = [None, None]
    for policy, several in agents.items():
        batches = [rollout[policy].batch for rollout in rollouts]
        for column in range(envs * len(several)):
            env, agent = made[column // len(several)], several[column % len(several)]
            found = rows_of(batches, column)
            turns = env.turns[agent]
            # The last turn may be open: its reward is still to come.
            is_open = bool(team.parts[policy].open[column])
            expected = [turn[:5] for turn in turns[: len(turns) - is_open]]
            assert [row[:4] for row in found] == [turn[:4] for turn in expected]
            # A column that has fewer rows than others ends with a cut.
            for row, turn in zip(found, expected, strict=True):
                assert row[4] == turn[4] or row[6]
            follows_right(found, turns)
            # What a policy remembers is of the agent's own turns since its episode began.
            assert [row[7] for row in found] == ages(turns)[: len(found)]
            # The value to bootstrap from is one turn older, also at masked rows.
            assert all(row[8] in (None, row[7] + 1) for row in found)
            carried = [batch.columns["carry['turns']"][column] for batch in batches]
            firsts = [first_row(batch, column) for batch in batches]
            assert all(c == v for c, v in zip(carried, firsts, strict=True) if v is not None)
        noted = [rollout[policy].episodes for rollout in rollouts]
        assert sum(map(len, (each.returns for each in noted))) >= sum(
            len(turn) == 6 for name in several for env in made for turn in env.turns[name][:-1]
        )


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
