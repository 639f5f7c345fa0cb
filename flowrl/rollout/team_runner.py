"""`TeamRunner`: a runner over environments of several agents, for which policies act."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast
from zlib import crc32

import jax
import numpy as np

from flowrl.core.clock import CONCAT, EVALUATION, INFERENCE, START, STEP, here
from flowrl.core.keeping import Keeping, writable
from flowrl.envs.gym_envs import env_name
from flowrl.errors import EnvError
from flowrl.graph.graph import Chain
from flowrl.rl.jitted_acting import ActTogether
from flowrl.rl.policies import Weights
from flowrl.rollout.acting import COMPILING
from flowrl.rollout.agents_vector import AgentsVector, Seating
from flowrl.rollout.evaluation import Evaluation
from flowrl.rollout.part import Part
from flowrl.rollout.playing_agents import Player, PolicyPlayer, ScriptedPlayer, play_agents
from flowrl.rollout.sample import Sample, seed_of
from flowrl.rollout.scripted import ScriptedActing
from flowrl.rollout.team_turns import TeamTurns

if TYPE_CHECKING:
    from flowrl.rollout.runners import Runners


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TeamSample:
    """The rollouts of several policies, and the steps of the environments that gave them."""

    by_policy: dict[str, Sample]
    env_steps: int
    reset: int = 0
    """Environments that were reset because they could not be brought back."""

    @property
    def turn(self) -> int:
        """The steps for which the runner has acted, as of `Sample`: those of all policies."""
        return max(sample.turn for sample in self.by_policy.values())


@dataclass(frozen=True)
class TeamEvaluation:
    """The episodes of an evaluation: those of all agents together, and of each policy's."""

    all: Evaluation
    by_policy: dict[str, Evaluation]

    def __len__(self) -> int:
        return len(self.all)


class TeamRunner(Keeping):
    """Samples rollouts of several policies from environments that they share.

    Args:
        spec: the settings of the runners.
        name: the name of the runners in the graph.
        seed: the run's.
        index: the number of this runner.
        restart_count: how often it was restarted.
    """

    lasting = ("facts", "seed", "turns")
    remade = (
        "spec", "envs", "label", "index", "seating", "vector", "parts", "scripted", "_resumed",
        "reset_environments", "act_together",
    )  # fmt: skip

    def __init__(
        self, spec: Runners, name: str, seed: int, index: int, restart_count: int = 0
    ) -> None:
        self.spec = spec
        self.envs = spec.envs_per_runner
        self.label = f"{name}, runner {index}"
        self.index = index
        self.facts = {"resource": name, "runner": index, "restart_count": restart_count}
        # Scripted policies come last, whose turns are in no rollout.
        order = [*spec.by_policy, *spec.scripted]
        self.seating = Seating(
            {policy: (spec.agents[policy], spec.spaces_of(policy)) for policy in order}, self.envs
        )
        seats = self.seating.by_policy
        columns = sum(len(seats[policy].env) for policy in spec.by_policy)
        self.turns = TeamTurns(self.seating, columns, spec.rollout_length)
        self.vector: AgentsVector | None = None
        """The environments, made at first use."""
        self.act_together: ActTogether | None = None
        """Acts by several policies in one call; made with the environments."""
        self.seed = seed_of(seed, name, index, restart_count)
        self.parts = {
            policy: Part(
                part, seats[policy], self.turns, policy or name, seed, index, restart_count
            )
            for policy, part in spec.by_policy.items()
        }
        for part in self.parts.values():
            # Its errors name the seed of the environments, which all policies share.
            part.seed = self.seed
        self.scripted = {
            policy: ScriptedActing(scripted, seats[policy], self._seeds_of(policy))
            for policy, scripted in spec.scripted.items()
        }

        self.reset_environments = 0
        """Environments that could not be brought back, until the next rollout says so."""
        self._resumed: dict[str, Any] | None = None
        """What was kept of its environments and columns, until they begin."""

    def _seeds_of(self, policy: str) -> list[int]:
        """Return the seeds of a scripted policy's random choices, one for each column."""
        sequence = np.random.SeedSequence([self.seed, crc32(policy.encode())])
        columns = len(self.seating.by_policy[policy].env)
        return [int(seed) for seed in sequence.generate_state(columns)]

    def keep(self) -> Any:
        """Return what lasts: the environments too, if they have begun."""
        acting = {**self.parts, **self.scripted}
        parts = {policy: part.keep() for policy, part in acting.items()}
        begun = self._resumed
        if self.vector is not None:
            columns = {policy: part.keep_columns() for policy, part in self.parts.items()}
            begun = {"vector": self.vector.keep(), "columns": columns}
        return {**super().keep(), "parts": parts, "begun": begun}

    def take(self, state: Any) -> None:
        """Go on from what was kept, once the next request brings weights."""
        state = writable(state)
        super().take(self.lasting_of(state))
        for policy, part in {**self.parts, **self.scripted}.items():
            part.take(state["parts"][policy])
        self._resumed = state["begun"]

    def close(self) -> None:
        """Close the environments."""
        if self.vector is not None:
            self.vector.close()

    def localize(self, chain: Chain) -> None:
        """Pass every later rollout through these operators before it is sent."""
        for part in self.parts.values():
            part.localize(chain)

    def go_on(self, turn: int) -> None:
        """Explore like a runner that has acted so many steps, whose place this one takes."""
        for part in self.parts.values():
            part.go_on(turn)

    def _start(self) -> AgentsVector:
        """Make and reset the environments for the first time, and compile the policies."""
        if self.vector is not None:
            return self.vector
        make, name = self.spec.make_agents, env_name(self.spec.env)
        vector = self.vector = AgentsVector(make, self.envs, self.seating, name)
        for part in self.parts.values():
            part.start()
        if self._resumed is None:
            vector.reset(self.seed)
        else:
            self._go_on_from(self._resumed, vector)
        for part in self.parts.values():
            part.compile()
        if len(self.parts) > 1:
            nets, explores = zip(
                *((x.network, x.explore) for x in self.parts.values()), strict=True
            )
            self.act_together = ActTogether(nets, explores)
            with COMPILING:
                self._act_together(self.parts.values())
        return vector

    def _go_on_from(self, begun: dict[str, Any], vector: AgentsVector) -> None:
        """Bring environments and columns back to where they were."""
        # Those that are reset begin another episode than any before.
        turn = max(part.turn for part in self.parts.values())
        lost = vector.bring_back(begun["vector"], (self.seed + turn) % 2**31)
        for policy, part in self.parts.items():
            part.take_columns(begun["columns"][policy], lost[part.seats.env])
        self.reset_environments = int(lost.sum())
        self._resumed = None

    def sample(self, *published: tuple[Weights, Any] | None) -> TeamSample:
        """Return the next rollout of each policy, and its episodes.

        Args:
            *published: for each policy: weights to act with and their version; None for those at
                hand.

        Raises:
            EnvError: an environment raised, gave NaN, or broke its declared shape or type.
        """
        for part, weights in zip(self.parts.values(), published, strict=True):
            part.use(weights)
        try:
            with START:
                vector = self._start()
            before = vector.steps.sum()
            with STEP:
                self._fill(vector)
                found = {policy: part.finish() for policy, part in self.parts.items()}
        except EnvError as error:
            self._locate(error)
            raise
        with CONCAT:
            sent = {policy: self.parts[policy].sent(sample) for policy, sample in found.items()}
            here().mark("returned", "")
            reset, self.reset_environments = self.reset_environments, 0
            return TeamSample(sent, int(vector.steps.sum() - before), reset)

    def evaluate(
        self, how: tuple[int, int, int], *published: tuple[Weights, Any] | None
    ) -> TeamEvaluation:
        """Play whole episodes greedily, in environments made for them.

        Args:
            how: how many, the seed of the first one, and the most steps of each, after which it is
                cut.
            *published: for each policy: weights to act with and their version; None for those at
                hand.
        """
        players: dict[str, Player] = {
            policy: ScriptedPlayer(scripted) for policy, scripted in self.spec.scripted.items()
        }
        for (policy, part), weights in zip(self.parts.items(), published, strict=True):
            part.use(weights)
            players[policy] = PolicyPlayer(part.network, part.weights, None)
        spec, (episodes, seed, max_steps) = self.spec, how
        by_agent: dict[str, Player] = {}
        for policy, agents in spec.agents.items():
            by_agent |= dict.fromkeys(agents, players[policy])
        with EVALUATION:
            games = play_agents(
                spec.env, by_agent, episodes, seed, spec.wrappers, spec.env_settings,
                max_steps=max_steps,
            )  # fmt: skip
        by_policy = {policy: games.of(spec.agents[policy]) for policy in self.parts}
        return TeamEvaluation(games.of(by_agent), by_policy)

    def _fill(self, vector: AgentsVector) -> None:
        """Let the agents act until a column of every environment is full."""
        turns = self.turns
        turns.begin_rollout()
        for part in self.parts.values():
            part.begin_rollout()
        running = np.ones(self.envs, bool)
        while True:
            turns.block(running)
            if not running.any():
                return
            turns.ask(running)
            actions = self._decide()
            turns.acted()
            for policy, scripted in self.scripted.items():
                actions[policy] = scripted.decide(running)
            vector.step(actions, running)
            turns.see()

    def _decide(self) -> dict[str, Any]:
        """Return the actions of the agents whose turn it is, by policy."""
        asking = {policy: part for policy, part in self.parts.items() if part.asks()}
        # One call for all policies costs little more than one for a single policy.
        if self.act_together is None or len(asking) < len(self.parts):
            return {policy: part.decide() for policy, part in asking.items()}
        each = zip(asking.items(), self._act_together(asking.values()), strict=True)
        return {policy: part.take_decision(*answer) for (policy, part), answer in each}

    def _act_together(self, parts: Iterable[Part]) -> list[tuple[np.ndarray[Any, Any], Any]]:
        """Return what each policy decides, packed, and its carry afterwards."""
        act = cast("ActTogether", self.act_together)
        with INFERENCE:
            return act(*zip(*(part.question() for part in parts), strict=True))

    def _locate(self, error: EnvError) -> None:
        """Add to an error whose environment failed, and how it was seeded."""
        error.message = f"{self.label}: {error.message}"
        if (within := error.facts.get("within")) is not None:
            error.facts["env"] = self.index * self.envs + within
            error.facts["seed"] = self.seed + within
        error.facts = {**self.facts, "runner_seed": self.seed, **error.facts}
