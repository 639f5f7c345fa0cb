"""`RunnersHandle`: the calls that operators make to runners of any kind."""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from fractions import Fraction
from typing import Any, ClassVar

from flowrl.core.events import WeightsSent
from flowrl.core.items import Batch, nbytes
from flowrl.envs.gym_envs import env_name
from flowrl.errors import GraphError
from flowrl.graph.graph import Chain
from flowrl.graph.protocols import Handle, Site
from flowrl.rl.policies import Weights
from flowrl.rl.spaces import Spaces
from flowrl.rollout.evaluation import MAX_STEPS

EVALUATED = tuple(
    f"eval/{name}"
    for name in ("return_mean", "return_std", "return_min", "return_max", "cut_episodes")
)
"""The columns that a Row has after an evaluation."""
RECENT = 100
"""The number of newest episodes over which `return_mean` and `length_mean` are means.

It is what publications on reinforcement learning usually report.
"""
OTHER_CHAIN = (
    "other operators of this graph sample from the same runners with another local=...; "
    "give each runners of its own"
)
"""The error where two operators ask the same runners for different work at the sampler."""


def part_of(count: int, min_fraction: float) -> int:
    """Return how many of `count` runners make up at least this fraction of them; at least one."""
    # The small number keeps a product such as 0.1 x 30 from being rounded up to the next integer.
    return max(1, math.ceil(min_fraction * count - 1e-9))


def allowed_requests(max_lag: int, updates: Fraction, oldest: int, rollouts: int) -> int:
    """Return how many more rollouts may be requested so that none is trained when it is too old.

    If k rollouts were received or are requested, then the last of them is trained by update number
    ceil(k x updates) at the latest. None of the requested ones must then be too old, whichever
    comes last.

    Args:
        max_lag: the largest policy lag, in updates.
        updates: updates per rollout.
        oldest: the policy version of the oldest weights that may still act.
        rollouts: those that were received or are requested.
    """
    # Update number u trains version u - 1, so its lag is u - 1 - oldest. With u = ceil(k x updates)
    # that allows k <= (max_lag + 1 + oldest) / updates.
    return max(0, int((max_lag + 1 + oldest) / updates) - rollouts)


class RunnersHandle(Handle):
    """The calls that operators make to runners of any kind."""

    site: Site
    """The site at which the runners were opened."""
    spaces: Spaces
    """The spaces of one environment."""
    spec: Any = None
    """The settings of the runners, where these have some of their own."""
    environments: int
    """The number of environments of all runners together."""
    on_device: bool = False
    """Whether they are functions of the device, which sample there."""
    shared: ClassVar[tuple[str, ...]] = (
        "publish", "pace", "episodes", "evaluate", "keep_evaluated",
    )  # fmt: skip

    @property
    def env_name(self) -> str:
        """What the environment is called in texts; empty if that is not known."""
        return "" if self.spec is None else env_name(self.spec.env)

    @abstractmethod
    def publish(self, weights: Weights, version: Any, to: Any = None, wait: bool = True) -> None:
        """Hand new weights to the runners; every later request for a rollout uses them.

        Args:
            weights: arrays by name.
            version: the policy version, which is that of the learner they come from.
            to: the numbers ``[B]`` of the runners that get them; None for all.
            wait: whether to wait until the weights are computed. If not, requests may be made with
                older ones in the meantime, and weights are never sent where newer ones are ready
                before they are needed.
        """

    def _count_published(self, weights: Weights, version: Any, wait: bool) -> None:
        """Count that weights were published, and emit the event of it."""
        arrays = itertools.chain.from_iterable(part.values() for part in weights)
        size = sum(map(nbytes, arrays))
        self.site.count(publishes=1, weight_bytes=size, unawaited=not wait)
        self.site.stream.emit(WeightsSent(self.site.name, int(version), size))

    def pace(self, max_lag: int, updates: Fraction) -> None:
        """Make no further request for a rollout that could be too old when it is trained.

        Args:
            max_lag: the largest policy lag that data may have when it is trained, in updates.
            updates: updates per rollout. Rollouts are trained in the order in which they come.

        Raises:
            GraphError: these runners can't pace requests.
        """
        raise GraphError(f"{type(self).__name__} can't pace requests; take on_stale='drop'")

    def localize(self, chain: Chain) -> None:
        """Pass every later rollout through these operators where it is sampled.

        Args:
            chain: the operators by name.

        Raises:
            GraphError: these runners can't do that, or do so already with other operators.
        """
        raise GraphError(
            f"{type(self).__name__} can't do work at the sampler; move it after ParallelSample"
        )

    def may(self, min_fraction: float = 0.0) -> bool:
        """Return whether a part of a round may be sampled now.

        If requests are paced, it may not be before there are newer weights.

        Args:
            min_fraction: the part of the runners; 0 for one rollout.
        """
        return True

    @abstractmethod
    def collect(self, min_fraction: float = 1.0) -> Any:
        """Ask every idle runner for a rollout with the newest weights, and join those that come.

        The batch is returned as soon as enough rollouts came. The others go on, and are in a later
        batch, with their true policy version.

        Args:
            min_fraction: the part of the runners whose rollouts are enough.

        Returns:
            ONE batch ``[rollout_length, ceil(min_fraction x num_runners) x envs_per_runner]``, or
            one item of what the operators at the sampler made of each rollout.

        Raises:
            EnvError: an environment raised, gave NaN, or broke its declared shape or type.
        """

    @abstractmethod
    def next(self, in_flight: int = 2) -> Any:
        """Return the next rollout that is ready, of one runner.

        Every runner is kept busy with requests that carry the newest weights.

        Args:
            in_flight: requests to each runner at once.

        Returns:
            A batch ``[rollout_length, envs_per_runner]``, or what the operators at the sampler made
            of it.

        Raises:
            EnvError: an environment raised, gave NaN, or broke its declared shape or type.
        """

    @abstractmethod
    def episodes(self) -> dict[str, Any]:
        """Return and reset the numbers of what happened since the last call.

        Returns:
            ``env_steps`` (the steps that were taken, also those that are in no rollout, but no
            resets) and ``episodes`` since the last call, and ``return_mean`` and ``length_mean``
            over the last 100 episodes.
        """

    @abstractmethod
    def evaluate(self, episodes: int, seed: int, max_steps: int = MAX_STEPS) -> dict[str, float]:
        """Play whole episodes greedily with the newest weights.

        The result also comes with the next `episodes`.

        Args:
            episodes: number of episodes.
            seed: seed of the environments, which are made for this.
            max_steps: most steps of an episode, which is then cut; its return until then counts.

        Returns:
            The mean, standard deviation, minimum and maximum of the returns, and how many episodes
            were cut, by the names of their columns in a row.
        """

    def expect_perturbed(self) -> None:
        """Prepare for `perturbed`, before the first round."""

    def perturbed(self, node: str, turn: Any, **how: Any) -> Batch:
        """Play whole episodes with perturbations of the newest weights.

        Args:
            node: name of the node that asks, by which its random numbers differ from others'.
            turn: ``uint32[]``, how often it asked before.
            **how: the settings ``pairs``, ``sigma``, ``episodes``, ``max_steps`` and ``sampled`` of
                `ParallelEvaluate`.

        Returns:
            A batch ``[2, pairs]``, as `ParallelEvaluate` yields it.

        Raises:
            GraphError: these runners can't do that.
            EnvError: an environment raised, gave NaN, or broke its declared shape or type.
        """
        raise GraphError(
            f"{type(self).__name__} can't play with perturbed weights, for there are several "
            "agents; make them one by fl.envs.Joint, or take an environment of one agent"
        )

    def keep_evaluated(self) -> None:
        """Keep the weights of each evaluation to come, of which there may be some."""

    def evaluated(self) -> Weights | None:
        """Return the weights that played the last evaluation, once its numbers were reported.

        Returns:
            None if there was no evaluation, or a newer one that no row has yet.
        """
        return None
