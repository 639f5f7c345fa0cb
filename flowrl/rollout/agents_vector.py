"""`AgentsVector`: environments of several agents, whose agents are columns by policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from flowrl.core.clock import RESET
from flowrl.core.keeping import Keeping
from flowrl.envs.agents import Agents, Turn, checked_names
from flowrl.envs.bringing_back import RetracedAgents
from flowrl.errors import EnvError, raised
from flowrl.rl.spaces import Spaces

Array = np.ndarray[Any, Any]


class Seats(Keeping):
    """The columns of one policy: agents of environments, and what each got in the last step.

    Columns are in the order of the environments, and of their agents.

    Args:
        policy: the name of the policy.
        agents: the agents of one environment that it acts for.
        envs: the number of environments.
        spaces: the spaces of each of these agents.
    """

    lasting = ("obs", "acting")
    remade = (
        "policy", "agents", "spaces", "env", "reward", "terminated", "truncated",
    )  # fmt: skip

    def __init__(self, policy: str, agents: Sequence[str], envs: int, spaces: Spaces) -> None:
        self.policy = policy
        self.agents = tuple(agents)
        self.spaces = spaces
        columns = envs * len(agents)
        self.env = np.repeat(np.arange(envs), len(agents))
        """By column: the index of its environment."""
        # An agent that has not come yet has an observation too, so that masks allow every action.
        self.obs = {part.name: np.ones((columns, *part.shape), part.dtype) for part in spaces.parts}
        """The newest observations, by the names of their fields: to act on, or final ones."""
        self.acting = np.zeros(columns, bool)
        """Whose turn it is."""
        self.reward = np.zeros(columns, np.float32)
        self.terminated = np.zeros(columns, bool)
        self.truncated = np.zeros(columns, bool)

    def take(self, state: Any) -> None:
        """Go on from what was kept, in the same arrays, for others look at them."""
        for name, x in self.obs.items():
            x[...] = state["obs"][name]
        self.acting[:] = state["acting"]

    def forget_step(self) -> None:
        """Forget what the last step gave."""
        for x in (self.reward, self.terminated, self.truncated):
            x[:] = 0


class AgentsVector(Keeping):
    """Environments of several agents that are stepped one after another.

    A reset takes a step of its own, as in Gymnasium's NEXT_STEP mode.

    Args:
        make: makes one environment.
        envs: how many.
        seats: the columns by policy.
        name: what an environment is called.
    """

    lasting = ("steps", "over")
    remade = ("envs", "seats", "name", "at")

    def __init__(
        self, make: Callable[[], Agents], envs: int, seats: Mapping[str, Seats], name: str
    ) -> None:
        self.envs: list[RetracedAgents] = []
        self.seats = seats
        self.name = name
        self.steps = np.zeros(envs, np.int64)
        """By environment: the steps that were taken."""
        self.over: list[list[str]] = [[] for _ in range(envs)]
        """By environment: the agents whose episode ended, and that were not seen since."""
        try:
            for _ in range(envs):
                self.envs.append(RetracedAgents(make()))
        except BaseException:
            self.close()
            raise
        self.at: list[dict[str, tuple[Seats, int]]] = [{} for _ in range(envs)]
        """By environment, by agent: its columns, and the index among them."""
        for each in seats.values():
            for column, env in enumerate(each.env):
                agent = each.agents[column % len(each.agents)]
                self.at[env][agent] = (each, column)

    def keep(self) -> Any:
        """Return what brings the environments back, as far as anything can."""
        return {
            **super().keep(),
            "envs": [env.keep() for env in self.envs],
            "seats": {policy: each.keep() for policy, each in self.seats.items()},
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
        super().take({name: state[name] for name in self.lasting})
        for policy, each in self.seats.items():
            each.take(state["seats"][policy])
        lost = np.zeros(len(self.envs), bool)
        with RESET:
            for i, env in enumerate(self.envs):
                try:
                    lost[i] = not env.bring_back(state["envs"][i])
                except Exception:  # noqa: BLE001 - it raises where it did not before
                    lost[i] = True
                if lost[i]:
                    self._reset(i, seed + i)
        return lost

    def close(self) -> None:
        """Close all environments."""
        for env in self.envs:
            env.close()

    def reset(self, seed: int) -> None:
        """Begin the first episodes; environment number i is reset with ``seed + i``."""
        for each in self.seats.values():
            each.forget_step()
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
        for each in self.seats.values():
            each.forget_step()
        for i in np.flatnonzero(running).tolist():
            acts = {}
            for agent, (seats, column) in self.at[i].items():
                if seats.acting[column]:
                    acts[agent] = actions[seats.policy][column]
            if acts:
                self._step(i, acts)
            else:
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
        try:
            turn = self.envs[i].reset(seed)
        except Exception as error:
            raise self._failed(i, f" raised in reset: {raised(error)}") from error
        if not turn.obs:
            raise self._failed(i, " has no agent that acts after its reset")
        self.over[i].clear()
        self._take(i, turn, "reset")

    def _failed(self, i: int, text: str) -> EnvError:
        text = f"environment {i} of {self.name}{text}"
        return EnvError(text, what=self.name, within=i, step=int(self.steps[i]))

    def _take(self, i: int, turn: Turn, verb: str) -> None:
        """Write what a turn says into the columns of its agents."""
        at, over = self.at[i], self.over[i]
        checked_names(turn, tuple(at), f"environment {i} of {self.name}")
        for seats, column in at.values():
            seats.acting[column] = False
        for agent, reward in turn.reward.items():
            seats, column = at[agent]
            seats.reward[column] = reward
            if reward and agent in over and agent not in turn.obs:
                raise self._failed(
                    i, f" gave a reward of {reward:g} to agent {agent}, whose episode is over"
                )
        for agent, end in turn.ended.items():
            seats, column = at[agent]
            over += [agent] if agent not in over else []
            seats.terminated[column], seats.truncated[column] = end.terminated, end.truncated
            self._see(i, seats, column, end.obs, agent, verb)
        for agent, obs in turn.obs.items():
            seats, column = at[agent]
            if agent in over:
                over.remove(agent)
            seats.acting[column] = True
            self._see(i, seats, column, obs, agent, verb)

    def _see(self, i: int, seats: Seats, column: int, obs: Any, agent: str, verb: str) -> None:
        parts = seats.spaces.parts
        # One array of the declared type and shape needs no closer look, which takes longer, and
        # this is called for every agent with every step.
        if type(obs) is np.ndarray and len(parts) == 1:
            (part,) = parts
            if (part.path, part.shape, part.declared) == ((), obs.shape, obs.dtype):
                seats.obs[part.name][column] = obs
                return
        for part in parts:
            if wrong := part.mismatch(obs, verb):
                raise self._failed(i, f" returned {wrong}, for agent {agent}")
        for name, x in seats.spaces.arrays(obs).items():
            seats.obs[name][column] = x
