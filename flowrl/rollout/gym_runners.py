"""`GymRunners`: the handle of runners over Gymnasium environments, each a worker of the site."""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import partial
from threading import Event, Lock
from typing import TYPE_CHECKING, Any, ClassVar, cast

import jax
import numpy as np

from flowrl.core.clock import TRANSFER, UPDATE, Reading, here
from flowrl.core.events import Restarted, Warned
from flowrl.core.remote import near
from flowrl.core.texts import plural
from flowrl.envs.gym_envs import steps_singly
from flowrl.errors import EnvError, FlowrlError, GraphError, LostError, RunError, lasting
from flowrl.graph.graph import Chain
from flowrl.graph.protocols import Future, Site, Workers
from flowrl.rl.policies import Weights, network
from flowrl.rollout.handle import OTHER_CHAIN, allowed_requests, part_of
from flowrl.rollout.local_chain import joined
from flowrl.rollout.playing_runners import PlayingRunners
from flowrl.rollout.published import Published, WeightsByRunner, as_states
from flowrl.rollout.requests import KEEP_SECONDS, AsyncRequests, LateError, kept_result
from flowrl.rollout.runner import Runner
from flowrl.rollout.runner_stub import RunnerStub
from flowrl.rollout.sample import Sample
from flowrl.rollout.statistics import EpisodeStatistics

if TYPE_CHECKING:
    from flowrl.rollout.runners import Runners

NOTABLE = 0.05
"""The least share of the runners' time in rounds at which waiting is reported as a finding."""


class GymRunners(PlayingRunners):
    """Handle of runners over Gymnasium environments, which are workers of the site.

    Published weights are put once, and each runner gets a reference to them with its next request.

    Args:
        spec: the settings of the runners.
        site: the site that makes the workers.
    """

    lasting = (
        "requests", "_weights", "_pending_versions", "_statistics", "_restarts_in_a_row",
        "_rollouts_received", "_received_in_total", "_last_restart_reason", "_seconds_in_rounds",
        "_seconds_idle", "_turns",
    )  # fmt: skip
    remade: ClassVar[tuple[str, ...]] = (
        "spec", "site", "spaces", "environments", "pool", "_pacing", "_local_chain",
        "_request_lock", "_is_closing", "_work",
        "_late",
    )  # fmt: skip

    def __init__(self, spec: Runners, site: Site) -> None:
        self.spec = spec
        self.site = site
        self.environments = spec.num_runners * spec.envs_per_runner
        self.pool = self._open_pool()
        self.requests = AsyncRequests(
            self._submit_sample,
            self.pool.wait,
            spec.num_runners,
            report_silent=self._report_silent,
        )
        self._weights = self._no_weights()
        self._pacing: tuple[int, Fraction] | None = None
        """The largest policy lag and the updates per rollout, if requests are paced."""
        self._local_chain: Chain | None = None
        """The operators that every rollout goes through at the sampler, if there are any."""
        self._pending_versions: list[deque[Any]] = [deque() for _ in range(spec.num_runners)]
        """By runner: the policy versions of its requests that have no result yet."""
        self._work = {}
        self._late = {}
        self._request_lock = Lock()  # for calls to go out in the order of the weights they carry
        self._statistics = self._no_statistics()
        self._restarts_in_a_row = [0] * spec.num_runners
        """By runner: restarts since its last result."""
        self._rollouts_received = [0] * spec.num_runners
        """By runner: rollouts that it returned."""
        self._turns = [0] * spec.num_runners
        """By runner: the steps for which it had acted by the last of them."""
        self._received_in_total = 0
        """Rollouts that all runners returned."""
        self._last_restart_reason = ""
        """The error for which the last runner was restarted."""
        self._is_closing = Event()
        self._seconds_in_rounds = self._seconds_idle = 0.0
        """Runner-seconds in rounds, and of these between a rollout and the end of its round."""

    def _open_pool(self) -> Workers:
        self.spaces = self.spec.spaces()
        return self.site.workers(
            self.spec.num_runners,
            partial(Runner, self.spec, self.site.name, self.site.seed),
            partial(RunnerStub, self.spec, self.site),
        )

    def _no_weights(self) -> Any:
        return WeightsByRunner(self.pool, self.spec.num_runners)

    def _no_statistics(self) -> Any:
        return EpisodeStatistics(self.site, self.spec.metrics)

    def close(self) -> None:
        """Close all runners and their environments."""
        self._is_closing.set()
        if self._received_in_total:
            self._statistics.warn_of_missing_keys()
        self.pool.close()

    def keep(self) -> Any:
        """Return what lasts, the runners' own state among it, after their calls have ended.

        Of a runner that is lost or hangs there is None: when the run is resumed, it is a new one.
        """
        runners = [self.pool.submit(i, "keep") for i in range(self.spec.num_runners)]
        # Their older calls end first, and are waited for until almost the same moment.
        until = self.requests.now() + KEEP_SECONDS
        state = super().keep()
        # A call that failed, or hangs, is made again with the newest weights.
        state["_pending_versions"] = self.requests.of_kept(
            self._pending_versions, state["requests"]
        )
        # Where something is placed, arrays come as remote ones.
        kept = [
            kept_result(each, self.pool.wait, until - self.requests.now())[1] for each in runners
        ]
        return {**state, "runners": list(map(near, kept))}

    def take(self, state: Any) -> None:
        """Go on from what was kept."""
        super().take(self.lasting_of(state))
        calls = []
        for runner, kept in enumerate(state["runners"]):
            verb, what = ("go_on", self._turns[runner]) if kept is None else ("take", kept)
            calls.append(self.pool.submit(runner, verb, what))
        for call in calls:
            call.result()

    def clocks(self) -> dict[str, Reading]:
        """Return the clock readings of the workers, by worker."""
        return self.pool.clocks()

    def facts(self) -> dict[str, Any]:
        """Return the numbers of runners, environments and rollouts, and how their time was spent.

        Returns:
            The settings ``count`` and ``envs``; ``singly``, whether environments step one after
            another; the rollouts by runner; ``rounds``, the runner-seconds in rounds and of these
            those of waiting for the slowest; ``remote``, whether runners are in other processes;
            ``unreported``, environment steps that no row has yet.
        """
        return {
            "count": self.spec.num_runners,
            "envs": self.spec.envs_per_runner,
            "singly": steps_singly(self.spec.env, self.spec.wrappers),
            "rollouts": list(self._rollouts_received),
            "rounds": [self._seconds_in_rounds, self._seconds_idle],
            "remote": self.site.remote,
            "unreported": self._statistics.unreported,
        }

    def findings(self) -> Iterator[str]:
        """Yield how often runners were restarted, and what waiting for the slowest costs."""
        name = self.site.name
        if times := self._statistics.restarted.get("restarts"):
            reason = f"the last time because: {self._last_restart_reason}"
            yield f"{name}: restarted {times} {plural(times, 'time')}, {reason}"
        share = self._seconds_idle / self._seconds_in_rounds if self._seconds_in_rounds else 0.0
        # Runners of this process step one after another, so none of them waits for another.
        if len(self.pool) > 1 and share >= NOTABLE and self.site.remote:
            remedy = "mode='async' with a Queue would use all of it, and min_fraction=0.8 a part"
            yield (
                f"{name}: {share:.0%} of the runners' time in rounds goes to waiting for the "
                f"slowest; {remedy}"
            )

    def publish(self, weights: Weights, version: Any, to: Any = None, wait: bool = True) -> None:
        """Publish new weights, which the next request to each runner that gets them carries.

        Args:
            weights: arrays by name.
            version: the policy version, which is the learner's.
            to: the numbers ``[B]`` of the runners that get them; None for all.
            wait: whether to wait until they are computed.
        """
        self._publish(self._weights, weights, version, to, wait)

    def _publish(self, kept: Any, weights: Weights, version: Any, to: Any, wait: bool) -> None:
        new = Published(weights, version)
        if wait:
            # Until the weights are there, it is the learner's update that time goes to.
            with UPDATE:
                jax.block_until_ready(weights)
            # The weights are put now, so that no request has to do it.
            new.reference(self.pool)
        runners = range(self.spec.num_runners) if to is None else np.unique(to)
        with self._request_lock:
            kept.add(new, runners, self._waits_for_newest)
        self._count_published(weights, version, wait)

    def localize(self, chain: Chain) -> None:
        """Make every runner pass its rollouts through these operators before it sends them.

        Args:
            chain: the operators by name.

        Raises:
            GraphError: they do so already with other operators.
        """
        if self._local_chain not in (None, chain):
            raise GraphError(OTHER_CHAIN)
        self._local_chain = chain
        # All runners are asked before any is waited for.
        for call in [self.pool.submit(i, "localize", chain) for i in range(self.spec.num_runners)]:
            call.result()

    def pace(self, max_lag: int, updates: Fraction) -> None:
        """Pace the requests from the next one on, as `RunnersHandle.pace` says."""
        # The ages of weights are what the pacing looks at, so there must be some.
        self._start()
        self._pacing = (max_lag, updates)

    @property
    def _waits_for_newest(self) -> bool:
        """Whether requests wait for the newest weights: where the policy lag is paced.

        With older weights the pacing might allow no request at all, and nothing would wake the
        stage when the newest are computed.
        """
        return self._pacing is not None

    def may(self, min_fraction: float = 0.0) -> bool:
        """Return whether enough requests for a part of a round may be made, or are pending."""
        wanted = part_of(self.spec.num_runners, min_fraction)
        return len(self.requests) + self._allowed() >= wanted

    def _allowed(self) -> float:
        """Return how many more requests the pacing allows; infinity without pacing."""
        if self._pacing is None:
            return math.inf
        # Weights may still act by a request without a result, or by one that is still to be made.
        with self._request_lock:
            pending = list(itertools.chain.from_iterable(self._pending_versions))
            selected = [self._select(runner) for runner in range(self.spec.num_runners)]
        oldest = min(pending + [weights.version for weights in selected if weights])
        rollouts = self._received_in_total + len(self.requests)
        return allowed_requests(*self._pacing, int(oldest), rollouts)

    @property
    def state(self) -> Any:
        """Policy versions of the weights at hand and of pending requests, and how far pacing is.

        ``due`` holds the newest version and, by runner, that of its next request; ``asked``, by
        runner, those of its requests without a result; ``paced``, how many requests the pacing
        still allows and the order of the runners.
        """
        asked = [as_states(versions) for versions in self._pending_versions]
        with self._request_lock:
            selected = [self._select(runner) for runner in range(self.spec.num_runners)]
            weights = (self._weights.newest, *selected)
        return {
            "due": as_states(w.version if w else np.int32(0) for w in weights),
            "asked": asked,
            "paced": (self._allowed(), *self.requests.order()) if self._pacing else (),
        }

    def collect(self, min_fraction: float = 1.0) -> Any:
        """Ask the idle runners, wait for enough rollouts, and join them in the runners' order.

        Args:
            min_fraction: the part of the runners whose rollouts are enough.

        Returns:
            A batch ``[rollout_length, ceil(min_fraction x num_runners) x envs_per_runner]``.

        Raises:
            EnvError: an environment raised, gave NaN, or broke its declared shape or type.
            RunError: a runner was lost more often in a row than `restarts` allows.
        """
        self._start()
        self.requests.in_flight = 1
        self.requests.fill(self._allowed())
        is_first_round = self._received_in_total == 0
        began = time.perf_counter()
        arrivals, received = [], []
        for _ in range(part_of(self.spec.num_runners, min_fraction)):
            received.append(self._receive())
            arrivals.append(time.perf_counter())
        # The first round holds the runners' start, which says nothing about the later ones.
        if not is_first_round:
            end = arrivals[-1]
            self._seconds_in_rounds += self.spec.num_runners * (end - began)
            self._seconds_idle += sum(end - arrival for arrival in arrivals)
        received.sort(key=lambda runner_and_sample: runner_and_sample[0])
        return self._join([sample for _, sample in received])

    def next(self, in_flight: int = 2) -> Any:
        """Keep every runner busy with requests, and wait for the first result.

        Args:
            in_flight: requests to each runner at once.

        Returns:
            A batch ``[rollout_length, envs_per_runner]`` of one runner.

        Raises:
            EnvError: an environment raised, gave NaN, or broke its declared shape or type.
            RunError: a runner was lost more often in a row than `restarts` allows.
        """
        self._start()
        self.requests.in_flight = in_flight
        self.requests.fill(self._allowed())
        _, sample = self._receive()
        return self._join([sample])

    def _submit_sample(self, runner: int) -> Future:
        """Ask a runner for a rollout, or what `_work` says, with the weights that it uses next."""
        with self._request_lock:
            weights = cast("Published", self._select(runner))  # every runner got the first weights
            self._pending_versions[runner].append(weights.version)
            references = self._weights.references_if_unsent(runner, weights)
            return self.pool.submit(runner, *self._work.get(runner, ("sample",)), *references)

    def _select(self, runner: int) -> Published | None:
        """Return the weights that the next request to a runner is to use. Needs `_request_lock`."""
        return cast("Published | None", self._weights.select(runner, self._waits_for_newest))

    def _receive(self) -> tuple[int, Sample]:
        """Return the next result and its runner; restart and ask again runners that are lost."""
        while True:
            try:
                request = self.requests.next(self.spec.timeout)
            except LateError as late:
                # Its request is still pending, so the restart finds it among the lost ones.
                self._restart_late(late)
                continue
            runner = request.worker
            self._pending_versions[runner].popleft()
            try:
                with TRANSFER:
                    sample: Sample = request.result()
            except RunError as error:
                self._restart(runner, 1, error, request.future)
            except EnvError as error:
                if self.spec.on_error == "stop":
                    raise
                self._restart(runner, 1, error, None)
            else:
                self._count_received(runner, sample)
                return runner, sample

    def _count_received(self, runner: int, sample: Sample) -> None:
        """Count a rollout of a runner, which ends a series of restarts."""
        self._restarts_in_a_row[runner] = 0
        self._rollouts_received[runner] += 1
        self._turns[runner] = sample.turn
        self._received_in_total += 1
        here().mark("received", f"{self.site.name}, {runner}")

    def _report_silent(self, runners: Sequence[int], seconds: float) -> None:
        """Warn of runners that may hang, for which no time-out is set."""
        more = f" (and {len(runners) - 1} more)" if len(runners) > 1 else ""
        text = (
            f"runner {runners[0]}{more} has given nothing for {seconds:.0f} s; if its environment "
            "hangs, set the `timeout` of Runners, after which such a runner is restarted"
        )
        self.site.stream.emit(Warned(f"{self.site.name}: {text}"))

    def _restart_late(self, late: LateError) -> None:
        """Restart a runner that let its oldest request wait for too long."""
        runner = late.worker
        text = f"{self.site.name}, runner {runner} gave nothing for {late.seconds:g} s"
        self._restart(runner, 0, RunError(text), self.requests.going[runner][0].future)

    def _restart(self, runner: int, lost: int, error: FlowrlError, because: Future | None) -> None:
        """Restart a runner and repeat its requests.

        Args:
            runner: its number.
            lost: requests that are lost beside those without a result.
            error: why it is restarted.
            because: the call for whose sake its process is to be restarted too; None for only the
                runner.

        Raises:
            FlowrlError: `error`, after as many restarts in a row as the settings allow.
        """
        # That its process ended says less than why an evaluation ended it.
        if (why := self._late.pop(runner, "")) and isinstance(error, LostError):
            error.message = f"{self.site.name}, runner {runner}: {why}"
        # A call to a process that has been replaced failed because of another runner's failure.
        if because is None or self.pool.current(because):
            self._wait_before_restart(runner, error)
        lost += len(self.requests.replace(runner))
        # No other thread may ask the new runner for anything before it gets weights again.
        with self._request_lock:
            self.pool.restart(runner, self.requests.restart_counts[runner], because)
            self._pending_versions[runner].clear()
            self._weights.forget_sent(runner)
            # The new runner explores on from where the old one was, through the same operators.
            self.pool.submit(runner, "go_on", self._turns[runner])
            if self._local_chain is not None:
                self.pool.submit(runner, "localize", self._local_chain)
        self._report_restart(runner, lost, error)
        # The lost requests are repeated, with the newest weights.
        for _ in range(lost):
            self.requests.ask(runner)

    def _wait_before_restart(self, runner: int, error: FlowrlError) -> None:
        """Count a restart; wait before the second in a row, and twice as long before each next one.

        Raises:
            FlowrlError: `error`, after as many restarts in a row as the settings allow.
        """
        restarts = self._restarts_in_a_row[runner]
        if restarts >= self.spec.restarts or self._is_closing.is_set():
            if restarts:
                times = f"{restarts} {plural(restarts, 'time')}"
                error.message += f"; it was restarted {times} in a row, and failed again"
            raise lasting(error)
        self._restarts_in_a_row[runner] += 1
        if restarts:
            self._is_closing.wait(0.1 * 2**restarts)

    def _report_restart(self, runner: int, lost: int, error: FlowrlError) -> None:
        """Count a restart and the environment steps of the requests lost by it."""
        self._last_restart_reason = str(error)
        steps = lost * self.spec.rollout_length * self.spec.envs_per_runner
        if runner in self._work:
            steps = 0  # how long the episodes of that work are, nobody knows
        self.site.count(restarts=1, lost_requests=lost, lost_steps=steps)
        self.site.stream.emit(Restarted(self.site.name, runner, str(error), steps))
        self._statistics.restart(steps)

    def _join(self, samples: list[Sample]) -> Any:
        """Join the rollouts of some samples to one item, and count them."""
        # Episodes are noted in the order of the runners: else the last 100 of them would depend on
        # whose result came first.
        for sample in samples:
            self._statistics.note(sample.episodes)
        # Operators at the sampler may make anything of a rollout, so its steps are counted here.
        steps = len(samples) * self.spec.envs_per_runner * self.spec.rollout_length
        self.site.count(requests=len(samples), sampled_steps=steps, outstanding=len(self.requests))
        return joined([sample.batch for sample in samples], self.site.run)

    def episodes(self) -> dict[str, Any]:
        """Return and reset what was counted since the last call, as `RunnersHandle` says."""
        return cast("dict[str, Any]", self._statistics.drain())

    def _start(self) -> Published:
        """Return the newest weights; where no learner published any, publish first ones."""
        if self._weights.newest is None:
            init = network(self.spec.policy, self.spaces).init
            self.publish(self.site.run(init, self.site.key("weights")), np.int32(0))
        return cast("Published", self._weights.newest)
