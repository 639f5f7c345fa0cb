"""The commands that play episodes: ``flowrl eval`` and ``flowrl match``."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrl.cli.arguments import import_named
from flowrl.cli.options import ENV_HELP, IMPORT_HELP, count, directory_argument, import_argument
from flowrl.cli.policies import add_which
from flowrl.errors import SettingError, unknown

if TYPE_CHECKING:
    from flowrl.envs.gym_envs import Make
    from flowrl.observe.match import AnyPlayer, Match

Command = Callable[[str, str, Callable[[argparse.Namespace], int]], argparse.ArgumentParser]
"""A function that adds a command: its name, its help, and the function that runs it."""
RANDOM = "random"
"""The name of a player whose actions are random."""


def add_eval(command: Command) -> None:
    """Add the command that plays episodes with a saved policy."""
    parser = command(
        "eval",
        "play episodes with the policy of a run, or with all that it saved together",
        evaluate,
    )
    directory_argument(parser)
    add_which(parser)
    _add_episodes(parser, 20)
    parser.add_argument(
        "--video",
        metavar="FOLDER",
        help="write videos of the first 3 episodes into this folder (extra video)",
    )


def add_match(command: Command) -> None:
    """Add the command that lets players play against each other."""
    parser = command(
        "match", "let saved policies play against each other, each from every seat", match
    )
    parser.add_argument(
        "players",
        metavar="PLAYER",
        nargs="+",
        help="a run's directory, DIR:POLICY where it saved several, random, or a function "
        "act(obs, rng) as file.py:function",
    )
    parser.add_argument(
        "--seat",
        metavar="AGENT=PLAYER",
        action="append",
        default=[],
        help="this player plays this agent in all episodes; name one for each agent",
    )
    _add_episodes(parser, 100)


def _add_episodes(parser: argparse.ArgumentParser, episodes: int) -> None:
    """Add how many episodes are played, where, and how."""
    parser.add_argument("--env", metavar="ENV", help=f"in place of the saved one; {ENV_HELP}")
    parser.add_argument(
        "--episodes",
        type=count,
        default=episodes,
        metavar="N",
        help=f"how many (default {episodes})",
    )
    parser.add_argument(
        "--sampled",
        action="store_true",
        help="sample actions from the policy, not the greedy ones (from action values: "
        "epsilon-greedily, with 0.05; of a deterministic policy: with noise of 0.1)",
    )
    parser.add_argument(
        "--max-steps",
        type=count,
        metavar="N",
        help="end every episode after N steps; 30,000 by default",
    )
    parser.add_argument("--seed", type=int, default=0, help="of every random number (default 0)")
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object on standard output: every return, and what is known of them "
        "all",
    )
    import_argument(parser, IMPORT_HELP)


def evaluate(args: argparse.Namespace) -> int:
    """Play episodes with a saved policy, or with several together, and print their returns."""
    from flowrl.envs.gym_envs import env_name
    from flowrl.observe.match import match as played_match
    from flowrl.observe.saved_policies import load, load_policies

    env = _env(args)
    if args.policy is None and args.which == "last":
        policies = load_policies(args.dir, allow=args.allow, env=env)
    else:
        which = {"policy": args.policy, "which": args.which}
        policies = {"": load(args.dir, **which, allow=args.allow, env=env)}
    if len(policies) > 1:
        if args.video:
            raise SettingError("--video films environments with one agent only")
        return _print_match(args, played_match(policies, episodes=args.episodes, **_how(args)))
    policy = next(iter(policies.values()))
    found = policy.evaluate(args.episodes, video=args.video, **_how(args))
    if args.json:
        played = {"env": env_name(policy.env) if policy.env else None, "seed": args.seed}
        stochastic = "epsilon-greedy" if policy.action_values else "sampled"
        stochastic = "with noise" if policy.deterministic else stochastic
        played["actions"] = stochastic if args.sampled else "greedy"
        print(json.dumps({**played, **found.plain()}))
    else:
        print(found)
    if args.video:
        print(f"videos of the first episodes are in {args.video}", file=sys.stderr)
    return 0


def match(args: argparse.Namespace) -> int:
    """Let players play against each other, and print who won how many episodes."""
    from flowrl.observe.match import match as played_match

    env = _env(args)
    players: dict[str, AnyPlayer] = {}
    for text in args.players:
        # A player may play against itself.
        name = text if text not in players else f"{text} ({len(players) + 1})"
        players[name] = _player(text, args)
    given = [_seat(text, players) for text in args.seat]
    seats = dict(given) or None
    if seats and len(seats) < len(given):
        agent, _ = Counter(agent for agent, _ in given).most_common(1)[0]
        raise SettingError(f"--seat names {agent} more than once; give each agent one player")
    found = played_match(players, env=env, episodes=args.episodes, seats=seats, **_how(args))
    return _print_match(args, found)


def _print_match(args: argparse.Namespace, found: Match) -> int:
    print(json.dumps({"seed": args.seed, **found.plain()}) if args.json else found)
    return 0


def _env(args: argparse.Namespace) -> Make | None:
    """Import what ``--import`` names, and return the environment that ``--env`` names, if any."""
    from flowrl.algos.named import environment

    import_named(args)
    return None if args.env is None else environment(args.env)


def _how(args: argparse.Namespace) -> dict[str, Any]:
    """Return how episodes are played, as `TrainedPolicy.evaluate` and `match` take it."""
    bound = {} if args.max_steps is None else {"max_steps": args.max_steps}
    return {"seed": args.seed, "greedy": not args.sampled, **bound}


def _player(text: str, args: argparse.Namespace) -> AnyPlayer:
    """Return the player that a text names.

    Raises:
        SettingError: it names none.
    """
    from flowrl.algos.named import code
    from flowrl.observe.saved_policies import load
    from flowrl.rl.team import Scripted

    if text == RANDOM:
        return Scripted()
    if Path(text).is_dir():
        return load(text, allow=args.allow)
    where, _, name = text.rpartition(":")
    if where and Path(where).is_dir():
        return load(where, policy=name, allow=args.allow)
    if not where:
        raise SettingError(
            f"there is no directory {text}; a player is a run's directory, DIR:POLICY, {RANDOM}, "
            "or file.py:function"
        )
    return Scripted(code(text))


def _seat(text: str, players: dict[str, AnyPlayer]) -> tuple[str, str]:
    """Return the agent and the player of ``AGENT=PLAYER``.

    Raises:
        SettingError: it has another form, or there is no such player.
    """
    agent, equals, player = text.partition("=")
    if not equals:
        raise SettingError(f"--seat takes AGENT=PLAYER, got {text}")
    if player not in players:
        raise SettingError(f"--seat {text}: {unknown('player', player, players)}")
    return agent, player
