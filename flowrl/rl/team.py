"""`Team`: several policies, and which agent each of them acts for; `Scripted` is one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from flowrl.errors import SettingError, a, unknown
from flowrl.graph.values import Spec
from flowrl.rl.policies import Policy


@dataclass(frozen=True)
class Scripted:
    """A policy that is a function: nothing trains it, and no batch holds its experience.

    Args:
        act: returns an action as the environment takes it, given an observation as the environment
            returns it and a NumPy random generator, which makes its random choices repeatable:
            ``act(obs, rng)``. None: a random action, each of those that are allowed with the same
            probability (default None).

    Raises:
        SettingError: `act` can't be called.

    >>> Scripted(max)
    Scripted(act=<built-in function max>)
    """

    act: Callable[[Any, np.random.Generator], Any] | None = None

    def __post_init__(self) -> None:
        if self.act is not None and not callable(self.act):
            raise SettingError(f"Scripted takes a function act(obs, rng), got {a(self.act)}")

    @property
    def name(self) -> str:
        """What it is called in texts."""
        if self.act is None:
            return "a random player"
        return getattr(self.act, "__name__", type(self.act).__name__)


class Team(Spec):
    """Policies that act for the agents of the same environments.

    Args:
        of: the name of each agent's policy, a mapping by agent or a function of the agent's name;
            None if agents are called as their policies are (default None).
        **policies: the policies by name, each a `Policy`, or a `Scripted` one.

    Raises:
        SettingError: there is no policy, all are scripted, or one is of another kind.

    >>> from flowrl.networks import MLP
    >>> team = Team(red=Policy(MLP), blue=Policy(MLP), of={"agent_0": "red", "agent_1": "blue"})
    >>> team.agents_of(["agent_0", "agent_1"], "a game")
    {'red': ('agent_0',), 'blue': ('agent_1',)}
    """

    def __init__(
        self,
        *,
        of: Mapping[str, str] | Callable[[str], str] | None = None,
        **policies: Policy | Scripted,
    ) -> None:
        if not policies:
            raise SettingError("a team needs policies: fl.Team(red=fl.Policy(...), ...)")
        for name, policy in policies.items():
            if not isinstance(policy, Policy | Scripted):
                raise SettingError(
                    f"team: {name} must be fl.Policy(...) or fl.Scripted(act), got {a(policy)}"
                )
        if all(isinstance(policy, Scripted) for policy in policies.values()):
            raise SettingError(
                "all policies of this team are scripted, so there is nothing to sample; give it an "
                "fl.Policy, or play them by fl.match"
            )
        if of is not None and not isinstance(of, Mapping) and not callable(of):
            raise SettingError(
                f"of must be a mapping from agents to policies, or a function, got {a(of)}"
            )
        super().__init__(dict, **policies)
        self.__dict__["fn"] = dict(of) if isinstance(of, Mapping) else of

    @classmethod
    def made(cls, fn: Any, settings: dict[str, Any]) -> Self:
        """Return a team with other policies or agents."""
        return cls(of=fn, **settings)

    def __hash__(self) -> int:
        return hash((type(self), *sorted(self.settings)))

    def parts(self) -> tuple[Any, list[tuple[str | None, Any]]]:
        """Return the class, then the policies and whom they act for as its arguments."""
        of = [] if self.fn is None else [("of", self.fn)]
        return type(self), [*self.settings.items(), *of]

    @property
    def scripted(self) -> dict[str, Scripted]:
        """The scripted policies by name."""
        return {name: x for name, x in self.settings.items() if isinstance(x, Scripted)}

    @property
    def networks(self) -> dict[str, Policy]:
        """The policies that are networks by name."""
        return {name: x for name, x in self.settings.items() if isinstance(x, Policy)}

    def agents_of(self, names: Iterable[str], env: str) -> dict[str, tuple[str, ...]]:
        """Return the agents of each policy, in the order of the environment.

        Args:
            names: the agents.
            env: what the environment is called.

        Raises:
            SettingError: an agent has no policy, or a policy has no agent.
        """
        found: dict[str, list[str]] = {name: [] for name in self.settings}
        for agent in names:
            policy = self._policy_of(agent, env)
            if policy not in found:
                where = f"agent {agent} of {env}"
                raise SettingError(f"{where} has an {unknown('policy', str(policy), found)}")
            found[policy].append(agent)
        for policy, agents in found.items():
            if not agents:
                raise SettingError(
                    f"policy {policy} acts for no agent of {env}, whose agents are "
                    f"{', '.join(names)}; name one of them in of=..., or leave the policy out"
                )
        return {policy: tuple(agents) for policy, agents in found.items()}

    def _policy_of(self, agent: str, env: str) -> str:
        of: Any = self.fn
        if of is None:
            return agent
        if not isinstance(of, Mapping):
            policy: str = of(agent)
            return policy
        if agent not in of:
            raise SettingError(
                f"agent {agent} of {env} has no policy; add it to of={{...}}, which names those "
                f"of {', '.join(map(str, of))}"
            )
        return str(of[agent])
