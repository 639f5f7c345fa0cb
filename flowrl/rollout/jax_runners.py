"""`JaxRunners`: the handle of runners over an environment written in JAX, in one process.

All sampling is pure functions of arrays, so that a runtime may fuse it with everything else.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from flowrl.core.clock import EVALUATION, STEP
from flowrl.core.items import Batch
from flowrl.core.keeping import into, leaves
from flowrl.errors import GraphError
from flowrl.graph.graph import Chain
from flowrl.graph.protocols import Site
from flowrl.rl.evolution import seeds_of
from flowrl.rl.policies import Weights
from flowrl.rollout.checks import check_perturbed
from flowrl.rollout.evaluation import MAX_STEPS
from flowrl.rollout.handle import OTHER_CHAIN, RunnersHandle, allowed_requests, part_of
from flowrl.rollout.jax_core import State, core_of
from flowrl.rollout.jax_perturbed import perturbed_of
from flowrl.rollout.local_chain import Local, joined
from flowrl.rollout.requests import whom_to_ask

if TYPE_CHECKING:
    from flowrl.rollout.runners import Runners


BY_LEAVES = ("work", "statistics")
"""The parts of the state that always have the same structure."""


class JaxRunners(RunnersHandle):
    """Handle of runners over an environment written in JAX, which sample a rollout when asked.

    `state` holds:

    - ``work``: the state of environments and runners, from which they go on;
    - ``statistics``: what the next Row reports;
    - ``evaluated``: the last evaluation, until it is reported;
    - ``perturbed``: how many perturbed episodes were cut since the last Row, where any are
      expected;
    - ``evaluated_with``: the weights that played it, or the first ones, where any evaluation is
      expected;
    - ``published``: the weights that a runner may still use, the newest last;
    - ``uses``: by runner, the index of its weights among these;
    - ``in_flight``: the rollouts that were requested and not taken, the oldest first;
    - ``order``: the runners, first the one that was asked the longest time ago;
    - ``paced``: where requests are paced, how many of the rollouts that make up the next updates
      were received (``phase``), and the policy version after the updates that are complete
      (``version``).

    Args:
        spec: the settings of the runners.
        site: the site that runs the functions.
    """

    spread: ClassVar[tuple[str, ...]] = ("work",)
    on_device = True
    remade: ClassVar[tuple[str, ...]] = (
        "spec", "site", "core", "spaces", "environments", "_local", "_local_chain", "_pacing",
    )  # fmt: skip

    def __init__(self, spec: Runners, site: Site) -> None:
        self.spec = spec
        self.site = site
        self.core = core_of(spec)
        self.spaces = spec.spaces()
        self.environments = spec.num_runners * spec.envs_per_runner
        self._local: Local | None = None
        self._local_chain: Chain | None = None
        """The operators that every rollout goes through, if there are any."""
        self._pacing: tuple[int, Fraction] | None = None
        """The largest policy lag and the updates per rollout, if requests are paced."""
        self.state: State = {
            "work": site.run(self.core.start, site.key("start")),
            "statistics": site.run(self.core.no_statistics),
            "evaluated": {},
            "published": [],
            "uses": [0] * spec.num_runners,
            "in_flight": [],
            "order": list(range(spec.num_runners)),
            "paced": {},
        }

    def close(self) -> None:
        """Do nothing: there are no processes and no environments to close."""

    def keep(self) -> Any:
        """Return the state; environments and statistics, whose classes may be any, by leaves."""
        return {**self.state, **{part: leaves(self.state[part]) for part in BY_LEAVES}}

    def take(self, state: Any) -> None:
        """Go on from the state that was kept."""
        known = {
            part: into(self.state[part], state[part], f"{self.site.name}, {part}")
            for part in BY_LEAVES
        }
        self.state = {**state, **known}

    def publish(self, weights: Weights, version: Any, to: Any = None, wait: bool = True) -> None:
        """Publish new weights, with which the runners that get them sample from now on.

        What is sampled with weights waits for their computation by itself.

        Args:
            weights: arrays by name.
            version: the policy version, which is the learner's.
            to: the numbers ``[B]`` of the runners that get them; None for all.
            wait: only counted here.
        """
        self.state = {**self.state, **with_published(self.state, weights, version, to)}
        self._count_published(weights, version, wait)

    def localize(self, chain: Chain) -> None:
        """Pass every later rollout through these operators.

        Args:
            chain: the operators by name.

        Raises:
            GraphError: the runners do so already with other operators.
        """
        if self._local_chain not in (None, chain):
            raise GraphError(OTHER_CHAIN)
        self._local_chain = chain
        self._local = Local(chain, self.core.network, self.site)

    def may(self, min_fraction: float = 0.0) -> bool:
        """Return whether enough requests for a part of a round may be made, or are pending."""
        wanted = part_of(self.spec.num_runners, min_fraction)
        return len(self.state["in_flight"]) + self._allowed() >= wanted

    def pace(self, max_lag: int, updates: Fraction) -> None:
        """Pace the requests from the next one on, as `RunnersHandle.pace` says."""
        # The ages of weights are what the pacing looks at, so there must be some.
        self._start()
        self._pacing = (max_lag, updates)
        self.state = {**self.state, "paced": {"phase": 0, "version": np.int32(0)}}

    def _allowed(self) -> float:
        """Return how many more requests the pacing allows; infinity without pacing."""
        if self._pacing is None:
            return math.inf
        pending = [int(item["version"]) for item in self.state["in_flight"]]
        in_use = [int(self.state["published"][use]["version"]) for use in self.state["uses"]]
        # Both are counted from the last complete updates on, so that the state repeats itself.
        paced = self.state["paced"]
        oldest = min([*pending, *in_use]) - int(paced["version"])
        return allowed_requests(*self._pacing, oldest, paced["phase"] + len(pending))

    @STEP
    def collect(self, min_fraction: float = 1.0) -> Any:
        """Ask the idle runners, and take enough rollouts of those that were asked first.

        Args:
            min_fraction: the part of the runners whose rollouts are enough.

        Returns:
            A batch ``[rollout_length, ceil(min_fraction x num_runners) x envs_per_runner]``, joined
            in the order of the runners.
        """
        self._start()
        runners, wanted = self.spec.num_runners, part_of(self.spec.num_runners, min_fraction)
        # Runners that all do the same sample as one, which is a single call and needs no joining.
        as_one = (
            self._local is None
            and not self.state["in_flight"]
            and self._allowed() == math.inf
            and self._alike()
        )
        if as_one and wanted == runners:
            self._sample(0, runners)
            return self._take(1, runners)
        self._fill(1)
        return self._take(wanted)

    @STEP
    def next(self, in_flight: int = 2) -> Any:
        """Ask every runner with less than `in_flight` requests again, and take the oldest rollout.

        Args:
            in_flight: requests to each runner at once.

        Returns:
            A batch ``[rollout_length, envs_per_runner]``.
        """
        self._start()
        self._fill(in_flight)
        return self._take(1)

    def _alike(self) -> bool:
        """Return whether all runners use the same weights."""
        return len(set(self.state["uses"])) == 1

    def _fill(self, in_flight: int) -> None:
        """Ask runners until each has `in_flight` requests or the pacing allows no more."""
        asked = [item["runner"] for item in self.state["in_flight"]]
        pending = [asked.count(runner) for runner in range(self.spec.num_runners)]
        for runner in whom_to_ask(self.state["order"], pending, in_flight, self._allowed()):
            self._sample(runner, 1)

    def _sample(self, first: int, count: int) -> None:
        """Sample a rollout of each of `count` runners from the first on, as one item."""
        used = self.state["published"][self.state["uses"][first]]
        which = () if count == self.spec.num_runners else (np.int32(first),)
        work, data, columns, ended = self.site.run(
            self.core.roll, self.state["work"], used["weights"], *which, count=count
        )
        envs = self.spec.envs_per_runner
        columns = {
            **columns,
            "version": np.full(count * envs, used["version"], np.int32),
            "producer": np.repeat(np.arange(first, first + count, dtype=np.int32), envs),
            "env": np.arange(first * envs, (first + count) * envs, dtype=np.int32),
        }
        batch = Batch(data, columns)
        item = {
            "runner": first,
            "version": used["version"],
            "batch": batch if self._local is None else self._local(used["weights"], batch),
            "ended": ended,
            "valid": data["valid"],
        }
        self._requested(item, work, range(first, first + count))

    def _requested(self, item: State, work: State, asked: range) -> None:
        """Keep a rollout that these runners sampled until it is taken."""
        self.state = {
            **self.state,
            "work": work,
            "in_flight": [*self.state["in_flight"], item],
            # The order stays that of before among those that were asked at once: a sort is stable.
            "order": sorted(self.state["order"], key=asked.__contains__),
        }

    def _take(self, items: int, runners: int = 1) -> Any:
        """Take the oldest items, each of so many runners; count and join them."""
        taken, in_flight = self.state["in_flight"][:items], self.state["in_flight"][items:]
        statistics = self.state["statistics"]
        for each in taken:
            statistics = self.site.run(self.core.note, statistics, each["ended"], each["valid"])
        by_runner = sorted(taken, key=lambda each: each["runner"])
        item, counts = self._joined(by_runner)
        self.state = {
            **self.state,
            "statistics": statistics,
            "in_flight": in_flight,
            "paced": self._paced_after(items),
        }
        self.site.count(requests=items * runners, outstanding=len(in_flight), **counts)
        return item

    def _joined(self, taken: list[State]) -> tuple[Any, dict[str, int]]:
        """Return what runners sampled as one item, and how many steps are counted for it."""
        # Operators at the sampler may make anything of a rollout, so its own steps are counted.
        steps = sum(math.prod(each["valid"].shape) for each in taken)
        return joined([each["batch"] for each in taken], self.site.run), {"sampled_steps": steps}

    def _paced_after(self, items: int) -> State:
        """Return where the pacing is after so many more rollouts."""
        before: State = self.state["paced"]
        if self._pacing is None:
            return before
        _, updates = self._pacing
        # `denominator` rollouts make up `numerator` updates.
        complete, phase = divmod(before["phase"] + items, updates.denominator)
        version = np.int32(before["version"] + complete * updates.numerator)
        return {"phase": phase, "version": version}

    def episodes(self) -> dict[str, Any]:
        """Return and reset what was counted since the last call, as `RunnersHandle` says."""
        report, remaining = self.site.run(self.core.report, self.state["statistics"])
        report = {**report, **self.state["evaluated"], **self.state.get("perturbed", {})}
        self.state = {**self.state, "statistics": remaining, "evaluated": {}}
        if "perturbed" in self.state:
            self.expect_perturbed()
        return report

    @EVALUATION
    def evaluate(self, episodes: int, seed: int, max_steps: int = MAX_STEPS) -> dict[str, float]:
        """Play all episodes at once with the newest weights, greedily.

        Args:
            episodes: how many.
            seed: of the environments.
            max_steps: after so many steps an episode is cut.

        Returns:
            Numbers by the names in `EVALUATED`.
        """
        newest = self._newest()
        # Not the seed's own key: others are derived from that.
        key = jax.random.fold_in(jax.random.key(seed), 0)
        found: dict[str, Any] = self.site.run(
            self.core.evaluate, newest, key, episodes=episodes, max_steps=max_steps
        )
        self.state = {**self.state, "evaluated": found}
        if "evaluated_with" in self.state:
            self.state["evaluated_with"] = newest
        self.site.count(evaluations=1, evaluated_episodes=episodes)
        return found

    def expect_perturbed(self) -> None:
        """Count in the state how many perturbed episodes are cut, from the beginning on."""
        self.state = {**self.state, "perturbed": {"cut_episodes": jnp.int32(0)}}

    @STEP
    def perturbed(self, node: str, turn: Any, **how: Any) -> Batch:
        """Play the episodes of all perturbations at once, as `RunnersHandle` says."""
        if self.spec.agents:
            return super().perturbed(node, turn, **how)
        check_perturbed(self.spec)
        self._start()
        if "perturbed" not in self.state:
            self.expect_perturbed()
        used, pairs = self.state["published"][-1], how.pop("pairs")
        seeds = self.site.run(seeds_of, self.site.key("perturbed", node), turn, pairs=pairs)
        play = perturbed_of(self.spec).play
        data, ended, cut = self.site.run(play, used["weights"], seeds, **how)
        statistics = self.site.run(self.core.note, self.state["statistics"], ended, ended["length"])
        counted = self.site.run(_with_cut, self.state["perturbed"], cut)
        self.state = {**self.state, "statistics": statistics, "perturbed": counted}
        episodes = 2 * pairs * how["episodes"]
        shares = min(pairs, self.spec.num_runners)
        self.site.count(
            requests=shares,
            perturbed_episodes=episodes,
            most_sampled_steps=episodes * how["max_steps"],
        )
        columns = {
            "version": np.full(pairs, used["version"], np.int32),
            "producer": np.repeat(np.arange(shares, dtype=np.int32), _sizes(pairs, shares)),
        }
        return Batch(data, columns)

    def keep_evaluated(self) -> None:
        """Keep the weights of each evaluation in the state, from the beginning on.

        So a program, whose state has one structure from its first round to its last, keeps them.
        """
        self.state = {**self.state, "evaluated_with": self._newest()}

    def evaluated(self) -> Weights | None:
        """Return the weights of the last evaluation, as `RunnersHandle` says."""
        return None if self.state["evaluated"] else self.state.get("evaluated_with")

    def _newest(self) -> Any:
        """Return the newest weights."""
        self._start()
        return self.state["published"][-1]["weights"]

    def _start(self) -> None:
        """Publish first weights where no learner published any."""
        if not self.state["published"]:
            weights = self.site.run(self.core.network.init, self.site.key("weights"))
            self.publish(weights, np.int32(0))


def _sizes(work: int, shares: int) -> list[int]:
    """Return the sizes of as many shares of work, as even as can be, the larger ones first."""
    return [work // shares + (share < work % shares) for share in range(shares)]


def _with_cut(counted: State, cut: Any) -> State:
    """Return the count of episodes that were cut with more of them."""
    return {"cut_episodes": counted["cut_episodes"] + cut}


def with_published(held: State, weights: Weights, version: Any, to: Any) -> dict[str, list[Any]]:
    """Return the weights that runners may still use, and which of them each uses.

    Args:
        held: the same before, as ``published`` and ``uses``.
        weights: new ones.
        version: their policy version.
        to: the numbers ``[B]`` of the runners that get them; None for all.
    """
    receivers = range(len(held["uses"])) if to is None else np.unique(to).tolist()
    published = [*held["published"], {"weights": weights, "version": version}]
    newest = len(published) - 1
    uses = [newest if runner in receivers else use for runner, use in enumerate(held["uses"])]
    # Weights that no runner uses any more are let go of.
    kept = sorted({*uses, newest})
    return {
        "published": [published[index] for index in kept],
        "uses": [kept.index(use) for use in uses],
    }
