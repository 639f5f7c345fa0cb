"""`Runners`: a set of numbered runners over Gymnasium environments, and the handle that operators call."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property, partial
from threading import Event, Lock
from typing import Any, ClassVar, Literal, cast

import gymnasium as gym
import jax
import numpy as np
from gymnasium.vector import VectorEnv

from flowrl.clock import TRANSFER, UPDATE, Reading, here
from flowrl.errors import EnvironmentFailed, FlowrlError, GraphError, RuntimeFailed, SettingError
from flowrl.events import Restarted
from flowrl.graph.graph import Chain
from flowrl.graph.protocols import Future, Handle, Resource, Site, Use, hidden
from flowrl.graph.site import alone
from flowrl.items import Batch
from flowrl.metrics import misnamed
from flowrl.resources.asking import RunnersHandle, part_of, room
from flowrl.resources.environments import Make, env_name, probe, steps_singly
from flowrl.resources.evaluation import MAX_STEPS, Evaluation
from flowrl.resources.fragments import Sample
from flowrl.resources.jax_envs import JaxEnv
from flowrl.resources.jax_runners import JaxRunners
from flowrl.resources.published import Published
from flowrl.resources.requests import AsyncRequests, Late
from flowrl.resources.runner_twin import RunnerTwin
from flowrl.resources.sampling import Runner
from flowrl.resources.told import Told
from flowrl.rl.explore import Explore, Sampled
from flowrl.rl.policies import SAMPLED, Policy, Weights, network
from flowrl.rl.spaces import Spaces

NOTABLE = 0.05
"""The share of time from which on a loss is told."""


class GymRunners(RunnersHandle):
    """Runners over Gymnasium environments at work: the weights are put once, and sent along with the next request."""

    def __init__(self, spec: Runners, site: Site) -> None:
        self.spec = spec
        self.site = site
        self.spaces = spec.spaces()
        self.environments = spec.count * spec.envs
        self.pool = site.workers(
            spec.count,
            partial(Runner, spec, site.name, site.seed),
            partial(RunnerTwin, spec, site),
        )
        self.requests = AsyncRequests(self._ask, self.pool.wait, spec.count)
        self._latest: Published | None = None
        """The newest weights of all."""
        self._due: list[Published | None] = [None] * spec.count
        """By runner: the weights that its next request is to use."""
        self._coming: list[deque[Published]] = [deque() for _ in range(spec.count)]
        """By runner: newer ones that may still be being computed."""
        self._lent: list[Published | None] = [None] * spec.count
        """By runner: those that it was sent."""
        self._paced: tuple[int, Fraction] | None = None
        """The largest lag, and the updates to a fragment, if requests are paced."""
        self._came = 0
        """Fragments so far."""
        self._chain: Chain | None = None
        """What is done at the sampler."""
        self._asked: list[deque[Any]] = [deque() for _ in range(spec.count)]
        """By runner: the versions with which the requests were made that have not come back."""
        self._asking = Lock()  # for calls to go out in the order of the weights they carry
        self._told = Told(site, spec.metrics)
        self._failures = [0] * spec.count
        """By runner: restarts in a row."""
        self._gone = [0] * spec.count
        """By runner: fragments that came of it."""
        self._because = ""
        """Why the last one was started anew."""
        self._closing = Event()
        self._rounds = self._idle = 0.0
        """Runner-seconds in rounds, and of these between a fragment and the end of its round."""

    def close(self) -> None:
        """Close all runners and their environments."""
        self._closing.set()
        if self._came:
            self._told.complain()
        self.pool.close()

    def clocks(self) -> dict[str, Reading]:
        """Those of the workers."""
        return self.pool.clocks()

    def facts(self) -> dict[str, Any]:
        """How many there are, what came of each, and the runner-seconds in rounds and of these those of waiting for the slowest."""
        so_far = {"fragments": list(self._gone), "rounds": [self._rounds, self._idle], "elsewhere": self.site.elsewhere}
        return {"count": self.spec.count, "envs": self.spec.envs, "singly": steps_singly(self.spec.env, self.spec.wrappers), **so_far}

    def findings(self) -> Iterator[str]:
        """What was started anew and why; what waiting for the slowest costs."""
        if times := self._told.restarted.get("restarts"):
            yield f"{self.site.name}: started anew {times} time{'s' * (times > 1)}, the last time because: {self._because}"
        share = self._idle / self._rounds if self._rounds else 0.0
        if len(self.pool) > 1 and share >= NOTABLE and self.site.elsewhere:
            way = "mode='async' behind a Queue would use all of it, and min_fraction=0.8 a part"
            yield f"{self.site.name}: {share:.0%} of the runners' time in rounds goes to waiting for the slowest; {way}"

    def publish(self, weights: Weights, version: Any, to: Any = None, wait: bool = True) -> None:
        """Put the weights once; the next request to each runner that gets them carries them."""
        new = Published(weights, version)
        if wait:
            with UPDATE:  # what it computes them from is not done yet
                jax.block_until_ready(weights)
            new.sent(self.pool)
        with self._asking:
            self._latest = new
            for index in range(self.spec.count) if to is None else np.unique(to):
                self._coming[index].append(new)
                self._next(index)
        self._published(weights, version, wait)

    def localize(self, chain: Chain) -> None:
        """Tell every runner."""
        if self._chain not in (None, chain):
            raise GraphError("other operators of this graph sample from the same runners with another local=...; give each runners of its own")
        self._chain = chain
        for call in [self.pool.submit(i, "localize", chain) for i in range(self.spec.count)]:
            call.result()

    def pace(self, max_lag: int, updates: Fraction) -> None:
        """Heed it from the next request on."""
        self._paced = (max_lag, updates)

    def may(self, min_fraction: float = 0.0) -> bool:
        """Whether enough may be asked, or were already."""
        return len(self.requests) + self._allowed() >= part_of(self.spec.count, min_fraction)

    def _allowed(self) -> float:
        """How many samples more may be asked for."""
        if self._paced is None:
            return math.inf
        with self._asking:
            oldest = min([v for asked in self._asked for v in asked] + [due.version for due in map(self._next, range(self.spec.count)) if due])
        return room(*self._paced, int(oldest), self._came + len(self.requests))

    @property
    def state(self) -> Any:
        """The versions of the weights at hand, and those with which requests were made that have not come back; and how far pacing is."""
        asked = [[{"version": v} for v in versions] for versions in self._asked]
        with self._asking:
            due = [{"version": p.version if p else np.int32(0)} for p in (self._latest, *map(self._next, range(self.spec.count)))]
        return {"due": due, "asked": asked, "paced": (self._allowed(), *self.requests.order()) if self._paced else ()}

    def collect(self, min_fraction: float = 1.0) -> Batch:
        """Ask the idle ones, wait for enough, join in the order of the runners."""
        self._start()
        self.requests.in_flight = 1
        self.requests.fill(self._allowed())
        began, arrived, came, first = time.perf_counter(), [], [], self._came == 0
        for _ in range(part_of(self.spec.count, min_fraction)):
            came.append(self._take())
            arrived.append(time.perf_counter())
        if not first:  # that one holds the runners' start
            self._rounds += self.spec.count * (arrived[-1] - began)
            self._idle += sum(arrived[-1] - at for at in arrived)
        return self._joined([sample for _, sample in sorted(came, key=lambda x: x[0])])

    def next(self, in_flight: int = 2) -> Batch:
        """Ask again whoever has less than so many requests, and wait for the first result."""
        self._start()
        self.requests.in_flight = in_flight
        self.requests.fill(self._allowed())
        return self._joined([self._take()[1]])

    def _ask(self, index: int) -> Future:
        with self._asking:
            due = cast("Published", self._next(index))  # every runner got the first weights
            self._asked[index].append(due.version)
            return self.pool.submit(index, "sample", self._lacking(index, due))

    def _next(self, index: int) -> Published | None:
        """What the next request to a runner is to use: the newest that it is to get and that is there; or is waited for, where lag is paced."""
        coming = self._coming[index]
        while coming and (self._due[index] is None or self._paced or coming[0].there(self.pool)):
            self._due[index] = coming.popleft()
        return self._due[index]

    def _take(self) -> tuple[int, Sample]:
        """The next result, and whose it is. A runner that is lost is started anew and asked again."""
        while True:
            try:
                request = self.requests.next(self.spec.timeout)
            except Late as late:
                error = RuntimeFailed(f"{self.site.name}, runner {late.worker} gave nothing for {late.seconds:g} s")
                self._restart(late.worker, 0, error, self.requests.going[late.worker][0].future)
                continue
            worker = request.worker
            self._asked[worker].popleft()
            try:
                with TRANSFER:
                    sample: Sample = request.result()
            except RuntimeFailed as error:
                self._restart(worker, 1, error, request.future)
            except EnvironmentFailed as error:
                if self.spec.on_error == "stop":
                    raise
                self._restart(worker, 1, error, None)
            else:
                self._failures[worker] = 0
                self._gone[worker] += 1
                self._came += 1
                here().mark("came", f"{self.site.name}, {worker}")
                return worker, sample

    def _restart(self, worker: int, lost: int, error: FlowrlError, because: Future | None) -> None:
        """Start a runner anew, unless it fails again and again: each time in a row is waited for twice as long.

        Raises:
            FlowrlError: `error`, after as many restarts as it has.
        """
        if because is None or self.pool.current(because):  # if not, it only lost its process to another one's failure
            failures = self._failures[worker]
            if failures >= self.spec.restarts or self._closing.is_set():
                if failures:
                    error.message += f"; it was started anew {failures} time{'s' * (failures > 1)} in a row, and failed again"
                raise error
            self._failures[worker] += 1
            if failures:
                self._closing.wait(0.1 * 2**failures)
        lost += len(self.requests.replace(worker))
        self.pool.restart(worker, self.requests.incarnations[worker], because)
        self._asked[worker].clear()
        self._lent[worker] = None
        self.pool.submit(worker, "go_on", self._gone[worker] * self.spec.fragment)
        if self._chain is not None:
            self.pool.submit(worker, "localize", self._chain)
        self._because = str(error)
        steps = lost * self.spec.fragment * self.spec.envs
        self.site.count(restarts=1, lost_requests=lost, lost_steps=steps)
        self.site.stream.emit(Restarted(self.site.name, worker, str(error), steps))
        self._told.restart(steps)
        for _ in range(lost):
            self.requests.ask(worker)

    def _joined(self, samples: list[Sample]) -> Batch:
        # Episodes are noted in the order of the runners, or the last 100 of them would depend on whose answer came first.
        for sample in samples:
            self._told.note(sample.episodes)
        batch = Batch.join([sample.batch for sample in samples])
        self.site.count(requests=len(samples), sampled_steps=batch.steps, outstanding=len(self.requests))
        return batch

    def episodes(self) -> dict[str, Any]:
        """Drain what gathered with the samples."""
        return self._told.tell()

    def evaluate(self, episodes: int, seed: int, max_steps: int = MAX_STEPS) -> dict[str, float]:
        """Share the episodes among the runners. Those of one that is lost meanwhile are missing; it is started anew by the next sample."""
        newest = self._start()
        shares = [part for part in np.array_split(np.arange(episodes), len(self.pool)) if len(part)]
        with self._asking:
            calls = [
                self.pool.submit(i, "evaluate", self._lacking(i, newest), len(part), seed + int(part[0]), max_steps) for i, part in enumerate(shares)
            ]
        parts: list[Evaluation] = []
        for call in calls:
            try:
                parts.append(call.result())
            except (RuntimeFailed, EnvironmentFailed) as error:
                if isinstance(error, EnvironmentFailed) and self.spec.on_error == "stop":
                    raise
        self.site.count(evaluations=1, evaluated_episodes=episodes)
        return self._told.evaluate(parts)

    def _start(self) -> Published:
        """The newest weights, which are runners' own where no learner gave them any."""
        if self._latest is None:
            self.publish(self.site.run(network(self.spec.policy, self.spaces).init, self.site.key("weights")), np.int32(0))
        return cast("Published", self._latest)

    def _lacking(self, index: int, wanted: Published) -> Any:
        """The weights as a worker takes them, if this one was not sent them last."""
        lacks, self._lent[index] = self._lent[index] is not wanted, wanted
        return wanted.sent(self.pool) if lacks else None


@dataclass(frozen=True)
class Runners(Resource):
    """`count` runners, each with `envs` environments, that give fragments of `fragment` steps per environment.

    Args:
        env: a Gymnasium id, or a function that makes an environment (or a vector of exactly `envs`).
        policy: what acts.
        count: runners: one after another in this process; on Ray each a thread, in processes that they share.
        envs: environments per runner.
        fragment: steps per environment and call.
        wrappers: put around each environment, the first one innermost.
        env_settings: keyword arguments for making an environment.
        timeout: seconds that a fragment may take on Ray; a runner that takes longer is killed and restarted. It doubles after each
            restart in a row, for starting takes part of it. None for any.
        restarts: how often in a row a runner whose process ended or hung is started anew; 0 for never.
        on_error: what happens when an environment raises or breaks its spaces: the run stops, or its runner is started anew.
        explore: how actions are picked from what the policy gives.
        normalize_rewards: the discount of the returns whose running deviation rewards are divided by, each runner's
            by its own; None for no scaling.
        clip_rewards: the bound of the rewards that are learned from, once they are scaled; None for any. Episode returns are those of the
            environment, neither scaled nor clipped.
        metrics: keys of the `info` that Gymnasium environments give with a step, numbers that each Row tells as ``env/KEY``, ``/min`` and ``/max``.
    """

    env: Make
    policy: Policy
    count: int = 1
    envs: int = 8
    fragment: int = 128
    wrappers: tuple[Callable[[Any], Any], ...] = ()
    env_settings: Mapping[str, Any] = field(default_factory=dict)
    timeout: float | None = None
    restarts: int = 3
    on_error: Literal["stop", "restart"] = "stop"
    explore: Explore = SAMPLED
    normalize_rewards: float | None = None
    clip_rewards: float | None = None
    metrics: tuple[str, ...] = ()

    handle: ClassVar[type[Handle]] = RunnersHandle  # type: ignore[type-abstract]  # GymRunners or JaxRunners

    def __post_init__(self) -> None:
        for name in ("count", "envs", "fragment"):
            if getattr(self, name) < 1:
                raise SettingError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.restarts < 0 or (self.timeout is not None and self.timeout <= 0):
            raise SettingError(f"restarts must not be negative and timeout above 0 or None, got restarts={self.restarts}, timeout={self.timeout}")
        if self.clip_rewards is not None and self.clip_rewards <= 0:
            raise SettingError(f"clip_rewards must be above 0 or None, got {self.clip_rewards}")
        if self.on_error not in ("stop", "restart"):
            raise SettingError(f"on_error must be stop or restart, got {self.on_error!r}")
        if isinstance(self.env, gym.Env | VectorEnv):
            raise SettingError(f"env must be an id, a class or a function that makes an environment, got one that is made already: {self.env}")
        if not isinstance(self.explore, Explore):
            raise SettingError(f"explore must be one such as fl.EpsilonGreedy(), got {self.explore!r}")
        if wrong := hidden(self.explore, Explore):
            raise SettingError(f"explore: {wrong}")
        if wrong := next(filter(None, (misnamed(key, "env/") for key in self.metrics)), ""):
            raise SettingError(f"metrics: {wrong}")
        if not isinstance(self.policy, Policy):
            raise SettingError(f"policy must be fl.Policy(ModuleClass, **settings), got {self.policy!r}")

    def __hash__(self) -> int:
        return hash((self.env, self.policy, self.count, self.envs, self.fragment, self.explore))

    def spaces(self) -> Spaces:
        """The spaces of the environment, found by making one."""
        return self._probed[0]

    @property
    def jax_env(self) -> JaxEnv | None:
        """The environment itself, if it is one written in JAX."""
        return self._probed[1]

    @cached_property
    def _probed(self) -> tuple[Spaces, JaxEnv | None]:
        return probe(self.env, self.wrappers, self.env_settings)

    def open(self, site: Site | None = None) -> RunnersHandle:
        """Start the runners. Without a site: in this process and without any graph, with first weights of their own.

        Those over an environment written in JAX are pure functions here, and workers only where these are in other processes.

        >>> import flowrl as fl
        >>> runners = fl.Runners("CartPole-v1", fl.Policy(fl.MLP), envs=4, fragment=16).open()
        >>> runners.collect()["obs"].shape
        (16, 4, 4)
        >>> runners.close()
        """
        here: Site = site or alone("runners", self)
        if self.metrics and self.jax_env is not None:
            raise SettingError("metrics: an environment in JAX tells no info with its steps; compute them from obs in an operator, by ctx.metric")
        return GymRunners(self, here) if self.jax_env is None or here.elsewhere else JaxRunners(self, here)

    def review(self, use: Use) -> Iterator[tuple[str, str]]:
        """Do new weights ever reach them, and can they explore so?"""
        if use.traced and (wrong := self.explore.check(network(self.policy, self.spaces()).head)):
            yield use.name, wrong
        if use.traced and use.total("requests") and not use.total("publishes") and any(use.total("updates", other) for other in use.resources):
            yield (
                use.name,
                "act with their first weights for ever, for no node publishes new ones to them; add sync=SyncWeights() behind TrainOneStep",
            )

    def describe(self) -> str:
        """``2 runners x 8 envs x 128 steps of CartPole-v1``, and how they explore if not by the policy's own chance."""
        parts = [f"{n} {word}{'s' * (n != 1)}" for n, word in ((self.count, "runner"), (self.envs, "env"), (self.fragment, "step"))]
        explore = "" if isinstance(self.explore, Sampled) else f", {type(self.explore).__name__}"
        return f"{' x '.join(parts)} of {env_name(self.env)}{explore}"
