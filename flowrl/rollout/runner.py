"""`Runner`: a vector of environments and a copy of the weights; samples rollouts on demand."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from flowrl.core.clock import CONCAT, EVALUATION, START, STEP, here
from flowrl.core.keeping import writable
from flowrl.errors import EnvError
from flowrl.rl.policies import Memory, Weights
from flowrl.rollout.acting import Acting
from flowrl.rollout.columns import column_of, copies, write
from flowrl.rollout.counters import Skipped
from flowrl.rollout.environments import Environments
from flowrl.rollout.evaluation import Evaluation, play
from flowrl.rollout.perturbed import PerturbedPlayer
from flowrl.rollout.sample import Episodes, Sample

if TYPE_CHECKING:
    from flowrl.rollout.runners import Runners

Array = np.ndarray[Any, Any]


class Runner(Acting):
    """Samples rollouts from its own environments, with the weights that it was given last.

    Args:
        spec: the settings of the runners.
        name: the name of the runners in the graph.
        seed: the run's.
        index: the number of this runner.
        restart_count: how often it was restarted.
    """

    lasting = (*Acting.lasting, "facts")
    # What begins with the first rollout is kept apart, and goes on from `_resumed`.
    remade = (
        *Acting.remade, "environments", "_started", "_resumed", "reset_environments", "done",
        "perturbing",
    )  # fmt: skip

    def __init__(
        self, spec: Runners, name: str, seed: int, index: int, restart_count: int = 0
    ) -> None:
        super().__init__(spec, name, seed, index, restart_count)
        self.facts = {"resource": name, "runner": index, "restart_count": restart_count}
        self.environments = Environments(spec, self.spaces)
        self.perturbing: PerturbedPlayer | None = None
        """What plays with perturbed weights, once it was asked to."""
        self._started = False
        self.reset_environments = 0
        """Environments that could not be brought back, until the next rollout says so."""
        self._resumed: dict[str, Any] | None = None
        """What was kept of its environments and episodes, until they begin."""

    def close(self) -> None:
        """Close the environments."""
        self.environments.close()
        if self.perturbing is not None:
            self.perturbing.close()

    @property
    def vector(self) -> Any:
        """The environments, made at first use."""
        return self.environments.vector

    def keep(self) -> Any:
        """Return what lasts: the environments too, if they have begun."""
        if not self._started:
            return {**super().keep(), "begun": self._resumed}
        begun = {"environments": self.environments.keep(), "done": self.done}
        return {**super().keep(), "begun": {**begun, **self.keep_columns()}}

    def take(self, state: Any) -> None:
        """Go on from what was kept, once the next request brings weights."""
        state = writable(state)
        super().take(self.lasting_of(state))
        self._resumed = state["begun"]

    def _start(self) -> None:
        """Reset the environments for the first time, and compile the policy."""
        if self._started:
            return
        self.environments.begin()
        self.start()
        if self._resumed is None:
            self.obs = self.environments.reset(seed=self.seed)
            self.done = np.zeros(self.spec.envs_per_runner, bool)
        else:
            self._go_on_from(self._resumed)
        self.compile()
        self._started = True

    def _go_on_from(self, begun: dict[str, Any]) -> None:
        """Bring environments and episodes back to where they were."""
        # Those that are reset begin another episode than any before.
        seed = (self.seed + self.turn) % 2**31
        lost = self.environments.bring_back(begun["environments"], seed, self.obs)
        self.done = begun["done"] & ~lost
        self.take_columns(begun, lost)
        self.reset_environments = int(lost.sum())
        self._resumed = None

    def sample(self, published: tuple[Weights, Any] | None) -> Sample:
        """Return the next rollout ``[rollout_length, envs_per_runner]`` and its episodes.

        Args:
            published: weights to act with and their policy version; None for those at hand.

        Raises:
            EnvError: an environment raised, gave NaN, or broke its declared shape or type.
        """
        self.use(published)
        try:
            with START:
                self._start()
            with STEP:
                sample = (
                    self._fill_next_step()
                    if self.environments.mode is AutoresetMode.NEXT_STEP
                    else self._fill_same_step()
                )
        except EnvError as error:
            self._locate(error)
            raise
        with CONCAT:
            sent = self.sent(sample)
            here().mark("returned", "")
            return sent

    def _locate(self, error: EnvError) -> None:
        """Add to an error whose environment failed, and how it was seeded."""
        error.message = f"{self.label}: {error.message}"
        if (within := error.facts.get("within")) is not None:
            error.facts["env"] = int(self.env[within])
            # Only of Gymnasium's own vector is it known that number i is seeded with seed + i.
            if isinstance(self.vector, SyncVectorEnv):
                error.facts["seed"] = self.seed + within
        error.facts = {**self.facts, "runner_seed": self.seed, **error.facts}

    def _measured(self, episodes: Episodes) -> Episodes:
        """Add what environments and operators at the sampler did since the last rollout."""
        episodes = super()._measured(episodes)
        if self.reset_environments:
            episodes = replace(episodes, reset=self.reset_environments)
            self.reset_environments = 0
        of_infos, other_keys = self.environments.measured()
        if not (of_infos or other_keys):
            return episodes
        return replace(episodes, metrics={**episodes.metrics, **of_infos}, infos=other_keys)

    def evaluate(
        self,
        how: tuple[int, int, int],
        published: tuple[Weights, Any] | None,
    ) -> Evaluation:
        """Play whole episodes greedily, in environments made for them.

        Args:
            how: how many, the seed of the first one, and the most steps of each, after which it is
                cut.
            published: weights to act with and their policy version; None for those at hand.
        """
        self.use(published)
        episodes, seed, max_steps = how
        spec = self.spec
        with EVALUATION:
            return play(
                spec.env,
                self.network,
                self.weights,
                episodes,
                seed,
                spec.wrappers,
                spec.env_settings,
                max_steps=max_steps,
            )

    def perturbed(
        self,
        seeds: Array,
        how: dict[str, Any],
        published: tuple[Weights, Any] | None,
    ) -> Sample:
        """Play whole episodes with perturbed weights, in environments made for them.

        Args:
            seeds: of the pairs, ``uint32[pairs]``.
            how: the settings that `PerturbedPlayer.play` takes.
            published: weights to perturb and their policy version; None for those at hand.
        """
        self.use(published)
        if self.perturbing is None:
            self.perturbing = PerturbedPlayer(self.spec, self.network, self.label, self.index)
        with STEP:
            weights = cast("Weights", self.weights)
            return self.perturbing.play(weights, self.version, seeds, **how)

    # -- filling a rollout

    def _fill_next_step(self) -> Sample:
        """Sample from environments whose reset takes a step of its own, which is a masked row."""
        steps = self.spec.rollout_length
        data, carry = self._empty(steps), self._carry()
        acts, reward, terminated, truncated, valid = (
            data[k] for k in ("packed", "reward", "terminated", "truncated", "valid")
        )
        valid[0] = ~self.done
        for t in range(steps):
            packed = self._decide()
            for name, x in self.obs.items():
                data[name][t] = x
            acts[t] = packed
            self.obs, reward[t], terminated[t], truncated[t], _ = self._step(packed)
            if self.network.recurrent:
                # `done` is still that of the step before: the row after an end is masked, and only
                # the row after that begins an episode with a new carry.
                self.memory = Memory(self.memory.carry, self.done)
                self.done = terminated[t] | truncated[t]
        # The row after an end is the reset, so it is no step.
        np.logical_not(terminated[:-1] | truncated[:-1], out=valid[1:])
        self.done = terminated[-1] | truncated[-1]
        return self._finish(data, copies(self.obs), carry, [])

    def _fill_same_step(self) -> Sample:
        """Sample in the other two autoreset modes, and bring the rollout to that of NEXT_STEP.

        Each column gets a masked row of its own for a final observation. A column in which more
        episodes end is full sooner; the steps that it then takes while others fill up are skipped.
        """
        steps, envs = self.spec.rollout_length, self.spec.envs_per_runner
        data, carry = self._empty(steps), self._carry()
        data["valid"][:] = False
        row, last = np.zeros(envs, int), copies(self.obs)
        skipped: list[Skipped] = []
        while (row < steps).any():
            packed = self._decide()
            unfilled = np.flatnonzero(row < steps)
            # The step of a column that was full before is in no rollout. Its observation is copied
            # first, for a vector may write the next one to the same place.
            full = np.flatnonzero(row >= steps)
            acted_on = [column_of(self.obs, column) for column in full.tolist()]
            at = (row[unfilled], unfilled)
            write(data, at, self.obs, packed=packed)
            data["valid"][at] = True
            obs, reward, terminated, truncated, final = self._step(packed)
            write(data, at, {}, reward=reward, terminated=terminated, truncated=truncated)
            over = terminated | truncated
            led_to = [column_of(final, column) for column in full.tolist()]
            skipped.extend(map(Skipped, full.tolist(), reward[full], over[full], acted_on, led_to))
            row[unfilled] += 1
            for name, x in last.items():
                x[unfilled] = final[name][unfilled]
            self.obs = obs
            # A final observation gets a masked row, unless it comes after the last row.
            ended = unfilled[over[unfilled] & (row[unfilled] < steps)]
            if len(ended):
                self._write_final_obs(data, (row[ended], ended), final)
                row[ended] += 1
                for name, x in last.items():
                    x[ended] = obs[name][ended]
            self.memory = Memory(self.memory.carry, over) if self.network.recurrent else self.memory
        sample = self._finish(data, last, carry, skipped)
        # An episode that ended with the last row has no masked row: its final observation is
        # `bootstrap_obs`. Its place is counted all the same, so that a replay does not put the
        # first observation of the next episode there.
        self.counters.rows += data["terminated"][-1] | data["truncated"][-1]
        return sample

    def _write_final_obs(
        self, data: dict[str, Array], at: tuple[Array, Array], final: dict[str, Array]
    ) -> None:
        """Write masked rows with final observations, and what the policy would do there.

        Args:
            data: the rollout.
            at: the rows and their columns.
            final: the observations ``[B, ...]`` that the last step led to.
        """
        # Any noise will do, for this action is never taken: only the value counts.
        packed, _ = self._decide_on(final, self.noise[0])
        write(data, at, final, packed=packed)
        data["reward"][at], data["terminated"][at], data["truncated"][at] = 0.0, False, False

    def _step(
        self, packed: Array
    ) -> tuple[dict[str, Array], Array, Array, Array, dict[str, Array]]:
        """Step all environments by packed actions; what it returns is that of `Environments`."""
        return self.environments.step(self.network.head.to_env(self.network.unpack(packed)[0]))
