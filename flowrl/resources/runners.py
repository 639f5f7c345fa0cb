"""`Runners`: a set of numbered runners over Gymnasium environments, and the handle that operators call."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from gymnasium.vector import VectorEnv

from flowrl.errors import SettingError
from flowrl.graph.protocols import Handle, Resource, Site, Use
from flowrl.graph.site import alone
from flowrl.items import Batch, nbytes
from flowrl.resources.environments import Make, env_name, spaces_of
from flowrl.resources.sampling import Episodes, Runner, RunnerTwin
from flowrl.rl.policies import Policy, Weights, network
from flowrl.rl.spaces import Spaces

RECENT = 100
"""`return_mean` and `length_mean` are means over this many of the newest episodes, as the field reports them."""


class RunnersHandle(Handle):
    """What operators ask of runners of any kind."""

    spaces: Spaces

    @abstractmethod
    def publish(self, weights: Weights, version: Any) -> None:
        """Hand new weights to all runners; every sample asked for from then on uses them.

        Args:
            weights: arrays by name.
            version: of the learner that they come from.
        """

    @abstractmethod
    def collect(self) -> Batch:
        """One fragment of every runner, with the newest weights, as ONE batch ``[fragment, count x envs]``.

        Raises:
            EnvironmentFailed: an environment raised, gave NaN, or broke its declared shape or type.
        """

    @abstractmethod
    def episodes(self) -> dict[str, Any]:
        """What happened since the last call: ``env_steps`` (valid ones) and ``episodes``; and means over the last 100 episodes."""

    @abstractmethod
    def evaluate(self, episodes: int, seed: int) -> dict[str, float]:
        """Play whole episodes greedily with the newest weights; what came of it is also told with the next `episodes`.

        Args:
            episodes: how many.
            seed: of the environments, which are made for this.

        Returns:
            ``eval/return_mean``, ``eval/return_std``, ``eval/return_min`` and ``eval/return_max``.
        """


class GymRunners(RunnersHandle):
    """Runners over Gymnasium environments at work: the weights are put once, and sent along with the next request."""

    def __init__(self, spec: Runners, site: Site) -> None:
        self.spec = spec
        self.site = site
        self.spaces = spec.spaces()
        self.state = {"version": np.int32(0)}
        self.pool = site.workers(
            spec.count,
            partial(Runner, spec, site.name, site.seed),
            partial(RunnerTwin, spec, site.name, site.seed),
        )
        self._newest: Any = None
        self._given: list[Any] = [None] * spec.count
        self._recent: deque[tuple[float, float]] = deque(maxlen=RECENT)
        self._since = {"env_steps": 0, "episodes": 0}
        self._evaluated: dict[str, float] = {}

    def close(self) -> None:
        """Close all runners and their environments."""
        self.pool.close()

    def publish(self, weights: Weights, version: Any) -> None:
        """Put the weights once; each runner's next request carries them."""
        self._newest = self.pool.put((weights, version))
        self.state = {"version": version}
        self.site.count(publishes=1, weight_bytes=sum(nbytes(x) for part in weights for x in part.values()))

    def collect(self) -> Batch:
        """Ask every runner, wait for all, join."""
        self._ready()
        calls = [self.pool.submit(i, "sample", self._lacking(i)) for i in range(len(self.pool))]
        samples = [call.result() for call in calls]
        for sample in samples:
            self._note(sample.episodes)
        batch = Batch.join([sample.batch for sample in samples])
        self.site.count(requests=len(samples), sampled_steps=batch.steps)
        return batch

    def episodes(self) -> dict[str, Any]:
        """Drain what gathered with the samples."""
        since, self._since = self._since, {"env_steps": 0, "episodes": 0}
        returns, lengths = zip(*self._recent, strict=True) if self._recent else ((math.nan,), (math.nan,))
        told, self._evaluated = self._evaluated, {}
        return {**since, "return_mean": float(np.mean(returns)), "length_mean": float(np.mean(lengths)), **told}

    def evaluate(self, episodes: int, seed: int) -> dict[str, float]:
        """Share the episodes among the runners."""
        self._ready()
        shares = [part for part in np.array_split(np.arange(episodes), len(self.pool)) if len(part)]
        calls = [self.pool.submit(i, "evaluate", self._lacking(i), len(part), seed + int(part[0])) for i, part in enumerate(shares)]
        returns = np.concatenate([call.result() for call in calls])
        self.site.count(evaluations=1, evaluated_episodes=episodes)
        self._evaluated = {f"eval/return_{k}": float(getattr(np, k)(returns)) for k in ("mean", "std", "min", "max")}
        return self._evaluated

    def _ready(self) -> None:
        if self._newest is None:
            self.publish(self.site.run(network(self.spec.policy, self.spaces).init, self.site.key("weights")), 0)

    def _lacking(self, index: int) -> Any:
        """The newest weights if this runner does not have them yet, else None."""
        if self._given[index] is self._newest:
            return None
        self._given[index] = self._newest
        return self._newest

    def _note(self, episodes: Episodes) -> None:
        self._since["env_steps"] += episodes.env_steps + episodes.skipped
        self._since["episodes"] += len(episodes.returns)
        self._recent.extend(zip(episodes.returns.tolist(), episodes.lengths.tolist(), strict=True))


@dataclass(frozen=True)
class Runners(Resource):
    """`count` runners, each with `envs` environments, that give fragments of `fragment` steps per environment.

    Args:
        env: a Gymnasium id, or a function that makes an environment (or a vector of exactly `envs`).
        policy: what acts.
        count: runners: one after another in this process, one actor each on Ray.
        envs: environments per runner.
        fragment: steps per environment and call.
        wrappers: put around each environment, the first one innermost.
        env_settings: keyword arguments for making an environment.
        normalize_rewards: the discount of the returns whose running deviation rewards are divided by, each runner's
            by its own; None for no scaling.
    """

    env: Make
    policy: Policy
    count: int = 1
    envs: int = 8
    fragment: int = 128
    wrappers: tuple[Callable[[Any], Any], ...] = ()
    env_settings: Mapping[str, Any] = field(default_factory=dict)
    normalize_rewards: float | None = None

    handle: ClassVar[type[Handle]] = GymRunners

    def __post_init__(self) -> None:
        for name in ("count", "envs", "fragment"):
            if getattr(self, name) < 1:
                raise SettingError(f"{name} must be at least 1, got {getattr(self, name)}")
        if isinstance(self.env, gym.Env | VectorEnv):
            raise SettingError(f"env must be an id, a class or a function that makes an environment, got one that is made already: {self.env}")
        if not isinstance(self.policy, Policy):
            raise SettingError(f"policy must be fl.Policy(ModuleClass, **settings), got {self.policy!r}")

    def __hash__(self) -> int:
        return hash((self.env, self.policy, self.count, self.envs, self.fragment))

    def spaces(self) -> Spaces:
        """The spaces of the environment, found by making one."""
        return self._spaces

    @cached_property
    def _spaces(self) -> Spaces:
        return spaces_of(self.env, self.wrappers, self.env_settings)

    def open(self, site: Site | None = None) -> GymRunners:
        """Start the runners. Without a site: in this process and without any graph, with first weights of their own.

        >>> import flowrl as fl
        >>> runners = fl.Runners("CartPole-v1", fl.Policy(fl.MLP), envs=4, fragment=16).open()
        >>> runners.collect()["obs"].shape
        (16, 4, 4)
        >>> runners.close()
        """
        return GymRunners(self, site or alone("runners", self))

    def review(self, use: Use) -> Iterator[tuple[str, str]]:
        """Do new weights ever reach them?"""
        if use.traced and use.total("requests") and not use.total("publishes") and any(use.total("updates", other) for other in use.resources):
            yield (
                use.name,
                "act with their first weights for ever, for no node publishes new ones to them; add sync=SyncWeights() behind TrainOneStep",
            )

    def describe(self) -> str:
        """``2 runners x 8 envs x 128 steps of CartPole-v1``."""
        parts = [f"{n} {word}{'s' * (n != 1)}" for n, word in ((self.count, "runner"), (self.envs, "env"), (self.fragment, "step"))]
        return f"{' x '.join(parts)} of {env_name(self.env)}"
