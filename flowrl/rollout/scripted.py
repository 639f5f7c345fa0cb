"""`ScriptedActing`: a scripted policy that acts for its agents."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Any

import jax
import numpy as np

from flowrl.core.keeping import Keeping
from flowrl.errors import PolicyError, SettingError, raised
from flowrl.rl.spaces import Spaces
from flowrl.rl.team import Scripted
from flowrl.rollout.agents_vector import Seats

Array = np.ndarray[Any, Any]


class ScriptedActing(Keeping):
    """A scripted policy that acts for its agents when it is their turn.

    Args:
        scripted: the policy.
        seats: the columns of its agents.
        seeds: of their random choices, ``[B]``.

    Raises:
        SettingError: its actions are random, and there is a mask of actions that are not of one
            discrete space.
    """

    lasting = ("rngs",)
    remade = ("scripted", "seats")

    def __init__(self, scripted: Scripted, seats: Seats, seeds: Iterable[int]) -> None:
        if scripted.act is None:
            check_random(seats.spaces, f"policy {seats.policy}")
        self.scripted = scripted
        self.seats = seats
        self.rngs = [np.random.default_rng(seed) for seed in seeds]
        """By column: the generator of its random choices."""

    def decide(self, running: Array) -> list[Any]:
        """Return the actions of all columns; None for those whose turn it is not.

        Args:
            running: ``bool[E]``, the environments that go on.

        Raises:
            PolicyError: the function raised.
        """
        seats = self.seats
        actions: list[Any] = [None] * len(seats.acting)
        for column in np.flatnonzero(seats.acting & running[seats.env]).tolist():
            # Copies: these arrays are written again, and the function may keep what it gets.
            seen = {name: x[column].copy() for name, x in seats.obs.items()}
            if self.scripted.act is None:
                actions[column] = random_action(seats.spaces, seen, self.rngs[column])
            else:
                obs = seats.spaces.tree(seen)
                actions[column] = self._called(self.scripted.act, obs, column)
        return actions

    def _called(self, act: Callable[..., Any], obs: Any, column: int) -> Any:
        try:
            return act(obs, self.rngs[column])
        except Exception as error:
            agent = self.seats.agents[column % len(self.seats.agents)]
            raise PolicyError(
                f"{self.scripted.name}, which plays {agent}, raised: {raised(error)}"
            ) from error


def check_random(spaces: Spaces, where: str) -> None:
    """Raise an error if random actions can't keep to the mask of the observations.

    Raises:
        SettingError: there is a mask, and actions have real numbers, too.
    """
    if spaces.seen is not spaces.obs and spaces.head.reals:
        raise SettingError(
            f"{where} is random, and observations have a mask of actions in {spaces.action}; "
            "random actions keep to a mask only where they are choices: write fl.Scripted(act) "
            "with a function of your own"
        )


def random_action(spaces: Spaces, obs: Mapping[str, Array], rng: np.random.Generator) -> Any:
    """Return a random action, each of those that are allowed with the same probability.

    Args:
        spaces: those of the agent.
        obs: its observation, by the names of fields.
        rng: makes the choice.
    """
    allowed = spaces.allowed(obs)
    if allowed is None:
        spaces.action.seed(int(rng.integers(2**31)))
        return spaces.action.sample()
    begins = np.cumsum((0, *spaces.head.sizes))
    row = [rng.choice(np.flatnonzero(allowed[i:j])) for i, j in pairwise(begins)]
    # The row of a single choice is that number.
    actions = spaces.head.to_env(np.array(row if spaces.head.kind == "categorical" else [row]))
    return jax.tree.map(lambda x: x[0], actions)
