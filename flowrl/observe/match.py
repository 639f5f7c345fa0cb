"""`match`: policies that play against, or with, each other in environments of several agents."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np

from flowrl.core.logs import log
from flowrl.core.row_json import plain_number
from flowrl.core.texts import decimal, plural
from flowrl.envs.gym_envs import Make, env_name
from flowrl.errors import SettingError, a, unknown
from flowrl.observe.trained import TrainedPolicy
from flowrl.rl.team import Scripted
from flowrl.rollout.evaluation import MAX_STEPS, Evaluation
from flowrl.rollout.playing_agents import Player, ScriptedPlayer, agents_in, play_agents

Array = np.ndarray[Any, Any]
AnyPlayer = TrainedPolicy | Scripted | Callable[[Any, np.random.Generator], Any]
"""What can play: a trained policy, a scripted one, or its function ``act(obs, rng)``."""
Seating = Mapping[str, str]
"""By agent: the name of the player that plays it."""


@dataclass(frozen=True, eq=False)
class Match:
    """The episodes that players played with one another.

    An episode is won by the player whose return in it is the highest, and a draw of those that
    share it. The return of a player is the mean of those of the agents that it plays.

    Args:
        players: by name: the episodes of each player.
        seatings: who plays which agent, one after the other; each has its part of the episodes.
        seating: ``int64[episodes]``: by episode, the index of its seating.
    """

    players: Mapping[str, Evaluation]
    seatings: tuple[Seating, ...]
    seating: Array

    def __len__(self) -> int:
        return len(self.seating)

    def __getitem__(self, player: str) -> Evaluation:
        """Return the episodes of a player.

        Raises:
            SettingError: there is no such player.
        """
        if player not in self.players:
            raise SettingError(unknown("player", player, self.players))
        return self.players[player]

    @property
    def _tops(self) -> dict[str, Array]:
        """By player: ``bool[episodes]``, where its return is the highest."""
        returns = np.stack([each.returns for each in self.players.values()])
        tops = np.isclose(returns, returns.max(0), rtol=1e-9, atol=1e-9)
        return dict(zip(self.players, tops, strict=True))

    def results(self, player: str) -> tuple[int, int, int]:
        """Return how many episodes a player won, drew and lost.

        Raises:
            SettingError: there is no such player.
        """
        self[player]
        tops = self._tops
        shared = np.sum([*tops.values()], axis=0) > 1
        won, drew = int((tops[player] & ~shared).sum()), int((tops[player] & shared).sum())
        return won, drew, len(self) - won - drew

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on how many episodes were cut or are copies of others, if any are."""
        return next(iter(self.players.values())).notes

    def plain(self) -> dict[str, Any]:
        """Return all that is known of the episodes as plain values, for JSON."""
        found: dict[str, Any] = {"episodes": len(self), "seatings": [*map(dict, self.seatings)]}
        found["seating"] = self.seating.tolist()
        found["players"] = {}
        for name, each in self.players.items():
            won, drew, lost = self.results(name)
            numbers = {"won": won, "drawn": drew, "lost": lost}
            mean, *returns = map(plain_number, (each.mean(), *each))
            found["players"][name] = {**numbers, "mean": mean, "returns": returns}
        return found

    def __str__(self) -> str:
        width = max(map(len, self.players))
        lines = [f"{len(self)} {plural(len(self), 'episode')}"]
        for name, each in self.players.items():
            won, drew, lost = self.results(name)
            numbers = f"mean {decimal(each.mean())}, std {decimal(each.std())}"
            lines.append(f"{name:<{width}}  {won} won, {drew} drawn, {lost} lost  {numbers}")
        return "\n".join(lines)


def match(
    players: Mapping[str, AnyPlayer],
    *,
    env: Make | None = None,
    env_settings: Mapping[str, Any] | None = None,
    episodes: int = 100,
    seed: int = 0,
    greedy: bool = True,
    seats: Seating | None = None,
    max_steps: int = MAX_STEPS,
) -> Match:
    """Let players play whole episodes of an environment of several agents.

    Policies that were trained for different agents, such as those of one team, play these. Others
    take turns: agent k is played by player k, counted round and round, and then each player moves
    on by one seat, so that everyone plays from every seat in as many episodes, with the same seeds.

    What makes the result less than it seems is logged as a warning: episodes that were cut, and
    those that are copies of each other.

    Args:
        players: by name: trained policies, `Scripted` ones, or functions ``act(obs, rng)``.
        env: id, class or function of the environment; None: that of the first trained policy
            (default None).
        env_settings: keyword arguments for making it; None: those of the first trained policy
            (default None).
        episodes: number of episodes of all seatings together (default 100).
        seed: seed of the first episode of each seating (default 0).
        greedy: trained policies take the greedy actions (default); else random ones.
        seats: the name of the player of each agent; None: as said above (default None).
        max_steps: most steps of an episode, which is then cut (default 30_000).

    Returns:
        The episodes of each player, and who won how many.

    Raises:
        SettingError: there are fewer than two players or more than agents, one of them can't play
            its agent, an agent has no player, no environment is known, or a number is below 1.
        EnvError: the environment raised, or broke its declared shape or type.
        PolicyError: a scripted policy raised.

    >>> import flowrl as fl
    >>> random = fl.Scripted()
    >>> players = {"a": random, "b": random}
    >>> found = fl.match(players, env="pettingzoo:classic.tictactoe_v3", episodes=4)
    >>> sum(found.results("a"))
    4
    """
    policies = [x for x in players.values() if isinstance(x, TrainedPolicy)]
    known = next((policy for policy in policies if policy.env is not None), None)
    if env is None:
        if known is None or known.env is None:
            raise SettingError("no player knows its environment; name it: env=..., or --env")
        env = known.env
    wrappers = () if known is None else known.wrappers
    if env_settings is None:
        env_settings = {} if known is None else known.env_settings
    agents = list(agents_in(env, wrappers, env_settings))
    acting = {name: _player(name, player, greedy) for name, player in players.items()}
    seatings = _seatings(players, agents, env_name(env), seats)
    shares = [len(share) for share in np.array_split(np.arange(episodes), len(seatings))]
    parts: dict[str, list[Evaluation]] = {name: [] for name in players}
    for seating, share in zip(seatings, shares, strict=True):
        # Fewer episodes than seatings leave some of these without one.
        if not share and episodes > 0:
            continue
        by_agent = {agent: acting[name] for agent, name in seating.items()}
        games = play_agents(
            env,
            by_agent,
            share,
            seed,
            wrappers,
            env_settings,
            max_steps=max_steps,
            sampled=not greedy,
        )
        for name in players:
            parts[name].append(games.of([agent for agent in agents if seating[agent] == name]))
    joined = {name: Evaluation.join(each) for name, each in parts.items()}
    found = Match(joined, tuple(seatings), np.repeat(np.arange(len(seatings)), shares))
    for note in found.notes:
        log(note)
    return found


def _player(name: str, given: Any, greedy: bool) -> Player:
    """Return what acts for a player.

    Raises:
        SettingError: it is of another kind.
    """
    if isinstance(given, TrainedPolicy):
        return given.player(greedy=greedy)
    if isinstance(given, Scripted):
        return ScriptedPlayer(given)
    if callable(given):
        return ScriptedPlayer(Scripted(given))
    raise SettingError(
        f"player {name} must be a trained policy (fl.load), fl.Scripted(...) or a function "
        f"act(obs, rng), got {a(given)}"
    )


def _seatings(
    players: Mapping[str, AnyPlayer], agents: list[str], env: str, seats: Seating | None
) -> list[Seating]:
    """Return who plays which agent, in one seating after the other.

    Raises:
        SettingError: a player has no agent, or an agent no player.
    """
    names = list(players)
    if seats is not None:
        _check_seats(seats, names, agents, env)
        return [seats]
    own = [(agent, name) for name in names for agent in _agents_of(players[name])]
    # Each was trained for agents of its own, and together these are all.
    if sorted(agent for agent, _ in own) == sorted(agents) and {x for _, x in own} == set(names):
        return [dict(own)]
    if not 2 <= len(names) <= len(agents):
        raise SettingError(
            f"a match in {env} needs at least 2 players and at most one for each of its agents "
            f"({', '.join(agents)}), got {len(names)}: {', '.join(names)}"
        )
    return [_seated(agents, names[i:] + names[:i]) for i in range(len(names))]


def _agents_of(player: AnyPlayer) -> tuple[str, ...]:
    """Return the agents for which a player was trained; a scripted one was for none."""
    return player.agents if isinstance(player, TrainedPolicy) else ()


def _seated(agents: list[str], names: list[str]) -> Seating:
    """Return who plays which agent, where the players take the agents round and round."""
    return dict(zip(agents, cycle(names), strict=False))


def _check_seats(seats: Seating, names: list[str], agents: list[str], env: str) -> None:
    """Check that every agent has a player, and every player an agent.

    Raises:
        SettingError: one has not.
    """
    for agent, name in seats.items():
        if agent not in agents:
            raise SettingError(f"seats: {env} has an {unknown('agent', agent, agents)}")
        if name not in names:
            raise SettingError(f"seats: {unknown('player', name, names)}")
    if left := [agent for agent in agents if agent not in seats]:
        raise SettingError(f"seats: nobody plays {', '.join(left)} of {env}")
    if idle := [name for name in names if name not in seats.values()]:
        raise SettingError(f"seats: no agent is played by {', '.join(idle)}")
