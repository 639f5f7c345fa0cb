"""The seam: what operators, resources and runtimes promise one another. Everything else may change; this may not drift.

An `Operator` is frozen settings with a `step`. A `Resource` is frozen settings whose lasting state lives behind a
`Handle`. A `Site` is what a runtime offers to both: a way to run pure functions and a way to get workers. The same
`step` and the same handle run in one process, over Ray actors, in the abstract trace, and traced into one XLA program,
because only the site differs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Generic,
    Protocol,
    TypeVar,
    Union,
    get_type_hints,
)

H = TypeVar("H", bound="Handle")
H_co = TypeVar("H_co", bound="Handle", covariant=True)


@dataclass(frozen=True)
class RefTo:
    """What the annotation ``Ref[X]`` leaves behind at run time: the kind of handle that the name must lead to."""

    kind: type[Handle]


if TYPE_CHECKING:
    from flowrl.core.clock import Reading
    from flowrl.core.events import Stream
    from flowrl.core.metrics import Metered

    class _Named(Generic[H_co]):
        """Never made: it only carries the type of handle for type checkers."""

    Ref = Union[str, _Named[H_co]]  # noqa: UP007 - only a Union can be subscripted
else:

    class Ref:
        """The name of a resource whose handle is of the given kind: ``learner: Ref[LearnerHandle] = "learner"``."""

        def __class_getitem__(cls, kind: type[Handle]) -> Any:
            return Annotated[str, RefTo(kind)]


class Future(Protocol):
    """A result that may not be there yet."""

    def result(self) -> Any:
        """Wait, then return it or raise what the call raised."""


class Workers(Protocol):
    """Numbered workers of one resource: objects in this process, actors elsewhere, or abstract twins."""

    def __len__(self) -> int: ...

    def put(self, value: Any) -> Any:
        """Make a value ready to be passed to many calls: sent once, then referred to."""

    def submit(self, index: int, method: str, *args: Any) -> Future:
        """Call a method of one worker."""

    def current(self, future: Any) -> bool:
        """Whether the process that was asked for this is still the one at work."""

    def restart(self, index: int, restart_count: int, because: Any = None) -> None:
        """End a worker and make it anew, by ``make(index, incarnation)``; and its process, if that is why a call, `because`, gave nothing.

        The calls to others in that process then fail too, and these must be started anew as well.
        """

    def ready(self, value: Any) -> bool:
        """Whether a value that is being computed could be `put` without waiting for it."""

    def wait(self, futures: Sequence[Any], timeout: float | None = None) -> int | None:
        """Which of these is done, or the first to be; None where none is within so many seconds."""

    def clocks(self) -> dict[str, Reading]:
        """By worker that is a process of its own and answers: its seconds by kind of work."""

    def close(self) -> None:
        """End them all."""


class Site(Protocol):
    """What a runtime offers to the resource `name`, and to the operators."""

    name: str
    seed: Any

    @property
    def stream(self) -> Stream:
        """What brings the events of the run to its observers."""

    @property
    def metrics(self) -> Metered:
        """What was measured since the last Row."""

    @property
    def remote(self) -> bool:
        """Whether workers are in other processes."""

    @property
    def devices(self) -> int:
        """How many devices may share the work of a function that `run` runs."""

    def key(self, *folds: int | str) -> Any:
        """A random key of this resource's own: the seed, its name and `folds`, folded together."""

    def run(
        self, fn: Callable[..., Any], *args: Any, donate: tuple[int, ...] = (), **static: Any
    ) -> Any:
        """Run a pure function: jitted, abstractly, or inline on tracers. `donate`: arguments whose buffers it may reuse."""

    def when(self, due: Any, handle: Handle, call: Callable[[], None]) -> None:
        """Call what changes a resource's state if it is due, which may be known only on the device."""

    def call(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Call any function of items as it is; the abstract trace finds the form of what it returns."""

    def test(self, fn: Callable[..., Any], *args: Any) -> bool:
        """Whether a predicate of items holds; the abstract trace tells only where static facts decide it."""

    def settle(self, item: Any) -> Any:
        """An item that leaves its stage, with arrays that lie where they will be taken from."""

    def workers(
        self,
        count: int,
        make: Callable[[int, int], Any],
        stub: Callable[[int, int], Any],
        near: bool = False,
    ) -> Workers:
        """Make `count` workers by ``make(index, 0)``, in this process if `near`; the abstract trace takes ``twin(index, 0)``, which gives shapes."""

    def resource(self, name: Any) -> Any:
        """The handle of another resource, opened on demand."""

    def seconds(self) -> float:
        """The clock. In the abstract trace every look at it is a long time after the last."""

    def planned(self, resource: Any, counter: str) -> int:
        """What the plan says that the nodes count of a resource in its steady period; 0 where there is no plan yet."""

    def count(self, **numbers: int) -> None:
        """Add to the counters of the node at work: what the plan predicts and the run then counts."""


class Handle(ABC):
    """A resource at work. It holds its state and calls its verbs."""

    shared: ClassVar[tuple[str, ...]] = ()
    """The verbs that any stage may call; all others are for the one stage that owns the resource."""
    spread: ClassVar[tuple[str, ...]] = ()
    """The parts of `state` whose arrays have an axis of environments first, which may be split over devices."""
    state: Any
    """A pytree: all the arrays that its verbs read and write, and the ``version`` of its weights. Environments and processes stay outside."""

    @abstractmethod
    def close(self) -> None:
        """Let go of processes and environments."""

    def clocks(self) -> dict[str, Reading]:
        """By process that works for this resource: its seconds by kind of work."""
        return {}

    nbytes: int = 0
    """That it holds once it is full, where it sets them aside."""

    def stock(self) -> Any:
        """What came in and what became of it, with `closed` telling whether all is accounted for; None of a resource that keeps nothing."""
        return None

    def facts(self) -> dict[str, Any]:
        """Plain numbers by which it is explained where time goes; lists hold what is counted."""
        return {}

    def findings(self) -> Iterator[str]:
        """Sentences on where time is lost, and what would mend it."""
        return iter(())


@dataclass(frozen=True)
class Use:
    """How a graph uses one resource: what its rules may look at."""

    name: str
    resources: Mapping[str, Resource]
    """All of the graph's resources."""
    traced: bool
    """Whether the abstract trace ran; if not, `counts` and `lags` are empty."""
    exact: bool
    """Whether it found a steady period: what is not counted then never happens."""
    counts: Mapping[str, Mapping[str, Mapping[str, int]]]
    """By resource, by node: the counters of its verbs in the steady period."""
    lags: Mapping[str, float]
    """By node that trains this resource: the largest lag of the data, NaN where it can't be known."""
    idle: Sequence[str]
    """The nodes that refer to this resource and never yield anything, where for want of that no Row closes."""
    queues: Mapping[str, str]
    """By node that refers to this resource and stands behind a queue: that queue."""

    def total(self, counter: str, resource: str | None = None) -> int:
        """A counter of a resource (this one by default), summed over the nodes."""
        return sum(c.get(counter, 0) for c in self.counts.get(resource or self.name, {}).values())


class Resource(ABC):
    """Frozen settings for something that lasts: runners, a learner, a replay buffer."""

    handle: ClassVar[type[Handle]]

    @abstractmethod
    def open(self, site: Site) -> Handle:
        """Make the state and return the handle."""

    @abstractmethod
    def describe(self) -> str:
        """One short line for plans and drawings."""

    @abstractmethod
    def review(self, use: Use) -> Iterator[tuple[str, str]]:
        """What is wrong with how a graph uses it: pairs of (node or resource, the problem and the way out)."""


class Context(Protocol):
    """What an operator's `step` may reach beside its state and its item."""

    name: str
    root: bool
    """Whether it is a start of the graph, and is given no items."""
    source: str | None
    """The node that the item came from; None at a root."""

    def __getitem__(self, ref: Ref[H]) -> H:
        """The handle behind a `Ref` field."""

    def run(self, fn: Callable[..., Any], *arrays: Any, **static: Any) -> Any:
        """Run a pure function of arrays, compiled once per function and static settings.

        What it reads beside its arguments is read once, when it is compiled.
        """

    def call(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Call a user's function of items as it is, uncompiled."""

    def test(self, fn: Callable[..., Any], *args: Any) -> bool:
        """Whether a user's predicate of items holds. The abstract trace can tell only where static facts decide it."""

    def seconds(self) -> float:
        """The clock, in seconds."""

    def when(self, due: Any, ref: Ref[Any], verb: str, *args: Any) -> None:
        """Call a verb that returns nothing if it is due: an `if` that holds in a program too, where `due` may be a tracer.

        A counter that decides it stands in the operator's state as a NumPy scalar, ``np.int32(0)``: it then goes on within a program, which need not
        spell out all that comes between.
        """

    def planned(self, ref: Ref[Any], counter: str) -> int:
        """What the plan says that all nodes count of a resource in its steady period; 0 while the plan is being made.

        ``Fraction(ctx.planned("learner", "updates"), ctx.planned("runners", "requests"))`` is the updates to a fragment.
        """

    def metric(self, name: str, value: Any) -> None:
        """Tell a number, or an array of shape [], which stays on the device until the Row closes.

        The next Row has the mean of the values since the last one as `name`, the least as ``name/min`` and the most as ``name/max``; NaN where none
        came. An XLA program can't: there metrics come from the loss.

        Raises:
            ContractError: it is no number, or every Row has a column of that name already.
        """

    def drop(self) -> None:
        """In a queue's step: the item goes no further, and counts as dropped."""


@dataclass(frozen=True)
class Bounds:
    """What a queue may hold."""

    capacity: int
    """Items."""
    full: str = "block"
    """What happens to an item that finds no room: ``block``, ``drop_oldest`` or ``drop_newest``."""
    order: str = "fifo"
    """``fifo`` or ``lifo``."""
    max_lag: int | None = None
    """The most updates that what comes out is old, if that is seen to."""


class Operator(ABC):
    """Frozen settings with a `step`: zero or more items out for each one in.

    The rule for `step`: it moves items, looks at static facts (steps, fields, its own bounded counters) and calls verbs
    or `ctx.run`; it never touches array values. `init` returns the complete state, and a step commits its state before
    it yields. Then the very same code also runs in the abstract trace and as part of one XLA program.
    """

    source: ClassVar[bool] = False
    """May stand at the start: its step then gets None for an item, once a pass."""
    writes: ClassVar[tuple[str, ...]] = ()
    """The `Ref` fields whose resource it changes. Such an operator is an effect: a branch may end at it."""
    reports: ClassVar[bool] = False
    """Closes a Row. A graph has exactly one."""
    joins: ClassVar[bool] = False
    """Takes items from several nodes; `ctx.source` tells which."""

    adds: ClassVar[tuple[str, ...]] = ()
    """The fields that it adds to a batch. Errors about a batch that lacks one name the operators that add it."""

    def line(self, plan: Any, node: str) -> tuple[str, str] | None:
        """What a `Plan` says of it under the name `node`: what it does, and how much; None for what can be said of any."""
        return None

    def review(self, graph: Any) -> Iterator[str]:
        """What is wrong with its settings beside those of others in a graph, with the way out."""
        yield from ()

    @property
    def queue(self) -> Bounds | None:
        """Of one that cuts the graph, so that what comes before and what comes after are stages that run side by side: what it may hold."""
        return None

    def prepare(self, ctx: Context) -> None:  # noqa: B027 - most have nothing to do
        """Called once, before the first pass: what is to be told to resources beforehand."""

    def ready(self, state: Any, ctx: Context) -> bool:
        """Of one at the start of a stage: whether it may fire. If not, its stage waits until another one changes something."""
        return True

    def has_capacity(self, state: Any, ctx: Context) -> bool:
        """Whether it can take what `ctx.source` gives it. If not, what that comes of waits, as it does before a full queue."""
        return True

    @abstractmethod
    def init(self) -> Any:
        """Return the state: a pytree that `step` changes in place, so a dict or a list; None for an operator without.

        Python numbers in it are static facts, by which the plan finds when the graph repeats itself: count up to a bound, and go on from 0. A number
        that grows for ever or is a fraction stands there as a NumPy number, ``np.int32(0)`` or ``np.float32(0)``: within a program it is an array.
        """

    @abstractmethod
    def step(self, state: Any, item: Any, ctx: Context) -> Iterator[Any]:
        """Take one item, yield any number."""


class Stateless(Operator):
    """An operator without a state."""

    def init(self) -> None:
        """None: there is no state."""


def hidden(owner: Any, base: type) -> str:
    """Say which field of a user's value hides an attribute of its base class; empty if none does.

    A field of the same type is no mistake: it sets per value what other classes set for all.
    """
    for name, value in vars(owner).items():
        if name in vars(base) and type(value) is not type(vars(base)[name]):
            means = f"its field {name}={value!r} hides {base.__name__}.{name}"
            return f"{means}, which has another meaning; give the field another name"
    return ""


def refs(operator: Any) -> dict[str, tuple[str, type[Handle]]]:
    """The `Ref` fields of an operator or a resource: field name to (name of the resource, kind of handle)."""
    found = {}
    for field, hint in get_type_hints(type(operator), include_extras=True).items():
        for mark in getattr(hint, "__metadata__", ()):
            if isinstance(mark, RefTo):
                found[field] = (getattr(operator, field), mark.kind)
    return found
