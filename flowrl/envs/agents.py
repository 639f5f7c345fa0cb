"""Environments of several agents: one interface, and adapters for PettingZoo's two.

All come down to turns. In a turn some agents act; the step then says which act next and what they
see, what every agent gained, and which agents ended.
"""

from __future__ import annotations

import importlib
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import gymnasium as gym

from flowrl.envs.flags import FLAGS, WANTED, no_flag, not_flags
from flowrl.envs.rewards import REWARDS, as_number, no_number
from flowrl.envs.rewards import WANTED as NUMBER_WANTED
from flowrl.errors import EnvError, SettingError, a, install, unknown

PETTINGZOO = "pettingzoo"
"""The prefix of the ids of PettingZoo's environments."""


class End(NamedTuple):
    """How an agent's episode ended."""

    terminated: bool
    truncated: bool
    obs: Any
    """Its final observation."""


class Turn(NamedTuple):
    """What an environment returns for its agents, by their names."""

    obs: Mapping[str, Any]
    """What the agents see that act next; those without an entry do not act."""
    reward: Mapping[str, float]
    """What agents gained and were not given before."""
    ended: Mapping[str, End]
    """The agents whose episode ended."""


class Agents(ABC):
    """One environment of several agents, in turns.

    After a turn in which nobody acts next, the environment is reset.
    """

    names: tuple[str, ...]
    """All agents that there can be, in their order."""
    state_space: gym.Space[Any] | None = None
    """The space of the global state; None where the environment has none of its own."""

    def state(self) -> Any:
        """Return the global state, in the `state_space`; None where there is no such space."""
        return None

    @abstractmethod
    def spaces_of(self, agent: str) -> tuple[gym.Space[Any], gym.Space[Any]]:
        """Return the spaces of an agent's observations and actions."""

    @abstractmethod
    def reset(self, seed: int | None = None) -> Turn:
        """Begin an episode.

        Args:
            seed: of the environment's random numbers; None to go on with them.
        """

    @abstractmethod
    def step(self, actions: Mapping[str, Any]) -> Turn:
        """Take a step by the actions of the agents that act."""

    @abstractmethod
    def close(self) -> None:
        """Close the environment."""


class _OfPettingZoo(Agents):
    """What PettingZoo's two kinds of environments have in common."""

    def __init__(self, env: Any) -> None:
        self.env = env
        self.names = tuple(env.possible_agents)
        # Many environments have no global state, and an own class need not name it.
        self.state_space = getattr(env, "state_space", None)

    def state(self) -> Any:
        """Return the global state, if the environment has a space for it."""
        return None if self.state_space is None else self.env.state()

    def spaces_of(self, agent: str) -> tuple[gym.Space[Any], gym.Space[Any]]:
        """Return the spaces of an agent's observations and actions."""
        return self.env.observation_space(agent), self.env.action_space(agent)

    def close(self) -> None:
        """Close the environment."""
        self.env.close()


class ParallelAgents(_OfPettingZoo):
    """An environment of PettingZoo's `ParallelEnv`, whose live agents act at the same time.

    An agent acts next if it is in `env.agents`, and its episode ends with a flag. It may come back
    later, which begins another episode.

    Args:
        env: the environment, or one with the same attributes.
    """

    def reset(self, seed: int | None = None) -> Turn:
        """Begin an episode."""
        found = self.env.reset(seed=seed)
        # What two agents see would be taken apart as if it were a pair.
        if not isinstance(found, tuple | list) or len(found) != 2:
            raise EnvError(f"{_count(found)} came from reset; it must return (observations, infos)")
        self._check_dicts("reset", observations=found[0])
        return Turn(self._seen(found[0], self.env.agents, "reset"), {}, {})

    def step(self, actions: Mapping[str, Any]) -> Turn:
        """Take a step by the actions of all live agents."""
        found = self.env.step(dict(actions))
        if not isinstance(found, tuple | list) or len(found) != 5:
            raise EnvError(
                f"{_count(found)} came from step; it must return (observations, rewards, "
                "terminations, truncations, infos)"
            )
        obs, reward, terminated, truncated, _ = found
        if not all(type(x) is dict for x in (obs, reward, terminated, truncated)):
            self._check_dicts(
                "step",
                observations=obs,
                rewards=reward,
                terminations=terminated,
                truncations=truncated,
            )
        agents, ended = self.env.agents, {}
        if not REWARDS.issuperset(map(type, reward.values())):
            reward = {agent: _number(agent, one, "step") for agent, one in reward.items()}
        for name, flags in (("terminated", terminated), ("truncated", truncated)):
            if not FLAGS.issuperset(map(type, flags.values())):
                _check_flags(name, flags)
        # This is called with every step, and few of them end an episode.
        if any(terminated.values()) or any(truncated.values()):
            for agent in obs:
                if terminated.get(agent) or truncated.get(agent):
                    flags = bool(terminated.get(agent)), bool(truncated.get(agent))
                    ended[agent] = End(*flags, obs[agent])
        for agent in actions:
            if agent not in agents and agent not in ended:
                raise EnvError(
                    f"agent {agent} left before its episode ended: it is not in env.agents any "
                    "more, and neither terminated nor truncated"
                )
        live = [agent for agent in agents if agent not in ended] if ended else agents
        return Turn(self._seen(obs, live, "step"), reward, ended)

    def _seen(self, obs: Mapping[str, Any], agents: Sequence[str], verb: str) -> dict[str, Any]:
        """Return what agents see that act next."""
        try:
            return {agent: obs[agent] for agent in agents}
        except KeyError:
            agent = next(agent for agent in agents if agent not in obs)
            raise EnvError(
                f"agent {agent} is in env.agents, but {verb} returned no observation of it; return "
                "one for every agent that acts next"
            ) from None

    def _check_dicts(self, verb: str, **found: Any) -> None:
        """Check that an environment returned dicts by agent.

        Raises:
            EnvError: it returned something else.
        """
        for name, one in found.items():
            if not isinstance(one, Mapping):
                raise EnvError(f"{a(one)} came as {name} from {verb}; they must be a dict by agent")


class AgentsInTurn(_OfPettingZoo):
    """An environment of PettingZoo's `AECEnv`, whose agents act one after another.

    Args:
        env: the environment, or one with the same attributes.
    """

    def reset(self, seed: int | None = None) -> Turn:
        """Begin an episode."""
        if self.env.reset(seed=seed) is not None:
            raise EnvError(
                "reset() returned something, as that of an environment whose agents act at once "
                "does, but there is a method last(), as where they act in turn; rename last(), or "
                "return nothing"
            )
        return self._next()

    def step(self, actions: Mapping[str, Any]) -> Turn:
        """Take a step by the action of the agent whose turn it is."""
        self.env.step(actions[self.env.agent_selection])
        return self._next()

    def _next(self) -> Turn:
        """Return the next agent's turn, after those that ended were taken out."""
        reward: dict[str, float] = {}
        ended: dict[str, End] = {}
        while self.env.agents:
            agent = self.env.agent_selection
            # It gives the reward since this agent acted last, whoever acted in between.
            obs, gained, terminated, truncated, _ = self.env.last()
            usual = type(gained) in REWARDS
            reward[agent] = gained if usual else _number(agent, gained, "last")
            usual = type(terminated) in FLAGS and type(truncated) in FLAGS
            if not usual and (wrong := not_flags(terminated, truncated)):
                raise EnvError(f"agent {agent} got {wrong}")
            if not (terminated or truncated):
                return Turn({agent: obs}, reward, ended)
            ended[agent] = End(bool(terminated), bool(truncated), obs)
            self.env.step(None)
        return Turn({}, reward, ended)


def _check_flags(name: str, flags: Mapping[str, Any]) -> None:
    """Check that agents have flags.

    Raises:
        EnvError: one of them has something else.
    """
    for agent, flag in flags.items():
        if wrong := no_flag(flag):
            raise EnvError(f"agent {agent} got {wrong} as {name} from step; {WANTED}")


def _number(agent: str, reward: Any, verb: str) -> float:
    """Return an agent's reward as a number.

    Raises:
        EnvError: it got something else.
    """
    if wrong := no_number(reward):
        raise EnvError(f"agent {agent} got {wrong} as reward from {verb}; {NUMBER_WANTED}")
    return as_number(reward)


def _count(found: Any) -> str:
    """Describe what came in place of a tuple of the right length."""
    return f"{len(found)} values" if isinstance(found, tuple | list) else a(found)


def agents_of(made: Any) -> Agents | None:
    """Return the one interface of an environment of several agents; None if it has but one."""
    if isinstance(made, Agents):
        return made
    # An environment of one agent may have names of agents too; its spaces are no methods.
    of_agent = callable(getattr(made, "observation_space", None))
    if not of_agent or getattr(made, "possible_agents", None) is None:
        return None
    # Where agents act in turn, a method says what happened last; others may have data of that name.
    in_turn = callable(getattr(made, "last", None))
    return AgentsInTurn(made) if in_turn else ParallelAgents(made)


def make_pettingzoo(name: str, **settings: Any) -> Any:
    """Make an environment by the name of its module.

    Args:
        name: such as ``classic.tictactoe_v3``, a module of PettingZoo, or ``mpe2.simple_spread_v3``
            of another package. Where agents can act at the same time, they do.
        **settings: keyword arguments for making it.

    Raises:
        SettingError: there is no such module, or it is not installed.
    """
    module = _module(name)
    make = getattr(module, "parallel_env", None) or getattr(module, "env", None)
    if make is None:
        raise SettingError(f"{module.__name__} makes no environment: it has no parallel_env or env")
    return make(**settings)


def _module(name: str) -> Any:
    """Return the module of an environment: one of PettingZoo, or of another package."""
    missing = []
    for path in (f"{PETTINGZOO}.{name}", name):
        try:
            # Modules of PettingZoo warn of being imported, in favour of a registry of its own.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                return importlib.import_module(path)
        except ModuleNotFoundError as error:
            missing.append(error)
            # The module is there, and something else that it imports is missing.
            if not f"{path}.".startswith(f"{error.name}."):
                break
    needed = missing[-1].name
    if missing[0].name == PETTINGZOO or needed not in name.split(".", 1):
        raise SettingError(
            f"'{PETTINGZOO}:{name}' needs a package ({missing[-1]}): {install('agents')}"
        ) from missing[-1]
    raise SettingError(
        f"unknown environment '{PETTINGZOO}:{name}': there is neither a module {PETTINGZOO}.{name} "
        f"nor {name}; names are such as {PETTINGZOO}:classic.tictactoe_v3, and what is of another "
        "package than PettingZoo needs that one, too"
    )


class Maker(ABC):
    """Makes environments out of another one; a value that knows what they are called."""

    @abstractmethod
    def name(self) -> str:
        """Return what the environments are called in texts."""

    @abstractmethod
    def __call__(self, **settings: Any) -> Any:
        """Make one, of the other environment with these settings."""


@dataclass(frozen=True)
class OneAgent(Maker):
    """Makes what stands for one agent of an environment: its spaces, without a step.

    Args:
        agent: the name of the agent.
        of: what the environment is called.
        spaces: the spaces of its observations and actions.
    """

    agent: str
    of: str
    spaces: tuple[gym.Space[Any], gym.Space[Any]] = field(compare=False)

    def name(self) -> str:
        """Return the agent's name, and that of the environment."""
        return f"{self.agent} of {self.of}"

    def __call__(self, **settings: Any) -> gym.Env[Any, Any]:
        """Return an environment that has the spaces and can't be stepped."""
        env: gym.Env[Any, Any] = _OnlySpaces()
        env.observation_space, env.action_space = self.spaces
        return env


class _OnlySpaces(gym.Env[Any, Any]):
    """An environment that has spaces and can't be stepped."""


def unknown_agent(turn: Turn, names: AbstractSet[str]) -> str:
    """Return what is wrong if a turn names an agent that the environment lacks; empty if none.

    Args:
        turn: what the environment returned.
        names: its agents.
    """
    for what, several in (("acts", turn.obs), ("got a reward", turn.reward), ("ended", turn.ended)):
        # This is called with every step: that all are known is the usual case.
        if several.keys() <= names:
            continue
        agent = next(agent for agent in several if agent not in names)
        return (
            f"{unknown('agent', str(agent), names)} {what}; name every agent that "
            "there can be in possible_agents"
        )
    return ""
