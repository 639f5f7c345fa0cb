"""Operators that move items: functions as operators, gates and joins."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, cast

import jax

from flowrl.core.items import Batch, Filling, steps_of
from flowrl.errors import ContractError, SettingError, a
from flowrl.graph.graph import Graph
from flowrl.graph.plan import Plan
from flowrl.graph.protocols import Context, Operator, Ref, Stateless
from flowrl.graph.settings import check_at_least_1
from flowrl.rollout.handle import RunnersHandle


@dataclass(frozen=True)
class Map(Stateless):
    """Yield what a function makes of each item.

    The function is called as it is; wrap heavy array maths in `jax.jit` yourself. When a graph is
    compiled it is called too: on JAX tracers or, where that fails, on zeros of the same shapes. If
    neither works, the plan says that it ends there.

    Args:
        fn: function from an item to an item.

    Raises:
        SettingError: `fn` is no function.
    """

    fn: Callable[[Any], Any]

    def __post_init__(self) -> None:
        _check(self.fn, "fn")

    def step(self, state: None, item: Any, ctx: Context) -> Iterator[Any]:
        """Yield what the function makes of the item."""
        yield ctx.call(self.fn, item)


@dataclass(frozen=True)
class Filter(Stateless):
    """Pass on the items for which ``keep(item)`` is true.

    When a graph is compiled it is called on JAX tracers; where the answer depends on values, the
    plan says that it ends there.

    Args:
        keep: function from an item to a truth value: True passes the item on.

    Raises:
        SettingError: `keep` is no function.
    """

    keep: Callable[[Any], bool]

    def __post_init__(self) -> None:
        _check(self.keep, "keep")

    def step(self, state: None, item: Any, ctx: Context) -> Iterator[Any]:
        """Yield the item if it is kept."""
        if ctx.test(self.keep, item):
            yield item


@dataclass(frozen=True)
class FlatMap(Stateless):
    """Yield every item that a function makes of each item.

    It is compiled as `Map` is.

    Args:
        fn: function from an item to any number of items.

    Raises:
        SettingError: `fn` is no function.
    """

    fn: Callable[[Any], Iterable[Any]]

    def __post_init__(self) -> None:
        _check(self.fn, "fn")

    def step(self, state: None, item: Any, ctx: Context) -> Iterator[Any]:
        """Yield all that the function makes of the item."""
        yield from ctx.call(_Listed(self.fn), item)


@dataclass(frozen=True)
class Gate(Operator):
    """Let no item through until a number of steps came, and from then on every item.

    Args:
        start: steps (T x B) of the items that it holds back before it opens, at least 1.

    Raises:
        SettingError: `start` is below 1.
        ContractError: an item that comes before it opens has no steps.
    """

    start: int

    def __post_init__(self) -> None:
        check_at_least_1(self, "start")

    def init(self) -> dict[str, int]:
        """Return the count of steps that came, which goes up to `start`."""
        return {"steps": Filling(0, self.start)}

    def step(self, held: dict[str, int], item: Any, ctx: Context) -> Iterator[Any]:
        """Yield the item if enough steps came before it, or else count its steps."""
        if held["steps"] >= self.start:
            yield item
        elif (steps := steps_of(item)) or isinstance(item, Batch):
            held["steps"] = Filling(min(self.start, held["steps"] + steps), self.start)
        else:
            raise ContractError(
                f"counts steps, which {a(item)} has none of; put it where batches or updates flow"
            )


def _in_order(by_node: Mapping[str, Any] | None) -> list[tuple[str, Any]] | None:
    """Return the pairs of a mapping, which compare with their order."""
    return None if by_node is None else list(by_node.items())


def _misnamed(
    operator: Operator, graph: Graph, what: str, by_node: Mapping[str, Any]
) -> Iterator[str]:
    """Yield which names of a mapping are of no node before an operator, and what comes in there."""
    for node in (node for node in graph.nodes if node.op is operator):
        if wrong := [name for name in by_node if name not in node.after]:
            before = ", ".join(node.after) or "none"
            yield f"has a {what} for {wrong[0]}, which is not before it; before it are: {before}"
        elif lacking := [name for name in node.after if name not in by_node]:
            yield f"has no {what} for {lacking[0]}, which is before it"


@dataclass(frozen=True)
class Merge(Operator):
    """Merge several streams into one, as items come or by fixed weights.

    By weights, ``Merge({"batch": 3, "demo": 1})``, the order is fixed, and spread as evenly as can
    be: batch batch demo batch. Items that come before their turn wait here. Once as many items of a
    node wait as its weight says, that node waits, too.

    Args:
        weights: by node, the number of its items in each round; None yields items as they come
            (default None).

    Raises:
        SettingError: a weight is no whole number from 1 on.
        ContractError: an item comes from a node that has no weight.
    """

    weights: Mapping[str, int] | None = None

    joins: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.weights is not None and (
            not self.weights or any(not isinstance(n, int) or n < 1 for n in self.weights.values())
        ):
            raise SettingError(
                f"weights must be whole numbers from 1 on by node, or None, got {self.weights!r}"
            )

    def review(self, graph: Graph) -> Iterator[str]:
        """Report nodes whose items have no weight, and weights of no such node."""
        if self.weights is not None:
            yield from _misnamed(self, graph, "weight", self.weights)

    def __eq__(self, other: object) -> bool:
        """Return whether another one gives the same turns: the order of the nodes counts."""
        return isinstance(other, Merge) and _in_order(self.weights) == _in_order(other.weights)

    def __hash__(self) -> int:
        """Return a number that equal ones share."""
        return hash(tuple(_in_order(self.weights) or ()))

    @cached_property
    def order(self) -> tuple[str, ...]:
        """The nodes of one round in the order of their turns.

        Each turn is that of the node which has had least of its share; of several, the first.
        """
        weights = dict(self.weights or {})
        total, credit, order = sum(weights.values()), dict.fromkeys(weights, 0), []
        for _ in range(total):
            # Every node earns its weight in each turn, and pays the sum of all for a turn.
            credit = {name: credit[name] + weight for name, weight in weights.items()}
            name = max(credit, key=credit.__getitem__)
            credit[name] -= total
            order.append(name)
        return tuple(order)

    def init(self) -> dict[str, Any]:
        """Return the items that wait, by node, and the index of the turn."""
        return {"waiting": {name: [] for name in self.weights or {}}, "turn": 0}

    def has_capacity(self, held: dict[str, Any], ctx: Context) -> bool:
        """Return whether fewer items of the node wait than its weight says."""
        if self.weights is None:
            return True
        waiting = held["waiting"].get(ctx.source, ())
        return len(waiting) < self.weights.get(str(ctx.source), 1)

    def step(self, held: dict[str, Any], item: Any, ctx: Context) -> Iterator[Any]:
        """Yield the items whose turn has come."""
        if self.weights is None:
            yield item
            return
        if ctx.source not in held["waiting"]:
            raise ContractError(
                f"an item comes from {ctx.source}, which has no weight; "
                f"weights are for {', '.join(self.weights)}"
            )
        held["waiting"][ctx.source].append(item)
        while waiting := held["waiting"][self.order[held["turn"]]]:
            # A step commits its state before it yields.
            next_item = waiting.pop(0)
            held["turn"] = (held["turn"] + 1) % len(self.order)
            yield next_item


@dataclass(frozen=True)
class UntilReturn:
    """The end of a phase of `Switch`: the newest weights play well, or so many items are passed.

    Args:
        goal: the mean return, of greedy actions, from which on the phase is over.
        within: items after which it is over in any case.
        every: items between two evaluations (default 100).
        episodes: episodes of each evaluation (default 10).
        seed: seed of the environments, the same in each evaluation (default 0).

    Raises:
        SettingError: `within`, `every` or `episodes` is below 1.
    """

    goal: float
    within: int
    every: int = 100
    episodes: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        check_at_least_1(self, "within", "every", "episodes")


@dataclass(frozen=True)
class Switch(Operator):
    """Pass on the items of one node, then those of the next: phases, such as offline, then online.

    ``Switch({"read": 5_000, "batch": None})`` passes 5,000 batches of ``read``, and from then on
    those of ``batch``. A node whose phase it is not waits, and so does all that stands before it:
    nothing is sampled while a dataset is read. With `UntilReturn` in place of a number, a phase
    ends as soon as the policy plays well.

    The plan holds the longest phases.

    Args:
        items: by node, in the order of their phases, how many of its items a phase has, or
            `UntilReturn`; None for the last one, which has no end.
        runners: name of the runners that play for `UntilReturn`, with the weights that they have
            (default None).

    Raises:
        SettingError: the last number is not None, another one is no whole number from 1 on, or a
            phase ends with a return and there are no `runners`.
        ContractError: an item comes from a node that has no phase.
    """

    items: Mapping[str, int | UntilReturn | None]
    runners: Ref[RunnersHandle] | None = None

    joins: ClassVar[bool] = True
    writes: ClassVar[tuple[str, ...]] = ("runners",)

    def __post_init__(self) -> None:
        *ends, last = self.items.values() if self.items else (0,)
        if last is not None or not all(
            isinstance(end, UntilReturn) or (isinstance(end, int) and end >= 1) for end in ends
        ):
            raise SettingError(
                "items must be whole numbers from 1 on by node, or UntilReturn, and None for the "
                f"last one, got {self.items!r}"
            )
        if self.runners is None and any(isinstance(end, UntilReturn) for end in ends):
            raise SettingError('UntilReturn needs someone to play: add runners="runners"')

    def review(self, graph: Graph) -> Iterator[str]:
        """Report nodes whose items have no phase, and phases of no such node."""
        yield from _misnamed(self, graph, "phase", self.items)

    def __eq__(self, other: object) -> bool:
        """Return whether another one has the same phases: the order of the nodes counts."""
        return (
            isinstance(other, Switch)
            and _in_order(self.items) == _in_order(other.items)
            and self.runners == other.runners
        )

    def __hash__(self) -> int:
        """Return a number that equal ones share."""
        return hash(tuple(self.items.items()))

    def line(self, plan: Plan, node: str) -> tuple[str, str]:
        """Return the phases, each with its end."""
        phases = []
        for name, end in self.items.items():
            most = end.within if isinstance(end, UntilReturn) else end
            phase = name if most is None else f"{most:,} of {name}"
            if isinstance(end, UntilReturn):
                phase = f"<= {phase} until it returns {end.goal:g}"
            phases.append(phase)
        return ", then ".join(phases), ""

    def init(self) -> dict[str, int]:
        """Return the index of the phase, and the number of its items that were passed on."""
        return {"phase": 0, "passed": self._counted(0, 0)}

    def _end(self, phase: int) -> int | UntilReturn | None:
        return list(self.items.values())[phase]

    def _counted(self, phase: int, passed: int) -> int:
        """Return a number of items of a phase, on which nothing depends before its end."""
        match self._end(phase):
            case None:
                return 0
            case UntilReturn() as end:
                evaluated = (passed // end.every + 1) * end.every
                return Filling(passed, min(end.within, evaluated))
            case most:
                return Filling(passed, most)

    def _over(self, passed: int, phase: int, ctx: Context) -> bool:
        """Return whether a phase ends with the item that is the last of so many."""
        end = self._end(phase)
        if not isinstance(end, UntilReturn):
            return passed == end
        if passed == end.within:
            return True
        if passed % end.every:
            return False
        runners = ctx[cast("Ref[RunnersHandle]", self.runners)]
        played = runners.evaluate(end.episodes, end.seed)["eval/return_mean"]
        # The plan holds the longest phases.
        return not isinstance(played, jax.ShapeDtypeStruct) and bool(played >= end.goal)

    def has_capacity(self, held: dict[str, int], ctx: Context) -> bool:
        """Return whether it is the phase of the node."""
        return ctx.source == list(self.items)[held["phase"]]

    def step(self, held: dict[str, int], item: Any, ctx: Context) -> Iterator[Any]:
        """Yield the item; with the last one of a phase, the next one begins."""
        if ctx.source not in self.items:
            raise ContractError(
                f"an item comes from {ctx.source}, which has no phase; "
                f"phases are of {', '.join(self.items)}"
            )
        phase, passed = held["phase"], held["passed"] + 1
        # Of what a node yields at once, some may come after its phase: it is passed on, too.
        if self._end(phase) is not None and self.has_capacity(held, ctx):
            over = self._over(passed, phase, ctx)
            phase += over
            held.update(phase=phase, passed=self._counted(phase, 0 if over else passed))
        yield item


def _check(fn: Any, name: str) -> None:
    if not callable(fn):
        raise SettingError(f"{name} must be a function, got {fn!r}")


@dataclass(frozen=True)
class _Listed:
    """A function that returns a list of all that another one yields."""

    fn: Callable[[Any], Iterable[Any]]

    def __call__(self, item: Any) -> list[Any]:
        return list(self.fn(item))
