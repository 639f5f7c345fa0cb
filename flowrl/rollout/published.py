"""Published policy weights, and which of them the next request to each runner carries."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable
from typing import Any

from flowrl.core.clock import WEIGHTS
from flowrl.core.keeping import Keeping
from flowrl.graph.protocols import Workers
from flowrl.rl.policies import Weights


class Published:
    """Policy weights on their way to the runners.

    Args:
        weights: arrays by name.
        version: the policy version, which is the learner's.
    """

    def __init__(self, weights: Weights, version: Any) -> None:
        self.weights = weights
        self.version = version
        self._reference: Any = None
        """What the workers take in place of the weights; None until these were put."""

    def reference(self, pool: Workers) -> Any:
        """Return the weights as the workers take them, after putting them on the first call."""
        if self._reference is None:
            with WEIGHTS:
                self._reference = pool.put((self.weights, self.version))
        return self._reference

    def is_ready(self, pool: Workers) -> bool:
        """Return whether the weights can be sent without waiting for their computation."""
        return self._reference is not None or pool.ready(self.weights)


class WeightsByRunner(Keeping):
    """Keeps, by runner, the weights that its next request uses and those that it was sent last.

    It has no lock of its own: callers from several threads hold one around its methods.

    Args:
        pool: the workers that the runners are.
        count: the number of runners.
    """

    lasting = ("newest", "evaluated", "_selected", "_newer")
    # A new runner has none: its next request carries its weights.
    remade = ("_pool", "_last_sent")

    def __init__(self, pool: Workers, count: int) -> None:
        self.newest: Published | None = None
        """The newest weights of all; None before the first were published."""
        self.evaluated: Published | None = None
        """Those that played the last evaluation; None before the first."""
        self._pool = pool
        self._selected: list[Published | None] = [None] * count
        """By runner: the weights that its next request uses unless newer ones are ready by then."""
        self._newer: list[deque[Published]] = [deque() for _ in range(count)]
        """By runner: newer weights, the oldest first, which may still be being computed."""
        self._last_sent: list[Published | None] = [None] * count
        """By runner: the weights that it was sent last, None if it has none."""

    def keep(self) -> Any:
        """Return the weights, each once, and by runner which of them it uses."""
        every = [
            self.newest,
            self.evaluated,
            *self._selected,
            *itertools.chain.from_iterable(self._newer),
        ]
        several = {id(each): each for each in every if each is not None}
        number = {key: i for i, key in enumerate(several)} | {id(None): None}

        def numbers(several: Iterable[Published | None]) -> list[int | None]:
            return [number[id(each)] for each in several]

        return {
            "weights": [(each.weights, each.version) for each in several.values()],
            "newest": number[id(self.newest)],
            "evaluated": number[id(self.evaluated)],
            "selected": numbers(self._selected),
            "newer": [numbers(waiting) for waiting in self._newer],
        }

    def take(self, state: Any) -> None:
        """Go on with the weights that were kept, none of which any runner has."""
        several = dict(enumerate(itertools.starmap(Published, state["weights"])))
        self.newest = several.get(state["newest"])
        self.evaluated = several.get(state["evaluated"])
        self._selected = [several.get(i) for i in state["selected"]]
        self._newer = [deque(map(several.__getitem__, waiting)) for waiting in state["newer"]]

    def add(self, published: Published, runners: Iterable[int], wait: bool) -> None:
        """Take new weights for these runners; `wait` is that of `select`."""
        self.newest = published
        for runner in runners:
            self._newer[runner].append(published)
            # Older weights that are no longer needed are let go of, even if the runner is not asked
            # for long.
            self.select(runner, wait)

    def select(self, runner: int, wait: bool) -> Published | None:
        """Return the weights that the next request to a runner is to use.

        Args:
            runner: its number.
            wait: take the newest weights even if they are still being computed. If not, take the
                newest that are ready, or the very first ones.

        Returns:
            The weights, or None if the runner was never given any.
        """
        newer = self._newer[runner]
        # A runner without any weights gets the first ones even if they are still being computed.
        while newer and (self._selected[runner] is None or wait or newer[0].is_ready(self._pool)):
            self._selected[runner] = newer.popleft()
        return self._selected[runner]

    def references_if_unsent(self, runner: int, wanted: Published) -> tuple[Any, ...]:
        """Return the reference to these weights, or None if the runner was sent them last.

        They count as sent to it from then on. It is a tuple, for a runner of several policies gets
        several.
        """
        was_sent_last = self._last_sent[runner] is wanted
        self._last_sent[runner] = wanted
        return (None if was_sent_last else wanted.reference(self._pool),)

    def forget_sent(self, runner: int) -> None:
        """Send a restarted runner its weights again with the next request."""
        self._last_sent[runner] = None


def as_states(versions: Iterable[Any]) -> list[dict[str, Any]]:
    """Return policy versions under the name by which the plan knows a version in a state."""
    return [{"version": version} for version in versions]
