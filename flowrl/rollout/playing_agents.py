"""`play_agents`: whole episodes of environments of several agents."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from flowrl.core.compiled import jitted
from flowrl.envs.agents import Agents
from flowrl.envs.gym_envs import Make, env_name, make_env
from flowrl.errors import SettingError, unknown
from flowrl.rl.explore import Explore
from flowrl.rl.jitted_acting import jitted_act
from flowrl.rl.policies import SAMPLED, Memory, Network
from flowrl.rl.spaces import Spaces
from flowrl.rl.team import Scripted
from flowrl.rollout.agents_vector import AgentsVector, Seating, Seats
from flowrl.rollout.evaluation import CHUNK, MAX_STEPS, Evaluation, check_counts, noise_of
from flowrl.rollout.scripted import ScriptedActing, check_random

Array = np.ndarray[Any, Any]
Acts = Callable[[Array, int], Any]
"""Returns an action for each column, of which those count whose turn it is.

It takes the environments ``bool[E]`` that go on, and the number of steps that were taken.
"""

ENVS = 32
"""The most environments that are played side by side."""
NEXT_AGENT = 0x9E3779B1
"""By how much the seeds of an episode's agents differ (an odd number, so that all do)."""


class Player(Protocol):
    """What can act for some agents of an environment."""

    def check(self, spaces: Spaces, where: str) -> None:
        """Raise an error if it can't act on these observations, or gives other actions.

        Args:
            spaces: those of the agents.
            where: the agent and its environment, for the error.

        Raises:
            SettingError: it can't.
        """

    def begin(self, seats: Seats, seeds: Array) -> Acts:
        """Begin episodes in all columns, and return what acts in them.

        Args:
            seats: the columns.
            seeds: of the random choices, ``uint32[B]``.
        """


class PolicyPlayer:
    """Acts with the weights of a policy.

    Args:
        net: the policy.
        weights: its weights.
        explore: how actions are picked; None for the greedy ones.
    """

    def __init__(self, net: Network, weights: Any, explore: Explore | None) -> None:
        self.net = net
        self.weights = jax.device_put(weights)
        self.act = jitted_act(net, explore or SAMPLED)
        self.noise_of_chunk = (
            None if explore is None else jitted(noise_of, (), ("net", net), ("explore", explore))
        )

    def check(self, spaces: Spaces, where: str) -> None:
        """Raise an error if these are not the spaces that the policy was made for."""
        own = self.net.spaces
        if spaces != own:
            raise SettingError(
                f"{where} has other spaces than the policy that is to play it: obs {spaces.obs}, "
                f"action {spaces.action}; the policy has obs {own.obs}, action {own.action}"
            )

    def begin(self, seats: Seats, seeds: Array) -> Acts:
        """Begin episodes, with a memory of none before them."""
        return _PolicyActs(self, seats, seeds)


class _PolicyActs:
    """Acts in the columns of a policy, from the beginning of their episodes on."""

    def __init__(self, player: PolicyPlayer, seats: Seats, seeds: Array) -> None:
        self.player, self.seats, self.seeds = player, seats, seeds
        self.memory = player.net.memory(player.weights, len(seeds))
        self.chunk: Array = np.empty(0)
        """The noise of the steps from the last multiple of `CHUNK` on."""
        self.chunk_number = -1

    def __call__(self, running: Array, step: int) -> Any:
        net, seats, memory = self.player.net, self.seats, self.memory
        if net.recurrent:
            # An agent that comes back after its end begins another episode.
            over = seats.terminated | seats.truncated
            self.memory = memory = Memory(memory.carry, np.asarray(memory.reset) | over)
        if not seats.acting.any():
            return None
        obs = seats.spaces.tree(seats.obs)
        packed, carry = self.player.act(self.player.weights, obs, self._noise(step), memory)
        if net.recurrent:
            self.memory = _remembered(seats.acting, carry, memory)
        return net.head.to_env(net.unpack(np.asarray(packed))[0])

    def _noise(self, step: int) -> Any:
        """Return the noise of a step, or None for greedy actions."""
        noise_of_chunk = self.player.noise_of_chunk
        if noise_of_chunk is None:
            return None
        # The step counts, and not how often it was asked: so an episode is the same beside others.
        if (number := step // CHUNK) != self.chunk_number:
            self.chunk = np.asarray(noise_of_chunk(self.seeds, jnp.uint32(number * CHUNK)))
            self.chunk_number = number
        noise: Array = self.chunk[step % CHUNK]
        return noise


def _remembered(acted: Array, carry: Any, before: Memory) -> Memory:
    """Return the memory after a step, in which who did not act remembers what it did."""

    def chosen(new: Any, old: Any) -> Array:
        found: Array = np.where(acted.reshape(-1, *[1] * (np.ndim(new) - 1)), new, old)
        return found

    return Memory(jax.tree.map(chosen, carry, before.carry), before.reset & ~acted)


@dataclass(frozen=True)
class ScriptedPlayer:
    """Acts as a scripted policy does.

    Args:
        scripted: the policy.
    """

    scripted: Scripted

    def check(self, spaces: Spaces, where: str) -> None:
        """Raise an error if actions are random and can't keep to a mask."""
        if self.scripted.act is None:
            check_random(spaces, where)

    def begin(self, seats: Seats, seeds: Array) -> Acts:
        """Begin episodes, in which each column has a generator of its own."""
        acting = ScriptedActing(self.scripted, seats, seeds.tolist())
        return lambda running, _: acting.decide(running)


@dataclass(frozen=True)
class AgentsEvaluation:
    """The episodes of the agents of one environment.

    Args:
        agents: the episodes of each agent, in the order of the environment. Lengths are in turns.
        steps: ``int64[episodes]``: the steps of the environment.
    """

    agents: dict[str, Evaluation]
    steps: Array

    def __len__(self) -> int:
        return len(self.steps)

    def of(self, agents: Iterable[str]) -> Evaluation:
        """Return the episodes of some agents together.

        A return is the mean of theirs, a length the steps of the environment, and an episode is cut
        if one of them was.
        """
        parts = [self.agents[agent] for agent in agents]
        digests = np.zeros(len(self), np.uint64)
        for part in parts:
            digests = digests * np.uint64(31) + part.digests
        return Evaluation(
            np.mean([part.returns for part in parts], axis=0),
            self.steps,
            np.any([part.cut for part in parts], axis=0),
            digests,
            parts[0].max_steps,
            parts[0].sampled,
        )


def play_agents(
    env: Make,
    players: Mapping[str, Player],
    episodes: int,
    seed: int,
    wrappers: tuple[Callable[[Any], Any], ...] = (),
    settings: Mapping[str, Any] | None = None,
    *,
    max_steps: int = MAX_STEPS,
    sampled: bool = False,
) -> AgentsEvaluation:
    """Play whole episodes of an environment of several agents.

    An agent's episode is over at its first end: where it comes back while others go on, what
    follows counts for nothing.

    Args:
        env: the environment.
        players: who acts for each of its agents.
        episodes: how many.
        seed: of the first episode; episode number i begins with the seed `seed` + i.
        wrappers: put around the environment.
        settings: for making it.
        max_steps: after so many steps of the environment an episode is cut.
        sampled: whether actions are sampled, for the notes of the result.

    Raises:
        SettingError: a number is no whole one of at least 1, the environment has one agent only,
            an agent has no player or a player no agent, or a player can't act for its agent.
        EnvError: the environment raised, or broke its declared shape or type.
        PolicyError: a scripted policy raised.
    """
    check_counts(episodes, max_steps)
    name = env_name(env)
    spaces = agents_in(env, wrappers, settings or {})
    _check_names(players, spaces, name)
    groups = _groups(players, spaces, name)
    count = min(episodes, ENVS)
    seating = Seating(
        {key: (agents, spaces[agents[0]]) for key, (_, agents) in groups.items()}, count
    )
    found = {agent: Evaluation.empty(episodes, max_steps, sampled) for agent in spaces}
    games = AgentsEvaluation(found, np.zeros(episodes, np.int64))
    vector = AgentsVector(lambda: make_env(env, 1, wrappers, settings or {}), count, seating, name)
    try:
        rounds = _Rounds(vector, {key: player for key, (player, _) in groups.items()}, games)
        for first in range(0, episodes, count):
            rounds.play(first, seed, max_steps)
    finally:
        vector.close()
    return games


def agents_in(
    env: Make, wrappers: tuple[Callable[[Any], Any], ...], settings: Mapping[str, Any]
) -> dict[str, Spaces]:
    """Return the spaces of an environment's agents by their names.

    Raises:
        SettingError: it has but one agent.
        EnvError: it can't be made.
    """
    made = make_env(env, 1, wrappers, settings)
    try:
        if not isinstance(made, Agents):
            raise SettingError(f"{env_name(env)} has but one agent, and a match needs several")
        return {agent: Spaces(*made.spaces_of(agent)) for agent in made.names}
    finally:
        made.close()


def _digests(count: int) -> list[Any]:
    """Return what takes in all that an agent sees and gains in each environment."""
    return [hashlib.blake2b(digest_size=8) for _ in range(count)]


def _check_names(players: Mapping[str, Player], spaces: Mapping[str, Spaces], name: str) -> None:
    for agent in spaces:
        if agent not in players:
            raise SettingError(f"agent {agent} of {name} has no player")
    for agent in players:
        if agent not in spaces:
            raise SettingError(f"{name}: {unknown('agent', str(agent), spaces)}")


def _groups(
    players: Mapping[str, Player], spaces: Mapping[str, Spaces], name: str
) -> dict[str, tuple[Player, list[str]]]:
    """Return the players, each with the agents for which it acts in one call."""
    found: dict[str, tuple[Player, list[str]]] = {}
    for agent, of_agent in spaces.items():
        player = players[agent]
        player.check(of_agent, f"agent {agent} of {name}")
        for other, agents in found.values():
            if other is player and spaces[agents[0]] == of_agent:
                agents.append(agent)
                break
        else:
            found[agent] = player, [agent]
    return found


class _Rounds:
    """Plays rounds of episodes, one in each environment.

    Args:
        vector: the environments.
        players: by the name of their seats.
        games: the episodes, which are written.
    """

    def __init__(
        self, vector: AgentsVector, players: Mapping[str, Player], games: AgentsEvaluation
    ) -> None:
        self.vector, self.players, self.games = vector, players, games
        self.found = games.agents
        self.order = {agent: index for index, agent in enumerate(games.agents)}

    def play(self, first: int, seed: int, max_steps: int) -> None:
        """Play the episodes from number `first` on."""
        vector, found = self.vector, self.found
        count = len(vector.envs)
        vector.steps[:] = 0
        vector.reset(seed + first)
        acts = {}
        for key, player in self.players.items():
            seats = vector.seating.by_policy[key]
            acts[key] = player.begin(seats, self._seeds(seats, seed + first))
        # The last round may have more environments than there are episodes left.
        running = np.arange(first, first + count) < len(self.games)
        live = {agent: running.copy() for agent in found}
        digests = {agent: _digests(count) for agent in found}
        for step in range(max_steps):
            running = running & self._goes_on(live)
            if not running.any():
                break
            acted = {agent: self._acting(agent) for agent in found}
            self._digest(digests, live, acted)
            vector.step({key: act(running, step) for key, act in acts.items()}, running)
            self._count(first, running, live, acted, digests)
        played = min(count, len(self.games) - first)
        self.games.steps[first : first + played] = vector.steps[:played]
        for agent, of_agent in found.items():
            left = np.flatnonzero(live[agent] & running)
            of_agent.cut[first + left] = True
            for i in range(played):
                of_agent.digests[first + i] = int.from_bytes(digests[agent][i].digest())

    def _seeds(self, seats: Seats, first: int) -> Array:
        """Return the seeds of the random choices of all columns."""
        seeds = []
        for column, env in enumerate(seats.env.tolist()):
            agent = seats.agents[column % len(seats.agents)]
            seeds.append((first + env + NEXT_AGENT * self.order[agent]) % 2**32)
        return np.array(seeds, np.uint32)

    def _of(self, agent: str) -> tuple[Seats, Array]:
        """Return the seats of an agent, and its columns, one for each environment."""
        place = self.vector.at[0][agent]
        seats = place.seats
        return seats, np.arange(place.column, len(seats.env), len(seats.agents))

    def _acting(self, agent: str) -> Array:
        """Return the environments ``bool[E]`` in which it is an agent's turn."""
        seats, columns = self._of(agent)
        return seats.acting[columns]

    def _goes_on(self, live: Mapping[str, Array]) -> Array:
        """Return the environments ``bool[E]`` where somebody acts, and some episode is not over."""
        acting = np.any([self._acting(agent) for agent in live], axis=0)
        going: Array = acting & np.any(list(live.values()), axis=0)
        return going

    def _digest(
        self,
        digests: Mapping[str, list[Any]],
        live: Mapping[str, Array],
        acted: Mapping[str, Array],
    ) -> None:
        """Add what the agents see that act."""
        for agent, alive in live.items():
            seats, columns = self._of(agent)
            for i in np.flatnonzero(alive & acted[agent]).tolist():
                for x in seats.obs.values():
                    digests[agent][i].update(x[columns[i]].tobytes())

    def _count(
        self,
        first: int,
        running: Array,
        live: dict[str, Array],
        acted: Mapping[str, Array],
        digests: Mapping[str, list[Any]],
    ) -> None:
        """Add what a step gave to the episodes that are not over."""
        for agent, of_agent in self.found.items():
            seats, columns = self._of(agent)
            playing = np.flatnonzero(live[agent] & running)
            rewards = seats.reward[columns]
            of_agent.returns[first + playing] += rewards[playing]
            of_agent.lengths[first + playing] += acted[agent][playing]
            for i in playing.tolist():
                digests[agent][i].update(rewards[i].tobytes())
            live[agent][running] &= ~(seats.terminated | seats.truncated)[columns][running]
