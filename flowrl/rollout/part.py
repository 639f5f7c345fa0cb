"""`Part`: a policy that acts for some agents of environments that it shares with other policies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import jax
import numpy as np

from flowrl.core.keeping import into, leaves
from flowrl.rl.policies import Memory
from flowrl.rollout.acting import Acting, Array
from flowrl.rollout.columns import copies, write
from flowrl.rollout.counters import Skipped
from flowrl.rollout.finite import Place
from flowrl.rollout.sample import Episodes, Sample

if TYPE_CHECKING:
    from flowrl.envs.agents import OneAgent
    from flowrl.rollout.agents_vector import Seats
    from flowrl.rollout.runners import Runners
    from flowrl.rollout.team_turns import TeamTurns


class Part(Acting):
    """A policy that acts for its agents, each a column of its rollouts, when it is their turn.

    A row is a turn of the agent: what it saw and did, and all reward until its next turn or its
    end. A rollout ends for an environment when one of its columns is full; where others have fewer
    rows, theirs end with a cut: the row after the last one is masked and holds the observation to
    bootstrap from. A turn whose reward is still to come goes to the next rollout, as its first row,
    with the policy version that acted.

    Args:
        spec: the settings of the runners, of which `envs_per_runner` are the columns.
        seats: the columns.
        turns: the turns of all columns of the runner.
        name: the name by which its random numbers differ from those of other policies.
        seed: the run's.
        index: the number of its runner.
        restart_count: how often that was restarted.
    """

    lasting = (*Acting.lasting, "held", "acted_by")
    remade = (
        *Acting.remade, "seats", "turns", "open", "early", "gained", "ended", "row", "acts",
        "final", "every", "data", "earned", "begins", "before", "versions", "turn_noise", "cut",
    )  # fmt: skip

    def __init__(
        self,
        spec: Runners,
        seats: Seats,
        turns: TeamTurns,
        name: str,
        seed: int,
        index: int,
        restart_count: int = 0,
    ) -> None:
        super().__init__(spec, name, seed, index, restart_count)
        self.seats, self.turns = seats, turns
        self.obs = seats.obs
        columns, own = spec.envs_per_runner, seats.own
        self.open, self.ended = turns.open[own], turns.ended[own]
        self.gained, self.early = turns.gained[own], turns.early[own]
        self.row, self.acts, self.final = turns.row[own], turns.acts[own], turns.final[own]
        self.every = np.arange(columns)
        self.earned: Array = np.empty(0)
        self.held: Array = np.empty(0)
        """The packed actions ``[B, n]`` of the turns that were open when the last rollout ended."""
        self.acted_by = np.zeros(columns, np.int32)
        """The policy version of each column's open turn."""
        self.data: dict[str, Array] = {}
        self.cut = np.zeros(columns, bool)
        """Whose episode goes on after its last row, though that is marked as truncated."""
        self.turn_noise: Array = np.empty(0)
        """The noise of the next actions."""

    def start(self) -> None:
        """Begin with no memory and no steps."""
        super().start()
        # What the policy remembered before each agent's last turn.
        self.before = self.memory

    def keep_columns(self) -> dict[str, Any]:
        """Return what the columns remember and have counted since `start`."""
        return {**super().keep_columns(), "before": leaves(self.before)}

    def take_columns(self, kept: dict[str, Any], lost: Array) -> None:
        """Go on from what was kept of the columns, but in those ``bool[B]`` that were reset."""
        super().take_columns(kept, lost)
        self.before = into(self.before, kept["before"], f"{self.label}, its recurrent state")
        # The turns of a reset environment have no reward any more.
        self.open &= ~lost
        self.ended &= ~lost
        self.gained[lost] = 0

    def take(self, state: Any) -> None:
        """Go on from what was kept; what the agents see is in the columns."""
        super().take(state)
        self.obs = self.seats.obs

    def begin_rollout(self) -> None:
        """Begin a rollout, with the turns that were open at the end of the last one."""
        turns, own = self.turns, self.seats.own
        shared = {name: x[:, own] for name, x in turns.data.items()}
        self.data = {**self._empty(self.spec.rollout_length + 1), **shared}
        self.earned = turns.earned[:, own]
        columns = np.flatnonzero(self.open)
        self.versions = np.where(self.open, self.acted_by, self.version).astype(np.int32)
        self.begins = self._carry_before(self.open)
        if len(columns):
            # What these agents saw is still the newest that they saw.
            self._write(columns, {**self.obs, "packed": self.held})

    def _carry_before(self, held: Array) -> dict[str, Array]:
        """Return the columns of the carry before the first row, which may be a held turn."""
        if not self.network.recurrent:
            return {}
        now = self.memory
        self.memory = _chosen(held, self.before, now)
        found = self._carry()
        self.memory = now
        return found

    def _write(self, columns: Array, fields: dict[str, Array]) -> None:
        """Write a turn of each of these columns as its next row."""
        at = (self.row[columns], columns)
        write(self.data, at, fields)
        self.data["valid"][at] = True
        self.row[columns] += 1

    def compile(self) -> None:
        """Compile the policy, and have noise at hand with which it is compiled beside others."""
        super().compile()
        self.turn_noise = self._noise()[0]

    def asks(self) -> bool:
        """Return whether any column needs the policy in the next step."""
        self.turn_noise = self._noise_of_turn()
        return bool(self.acts.any() or self.final.any())

    def question(self) -> tuple[Any, ...]:
        """Return what the policy acts on: weights, observations, noise and memory."""
        return self.weights, self.spaces.tree(self.obs), self.turn_noise, self.memory

    def decide(self) -> Any:
        """Act by the policy alone; what it returns is what `take_decision` returns."""
        return self.take_decision(*self._decide_on(self.obs, self.turn_noise))

    def take_decision(self, packed: Array, carry: Any) -> Any:
        """Write a row for each agent whose turn it is, and return the actions of all columns.

        Args:
            packed: what the policy decided, as `Network.act` packs it.
            carry: the policy's carry afterwards.

        Returns:
            The actions ``[B, ...]``.
        """
        acts, final, memory = self.acts, self.final, self.memory
        if self.network.recurrent:
            # Who does not act remembers what it did.
            new = Memory(carry, np.zeros(len(acts), bool))
            self.memory = _chosen(acts, new, memory)
            self.before = _chosen(acts, memory, self.before)
        if final.any():
            self._write_final(np.flatnonzero(final), packed)
        # Every column is written, which takes less time than to choose those that act: the next
        # row of one that does not is written again when it acts.
        at = (self.row, self.every)
        for name, x in self.obs.items():
            self.data[name][at] = x
        self.data["packed"][at] = packed
        return self.network.head.to_env(self.network.unpack(packed)[0])

    def _write_final(self, columns: Array, packed: Array) -> None:
        """Write masked rows with the final observations of these columns."""
        write(self.data, (self.row[columns], columns), {**self.obs, "packed": packed})
        self.row[columns] += 1
        self._begin_again(columns)

    def _begin_again(self, columns: Array) -> None:
        """Let the next turn begin an episode in these columns, whose final row is written."""
        self.ended[columns] = False
        if self.network.recurrent:
            begins = np.isin(np.arange(len(self.ended)), columns)
            self.memory = Memory(self.memory.carry, self.memory.reset | begins)

    def finish(self) -> Sample:
        """Return the rollout, once no environment goes on."""
        steps, shared = self.spec.rollout_length, self.turns.data
        # Those that all policies share are copied, for Ray to send whole arrays.
        self.data = {
            name: x[:steps].copy() if name in shared else x[:steps] for name, x in self.data.items()
        }
        data, last = self.data, copies(self.obs)
        columns = np.flatnonzero(self.open)
        if len(columns):
            # An open turn leaves this rollout, and its observation is the one to bootstrap from.
            self.row[columns] -= 1
            at = (self.row[columns], columns)
            data["valid"][at] = False
            self.held = np.zeros((len(self.open), data["packed"].shape[2]), np.float32)
            self.held[columns] = data["packed"][at]
            self.acted_by[columns] = self.versions_of_open()[columns]
            # A column that is left without a row is nobody's data.
            self.versions[self.row == 0] = self.version
        cut = self._fill(np.flatnonzero(self.row < steps), last)
        self.cut = np.isin(np.arange(len(self.open)), cut[1])
        sample = self._finish(data, last, self.begins, [])
        # A cut ends no episode, so it is marked after episodes were counted.
        sample.batch.data["truncated"][cut] = True
        return sample

    def versions_of_open(self) -> Array:
        """Return the version of each column's open turn."""
        # A turn that was open before this rollout is still the first row.
        return np.where(self.row == 0, self.versions, self.version)

    def _fill(self, short: Array, last: dict[str, Array]) -> tuple[Array, Array]:
        """Fill columns that have fewer rows with masked ones.

        Args:
            short: the columns.
            last: the observations ``[B, ...]`` after their last rows.

        Returns:
            The last rows of those whose episode goes on, and their columns: the places of cuts.
        """
        if not len(short):
            return short, short
        data = self.data
        packed, _ = self._decide_on(last, self.noise[0])
        if self.open.any():
            # A policy that remembers has seen an open turn's observation already.
            packed = np.where(self.open[:, None], self.held, packed)
        for column in short.tolist():
            rows = slice(int(self.row[column]), None)
            for name, x in last.items():
                data[name][rows, column] = x[column]
            data["packed"][rows, column] = packed[column]
        # A final observation is in the first of these rows, so the next turn begins an episode.
        self._begin_again(short[self.ended[short]])
        before = self.row[short] - 1
        goes_on = (before >= 0) & data["valid"][before, short]
        over = data["terminated"][before, short] | data["truncated"][before, short]
        kept = goes_on & ~over
        return before[kept], short[kept]

    def _episodes(self, data: dict[str, Array], skipped: list[Skipped]) -> Episodes:
        """Return the episodes that ended, with what agents gained before their first turns."""
        return super()._episodes({**data, "reward": self.earned[: len(data["valid"])]}, skipped)

    def _place(self, column: int) -> Place:
        """Return which agent of which environment a column stands for."""
        agents, env = self.seats.agents, int(self.seats.env[column])
        of = cast("OneAgent", self.spec.env).of
        envs = len(self.seats.env) // len(agents)
        agent = agents[column % len(agents)]
        return Place(f"{agent} of {of}", env, self.index * envs + env)

    def _identity(self) -> dict[str, Array]:
        """Return the columns that say by which weights and environments a rollout came to be."""
        own = {
            "version": self.versions,
            "last_version": np.full(len(self.open), self.version, np.int32),
            "cut": self.cut,
        }
        return {**super()._identity(), **own}


def _chosen(which: Array, one: Memory, other: Memory) -> Memory:
    """Return the memory of one for the columns ``bool[B]``, and of the other for the rest."""

    def of(x: Any, y: Any) -> Any:
        return np.where(which.reshape(-1, *[1] * (np.ndim(x) - 1)), x, y)

    found: Memory = jax.tree.map(of, one, other)
    return found
