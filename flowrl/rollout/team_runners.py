"""`TeamRunners`: the handle of runners over environments of several agents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from flowrl.core.keeping import Keeping
from flowrl.errors import GraphError
from flowrl.graph.protocols import Site, Workers
from flowrl.rl.policies import Weights, network
from flowrl.rollout.evaluation import MAX_STEPS
from flowrl.rollout.gym_runners import GymRunners
from flowrl.rollout.handle import EVALUATED, RunnersHandle
from flowrl.rollout.local_chain import joined, of_policies
from flowrl.rollout.of_policies import OfPolicies
from flowrl.rollout.published import Published, WeightsByRunner, as_states
from flowrl.rollout.statistics import EpisodeStatistics
from flowrl.rollout.team_runner import TeamEvaluation, TeamRunner, TeamSample
from flowrl.rollout.team_stub import TeamStub

if TYPE_CHECKING:
    from flowrl.rollout.runners import Runners


@dataclass(frozen=True)
class Selected:
    """The weights of each policy that a request uses."""

    by_policy: Mapping[str, Published]

    @property
    def version(self) -> dict[str, Any]:
        """The policy version of each."""
        return {policy: each.version for policy, each in self.by_policy.items()}


class TeamWeights(Keeping):
    """Keeps what `WeightsByRunner` does, of several policies.

    Args:
        policies: their names.
        pool: the workers that the runners are.
        count: the number of runners.
    """

    def __init__(self, policies: Iterable[str], pool: Workers, count: int) -> None:
        self.by_policy = {policy: WeightsByRunner(pool, count) for policy in policies}

    remade = ("by_policy",)

    def keep(self) -> Any:
        """Return the weights of each policy."""
        return {policy: each.keep() for policy, each in self.by_policy.items()}

    @property
    def evaluated(self) -> Selected | None:
        """The weights that played the last evaluation; None before the first."""
        return _selected({policy: each.evaluated for policy, each in self.by_policy.items()})

    @evaluated.setter
    def evaluated(self, played: Selected) -> None:
        for policy, each in self.by_policy.items():
            each.evaluated = played.by_policy[policy]

    def take(self, state: Any) -> None:
        """Go on with the weights that were kept."""
        for policy, each in self.by_policy.items():
            each.take(state[policy])

    @property
    def newest(self) -> Selected | None:
        """The newest weights of each policy; None before each has some."""
        return _selected({policy: each.newest for policy, each in self.by_policy.items()})

    def select(self, runner: int, wait: bool) -> Selected | None:
        """Return the weights that the next request to a runner is to use."""
        found = {policy: each.select(runner, wait) for policy, each in self.by_policy.items()}
        return _selected(found)

    def references_if_unsent(self, runner: int, wanted: Selected) -> tuple[Any, ...]:
        """Return what a runner takes in place of the weights of each policy, in their order."""
        return tuple(
            each.references_if_unsent(runner, wanted.by_policy[policy])[0]
            for policy, each in self.by_policy.items()
        )

    def forget_sent(self, runner: int) -> None:
        """Send a restarted runner its weights again with the next request."""
        for each in self.by_policy.values():
            each.forget_sent(runner)


def _selected(found: dict[str, Published | None]) -> Selected | None:
    present = {policy: each for policy, each in found.items() if each is not None}
    return Selected(present) if len(present) == len(found) else None


class TeamStatistics(Keeping):
    """Gathers what `EpisodeStatistics` does, of several policies.

    Args:
        policies: their names.
        site: the site of the runners.
    """

    lasting = ("all", "env_steps", "totals", "others")
    remade = ("by_policy",)

    def __init__(self, policies: Iterable[str], site: Site) -> None:
        self.all = EpisodeStatistics(site, ())
        self.by_policy = {policy: EpisodeStatistics(site, ()) for policy in policies}
        self.env_steps = 0
        """The steps of environments since `drain` was called last."""
        self.totals: Counter[str] = Counter()
        """The steps and episodes of agents since the start of the run, by column."""
        self.others: dict[str, float] = {}
        """What else every row reports, by column."""

    def keep(self) -> Any:
        """Return what lasts, of each policy too."""
        of_each = {policy: each.keep() for policy, each in self.by_policy.items()}
        return {"all": super().keep(), "by_policy": of_each}

    def take(self, state: Any) -> None:
        """Go on from what was kept."""
        super().take(state["all"])
        for policy, each in self.by_policy.items():
            each.take(state["by_policy"][policy])

    @property
    def restarted(self) -> dict[str, int]:
        """Restarts of all runners, and the steps that were lost by them."""
        return self.all.restarted

    @property
    def evaluated(self) -> dict[str, float]:
        """The last evaluation, until it is reported."""
        return self.all.evaluated

    def evaluate(self, parts: list[TeamEvaluation]) -> dict[str, float]:
        """Join what runners evaluated, and keep it for the next Row: of all agents, and by policy.

        Returns:
            Numbers by the names in `EVALUATED`, which are those of all agents together.
        """
        for policy, each in self.by_policy.items():
            each.evaluate([part.by_policy[policy] for part in parts])
        return self.all.evaluate([part.all for part in parts])

    def note(self, sample: TeamSample) -> None:
        """Add what came with a rollout."""
        self.env_steps += sample.env_steps
        self.all.warn_of_reset(sample.reset)
        for policy, each in sample.by_policy.items():
            self.all.note(each.episodes)
            self.by_policy[policy].note(each.episodes)

    def restart(self, steps: int) -> None:
        """Count that a runner was restarted, by which so many steps were lost."""
        self.all.restart(steps)

    def warn_of_missing_keys(self) -> None:
        """Do nothing: no keys are wanted."""

    @property
    def unreported(self) -> int:
        """The environment steps since `drain` was called last."""
        return self.env_steps

    def drain(self) -> dict[str, Any]:
        """Return all that gathered since the last call, and start gathering again."""
        found = self.all.drain()
        # Steps of environments and those of their agents are counted apart.
        self.totals["agent_steps"] += found["env_steps"]
        found["env_steps"], self.env_steps = self.env_steps, 0
        for policy, each in self.by_policy.items():
            of_one = each.drain()
            if policy:
                self.totals[f"agent_steps/{policy}"] += of_one["env_steps"]
                self.totals[f"episodes/{policy}"] += of_one["episodes"]
                for name in ("return_mean", "length_mean", *EVALUATED):
                    if name in of_one:
                        found[f"{name}/{policy}"] = of_one[name]
        return {**found, **self.totals, **self.others}


class TeamRunners(OfPolicies, GymRunners):  # type: ignore[override]  # only one has spaces
    """Handle of runners over environments of several agents, which are workers of the site.

    A batch holds the agents of a policy as columns; several policies have a `MultiBatch`. A
    reference ``runners.POLICY`` leads to `part`.

    Args:
        spec: the settings of the runners.
        site: the site that makes the workers.
    """

    remade: ClassVar[tuple[str, ...]] = (*GymRunners.remade, "parts", "of_one")

    def __init__(self, spec: Runners, site: Site) -> None:
        self.parts = spec.by_policy
        super().__init__(spec, site)
        self.of_one = {policy: PolicyRunners(self, policy) for policy in self.parts if policy}

    def _open_pool(self) -> Workers:
        if not self._is_team:
            self.environments = self.parts[""].envs_per_runner * self.spec.num_runners
        return self.site.workers(
            self.spec.num_runners,
            partial(TeamRunner, self.spec, self.site.name, self.site.seed),
            partial(TeamStub, self.spec, self.site),
        )

    def _no_weights(self) -> Any:
        return TeamWeights(self.parts, self.pool, self.spec.num_runners)

    def _no_statistics(self) -> Any:
        return TeamStatistics(self.parts, self.site)

    def publish_of(
        self, policy: str, weights: Weights, version: Any, to: Any = None, wait: bool = True
    ) -> None:
        """Publish new weights of a policy; the other arguments are those of `publish`."""
        self._publish(self._weights.by_policy[policy], weights, version, to, wait)

    def report(self, columns: Mapping[str, float]) -> None:
        """Report these numbers in every row from now on, by column."""
        self._statistics.others.update(columns)

    @property
    def state(self) -> Any:
        """Policy versions of the weights at hand and of pending requests, by policy."""
        with self._request_lock:
            every = [self._weights.newest, *map(self._select, range(self.spec.num_runners))]

        found = {}
        for policy in self.parts:
            due = [each.version[policy] if each else np.int32(0) for each in every]
            asked = [as_states(map(itemgetter(policy), each)) for each in self._pending_versions]
            found[policy] = {"due": as_states(due), "asked": asked}
        return found if self._is_team else found[""]

    def _join(self, samples: list[Any]) -> Any:
        """Join the rollouts of some samples to one batch, and count them."""
        for sample in samples:
            self._statistics.note(sample)
        batches = {}
        for policy in self.parts:
            of_one = [sample.by_policy[policy].batch for sample in samples]
            batches[policy] = joined(of_one, self.site.run)
        item = of_policies(batches) if self._is_team else batches[""]
        of_each = {
            f"sampled_steps/{policy}": batch.steps for policy, batch in batches.items() if policy
        }
        self.site.count(
            requests=len(samples),
            sampled_steps=item.steps,
            outstanding=len(self.requests),
            **of_each,
        )
        return item

    def evaluated_of(self, policy: str) -> Weights | None:
        """Return the weights of a policy in the last evaluation, as `RunnersHandle` says."""
        played = self._weights.evaluated
        if self._statistics.evaluated or played is None:
            return None
        weights: Weights = played.by_policy[policy].weights
        return weights

    def _start(self) -> Any:
        """Return the newest weights; policies that no learner published any of get first ones."""
        for policy, each in self._weights.by_policy.items():
            if each.newest is None:
                spec = self.parts[policy]
                init = network(spec.policy, spec.spaces()).init
                key = self.site.key(f"weights/{policy}" if policy else "weights")
                self.publish_of(policy, self.site.run(init, key), np.int32(0))
        return self._weights.newest


class PolicyRunners(RunnersHandle):
    """One policy of runners that have several, as those see it who train or publish it.

    Args:
        team: the handle of all.
        policy: its name.
    """

    remade = ("team", "policy", "spec", "site", "spaces", "environments", "on_device")
    lasting = ()

    def __init__(self, team: OfPolicies, policy: str) -> None:
        self.team: Any = team
        self.policy = policy
        self.spec = team.parts[policy]
        self.site = team.site
        self.spaces = self.spec.spaces()
        self.environments = self.spec.num_runners * self.spec.envs_per_runner
        self.on_device = team.on_device

    def close(self) -> None:
        """Do nothing: the environments are those of the team."""

    def publish(self, weights: Weights, version: Any, to: Any = None, wait: bool = True) -> None:
        """Publish new weights of this policy."""
        self.team.publish_of(self.policy, weights, version, to, wait)

    def report(self, columns: Mapping[str, float]) -> None:
        """Report these numbers with the team's episodes, in every row from now on.

        Args:
            columns: the numbers by column.
        """
        self.team.report(columns)

    def collect(self, min_fraction: float = 1.0) -> Any:
        """Refuse to sample one policy alone.

        Raises:
            GraphError: always.
        """
        raise GraphError(self._all)

    def next(self, in_flight: int = 2) -> Any:
        """Refuse to sample one policy alone.

        Raises:
            GraphError: always.
        """
        raise GraphError(self._all)

    def episodes(self) -> dict[str, Any]:
        """Refuse to report one policy alone.

        Raises:
            GraphError: always.
        """
        raise GraphError(self._all)

    def evaluate(self, episodes: int, seed: int, max_steps: int = MAX_STEPS) -> dict[str, float]:
        """Refuse to evaluate one policy alone.

        Raises:
            GraphError: always.
        """
        raise GraphError(self._all)

    def evaluated(self) -> Weights | None:
        """Return the weights of this policy in the last evaluation, as `RunnersHandle` says."""
        weights: Weights | None = self.team.evaluated_of(self.policy)
        return weights

    @property
    def _all(self) -> str:
        name = self.site.name
        return (
            f"the policies of {name} act together; write runners='{name}' in place of "
            f"'{name}.{self.policy}'"
        )
