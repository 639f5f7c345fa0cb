"""`SwapSeats`: who has which seat, and that each gets what is its own."""

from collections import Counter

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

import flowrl as fl
from flowrl.envs.agents import Agents, End, Turn
from flowrl.envs.bringing_back import RetracedAgents

SWAPPED = fl.envs.SwapSeats()


class Named(Agents):
    """Two seats in turn: each sees its own number, and gets it as a reward at the end."""

    names = ("first", "second")

    def __init__(self, second=9):
        self.spaces = {"first": Discrete(9), "second": Discrete(second)}
        self.acts = []

    def spaces_of(self, agent):
        return Box(0, 9, (1,)), self.spaces[agent]

    def _seen(self, agent):
        return np.array([1 + self.names.index(agent)], np.float32)

    def reset(self, seed=None):
        self.seed = seed
        return Turn({"first": self._seen("first")}, {}, {})

    def step(self, actions):
        self.acts.append(actions)
        if "first" in actions:
            return Turn({"second": self._seen("second")}, {"first": 0.5}, {})
        ended = {name: End(True, False, 10 * self._seen(name)) for name in self.names}
        return Turn({}, {"first": 1.0, "second": 2.0}, ended)

    def close(self):
        pass


def episode(env, actions, seed=None):
    """Play an episode; return the new name of each seat, after checking all that it gets."""
    turn = env.reset(seed)
    (one,) = turn.obs
    (other,) = {*env.names} - {one}
    assert turn.obs[one] == 1
    turn = env.step({one: actions[one]})
    assert (turn.reward, list(turn.obs)) == ({one: 0.5}, [other]) and turn.obs[other] == 2
    turn = env.step({other: actions[other]})
    assert (turn.obs, turn.reward) == ({}, {one: 1.0, other: 2.0})
    assert [turn.ended[name].obs.item() for name in (one, other)] == [10, 20]
    return one, other


def test_each_gets_what_its_seat_gets_and_both_seats_as_often():
    env = SWAPPED(Named())
    assert env.names == ("learner", "opponent")
    actions = {"learner": 3, "opponent": 7}
    seats = [episode(env, actions, 0)]
    seats += [episode(env, actions) for _ in range(999)]
    # The standard deviation of the number of 1000 fair choices is 16.
    assert abs(Counter(seats)["learner", "opponent"] - 500) < 80
    # In the seat that a name has, its own action is taken.
    first = [acts["first"] for acts in env.inner.acts if "first" in acts]
    assert first == [actions[one] for one, _ in seats]
    # The seed goes to the environment itself, and decides the order of the seats.
    env.reset(7)
    assert env.inner.seed == 7
    again = SWAPPED(Named())
    assert [episode(again, actions, 0)] + [episode(again, actions) for _ in range(999)] == seats


def test_seats_are_brought_back_with_what_follows():
    env = RetracedAgents(SWAPPED(Named()))
    env.reset(3)
    for _ in range(5):
        (one,) = env.reset().obs
        env.step({one: 1})
        kept = env.keep()
        again = RetracedAgents(SWAPPED(Named()))
        assert again.bring_back(kept)
        assert again.inner.seats == env.inner.seats
        later = [[next(iter(x.reset().obs)) for _ in range(20)] for x in (env, again)]
        assert later[0] == later[1] and len(set(later[0])) == 2


def test_what_can_not_be_swapped_is_refused():
    def refused(wrapper, env, text):
        with pytest.raises(fl.errors.SettingError, match=text):
            wrapper(env)

    three = fl.envs.SwapSeats(names=("a", "b", "c"))
    refused(three, Named(), r"has the names a, b, c for 2 agents \(first, second\)")
    refused(SWAPPED, Named(second=2), "the spaces of first and second differ")
    refused(SWAPPED, object(), "needs an environment of several agents, got ")
    with pytest.raises(fl.errors.SettingError, match="names must differ"):
        fl.envs.SwapSeats(names=("a", "a"))
