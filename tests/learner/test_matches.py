"""Which opponent an episode was against, beside games that write down who really played."""

import random

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from gymnasium.spaces import Box, Discrete
from hypothesis import example, given, settings
from hypothesis import strategies as st

import flowrl as fl
from flowrl.core.items import Batch
from flowrl.envs.agents import Agents, End, Turn
from flowrl.learner.matches import Matches
from flowrl.rollout.team_runner import TeamRunner

VERSIONS, ENVS = 4, 2


class Signing(nnx.Module):
    """A policy whose every action is a number in its weights: its version."""

    def __init__(self, obs_space, action_space, *, rngs):
        self.logits = nnx.Param(jnp.zeros(fl.networks.action_outputs(action_space)))

    def __call__(self, obs):
        return jnp.tile(self.logits[...], (obs.shape[0], 1)), jnp.zeros(obs.shape[0])


def signing(weights, version):
    """Weights of a policy that signs with this version."""
    logits = 1e4 * (np.arange(VERSIONS) == version).astype(np.float32)
    (name,) = weights.params
    return weights._replace(params={name: logits})


class Noted(Agents):
    """A game of random turns, rewards and length, which notes who took part in each episode."""

    names = ("learner", "a", "b")
    rollout = 0
    """The number of the rollout that is being sampled."""

    def __init__(self, rates, seed, opponents):
        self.random, self.rates, self.opponents = random.Random(seed), rates, opponents
        self.games = []
        """Of each episode in which the learner acted: its rewards, who played, and from which
        rollout on until which."""

    def spaces_of(self, agent):
        return Box(0, 1, (1,)), Discrete(VERSIONS)

    def _next(self, reward):
        self.acting = [n for n in self.names if self.random.random() < self.rates["act"]]
        self.acting = self.acting or [self.random.choice(self.names)]
        return Turn({name: np.zeros(1, np.float32) for name in self.acting}, reward, {})

    def reset(self, seed=None):
        self.total, self.versions, self.begun, self.acted = 0.0, set(), None, False
        return self._next({})

    def step(self, actions):
        assert set(actions) == set(self.acting)
        self.begun = Noted.rollout if self.begun is None else self.begun
        self.acted |= "learner" in actions
        self.versions |= {int(x) for name, x in actions.items() if name in self.opponents}
        gain = float(self.random.randrange(-2, 3))
        # What the learner gains before its first turn is in none of its rows.
        self.total += gain * self.acted
        if self.random.random() >= self.rates["end"]:
            return self._next({"learner": gain})
        flags = self.random.choice([(True, False), (False, True)])
        if self.acted:
            self.games.append((self.total, self.versions, self.begun, Noted.rollout))
        ended = dict.fromkeys(self.names, End(*flags, np.zeros(1, np.float32)))
        return Turn({}, {"learner": gain}, ended)

    def close(self):
        pass


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 1000),
    rates=st.fixed_dictionaries(
        {"act": st.sampled_from([0.2, 0.6, 1.0]), "end": st.sampled_from([0.05, 0.3, 0.7])}
    ),
    steps=st.sampled_from([1, 3, 8]),
    versions=st.lists(st.integers(0, VERSIONS - 1), min_size=2, max_size=6),
    several=st.booleans(),
)
@example(seed=944, rates={"act": 0.2, "end": 0.3}, steps=3, versions=[2, 2, 1], several=False)
@example(seed=312, rates={"act": 0.2, "end": 0.3}, steps=8, versions=[0, 1, 2], several=True)
def test_an_episode_is_against_the_version_that_played_all_of_it(
    seed, rates, steps, versions, several
):
    made = []

    def make():
        made.append(Noted(rates, seed + len(made), ("a", "b") if several else ("a",)))
        return made[-1]

    policy = fl.Policy(Signing)
    of = {"learner": "learner", "a": "opponent", "b": "opponent" if several else "other"}
    names = set(of.values())
    team = fl.Team(**dict.fromkeys(sorted(names), policy), of=of)
    spec = fl.Runners(make, team, envs_per_runner=ENVS, rollout_length=steps)
    runner = TeamRunner(spec, "runners", 0, 0)
    made.clear()
    weights = runner.parts["learner"].network.init(jax.random.key(0))
    matches = Matches(ENVS, 1, 1 + several)
    found = [[] for _ in range(ENVS)]
    for number, version in enumerate(versions):
        Noted.rollout = number
        published = {name: (signing(weights, version), version) for name in names}
        batches = runner.sample(*(published[name] for name in runner.parts)).by_policy
        # Games of one environment alone say which environment they are of.
        learner, opponent = batches["learner"].batch, batches["opponent"].batch
        before = [len(env.games) for env in made]
        games = matches.ended(learner, opponent)
        of_env = np.argwhere(ends_of(learner))[:, 1].tolist()
        assert len(games) == len(of_env)
        for env, game in zip(of_env, games, strict=True):
            found[env].append(game)
        assert [len(games) for games in found] == before
    for games, env in zip(found, made, strict=True):
        before = 0
        for game, (total, played, begun, over) in zip(games, env.games, strict=True):
            assert game.total == total
            assert played <= set(versions[begun : over + 1])
            if game.version is not None:
                assert played <= {game.version}
            # Since the learner's last episode ended there may have been others without it.
            assert (game.version is None) <= (len(set(versions[before : over + 1])) > 1)
            before = over


def rollout(ends, version, first=0, open_before=None):
    """A rollout of one environment that ends episodes at these rows, each of reward 1."""
    ends = np.array(ends, bool)[:, None]
    none = np.zeros_like(ends)
    data = {"reward": np.ones(ends.shape), "valid": ~none, "terminated": ends, "truncated": none}
    columns = {"env": 0, "first": first, "last_version": version}
    columns["version"] = version if open_before is None else open_before
    columns = {name: np.array([x], np.int32) for name, x in columns.items()}
    return Batch(data, {**columns, "cut": np.array([False])})


def games_of(*batches):
    """The episodes of rollouts one after another, in which both policies do the same."""
    matches = Matches(1, 1, 1)
    return [game for batch in batches for game in matches.ended(batch, batch)]


def test_an_episode_that_begins_with_a_rollout_is_not_against_an_earlier_version():
    whole = [rollout([0, 1, 0, 0, 1], v, 5 * i) for i, v in enumerate([7, 9, 7])]
    assert games_of(*whole) == [(2, 7), (3, 7), (2, 9), (3, 9), (2, 7), (3, 7)]
    # Where an episode goes on over the change of versions, it is against none.
    over = [rollout([0, 1, 0], v, 3 * i) for i, v in enumerate([7, 7, 9])]
    assert games_of(*over) == [(2, 7), (3, 7), (3, None)]


def test_a_turn_that_was_open_before_is_of_an_earlier_version():
    batches = [rollout([0, 1], 7), rollout([0, 1], 9, 2, open_before=7), rollout([1, 1], 9, 4)]
    assert games_of(*batches) == [(2, 7), (2, None), (1, 9), (1, 9)]


def test_a_restarted_runner_begins_new_episodes():
    # The second rollout does not go on from the first one.
    batches = [rollout([0, 0], 3), rollout([0, 1], 5, 1), rollout([0, 1], 5, 3)]
    assert games_of(*batches) == [(2, 5), (2, 5)]


def ends_of(batch):
    """The rows that end an episode, and not a rollout alone."""
    ends = batch["valid"] & (batch["terminated"] | batch["truncated"])
    for column in np.flatnonzero(batch.columns["cut"]):
        ends[np.flatnonzero(batch["valid"][:, column])[-1], column] = False
    return ends
