"""The driver's side of a keeper's process: functions run there, and their arrays stay there."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, Protocol, cast

import jax
import numpy as np

from flowrl.core.clock import Reading
from flowrl.core.compiled import check_count, jitted
from flowrl.core.remote import Joining, RemoteArray
from flowrl.runtime.driver import for_worker
from flowrl.runtime.keeper import At, Hole, Joint

IN_FLIGHT = 2
"""How many functions of a process may be under way before the first of them has to be done."""


class Remote(Protocol):
    """The process of a keeper, or a group of processes, as the runtime reaches it."""

    name: str

    def submit(self, method: str, *args: Any, sent: Sequence[Any] = ()) -> Any:
        """Call a method of the keeper.

        Args:
            method: its name.
            *args: its first arguments.
            sent: what follows them: references to packed arrays in the object store.

        Returns:
            A future with `result`, `wait`, `done` and its reference `ref`, which becomes its result
            where it is an argument of another call.
        """

    def clocks(self) -> dict[str, Reading]:
        """Return, by process, its seconds by kind of work, if it answers in time."""

    def end(self) -> None:
        """End the process."""


class Stored:
    """Packed arrays that are in the object store, or will be."""

    def __init__(self, pending: Any) -> None:
        self.pending = pending

    def array(self, leaf: int) -> np.ndarray[Any, Any]:
        """Fetch one array, by its number, into this process."""
        found: np.ndarray[Any, Any] = self.pending.result()[leaf]
        return found

    def wait(self) -> None:
        """Wait until the arrays are there."""
        self.pending.wait()

    def done(self) -> bool:
        """Return whether the arrays are there."""
        return bool(self.pending.done())


class Kept:
    """Arrays that a keeper has under a number, or will have."""

    def __init__(self, home: Home, number: int, pending: Any) -> None:
        self.home = home
        self.number = number
        self.pending = pending
        self.stored: dict[int, Stored] = {}

    def __del__(self) -> None:
        self.home.dropped.append(self.number)

    def store(self, leaf: int) -> Stored:
        """Put one of the arrays into the object store, unless it is there already."""
        if leaf not in self.stored:
            self.stored[leaf] = Stored(self.home.make([At(self.number, leaf)]))
        return self.stored[leaf]

    def array(self, leaf: int) -> np.ndarray[Any, Any]:
        """Fetch one array, by its number, into this process."""
        # The function's own error is raised here, not one of the transfer.
        self.pending.result()
        return self.store(leaf).array(0)

    def wait(self) -> None:
        """Wait until the arrays are computed."""
        self.pending.result()

    def done(self) -> bool:
        """Return whether the arrays are computed."""
        return bool(self.pending.done())


class Home:
    """A keeper's process as the driver sees it."""

    def __init__(self, remote: Remote) -> None:
        self.remote = remote
        self.numbers = itertools.count()
        self.programs: dict[Any, tuple[int, Any]] = {}
        """By function, settings and tree structure of its arguments: its number in the process, and
        its compiled form, from which the shapes of its outputs are found."""
        self.dropped: deque[int] = deque()
        """Numbers under which nothing needs to be kept any more."""
        self.in_flight: deque[Any] = deque()
        """The calls of functions that may not be done yet, oldest first."""

    @cached_property
    def devices(self) -> int:
        """How many devices the process has, or all of a group together."""
        return int(self.remote.submit("devices").result())

    def run(
        self,
        fn: Callable[..., Any],
        donate: tuple[int, ...],
        static: Mapping[str, Any],
        args: tuple[Any, ...],
    ) -> Any:
        """Run a compiled function in the process.

        Args:
            fn: a pure function of arrays.
            donate: the positions of arguments whose memory it may reuse.
            static: its settings.
            args: a pytree of arguments, of which some may be remote arrays.

        Returns:
            Its outputs, as remote arrays.

        Raises:
            ContractError: the run compiles more functions than any graph has.
            SettingError: the function can't be pickled.
        """
        leaves, structure = jax.tree.flatten(args)
        # The types distinguish 2 from 2.0, which are equal keys.
        types = (type(value) for value in static.values())
        key = (fn, donate, *static.items(), *types, structure)
        code = None
        if (known := self.programs.get(key)) is None:
            check_count(len(self.programs), fn)
            known = len(self.programs), jitted(fn, donate, *static.items())
            # The structure travels as a tree of numbers, which can always be pickled.
            numbered = jax.tree.unflatten(structure, range(len(leaves)))
            code = for_worker((fn, donate, tuple(static.items()), numbered), _name(fn))
        number, function = known
        shapes = [
            jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, RemoteArray) else x
            for x in leaves
        ]
        outputs = function.eval_shape(*jax.tree.unflatten(structure, shapes))
        kept = self._submit("run", leaves, number, code)
        # Only now has the process the code: an earlier call may have failed before it was sent.
        self.programs[key] = known
        stubs, output_structure = jax.tree.flatten(outputs)
        return jax.tree.unflatten(
            output_structure,
            [RemoteArray(x.shape, x.dtype, kept, i) for i, x in enumerate(stubs)],
        )

    def call(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Call any function in the process, and wait for what is no array of its result.

        Raises:
            SettingError: the function can't be pickled.
        """
        leaves, structure = jax.tree.flatten(args)
        numbered = jax.tree.unflatten(structure, range(len(leaves)))
        kept = self._submit("call", leaves, for_worker((fn, numbered), _name(fn)))
        return fill(kept.pending.result(), kept)

    def _submit(self, method: str, leaves: Sequence[Any], *args: Any) -> Kept:
        """Call a method of the keeper that keeps its arrays, once fewer calls are in flight."""
        # The oldest call has to be done first; if it failed, its error is raised here.
        while len(self.in_flight) >= IN_FLIGHT:
            self.in_flight.popleft().result()
        sent: list[Any] = []
        number, addresses = next(self.numbers), [self._address(x, sent) for x in leaves]
        refs = [x.ref for x in sent]
        pending = self.remote.submit(
            method, number, self._take_dropped(), addresses, *args, sent=refs
        )
        self.in_flight.append(pending)
        return Kept(self, number, pending)

    def make(self, tree: Any) -> Any:
        """Send a tree to the process, which answers with it once its remote arrays have values.

        Returns:
            A future of the tree, whose reference can be an argument of any call.
        """
        sent: list[Any] = []
        tree = jax.tree.map(lambda x: self._address(x, sent), tree)
        refs = [x.ref for x in sent]
        return self.remote.submit("make", self._take_dropped(), tree, sent=refs)

    def _take_dropped(self) -> list[int]:
        """Return the numbers under which nothing needs to be kept, each of them once."""
        taken: list[int] = []
        # Threads of several stages take them, so their number may fall between two looks.
        with suppress(IndexError):
            while True:
                taken.append(self.dropped.popleft())
        return taken

    def _address(self, x: Any, sent: list[Any]) -> Any:
        """Return what stands for an array in a message.

        Futures of arrays that have to come with the message are appended to `sent`.
        """
        if not isinstance(x, RemoteArray):
            return x
        source, leaf = x.source, x.leaf
        if isinstance(source, Joining):
            parts = [*_parts(source)]
            addresses = tuple(self._address(part, sent) for part in parts)
            lengths = tuple(part.shape[source.axis] for part in parts)
            return Joint(addresses, source.axis, lengths)
        if isinstance(source, Kept):
            if source.home is self:
                return At(source.number, leaf)
            # What another process keeps goes through the object store, as a list of one array.
            source, leaf = source.store(leaf), 0
        pending = cast("Stored", source).pending
        # Arrays of one source travel once.
        if pending not in sent:
            sent.append(pending)
        return At(~sent.index(pending), leaf)


def _parts(source: Joining) -> Iterator[Any]:
    """Yield the arrays that are joined, where some are joined themselves along the same axis."""
    for part in source.parts:
        inner = part.source if isinstance(part, RemoteArray) else None
        if isinstance(inner, Joining) and inner.axis == source.axis:
            yield from _parts(inner)
        else:
            yield part


def _name(fn: Any) -> str:
    """Return a function's name as its author knows it."""
    # A partial, and the wrapper of an operator such as FlatMap, have the user's function within.
    inner = getattr(fn, "func", getattr(fn, "fn", fn))
    return str(getattr(inner, "__name__", inner))


def fill(tree: Any, source: Any) -> Any:
    """Return a tree with remote arrays of `source` in the place of its holes."""
    return jax.tree.map(
        lambda x: RemoteArray(x.shape, x.dtype, source, x.leaf) if isinstance(x, Hole) else x, tree
    )


def homes_of(tree: Any) -> Iterator[Home]:
    """Yield the process of each remote array of a tree that a keeper has."""
    for x in jax.tree.leaves(tree):
        if isinstance(x, RemoteArray) and isinstance(x.source, Kept):
            yield x.source.home
        elif isinstance(x, RemoteArray) and isinstance(x.source, Joining):
            yield from homes_of(x.source.parts)
