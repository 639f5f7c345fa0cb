"""`Runners`: the settings of numbered runners, which open the handle that operators call."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from inspect import signature
from typing import Any, ClassVar, Literal, cast

import gymnasium as gym
import numpy as np

from flowrl.core.texts import plural
from flowrl.envs.agents import Agents, OneAgent
from flowrl.envs.gym_envs import Make, Probed, env_name, make_env, probe
from flowrl.envs.jax_agents import HostAgents, JaxAgents
from flowrl.envs.jax_envs import JaxEnv
from flowrl.errors import GraphError, SettingError
from flowrl.graph.protocols import Handle, Resource, Site
from flowrl.graph.site import alone
from flowrl.graph.use import Use
from flowrl.rl.actions import leaves
from flowrl.rl.explore import Explore, Sampled
from flowrl.rl.noisy_layers import NoisyLinear
from flowrl.rl.normalizing import RunningNorm
from flowrl.rl.policies import SAMPLED, Policy, network
from flowrl.rl.spaces import Spaces
from flowrl.rl.team import Scripted, Team
from flowrl.rollout.checks import check_settings
from flowrl.rollout.gym_runners import GymRunners
from flowrl.rollout.handle import RunnersHandle
from flowrl.rollout.jax_runners import JaxRunners
from flowrl.rollout.jax_team_runners import JaxTeamRunners
from flowrl.rollout.of_policies import several
from flowrl.rollout.team_runners import TeamRunners


@dataclass(frozen=True)
class Runners(Resource):
    """Numbered runners that step environments with a policy and return rollouts.

    Each of the `num_runners` runners has `envs_per_runner` environments, and each of its rollouts
    has `rollout_length` steps per environment.

    Args:
        env: Gymnasium id, or a function or class that makes an environment (or a vector of exactly
            `envs_per_runner`). ``gymnax:NAME``, ``brax:NAME`` and ``jaxmarl:NAME`` are
            environments written in JAX.
        policy: policy that chooses the actions, or a `Team` of them for several agents.
        num_runners: number of runners: one after another in this process; on Ray each is a thread,
            in processes that they share (default 1).
        envs_per_runner: environments of each runner (default 8).
        rollout_length: steps per environment in one rollout (default 128).
        wrappers: functions put around each environment, the first one innermost (default none).
        env_settings: keyword arguments for making an environment (default none).
        timeout: seconds that a rollout may take on Ray; a runner that takes longer is killed and
            restarted. The timeout doubles after each restart in a row, for starting takes part of
            it. None: no limit (default None).
        evaluation_timeout: seconds that a runner's episodes of an evaluation may take on Ray, with
            what it was asked for before; a runner that takes longer is killed, and restarted with
            its next rollout. The evaluation goes on without its episodes. Doubles as `timeout`
            does. None: no limit (default None).
        restarts: restarts in a row of a runner whose process ended or hung; 0: none (default 3).
        on_error: what happens when an environment raises or breaks its spaces: ``stop`` the run, or
            ``restart`` its runner (default ``stop``).
        explore: how actions are chosen from the policy's distribution; for a `Team`, one for all or
            a mapping by policy (default `Sampled`).
        normalize_rewards: discount factor, from 0 to 1, of the returns whose running standard
            deviation rewards are divided by, each runner's by its own; None: no scaling (default
            None).
        clip_rewards: bound of the absolute rewards that are learned from, once they are scaled;
            None: no bound (default None). Episode returns are those of the environment, neither
            scaled nor clipped.
        metrics: keys of the `info` that Gymnasium environments return with a step, numbers that
            each row reports as ``env/KEY``, ``env/KEY/min`` and ``env/KEY/max`` (default none).

    Raises:
        SettingError: a setting has a value that it can't have.
    """

    env: Make
    policy: Policy | Team
    num_runners: int = 1
    envs_per_runner: int = 8
    rollout_length: int = 128
    wrappers: tuple[Callable[[Any], Any], ...] = ()
    env_settings: Mapping[str, Any] = field(default_factory=dict)
    timeout: float | None = None
    evaluation_timeout: float | None = None
    restarts: int = 3
    on_error: Literal["stop", "restart"] = "stop"
    explore: Explore | Mapping[str, Explore] = SAMPLED
    normalize_rewards: float | None = None
    clip_rewards: float | None = None
    metrics: tuple[str, ...] = ()

    # Whatever the numbers among the settings are, the environment has the same spaces.
    independent: ClassVar[tuple[str, ...]] = ("_probed",)
    # What makes the environment may be settings, too, but its numbers are the environment's.
    constants: ClassVar[tuple[str, ...]] = ("env", "wrappers", "env_settings")
    # The handle is GymRunners or JaxRunners, by the environment.
    handle: ClassVar[type[Handle]] = RunnersHandle  # type: ignore[type-abstract]

    def __post_init__(self) -> None:
        check_settings(self)

    def __hash__(self) -> int:
        # Not of the fields that may hold lists or dicts.
        return hash(
            (
                self.env,
                self.policy,
                self.num_runners,
                self.envs_per_runner,
                self.rollout_length,
            )
        )

    def spaces(self) -> Spaces:
        """Return the spaces of the environment, found by making one.

        Raises:
            GraphError: there are several policies, each with spaces of its own.
        """
        if self._probed.spaces is not None:
            return self._probed.spaces
        if len(self.by_policy) > 1:
            raise GraphError(several("runners", self.by_policy))
        return next(iter(self.by_policy.values())).spaces()

    @property
    def jax_env(self) -> JaxEnv | JaxAgents | None:
        """The environment itself, if it is one written in JAX."""
        return self._probed.jax_env

    @property
    def skips(self) -> bool:
        """Whether the environment is a vector of which some columns' steps are skipped."""
        return self._probed.skips

    @property
    def in_jax(self) -> bool:
        """Whether the environment is written in JAX."""
        return self.jax_env is not None

    def part_names(self) -> Collection[str]:
        """Return the names of the policies that are networks, if there is a team of them."""
        return tuple(self.policy.networks) if isinstance(self.policy, Team) else ()

    @property
    def scripted(self) -> Mapping[str, Scripted]:
        """The scripted policies of a team by name."""
        return self.policy.scripted if isinstance(self.policy, Team) else {}

    @property
    def agents(self) -> Mapping[str, tuple[str, ...]]:
        """The agents by policy; that of the one policy that acts for all is ``""``.

        Empty where the environment has but one agent.

        Raises:
            SettingError: an agent has no policy, or a policy no agent.
        """
        names = self._probed.agents
        if names is None:
            return {}
        if isinstance(self.policy, Team):
            return self.policy.agents_of(names, env_name(self.env))
        return {"": tuple(names)}

    @cached_property
    def by_policy(self) -> dict[str, Runners]:
        """By policy: the settings of runners whose environments are its agents, its columns.

        Raises:
            SettingError: an agent has no policy, a policy no agent, or agents of one policy have
                different spaces.
        """
        if self._probed.agents is None:
            if isinstance(self.policy, Team):
                raise SettingError(
                    f"{env_name(self.env)} has but one agent; give its runners a policy, no team"
                )
            return {"": self}
        found = {}
        for name, agents in self.agents.items():
            spaces = self.spaces_of(name)
            if name not in self.scripted:
                found[name] = self._of(name, agents, spaces)
        return found

    @property
    def _one_policy(self) -> Policy:
        """The policy, where there is no team of them."""
        return cast("Policy", self.policy)

    def spaces_of(self, policy: str) -> Spaces:
        """Return the spaces of each agent of a policy; ``""`` is the one that acts for all.

        Raises:
            SettingError: agents of the policy have different spaces.
        """
        known, agents, name = self._probed.agents or {}, self.agents[policy], policy
        spaces, label = known[agents[0]], env_name(self.env)
        for agent in agents:
            if known[agent] != spaces:
                who = f"policy {name} acts" if name else "one policy acts"
                raise SettingError(
                    f"{who} for {agents[0]} and {agent} of {label}, whose spaces differ: {spaces} "
                    f"and {known[agent]}; give each its own policy: "
                    "fl.Team(red=fl.Policy(...), blue=fl.Policy(...), of={...})"
                )
        return spaces

    def _of(self, name: str, agents: Sequence[str], spaces: Spaces) -> Runners:
        """Return the settings of runners whose environments are the agents of one policy."""
        label = env_name(self.env)
        policy = self.policy.settings[name] if isinstance(self.policy, Team) else self.policy
        return replace(
            self,
            env=OneAgent(agents[0], label, (spaces.obs, spaces.action)),
            policy=policy,
            explore=self.explore_of(name).of_agents(len(agents)),
            envs_per_runner=self.envs_per_runner * len(agents),
            wrappers=(),
            env_settings={},
            metrics=(),
        )

    def explore_of(self, policy: str) -> Explore:
        """Return how the actions of one policy are chosen; ``""`` stands for the only one."""
        if isinstance(self.explore, Explore):
            return self.explore
        return self.explore.get(policy, SAMPLED)

    def make_agents(self) -> Agents:
        """Make one environment of several agents."""
        # One in JAX changes nothing, so that several share it, and what is compiled for it.
        if isinstance(self.jax_env, JaxAgents):
            return HostAgents(self.jax_env)
        made: Agents = make_env(self.env, 1, self.wrappers, self.env_settings)
        return made

    @cached_property
    def _probed(self) -> Probed:
        return probe(self.env, self.wrappers, self.env_settings)

    def open(self, site: Site | None = None) -> RunnersHandle:
        """Start the runners and return their handle.

        Runners over an environment written in JAX are pure functions here, and workers only where
        these are in other processes.

        Args:
            site: the site of a runtime. Without one, the runners are in this process and belong to
                no graph, and they have first weights of their own.

        Raises:
            SettingError: `metrics` is set, and the environment is written in JAX.

        >>> import flowrl as fl
        >>> policy = fl.Policy(fl.networks.MLP)
        >>> settings = fl.Runners("CartPole-v1", policy, envs_per_runner=4, rollout_length=16)
        >>> runners = settings.open()
        >>> runners.collect()["obs"].shape
        (16, 4, 4)
        >>> runners.close()
        """
        own_site: Site = site or alone("runners", self)
        if self.metrics and self.jax_env is not None:
            raise SettingError(
                "metrics: an environment in JAX returns no info with its steps; compute them from "
                "obs in an operator, by ctx.metric"
            )
        # It raises an error where a team has but one agent, so it is asked first.
        if self.by_policy and self.agents:
            # A scripted policy is a function of Python, which computes with values.
            if self.jax_env is None or own_site.remote or self.scripted:
                return TeamRunners(self, own_site)
            return JaxTeamRunners(self, own_site)
        if self.jax_env is None or own_site.remote:
            return GymRunners(self, own_site)
        return JaxRunners(self, own_site)

    def review(self, use: Use) -> Iterator[tuple[str, str]]:
        """Yield problems: new weights never reach the runners, or exploration does not fit actions.

        Args:
            use: how a graph uses the runners.
        """
        if not use.traced:
            return
        for spec in self.by_policy.values():
            explore, net = spec.explore_of(""), network(spec.policy, spec.spaces())
            if wrong := explore.check(net.head):
                yield use.name, wrong
            elif explore.noisy and not net.layers(NoisyLinear):
                how = f"explore by noisy layers ({type(explore).__name__}), which {net.name} lacks"
                way = "give it some (noisy=True of fl.networks.QNetwork), or take EpsilonGreedy"
                yield use.name, f"{how}; {way}"
        learns = any(use.total("updates", other) for other in use.resources)
        if use.total("requests") and not use.total("publishes") and learns:
            problem = (
                "act with their first weights for ever, for no node publishes new ones to them"
            )
            yield use.name, f"{problem}; add sync=SyncWeights() after TrainOneStep"

    def advice(self) -> str:
        """Return what to know before a run: how observations are normalised; else an empty text.

        They may be so by a wrapper, or have no bounds and not be so, where the policy has a setting
        ``normalize``: what a network of the user's own does is not known.
        """
        if self.agents:
            return next(filter(None, (spec.advice() for spec in self.by_policy.values())), "")
        if self._probed.own_moments:
            return (
                f"NormalizeObservation scales the observations of {env_name(self.env)} by moments "
                "that it keeps in each environment, so that evaluations and a saved policy see "
                "others than the runners; take normalize=True, a setting of stock graphs and "
                "networks, whose moments are part of the policy"
            )
        policy = self._one_policy
        fn = policy.fn
        # Modules of NNX have a metaclass, whose signature is that of any call.
        of: Any = fn.__init__ if isinstance(fn, type) else fn  # type: ignore[misc]
        parameters = signature(of).parameters
        if "normalize" not in parameters:
            return ""
        free = all(
            isinstance(space, gym.spaces.Box)
            and np.issubdtype(space.dtype, np.floating)
            and not (space.bounded_below | space.bounded_above).any()
            for _, space in leaves(self.spaces().seen)
        )
        if not free or network(policy, self.spaces()).layers(RunningNorm):
            return ""
        return (
            f"observations of {env_name(self.env)} have no bounds and are not normalised; "
            "normalize=True, a setting of stock graphs and networks, scales them by running moments"
        )

    def describe(self) -> str:
        """Return a text such as ``2 runners x 8 envs x 128 steps of CartPole-v1``.

        The exploration follows if it is not that of sampling from the policy's distribution.
        """
        sizes = (
            (self.num_runners, "runner"),
            (self.envs_per_runner, "env"),
            (self.rollout_length, "step"),
        )
        parts = [f"{number} {plural(number, word)}" for number, word in sizes]
        ways = self.explore.values() if isinstance(self.explore, Mapping) else [self.explore]
        others = dict.fromkeys(type(way).__name__ for way in ways if not isinstance(way, Sampled))
        scripted = [f"{name} by {policy.name}" for name, policy in self.scripted.items()]
        return ", ".join([f"{' x '.join(parts)} of {env_name(self.env)}", *others, *scripted])
