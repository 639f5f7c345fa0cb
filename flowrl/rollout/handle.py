"""What operators ask of runners of any kind."""

from __future__ import annotations

import math
from abc import abstractmethod
from fractions import Fraction
from typing import Any, ClassVar

from flowrl.core.events import WeightsSent
from flowrl.core.items import Batch, nbytes
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
"""The columns of a Row after an evaluation."""
RECENT = 100
"""`return_mean` and `length_mean` are means over this many of the newest episodes, as the field reports them."""


def part_of(count: int, min_fraction: float) -> int:
    """How many of `count` runners are so large a part, at least one."""
    return max(1, math.ceil(min_fraction * count - 1e-9))


def allowed_requests(max_lag: int, updates: Fraction, oldest: int, fragments: int) -> int:
    """How many samples more may be asked for so that none is trained when it is too old.

    If k fragments have come or are asked for, then the last of them is trained by update number ceil(k x updates) at the latest. None of those
    asked for must then be too old, whichever comes last.

    Args:
        max_lag: updates.
        updates: to a fragment.
        oldest: the version of the oldest weights that may still act.
        fragments: that came or are asked for.
    """
    return max(0, int((max_lag + 1 + oldest) / updates) - fragments)


class RunnersHandle(Handle):
    """What operators ask of runners of any kind."""

    site: Site
    spaces: Spaces
    environments: int
    """Of all runners together."""
    shared: ClassVar[tuple[str, ...]] = ("publish", "pace", "episodes", "evaluate")

    @abstractmethod
    def publish(self, weights: Weights, version: Any, to: Any = None, wait: bool = True) -> None:
        """Hand new weights to the runners; every sample asked for from then on uses them.

        Args:
            weights: arrays by name.
            version: of the learner that they come from.
            to: the numbers ``[B]`` of those who get them; None for all.
            wait: until they are computed. If not, samples may be asked for with older ones in the meantime, and these are never sent
                where newer ones are ready before they are needed.
        """

    def _published(self, weights: Weights, version: Any, wait: bool) -> None:
        """Count and tell that weights were published."""
        size = sum(nbytes(x) for part in weights for x in part.values())
        self.site.count(publishes=1, weight_bytes=size, unawaited=not wait)
        self.site.stream.emit(WeightsSent(self.site.name, int(version), size))

    def pace(self, max_lag: int, updates: Fraction) -> None:
        """From now on ask for no sample that could be more than `max_lag` updates old when it is trained.

        Args:
            max_lag: updates.
            updates: to a fragment. Fragments are trained in the order in which they come.

        Raises:
            GraphError: these runners can't.
        """
        raise GraphError(f"{type(self).__name__} can't pace requests; take on_stale='drop'")

    def localize(self, chain: Chain) -> None:
        """From now on every fragment goes through these operators where it is sampled.

        Raises:
            GraphError: these runners can't, or do so already with others.
        """
        raise GraphError(
            f"{type(self).__name__} can't do work at the sampler; move it behind ParallelSample"
        )

    def may(self, min_fraction: float = 0.0) -> bool:
        """Whether so large a part of a round (0: a fragment) may be sampled now: not before there are newer weights, if requests are paced."""
        return True

    @abstractmethod
    def collect(self, min_fraction: float = 1.0) -> Batch:
        """Ask every idle runner for a fragment with the newest weights; as soon as enough came, join them to ONE batch.

        Args:
            min_fraction: of the runners, whose fragments make a batch ``[fragment, ceil(min_fraction x count) x envs]``. The others'
                go on, and are in a later batch, with their true version.

        Raises:
            EnvironmentFailed: an environment raised, gave NaN, or broke its declared shape or type.
        """

    @abstractmethod
    def next(self, in_flight: int = 2) -> Batch:
        """The next fragment that is ready ``[fragment, envs]``; every runner is kept busy with requests that carry the newest weights.

        Args:
            in_flight: requests to each runner at once.

        Raises:
            EnvironmentFailed: an environment raised, gave NaN, or broke its declared shape or type.
        """

    @abstractmethod
    def episodes(self) -> dict[str, Any]:
        """What happened since the last call: ``env_steps`` (valid ones) and ``episodes``; and means over the last 100 episodes."""

    @abstractmethod
    def evaluate(self, episodes: int, seed: int, max_steps: int = MAX_STEPS) -> dict[str, float]:
        """Play whole episodes greedily with the newest weights; the result also comes with the next `episodes`.

        Args:
            episodes: how many.
            seed: of the environments, which are made for this.
            max_steps: of an episode, which is cut after so many; its return so far then counts.

        Returns:
            By the names in `EVALUATED`: the mean, standard deviation, minimum and maximum of the returns, and how many episodes were cut.
        """
