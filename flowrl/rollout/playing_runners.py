"""`PlayingRunners`: runners that are workers, and play whole episodes beside their rollouts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from flowrl.core.events import Warned
from flowrl.core.items import Batch
from flowrl.errors import EnvError, GraphError, RunError
from flowrl.graph.protocols import Future, Workers
from flowrl.rl.evolution import seeds_of
from flowrl.rl.policies import Weights
from flowrl.rollout.checks import check_perturbed
from flowrl.rollout.evaluation import MAX_STEPS, Evaluation
from flowrl.rollout.handle import RunnersHandle
from flowrl.rollout.published import Published
from flowrl.rollout.requests import AsyncRequests
from flowrl.rollout.sample import Sample

if TYPE_CHECKING:
    from flowrl.rollout.runners import Runners


class PlayingRunners(RunnersHandle):
    """Handle of runners that are workers of the site: their evaluations, greedy or perturbed."""

    spec: Runners
    """The settings of the runners."""
    pool: Workers
    """The workers."""
    requests: AsyncRequests
    """The calls to them, each for a rollout or for what `_work` says."""
    _weights: Any
    """The published weights, by runner."""
    _statistics: Any
    """The episodes since the last Row."""
    _request_lock: Lock
    """Held for calls to go out in the order of the weights that they carry."""
    _late: dict[int, str]
    """By runner whose process was ended because its evaluation was late: what to say of it."""
    _work: dict[int, tuple[Any, ...]]
    """By runner: the verb that is called in place of ``sample``, and its arguments."""

    @abstractmethod
    def _start(self) -> Published:
        """Return the newest weights; where no learner published any, publish first ones."""

    @abstractmethod
    def _receive(self) -> tuple[int, Sample]:
        """Return the next result and its runner; restart and ask again runners that are lost."""

    def evaluate(self, episodes: int, seed: int, max_steps: int = MAX_STEPS) -> dict[str, float]:
        """Play whole episodes greedily with the newest weights, shared among the runners.

        The episodes of a runner that is lost meanwhile, or takes longer than `evaluation_timeout`,
        or whose environment fails, are missing, which is reported. The next sample restarts a lost
        runner; after a failed environment there is nothing to restart, for an evaluation has
        environments of its own.

        Args:
            episodes: how many.
            seed: of the environments, which are made for this.
            max_steps: after so many steps an episode is cut.

        Returns:
            Numbers by the names in `EVALUATED`.

        Raises:
            EnvError: an environment failed, and `on_error` is ``stop``.
        """
        parts: list[Evaluation] = []
        began = self.requests.now()
        for runner, call in enumerate(self._submit_evaluations(episodes, seed, max_steps)):
            try:
                parts.append(self._played(runner, call, began))
            except (RunError, EnvError) as error:
                # The evaluation goes on without the episodes of this runner.
                if isinstance(error, EnvError) and self.spec.on_error == "stop":
                    raise
                text = f"an evaluation lacks the episodes of runner {runner}: {error}"
                self.site.stream.emit(Warned(f"{self.site.name}: {text}"))
            finally:
                self.requests.end_other(runner)
        self.site.count(evaluations=1, evaluated_episodes=sum(map(len, parts)))
        return cast("dict[str, float]", self._statistics.evaluate(parts))

    def _played(self, runner: int, call: Future, began: float) -> Evaluation:
        """Wait for the episodes of a runner, and end its process where they are late.

        Args:
            runner: its number.
            call: the call to it.
            began: when all runners were asked, in seconds of ``requests.now``.

        Raises:
            RunError: the runner was lost, or its episodes are late.
        """
        if (timeout := self.spec.evaluation_timeout) is not None:
            # A process that has to start first takes longer, as it does for a rollout.
            seconds = timeout * self.requests.patience[runner]
            left = max(0.0, began + seconds - self.requests.now())
            if self.pool.wait([call], left) is None:
                why = (
                    f"they took longer than {seconds:g} s (evaluation_timeout); raise it if the "
                    "environment does not hang, or bound episodes by the max_steps of Evaluate"
                )
                # The stage that owns the runners restarts them, once their calls fail.
                self._late[runner] = (
                    f"its process was ended for late episodes of an evaluation: {why}"
                )
                self.pool.end(call)
                raise RunError(why)
        evaluation: Evaluation = call.result()
        return evaluation

    def evaluated(self) -> Weights | None:
        """Return the weights of the last evaluation, as `RunnersHandle` says."""
        played = self._weights.evaluated
        return None if self._statistics.evaluated or played is None else played.weights

    def _submit_evaluations(self, episodes: int, seed: int, max_steps: int) -> list[Future]:
        """Ask each runner to play its share of the episodes; none is asked to play no episode."""
        newest = self._weights.evaluated = self._start()
        calls = []
        for runner, share in enumerate(_shares(np.arange(episodes), len(self.pool))):
            # Episode number i begins with seed + i, whichever runner plays it.
            how = (len(share), seed + int(share[0]), max_steps)
            submit = partial(self._submit_evaluation, runner, newest, *how)
            # A rollout that is requested meanwhile waits for the evaluation, and is not late.
            calls.append(self.requests.give_other(runner, submit))
        return calls

    def _submit_evaluation(self, runner: int, weights: Published, *how: int) -> Future:
        """Ask a runner to play episodes: how many, from which seed on, and their most steps."""
        with self._request_lock:
            references = self._weights.references_if_unsent(runner, weights)
            return self.pool.submit(runner, "evaluate", how, *references)

    def perturbed(self, node: str, turn: Any, **how: Any) -> Batch:
        """Play episodes with perturbed weights, shared among the runners by pairs.

        A runner that is lost is restarted and asked for the same again, as it is for a rollout.
        What a share of the pairs returns depends on its seeds alone, so a lost runner changes
        nothing.

        Args:
            node: name of the node that asks.
            turn: ``uint32[]``, how often it asked before.
            **how: as `RunnersHandle.perturbed` says.

        Raises:
            EnvError: an environment raised, gave NaN, or broke its declared shape or type.
            GraphError: there are several agents, the runners have settings that such episodes do
                not follow, or rollouts are still under way.
            RunError: a runner was lost more often in a row than `restarts` allows.
        """
        if self.spec.agents:
            return super().perturbed(node, turn, **how)
        check_perturbed(self.spec)
        self._start()
        if len(self.requests):
            raise GraphError(
                "can't ask for perturbed episodes while rollouts of the same runners are under "
                "way; give ParallelEvaluate runners of its own"
            )
        pairs = how.pop("pairs")
        seeds = self.site.run(seeds_of, self.site.key("perturbed", node), turn, pairs=pairs)
        known = np.asarray(self.site.known(seeds, np.zeros(pairs, np.uint32)))
        shares = _shares(known, len(self.pool))
        self._work = {i: ("perturbed", share, how) for i, share in enumerate(shares)}
        self.requests.in_flight = 1
        for runner in self._work:
            self.requests.ask(runner)
        received = sorted((self._receive() for _ in shares), key=lambda each: each[0])
        self._work = {}
        for _, sample in received:
            self._statistics.note(sample.episodes)
        episodes = 2 * pairs * how["episodes"]
        self.site.count(
            requests=len(shares),
            perturbed_episodes=episodes,
            most_sampled_steps=episodes * how["max_steps"],
        )
        return Batch.join([sample.batch for _, sample in received])


def _shares(work: np.ndarray[Any, Any], runners: int) -> Sequence[np.ndarray[Any, Any]]:
    """Return the shares of work of the first runners, as even as can be; none of them is empty."""
    return [share for share in np.array_split(work, runners) if len(share)]
