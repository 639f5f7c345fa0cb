"""Caches of what is compiled in a process: functions and programs.

The newest are kept for the runs to come.
"""

from __future__ import annotations

import hashlib
from bdb import BdbQuit
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import cache, lru_cache, partial
from threading import Lock
from types import ModuleType
from typing import Any

import jax

from flowrl.core.arguments import Values, compares_by_value, substituted, with_arguments
from flowrl.core.clock import IDLE, here
from flowrl.core.compile_cache import use_compile_cache
from flowrl.core.machine import keep_freed_memory
from flowrl.errors import ContractError, a, raised

Array = Any

COMPILING = "/jax/core/compile/"
"""The beginning of the names of JAX's events that measure tracing and compiling."""
FUNCTIONS = 32
"""The number of compiled functions that are kept once no run holds them.

A run has 3 to 12, and one takes about 10 MB.
"""
COPIED_BYTES = 64_000_000
"""The size up to which arrays are copied for the first call of a function that reuses them."""
MOST = 500
"""The number of functions that one run may compile."""
PROGRAMS = 4
"""The number of compiled programs of the xla runtime that are kept."""
SIGNATURES = 64
"""The number of settings of the xla runtime of which it is kept which program serves them."""
CALLBACK = "callback"
"""What the text of a program contains that calls Python."""


def jitted(fn: Callable[..., Any], donate: tuple[int, ...], *static: tuple[str, Any]) -> Any:
    """Return a compiled function with its static settings.

    Fractional numbers among the settings, and among those of the object whose method it is, are
    arguments of what is compiled (`core/arguments.py`): another learning rate compiles nothing. It
    is the same compiled function for settings that are equal but for such numbers, and of equal
    types. Only the newest are kept here, or every setting that was ever tried would stay in memory.
    A caller that uses one often must hold it itself, as `Place.jitted` does.

    Args:
        fn: the function to compile.
        donate: the indices of the positional arguments whose buffers it may reuse.
        static: names and values of the keywords that it is compiled with.

    Raises:
        ContractError: `fn` is a method of an object that may change.
    """
    check_pure(fn)
    if (found := generalised(fn, donate, *static)) is not None:
        run, numbers = found
        return WithNumbers(run, tuple(numbers.values()), fn, donate, static)
    return exactly(fn, donate, *static)


def exactly(fn: Callable[..., Any], donate: tuple[int, ...], *static: tuple[str, Any]) -> Any:
    """Return a function compiled for these very settings; the arguments are those of `jitted`."""
    return kept(fn, donate, static, _types(static))


def generalised(
    fn: Callable[..., Any], donate: tuple[int, ...], *static: tuple[str, Any]
) -> tuple[General, dict[str, float]] | None:
    """Return a function compiled for all values of the numbers among its settings.

    Returns:
        The function, and the numbers by their paths, in the order in which it takes them; None
        where there are none. The arguments are those of `jitted`.
    """
    numbers: dict[str, float] = {}
    general = tuple((name, with_arguments(value, name, numbers)) for name, value in static)
    # Two methods are equal only if their object is one and the same, so it is a part of the key.
    function, owner = getattr(fn, "__func__", fn), None
    if function is not fn:
        owner = with_arguments(getattr(fn, "__self__", None), "self", numbers)
    if numbers:
        # An object that can't be hashed is no key.
        with suppress(TypeError):
            names = tuple(numbers)
            return with_numbers(function, owner, donate, general, _types(general), names), numbers
    return None


def _types(static: tuple[tuple[str, Any], ...]) -> tuple[type, ...]:
    return tuple(type(value) for _, value in static)


def _before_compiling() -> None:
    """Set up what every process that computes has."""
    use_compile_cache()
    keep_freed_memory()


@lru_cache(maxsize=FUNCTIONS)
def kept(
    fn: Callable[..., Any],
    donate: tuple[int, ...],
    static: tuple[tuple[str, Any], ...],
    types: tuple[type, ...],  # noqa: ARG001 - it is part of the cache's key
) -> Any:
    """Return a function compiled with its static settings, from a bounded cache.

    The types of the settings distinguish 2 from 2.0, which Python takes for equal.
    """
    _before_compiling()
    return jax.jit(partial(fn, **dict(static)), donate_argnums=donate)


@lru_cache(maxsize=FUNCTIONS)
def with_numbers(
    function: Callable[..., Any],
    owner: Any,
    donate: tuple[int, ...],
    static: tuple[tuple[str, Any], ...],
    types: tuple[type, ...],  # noqa: ARG001 - it is part of the cache's key
    numbers: tuple[str, ...],
) -> Any:
    """Return a function compiled for all values of its numbers, from a bounded cache.

    Args:
        function: the function; that of a method takes its object first.
        owner: the object whose method it is, or None.
        donate: the indices of the positional arguments whose buffers it may reuse.
        static: its settings.
        types: their types.
        numbers: the names of the `Argument`s among the settings and in the owner, whose values it
            takes first, as one tuple.
    """

    def run(given: tuple[Any, ...], *args: Any) -> Any:
        values = Values(dict(zip(numbers, given, strict=True)))
        own = () if owner is None else (substituted(owner, values),)
        settings = {name: substituted(value, values) for name, value in static}
        return function(*own, *args, **settings)

    _before_compiling()
    return General(jax.jit(run, donate_argnums=tuple(i + 1 for i in donate)), donate)


class General:
    """A compiled function that takes the values of its numbers first, as one tuple.

    Args:
        run: the compiled function.
        donate: the indices of the other arguments whose buffers it reuses.
    """

    def __init__(self, run: Any, donate: tuple[int, ...]) -> None:
        self.run = run
        self.proven = False
        """Whether it ran once."""
        self.failed = False
        """Whether it can't take its numbers so."""
        self._donate = donate

    def first(self, numbers: tuple[Array, ...], *args: Any) -> Any:
        """Run it for the first time, and return what it returns, computed.

        It may fail, even as it runs, where Python decides by a number. So it gets copies of the
        arrays whose buffers it reuses: the caller's are left for another way. Of a large replay
        there is no room for a copy; then only what fails while it is traced has another way.
        """
        donated = jax.tree.leaves([args[i] for i in self._donate])
        if sum(x.nbytes for x in donated if isinstance(x, jax.Array)) <= COPIED_BYTES:
            args = tuple(
                jax.tree.map(_copy, x) if i in self._donate else x for i, x in enumerate(args)
            )
        result = jax.block_until_ready(self.run(numbers, *args))
        self.proven = True
        return result

    def consumed(self, args: tuple[Any, ...]) -> bool:
        """Return whether the buffers of some of these arguments have been reused."""
        donated = jax.tree.leaves([args[i] for i in self._donate])
        return any(isinstance(x, jax.Array) and x.is_deleted() for x in donated)


def _copy(x: Any) -> Any:
    return jax.numpy.copy(x) if isinstance(x, jax.Array) else x


class WithNumbers:
    """A compiled function with the values of the numbers that it takes as arguments.

    Where the function can't take them so, because Python decides by such a number, it is compiled
    for these very numbers.

    Args:
        general: the compiled function for all values.
        numbers: their values.
        fn: the function.
        donate: the indices of the positional arguments whose buffers it may reuse.
        static: its settings.
    """

    def __init__(
        self,
        general: General,
        numbers: tuple[float, ...],
        fn: Callable[..., Any],
        donate: tuple[int, ...],
        static: tuple[tuple[str, Any], ...],
    ) -> None:
        self._general = general
        # Made once, and weakly typed as numbers of Python are: they take on the type of what they
        # meet.
        self._numbers = tuple(jax.numpy.asarray(number) for number in numbers)
        self._exactly = partial(kept, fn, donate, static, _types(static))
        self._exact: Any = self._exactly() if general.failed else None

    def __call__(self, *args: Any) -> Any:
        """Return what the function returns."""
        if self._exact is not None:
            return self._exact(*args)
        if self._general.proven:
            return self._general.run(self._numbers, *args)
        return self._either(self._general.first, lambda exact: exact(*args), *args)

    def eval_shape(self, *args: Any) -> Any:
        """Return the shapes of what the function returns."""
        if self._exact is not None:
            return self._exact.eval_shape(*args)
        shapes = self._general.run.eval_shape
        return self._either(shapes, lambda exact: exact.eval_shape(*args), *args)

    def _either(
        self, general: Callable[..., Any], exactly: Callable[[Any], Any], *args: Any
    ) -> Any:
        """Return what the function for all values gives, or else that for these values."""
        try:
            return general(self._numbers, *args)
        except BdbQuit:
            # The user left pdb within it, and must not find it open again.
            raise
        except Exception:
            # A number that is a tracer can cause errors of any kind, for user code may check it;
            # the function's own mistake comes again. Without its arguments the function can't be
            # called again, and this error is its own.
            if self._general.consumed(args):
                raise
            self._exact = self._exactly()
        result = exactly(self._exact)
        self._general.failed = True
        return result


class Recent:
    """Bounded cache of the values of the keys that were used last.

    Args:
        most: the number of values that it keeps.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._kept: OrderedDict[Hashable, Any] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return the value of a key, which is made if it is not there.

        A key that can't be compared, such as one with an array in it, has its value made each time.
        """
        # A key with an array in it can neither be hashed nor compared.
        comparable = True
        try:
            with self._lock:
                if key in self._kept:
                    self._kept.move_to_end(key)
                    return self._kept[key]
        except (TypeError, ValueError):
            comparable = False
        # Made without the lock: it may take minutes.
        value = make()
        if comparable:
            with self._lock:
                self._kept[key] = value
                while len(self._kept) > self.most:
                    self._kept.popitem(last=False)
        return value


programs = Recent(PROGRAMS)
"""The compiled programs of the xla runtime in this process."""
signatures = Recent(SIGNATURES)
"""By all that a program of the xla runtime is made from, its key among `programs`."""


def program_of(key: Hashable, layout: Hashable, lower: Callable[[bool], Any]) -> tuple[Any, bool]:
    """Return a compiled program of the xla runtime, and whether it takes numbers of settings.

    Programs are the same if XLA gets the same text, whatever they are made from: so one serves
    other numbers, but not if Python read one of them, which is then a constant in the text.

    Args:
        key: all that it is made from. With an equal one it need not be made again; one that can't
            be hashed is equal to none.
        layout: how what it takes is laid out over devices.
        lower: makes the program, with its numbers as inputs or else as constants.
    """
    lowered = cache(lower)

    def signature() -> tuple[Any, bool]:
        text = lowered(True).as_text()
        # What a callback does is not in the text, and Python may compute with a number there.
        if CALLBACK in text:
            return key, False
        digest = hashlib.sha256(text.encode()).hexdigest()
        return (digest, lowered(True).out_tree, layout), True

    same, takes_numbers = signatures.get(key, signature)
    _before_compiling()
    return programs.get(same, lambda: lowered(takes_numbers).compile()), takes_numbers


def check_count(count: int, fn: Callable[..., Any]) -> None:
    """Refuse to compile a function for a run that has compiled more of them than any graph has.

    Args:
        count: the functions that the run has compiled so far.
        fn: the function that it would compile next.

    Raises:
        ContractError: there are `MOST` or more; it has the way out.
    """
    if count >= MOST:
        name = getattr(fn, "__name__", repr(fn))
        raise ContractError(
            f"{name} would be function number {count + 1} that this run compiles: "
            "does each item define it again, or give it other keywords? "
            "Define it once, at the top of its module, and give it what changes "
            "as an array among its positional arguments"
        )


def check_pure(fn: Callable[..., Any]) -> None:
    """Refuse a method of an object that may change.

    A compiled method holds the object's fields as they are now.

    Raises:
        ContractError: it is such a method; the error has the way out.
    """
    owner = getattr(fn, "__self__", None)
    kind = type(owner)
    # An object that compares by value is taken for one that does not change: it is a cache's key.
    by_value = compares_by_value(kind)
    ours = kind.__module__.startswith("flowrl.")
    if owner is None or isinstance(owner, type | ModuleType) or ours or by_value:
        return
    name = getattr(fn, "__name__", "it")
    raise ContractError(
        f"{name} is a method of {a(owner)}, whose fields may change after it is compiled; "
        f"make {kind.__name__} a frozen dataclass, "
        "or give a plain function all that it reads as arguments"
    )


def _compiled(event: str, duration_secs: float, **_: Any) -> None:
    """Count the seconds in which JAX traced and compiled a function as `start`.

    They are no work of the node that called the function first.
    """
    clock = here()
    if event.startswith(COMPILING) and clock.stack[-1] not in IDLE:
        clock.move(duration_secs, clock.stack[-1], "start")


jax.monitoring.register_event_duration_secs_listener(_compiled)


def explained(error: Exception) -> str:
    """Return the text of an error in a user's own code, with the way out where it met a shape."""
    if isinstance(error, jax.errors.TracerArrayConversionError):
        return (
            "a function for ctx.run computes with jax.numpy, not numpy (np.clip becomes jnp.clip): "
            "it is compiled, and so sees no values"
        )
    hints = {
        "ShapeDtypeStruct": "while a graph is checked a step sees shapes: "
        "put maths on arrays into ctx.run(function, ...)",
        "read-only": "other nodes may have the same item: "
        "change a copy of the array, and give batch.with_(name=copy)",
    }
    fitting = [hint for sign, hint in hints.items() if sign in str(error)]
    return "; ".join([raised(error), *fitting])
