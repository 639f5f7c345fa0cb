"""`JaxTeamRunners`: the handle of runners over an environment of several agents in JAX."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from flowrl.core.broken import Broken
from flowrl.core.items import Batch
from flowrl.envs.jax_agents import names_of_agents
from flowrl.errors import GraphError
from flowrl.graph.graph import Chain
from flowrl.graph.protocols import Site
from flowrl.rl.policies import Weights
from flowrl.rollout.acting import key_of
from flowrl.rollout.handle import OTHER_CHAIN
from flowrl.rollout.jax_core import State
from flowrl.rollout.jax_runners import JaxRunners, with_published
from flowrl.rollout.jax_team_core import risen, team_core_of
from flowrl.rollout.local_chain import Local, joined, of_policies
from flowrl.rollout.of_policies import OfPolicies
from flowrl.rollout.team_runners import PolicyRunners

if TYPE_CHECKING:
    from flowrl.rollout.runners import Runners


class JaxTeamRunners(OfPolicies, JaxRunners):  # type: ignore[override]  # only one has spaces
    """Handle of runners over an environment of several agents in JAX, in one process.

    What they give is what `TeamRunners` give. `state` is that of `JaxRunners`, but ``published``
    and ``uses`` are held by policy, under ``of``.

    Args:
        spec: the settings of the runners.
        site: the site that runs the functions.
    """

    remade: ClassVar[tuple[str, ...]] = (
        "spec", "site", "core", "spaces", "environments", "parts", "of_one", "_local",
        "_local_chain", "_pacing",
    )  # fmt: skip

    def __init__(self, spec: Runners, site: Site) -> None:
        self.spec, self.site = spec, site
        self.parts = spec.by_policy
        self.core: Any = team_core_of(spec)
        # Where one policy acts for all, its environments are the agents.
        of_runner = spec.envs_per_runner if self._is_team else self.parts[""].envs_per_runner
        self.environments = spec.num_runners * of_runner
        self.of_one = {policy: PolicyRunners(self, policy) for policy in self.parts if policy}
        self._local: Any = None
        """By policy: the operators that every rollout goes through, if there are any."""
        self._local_chain: Chain | None = None
        self._pacing = None
        keys = {policy: key_of(site.seed, policy or site.name) for policy in self.parts}
        runners = range(spec.num_runners)
        self.state: State = {
            "work": site.run(self.core.start, keys, site.key("start")),
            "statistics": site.run(self.core.no_statistics),
            "evaluated": {},
            "of": {policy: {"published": [], "uses": [0] * len(runners)} for policy in self.parts},
            "in_flight": [],
            "order": list(runners),
            "paced": {},
        }

    def publish_of(
        self, policy: str, weights: Weights, version: Any, to: Any = None, wait: bool = True
    ) -> None:
        """Publish new weights of a policy; the other arguments are those of `publish`."""
        before, after = self.state["of"], self.state["of"][policy]
        after = {**after, **with_published(after, weights, version, to)}
        if before[policy]["published"]:
            self._rise(policy, _versions(after) - _versions(before[policy]))
        self.state = {**self.state, "of": {**before, policy: after}}
        self._count_published(weights, version, wait)

    def _rise(self, policy: str, by: np.ndarray[Any, Any]) -> None:
        """Note by how much the version of a policy rose, ``int32[runners]``."""
        work = self.state["work"]
        rises = work["runners"]["rises"]
        rises = {**rises, policy: self.site.run(risen, rises[policy], by)}
        runners = {**work["runners"], "rises": rises}
        self.state = {**self.state, "work": {**work, "runners": runners}}

    def localize(self, chain: Chain) -> None:
        """Pass every later rollout of each policy through these operators.

        Raises:
            GraphError: the runners do so already with other operators.
        """
        if self._local_chain not in (None, chain):
            raise GraphError(OTHER_CHAIN)
        self._local_chain = chain
        self._local = {
            policy: Local(chain, part.network, self.site)
            for policy, part in self.core.parts.items()
        }

    def _alike(self) -> bool:
        """Return whether all runners use the same weights of each policy."""
        return all(len(set(held["uses"])) == 1 for held in self.state["of"].values())

    def _sample(self, first: int, count: int) -> None:
        """Sample a rollout of each of `count` runners from the first on, as one item."""
        asked, of = range(first, first + count), self.state["of"]
        used = {policy: held["published"][held["uses"][first]] for policy, held in of.items()}
        which = () if count == self.spec.num_runners else (np.int32(first),)
        weights = {policy: each["weights"] for policy, each in used.items()}
        work, data, columns, happened = self.site.run(
            self.core.roll, self.state["work"], weights, *which, count=count
        )
        batches, valid = {}, {policy: each["valid"] for policy, each in data.items()}
        for policy, part in self.parts.items():
            version, envs = used[policy]["version"], part.envs_per_runner
            # Which turns were open is known in a run alone; a plan counts none of them.
            older = self.site.known(columns[policy]["older"], np.zeros(count * envs, np.int32))
            of_columns = {
                **columns[policy],
                "older": older,
                "version": np.full(count * envs, version, np.int32),
                "producer": np.repeat(np.array(asked, np.int32), envs),
                "env": np.arange(first * envs, (first + count) * envs, dtype=np.int32),
            }
            batch = Batch(data[policy], of_columns)
            local = self._local[policy] if self._local else None
            batches[policy] = batch if local is None else local(used[policy]["weights"], batch)
        item = {"runner": first, "batch": batches, "ended": happened, "valid": valid}
        self._requested(item, work, asked)

    def _joined(self, taken: list[State]) -> tuple[Any, dict[str, int]]:
        """Return what runners sampled as one item, and how many steps are counted for it."""
        batches, of = [each["batch"] for each in taken], {}
        for policy in self.parts:
            of[policy] = joined([each[policy] for each in batches], self.site.run)
        item = of_policies(of) if self._is_team else of[""]
        steps = {f"sampled_steps/{name}": batch.steps for name, batch in of.items() if name}
        return item, {"sampled_steps": item.steps, **steps}

    def episodes(self) -> dict[str, Any]:
        """Return and reset what was counted since the last call, as `RunnersHandle` says."""
        report = super().episodes()
        return {**report, "broken": Broken(report["broken"], names_of_agents(self.core.env))}

    def evaluated_of(self, policy: str) -> Weights | None:
        """Return the weights of a policy in the last evaluation, as `RunnersHandle` says."""
        if self.state["evaluated"] or "evaluated_with" not in self.state:
            return None
        weights: Weights = self.state["evaluated_with"][policy]
        return weights

    def _newest(self) -> dict[str, Weights]:
        """Return the newest weights of each policy."""
        self._start()
        return {name: held["published"][-1]["weights"] for name, held in self.state["of"].items()}

    def _start(self) -> None:
        """Publish first weights of policies of which no learner published any."""
        for policy, held in self.state["of"].items():
            if not held["published"]:
                key = self.site.key(f"weights/{policy}" if policy else "weights")
                init = self.core.parts[policy].network.init
                self.publish_of(policy, self.site.run(init, key), np.int32(0))


def _versions(held: State) -> np.ndarray[Any, Any]:
    """Return by runner the policy version of the weights that it uses, ``int32[runners]``."""
    return np.array([held["published"][use]["version"] for use in held["uses"]], np.int32)
