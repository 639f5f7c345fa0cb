"""`AgentsVector`: environments of several agents, whose agents are columns by policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from flowrl.core.clock import RESET
from flowrl.core.keeping import Keeping
from flowrl.envs.agents import Agents, Turn, unknown_agent
from flowrl.envs.bringing_back import RetracedAgents
from flowrl.errors import EnvError, raised, step_of
from flowrl.rl.spaces import Spaces

Array = np.ndarray[Any, Any]


class Seating:
    """The columns of all policies, and what each got in the last step: one policy after another.

    One operation on an array serves the columns of all policies, of which each sees its own part.

    Args:
        policies: by name of a policy: the agents of one environment that it acts for, and the
            spaces of each of these.
        envs: the number of environments.
    """

    def __init__(self, policies: Mapping[str, tuple[Sequence[str], Spaces]], envs: int) -> None:
        columns = envs * sum(len(agents) for agents, _ in policies.values())
        self.acting = np.zeros(columns, bool)
        """Whose turn it is."""
        self.reward = np.zeros(columns, np.float32)
        self.terminated = np.zeros(columns, bool)
        self.truncated = np.zeros(columns, bool)
        self.by_policy: dict[str, Seats] = {}
        first = 0
        for policy, (agents, spaces) in policies.items():
            seats = self.by_policy[policy] = Seats(self, policy, agents, envs, spaces, first)
            first = seats.own.stop
        self.env = np.concatenate([seats.env for seats in self.by_policy.values()])
        """By column: the index of its environment."""

    def forget_step(self) -> None:
        """Forget what the last step gave."""
        for x in (self.reward, self.terminated, self.truncated):
            x.fill(0)


class Seats(Keeping):
    """The columns of one policy: agents of environments.

    Columns are in the order of the environments, and of their agents.

    Args:
        all_seats: the columns of all policies.
        policy: the name of the policy.
        agents: the agents of one environment that it acts for.
        envs: the number of environments.
        spaces: the spaces of each of these agents.
        first: the number of its first column among all.
    """

    lasting = ("obs", "acting")
    remade = (
        "policy", "agents", "spaces", "own", "env", "reward", "terminated", "truncated",
    )  # fmt: skip

    def __init__(
        self,
        all_seats: Seating,
        policy: str,
        agents: Sequence[str],
        envs: int,
        spaces: Spaces,
        first: int,
    ) -> None:
        self.policy = policy
        self.agents = tuple(agents)
        self.spaces = spaces
        columns = envs * len(agents)
        self.own = slice(first, first + columns)
        """Its columns among those of all policies."""
        self.env = np.repeat(np.arange(envs), len(agents))
        """By column: the index of its environment."""
        # An agent that has not come yet has an observation too, so that masks allow every action.
        self.obs = {part.name: np.ones((columns, *part.shape), part.dtype) for part in spaces.parts}
        """The newest observations, by the names of their fields: to act on, or final ones."""
        own = self.own
        self.acting, self.reward = all_seats.acting[own], all_seats.reward[own]
        self.terminated, self.truncated = all_seats.terminated[own], all_seats.truncated[own]

    def take(self, state: Any) -> None:
        """Go on from what was kept, in the same arrays, for others look at them."""
        for name, x in self.obs.items():
            x[...] = state["obs"][name]
        self.acting[:] = state["acting"]


class _Place(NamedTuple):
    """The column of an agent."""

    seats: Seats
    column: int
    """Its number among its policy's."""
    number: int
    """Its number among those of all policies."""
    obs: Array | None
    """Where its observation stands; None if that has several parts, or choices to be checked."""
    shape: tuple[int, ...]
    dtype: Any
    """The shape and the type that the environment declares of it."""


def _place(seats: Seats, column: int) -> _Place:
    number, parts = seats.own.start + column, seats.spaces.parts
    if len(parts) > 1 or parts[0].path or parts[0].bounds is not None:
        return _Place(seats, column, number, None, (), None)
    (part,) = parts
    # With `...` it is a view of the array even where that is of numbers.
    return _Place(
        seats, column, number, seats.obs[part.name][column, ...], part.shape, part.declared
    )


class AgentsVector(Keeping):
    """Environments of several agents that are stepped one after another.

    A reset takes a step of its own, as in Gymnasium's NEXT_STEP mode.

    Args:
        make: makes one environment.
        envs: how many.
        seating: the columns of all policies.
        name: what an environment is called.
    """

    lasting = ("steps", "over", "began")
    remade = ("envs", "seating", "name", "at", "next", "before_episode")

    def __init__(self, make: Callable[[], Agents], envs: int, seating: Seating, name: str) -> None:
        self.envs: list[RetracedAgents] = []
        self.seating = seating
        self.name = name
        self.steps = np.zeros(envs, np.int64)
        """By environment: the steps that were taken."""
        self.before_episode = np.zeros(envs, np.int64)
        """Those of them that were before the environment's episode."""
        self.over: list[list[str]] = [[] for _ in range(envs)]
        """By environment: the agents whose episode ended, and that were not seen since."""
        self.began: list[list[str]] = [[] for _ in range(envs)]
        """By environment: the agents that have had a turn since its reset."""
        try:
            for _ in range(envs):
                self.envs.append(RetracedAgents(make()))
        except BaseException:
            self.close()
            raise
        self.at: list[dict[str, _Place]] = [{} for _ in range(envs)]
        """By environment, by agent: its column."""
        for seats in seating.by_policy.values():
            for column, env in enumerate(seats.env.tolist()):
                agent = seats.agents[column % len(seats.agents)]
                self.at[env][agent] = _place(seats, column)
                self._check_actions(env, agent, seats.spaces)
        self.next: list[list[tuple[str, str, int]]] = [[] for _ in range(envs)]
        """By environment, of each agent that acts next: its name, its policy and its column."""

    def _check_actions(self, i: int, agent: str, spaces: Spaces) -> None:
        """Check that an agent takes the actions that its policy was made for.

        Raises:
            EnvError: it has another space of actions.
        """
        _, found = self.envs[i].spaces_of(agent)
        if found != spaces.action:
            self.close()
            raise EnvError(
                f"agent {agent} of environment {i} of {self.name} has the action space {found}, "
                f"but in one that was made before it had {spaces.action}; let all that are "
                "made have the same"
            )

    def keep(self) -> Any:
        """Return what brings the environments back, as far as anything can."""
        return {
            **super().keep(),
            "envs": [env.keep() for env in self.envs],
            "seats": {policy: each.keep() for policy, each in self.seating.by_policy.items()},
        }

    def take(self, state: Any) -> None:
        """Refuse: environments are brought back by `bring_back`, which may reset some.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError

    def bring_back(self, state: Any, seed: int) -> Array:
        """Bring the environments back, and reset those that can't be.

        Args:
            state: what `keep` returned.
            seed: of those that are reset.

        Returns:
            ``bool[E]``: which were reset.
        """
        super().take(self.lasting_of(state))
        for policy, each in self.seating.by_policy.items():
            each.take(state["seats"][policy])
        for at, acts in zip(self.at, self.next, strict=True):
            acts[:] = [
                (agent, place.seats.policy, place.column)
                for agent, place in at.items()
                if self.seating.acting[place.number]
            ]
        lost = np.zeros(len(self.envs), bool)
        with RESET:
            for i, env in enumerate(self.envs):
                try:
                    lost[i] = not env.bring_back(state["envs"][i])
                except Exception:  # noqa: BLE001 - it raises where it did not before
                    lost[i] = True
                if lost[i]:
                    self._reset(i, seed + i)
                else:
                    self.before_episode[i] = self.steps[i] - len(env.actions)
        return lost

    def close(self) -> None:
        """Close all environments."""
        for env in self.envs:
            env.close()

    def reset(self, seed: int) -> None:
        """Begin the first episodes; environment number i is reset with ``seed + i``."""
        self.seating.forget_step()
        with RESET:
            for i in range(len(self.envs)):
                self._reset(i, seed + i)

    def step(self, actions: Mapping[str, Any], running: Array) -> None:
        """Step some environments, or reset those in which nobody acts.

        Args:
            actions: by policy: the actions of all of its columns, of which those count whose turn
                it is.
            running: ``bool[E]``, the environments that are stepped.
        """
        self.seating.forget_step()
        for i in np.flatnonzero(running).tolist():
            acts = {agent: actions[policy][column] for agent, policy, column in self.next[i]}
            if acts:
                self._step(i, acts)
                continue
            if left := sorted(set(self.began[i]) - set(self.over[i])):
                raise self._failed(
                    i,
                    f" left agent {left[0]} without an end of its episode: nobody acts next, and "
                    "it neither terminated nor was truncated; let its last turn say which",
                )
            with RESET:
                self._reset(i, None)

    def _step(self, i: int, acts: Mapping[str, Any]) -> None:
        self.steps[i] += 1
        try:
            turn = self.envs[i].step(acts)
        except EnvError as error:
            raise self._failed(i, f": {error.message}") from None
        except Exception as error:
            raise self._failed(i, f" raised in step({acts!r}): {raised(error)}") from error
        self._take(i, turn, "step")

    def _reset(self, i: int, seed: int | None) -> None:
        self.before_episode[i] = self.steps[i]
        try:
            turn = self.envs[i].reset(seed)
        except EnvError as error:
            raise self._failed(i, f": {error.message}") from None
        except Exception as error:
            raise self._failed(i, f" raised in reset: {raised(error)}") from error
        if not turn.obs:
            raise self._failed(i, " has no agent that acts after its reset")
        self.over[i].clear()
        self.began[i].clear()
        self._take(i, turn, "reset")

    def _failed(self, i: int, text: str) -> EnvError:
        step = int(self.steps[i])
        in_episode = step - int(self.before_episode[i])
        return EnvError(
            f"environment {i} of {self.name}{text}; it happened {step_of(step, in_episode)}",
            what=self.name,
            within=i,
            step=step,
            episode_step=in_episode,
        )

    def _take(self, i: int, turn: Turn, verb: str) -> None:
        """Write what a turn says into the columns of its agents."""
        at, over, seating = self.at[i], self.over[i], self.seating
        if wrong := unknown_agent(turn, at.keys()):
            raise self._failed(i, f": {wrong}")
        for agent, _, _ in self.next[i]:
            seating.acting[at[agent].number] = False
        for agent, reward in turn.reward.items():
            seating.reward[at[agent].number] = reward
            if reward and agent in over and agent not in turn.obs:
                raise self._failed(
                    i,
                    f" gave a reward of {float(reward):g} to agent {agent}, whose episode is over",
                )
        for agent, end in turn.ended.items():
            place = at[agent]
            over += [agent] if agent not in over else []
            seating.terminated[place.number] = end.terminated
            seating.truncated[place.number] = end.truncated
            self._see(i, place, end.obs, agent, verb)
        acts = []
        for agent, obs in turn.obs.items():
            place = at[agent]
            if agent in over:
                over.remove(agent)
            if agent not in self.began[i]:
                self.began[i].append(agent)
            seating.acting[place.number] = True
            acts.append((agent, place.seats.policy, place.column))
            self._see(i, place, obs, agent, verb)
        self.next[i] = acts

    def _see(self, i: int, place: _Place, obs: Any, agent: str, verb: str) -> None:
        # One array of the declared type and shape needs no closer look, which takes longer, and
        # this is called for every agent with every step.
        if (
            place.obs is not None
            and type(obs) is np.ndarray
            and obs.shape == place.shape
            and obs.dtype == place.dtype
        ):
            place.obs[...] = obs
            return
        seats = place.seats
        for part in seats.spaces.parts:
            if wrong := part.mismatch(obs, verb):
                raise self._failed(i, f" returned {wrong}, for agent {agent}")
        for name, x in seats.spaces.arrays(obs).items():
            seats.obs[name][place.column] = x
