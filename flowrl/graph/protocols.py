"""The protocols between operators, resources and runtimes: all else may change, these may not.

An `Operator` is frozen settings with a `step`. A `Resource` is frozen settings whose lasting state
is held by a `Handle`. A `Site` is what a runtime offers to both: a way to run pure functions and a
way to get workers. The same `step` and the same handle run in one process, over Ray actors, in the
abstract trace, and traced into one XLA program, because only the site differs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, Protocol, TypeVar, Union

from flowrl.core.keeping import Keeping
from flowrl.errors import GraphError
from flowrl.graph.bounds import Bounds
from flowrl.graph.settings import Settings

H = TypeVar("H", bound="Handle")
H_co = TypeVar("H_co", bound="Handle", covariant=True)


@dataclass(frozen=True)
class RefTo:
    """Mark that the annotation ``Ref[X]`` leaves at run time."""

    kind: type[Handle]
    """The kind of handle that the name must lead to."""


if TYPE_CHECKING:
    from flowrl.core.clock import Reading
    from flowrl.core.events import Stream
    from flowrl.core.metrics import Metered
    from flowrl.graph.use import Use

    # For type checkers a `Ref` is a str that carries the handle's type, so that `ctx[ref]` has that
    # type. At run time the annotation leaves a `RefTo`, which `refs` reads.
    class _Named(Generic[H_co]):
        """Carrier of the type of handle for type checkers; it is never made."""

    Ref = Union[str, _Named[H_co]]  # noqa: UP007 - only a Union can be subscripted
else:

    class Ref:
        """Name of a resource whose handle is of a given kind.

        For instance ``learner: Ref[LearnerHandle] = "learner"``.
        """

        def __class_getitem__(cls, kind: type[Handle]) -> Any:
            return Annotated[str, RefTo(kind)]


class Future(Protocol):
    """Result of a call that may not have ended yet."""

    def result(self) -> Any:
        """Wait for the call, then return its result or raise what it raised."""


class Workers(Protocol):
    """Numbered workers of one resource: local objects, remote actors or shape-only stubs."""

    def __len__(self) -> int: ...

    def put(self, value: Any) -> Any:
        """Return a value as many calls may have it for an argument, made ready once for all."""

    def submit(self, index: int, method: str, *args: Any) -> Future:
        """Call a method of one worker, and return the future result."""

    def current(self, future: Any) -> bool:
        """Return whether the process that got this call is still the one at work.

        A call that failed in a process which was replaced since failed because of another worker of
        it, so restarting its own worker counts as no further try.
        """

    def restart(self, index: int, restart_count: int, because: Any = None) -> None:
        """End a worker and make it again, by ``make(index, restart_count)``.

        Its process is restarted too if that is why a call returned nothing. The calls to others in
        that process then fail as well, and these workers must be restarted too.

        Args:
            index: the worker.
            restart_count: how often this worker was restarted, this time included.
            because: the call that returned nothing.
        """

    def end(self, future: Any) -> None:
        """End the process that got this call, from any thread; its workers' calls then fail."""

    def ready(self, value: Any) -> bool:
        """Return whether a value that is being computed could be `put` without waiting for it."""

    def wait(self, futures: Sequence[Any], timeout: float | None = None) -> int | None:
        """Return the index of a call that is done, waiting for the first if none is.

        Args:
            futures: the calls.
            timeout: the seconds after which None is returned; None waits without end.
        """

    def clocks(self) -> dict[str, Reading]:
        """Return the seconds by kind of work of each worker that is a process and answers."""

    def close(self) -> None:
        """End all workers."""


class Site(Protocol):
    """What a runtime offers to the resource `name`, and to the operators."""

    name: str
    """The name of the resource; empty at the site of the nodes."""
    seed: Any
    """The seed of the run."""

    @property
    def stream(self) -> Stream:
        """The stream that brings the events of the run to its observers."""

    @property
    def metrics(self) -> Metered:
        """What was measured since the last Row."""

    @property
    def remote(self) -> bool:
        """Whether workers are in other processes."""

    @property
    def devices(self) -> int:
        """The number of devices that may share the work of a function that `run` runs."""

    def key(self, *folds: int | str) -> Any:
        """Return a random key of this resource: the seed, its name and `folds` folded together."""

    def run(
        self, fn: Callable[..., Any], *args: Any, donate: tuple[int, ...] = (), **static: Any
    ) -> Any:
        """Run a pure function: jitted, abstractly, or inline on tracers.

        Args:
            fn: the function.
            *args: its arguments, pytrees of arrays.
            donate: the indices of the arguments whose buffers it may reuse.
            **static: its settings, for each of which it is compiled once.
        """

    def when(self, due: Any, handle: Handle, call: Callable[[], None]) -> None:
        """Call what changes a resource's state if it is due.

        Args:
            due: whether it is due, which may be known only on the device.
            handle: the resource's handle.
            call: what changes the state.
        """

    def call(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Call a function of items as it is; the abstract trace finds the shapes it returns."""

    def test(self, fn: Callable[..., Any], *args: Any) -> bool:
        """Return whether a predicate of items holds.

        The abstract trace knows it only where static facts decide it.
        """

    def known(self, value: Any, planned: Any) -> Any:
        """Return a value, or in the abstract trace, which computes none, what a plan takes it for.

        Both have the same shape and type.
        """

    def settle(self, item: Any) -> Any:
        """Make an item's arrays available to the stages after this one, and return the item.

        A placed stage puts them into Ray's object store; other stages have nothing to do.
        """

    def workers(
        self,
        count: int,
        make: Callable[[int, int], Any],
        stub: Callable[[int, int], Any],
        near: bool = False,
    ) -> Workers:
        """Make workers.

        Args:
            count: how many.
            make: makes a worker, given its index and its restart count (0 at first).
            stub: makes, in its place, a shape-only stub for the abstract trace.
            near: whether they must be in this process.
        """

    def resource(self, name: Any) -> Any:
        """Return the handle of another resource, which is opened on demand."""

    def seconds(self) -> float:
        """Return the time in seconds. In the abstract trace it jumps far ahead at every look."""

    def planned(self, resource: Any, counter: str) -> int:
        """Return what the nodes count of a resource in the plan's steady period.

        It is 0 where there is no plan yet.
        """

    def count(self, **numbers: int) -> None:
        """Add to the counters of the node at work, which the plan predicts and the run counts."""


class Handle(Keeping, ABC):
    """Resource at work: an object that holds the resource's state and has its verbs as methods.

    `keep` returns all that lasts of it and `take` goes on from that: `state`, unless `lasting`
    names other attributes.
    """

    lasting: ClassVar[tuple[str, ...]] = ("state",)

    shared: ClassVar[tuple[str, ...]] = ()
    """The verbs that any stage may call; the others are for the stage that owns the resource."""
    spread: ClassVar[tuple[str, ...]] = ()
    """The parts of `state` with environments as first axis, which may be split over devices."""
    state: Any
    """A pytree of all arrays that the verbs read and write, and the ``version`` of the weights.

    Environments and processes stay outside.
    """

    @abstractmethod
    def close(self) -> None:
        """Close the processes and environments."""

    def part(self, name: str) -> Handle:
        """Return the handle of a part, which a reference ``resource.part`` names.

        Raises:
            GraphError: the resource has no such part.
        """
        raise GraphError(f"{type(self).__name__} has no parts, so there is no '{name}' in it")

    def clocks(self) -> dict[str, Reading]:
        """Return the seconds by kind of work of each process that works for this resource."""
        return {}

    nbytes: int = 0
    """The bytes that it holds once it is full, where it sets memory aside."""

    def shareable(self) -> tuple[int, int]:
        """Return the rows of a step that devices may share, and the bytes exchanged in it then."""
        return 0, 0

    def stock(self) -> Any:
        """Return an account of what came in and what became of it; None if it keeps nothing.

        The attribute `closed` of the account is whether everything is accounted for.
        """
        return None

    def facts(self) -> dict[str, Any]:
        """Return plain numbers that explain where time goes.

        Numbers that count up are put into lists: the difference of two profiles subtracts lists
        entry by entry, and takes every other fact as it is at its end.
        """
        return {}

    def findings(self) -> Iterator[str]:
        """Yield sentences on where time is lost and what would fix it."""
        return iter(())


class Resource(Settings, ABC):
    """Frozen settings of something that lasts: runners, a learner, a replay buffer."""

    handle: ClassVar[type[Handle]]
    """The kind of handle that `open` returns."""
    feeds: ClassVar[tuple[str, ...]] = ()
    """The `Ref` fields whose resource gets its weights from this one, and from no node."""
    works_alone: ClassVar[bool] = False
    """Whether it does its work when it is opened, so that no node need refer to it."""
    shares: ClassVar[bool] = False
    """Whether several processes may share its work."""

    @property
    def in_jax(self) -> bool:
        """Whether environments run in JAX, so that a GPU steps many of them at once."""
        return False

    @abstractmethod
    def open(self, site: Site) -> Handle:
        """Make the state and return the handle."""

    @abstractmethod
    def describe(self) -> str:
        """Return one short line for plans and drawings."""

    def part_names(self) -> Collection[str]:
        """Return the names of its parts, to which references ``resource.part`` lead."""
        return ()

    @abstractmethod
    def review(self, use: Use) -> Iterator[tuple[str, str]]:
        """Yield what is wrong with how a graph uses it.

        Each item is a pair of a node or resource and a text: the problem and the way out.
        """


class Context(Protocol):
    """What an operator's `step` may reach beside its state and its item."""

    name: str
    """The name of the node."""
    root: bool
    """Whether the node is a start of the graph, which is given no items."""
    source: str | None
    """The node that the item came from; None at a root."""

    def __getitem__(self, ref: Ref[H]) -> H:
        """Return the handle that a `Ref` field names."""

    def run(self, fn: Callable[..., Any], *arrays: Any, **static: Any) -> Any:
        """Run a pure function of arrays, compiled once per function and static settings.

        What it reads beside its arguments is read once, when it is compiled.
        """

    def call(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Call a user's function of items as it is, uncompiled."""

    def test(self, fn: Callable[..., Any], *args: Any) -> bool:
        """Return whether a user's predicate of items holds.

        The abstract trace knows it only where static facts decide it.
        """

    def seconds(self) -> float:
        """Return the time in seconds."""

    def when(self, due: Any, ref: Ref[Any], verb: str, *args: Any) -> None:
        """Call a verb that returns nothing if it is due.

        This is an `if` that holds in an XLA program too. A counter that decides it stands in the
        operator's state as a NumPy scalar, ``np.int32(0)``: it then goes on within a program, which
        need not unroll all that comes between.

        Args:
            due: whether to call the verb; a tracer within a program.
            ref: the name of the resource.
            verb: the name of the verb.
            *args: the arguments of the verb.
        """

    def repeat(self, times: int, make: Callable[[], Any]) -> Iterator[Any]:
        """Yield what a function returns, so many times, but no None: a loop in an XLA program."""

    def planned(self, ref: Ref[Any], counter: str) -> int:
        """Return what all nodes count of a resource in the plan's steady period.

        It is 0 in the first abstract trace; a second answers with the numbers of the first. Updates
        to a rollout: ``Fraction(planned("learner", "updates"), planned("runners", "requests"))``.

        Args:
            ref: the name of the resource.
            counter: the name of the counter, such as ``updates``.
        """

    def metric(self, name: str, value: Any) -> None:
        """Report a number, which stays on the device until the Row closes if it is an array.

        The next Row has the mean of the values since the last one as ``name``, the least as
        ``name/min`` and the largest as ``name/max``; NaN where there was none. In an XLA program
        this is not possible: there metrics come from the loss.

        Args:
            name: the name of the metric.
            value: a number, or an array of shape [].

        Raises:
            ContractError: it is no number, or every Row has a column of that name already.
        """

    def drop(self) -> None:
        """Drop the item, in a queue's step: it goes no further, and counts as dropped."""


class Operator(Settings, ABC):
    """Frozen settings with a `step` that yields zero or more items for each one that it takes.

    The rule for `step`: it moves items, looks at static facts (steps, fields, its own bounded
    counters) and calls verbs or `ctx.run`; it never touches array values. `init` returns the
    complete state, and a step commits its state before it yields, for the nodes downstream run at
    the yield, and after an error there the step is never resumed. Then the very same code also runs
    in the abstract trace and as part of one XLA program.
    """

    source: ClassVar[bool] = False
    """Whether it may stand at a start, where its step gets None for an item once a pass."""
    writes: ClassVar[tuple[str, ...]] = ()
    """The `Ref` fields whose resource it changes. A branch may end at such an operator."""
    reports: ClassVar[bool] = False
    """Whether it is the reporting operator, which closes Rows. A graph has exactly one."""

    @property
    def takes_part(self) -> str:
        """The part of a resource's items that it takes out of them; empty for none."""
        return ""

    joins: ClassVar[bool] = False
    """Whether it takes items from several nodes; `ctx.source` is the one that an item is from."""

    adds: ClassVar[tuple[str, ...]] = ()
    """The fields that it adds to a batch.

    Errors about a batch that lacks a field name the operators that add it.
    """

    def line(self, plan: Any, node: str) -> tuple[str, str] | None:
        """Return what a plan says of it: what it does, and how much.

        Args:
            plan: the `Plan`.
            node: the name of the operator's node.

        Returns:
            Two texts, or None for what the plan can say of any operator.
        """
        return None

    def review(self, graph: Any) -> Iterator[str]:
        """Yield what is wrong with its settings beside those of others in a graph, and the fix."""
        yield from ()

    @property
    def queue(self) -> Bounds | None:
        """What it may hold if it is a queue, else None.

        A queue cuts the graph: what comes before it and what comes after it are stages that run
        side by side.
        """
        return None

    def prepare(self, ctx: Context) -> None:
        """Prepare resources for the run; it is called once, before the first pass."""

    def at_sampler(self, ctx: Context) -> Operator:
        """Return the operator that does its work where rollouts are sampled; itself by default.

        In place of each resource that finds the behaviour policy, so it holds what else it needs.
        """
        return self

    def ready(self, state: Any, ctx: Context) -> bool:
        """Return whether it may fire, for a node without inputs.

        If not, its stage waits until another one changes something. A queue is not asked: its stage
        goes on while it holds an item.
        """
        return True

    def has_capacity(self, state: Any, ctx: Context) -> bool:
        """Return whether it can take an item from `ctx.source`.

        If not, what would yield that item waits, as it does before a full queue.
        """
        return True

    @abstractmethod
    def init(self) -> Any:
        """Return the state, a pytree that `step` changes in place; None for an operator without.

        A state is a dict or a list, since these can be changed in place. Python numbers in it are
        static facts, by which the plan finds when the graph repeats itself: count up to a bound,
        and go on from 0. A number that grows for ever or is a fraction is an array,
        ``jnp.float32(0)``, on which no `if` depends. A count that decides when something is due is
        a NumPy number, ``np.int32(0)``, if it is to go on within a program (see `Context.when`).
        """

    @abstractmethod
    def step(self, state: Any, item: Any, ctx: Context) -> Iterator[Any]:
        """Take one item and yield any number of items.

        Args:
            state: what `init` returned, to be changed in place before an item is yielded.
            item: what an operator upstream yielded; None at a root.
            ctx: what else the step may reach.
        """


class Stateless(Operator):
    """Base class of operators without a state."""

    def init(self) -> None:
        """Return None, for there is no state."""
